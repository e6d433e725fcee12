// Spares: the election as a state machine, and a simulation of hosts whose network parts, delays and heals.
#include "launch/election.hpp"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <deque>
#include <list>
#include <map>
#include <memory>
#include <random>
#include <set>

#include "launch/coordinator.hpp"
#include "sampling.hpp"
#include "seed.hpp"

namespace tsr {
namespace {

using Time = Clock::time_point;

TEST(Election, AMajorityIsAskedBeforeItIsBound) {
    const Time now;
    Election first(1, 3);
    Election second(2, 3);
    first.lose(now);
    first.tick(now + Election::pause);
    ASSERT_EQ(first.question(), (Stand{1, false}));
    EXPECT_FALSE(second.answer({1, false}, now).yes) << "it follows a leader";
    EXPECT_FALSE(first.count(2, second.answer({1, false}, now)));
    EXPECT_EQ(first.term(), 0) << "nothing binds it: it can follow the leader of term 0 again";
    second.lose(now);
    EXPECT_FALSE(first.count(2, second.answer({1, false}, now)));
    EXPECT_EQ(second.term(), 0);
    ASSERT_EQ(first.question(), (Stand{1, true}));
    EXPECT_TRUE(first.count(2, second.answer({1, true}, now)));
    EXPECT_EQ(first.term(), 1);
}

TEST(Election, AVoterVotesOnceInATerm) {
    const Time now;
    Election voter(0, 5);
    voter.lose(now);
    EXPECT_TRUE(voter.answer({3, true}, now).yes);
    EXPECT_FALSE(voter.answer({3, true}, now).yes);
    EXPECT_FALSE(voter.answer({2, true}, now).yes);
    const Vote no = voter.answer({3, false}, now);
    EXPECT_FALSE(no.yes);
    EXPECT_EQ(no.highest, 3);
    // One vote counts once; who hears of a later term asks for the one after it.
    Election other(1, 5);
    other.lose(now);
    other.tick(now + Election::pause);
    EXPECT_FALSE(other.count(2, {1, false, true, 0}));
    EXPECT_FALSE(other.count(2, {1, false, true, 0}));
    EXPECT_FALSE(other.question()->binding);
    EXPECT_FALSE(other.count(0, no));
    other.tick(other.next_tick().value());
    EXPECT_EQ(other.question()->term, 4);
}

// It may have lost its leader since, and the term is the same.
TEST(Election, WhoSaidNoIsAskedAgain) {
    const Time now;
    Election first(0, 3);
    Election second(1, 3);
    first.lose(now);
    first.tick(now);
    ASSERT_EQ(first.new_question(), (Stand{1, false}));
    EXPECT_FALSE(first.new_question());
    EXPECT_FALSE(first.count(1, second.answer({1, false}, now)));
    second.lose(now);
    first.tick(first.next_tick().value());
    ASSERT_EQ(first.new_question(), (Stand{1, false}));
    EXPECT_FALSE(first.count(1, second.answer({1, false}, now)));
    ASSERT_EQ(first.new_question(), (Stand{1, true}));
    EXPECT_TRUE(first.count(1, second.answer({1, true}, now)));
}

// --- the simulation

constexpr milliseconds silence{3000};
constexpr milliseconds beat{1000};
constexpr milliseconds step{50};

// Both ends close it separately; what is under way when the network parts arrives when it heals, or never.
struct Connection {
    int client;
    int server;
    Coordinator::Node node;
    std::deque<std::pair<Time, Report>> up;
    std::deque<std::pair<Time, Order>> down;
    bool client_open = true;
    bool server_open = true;
    Time client_heard;
    Time server_heard;
    std::optional<Hello> hello;
};

// A host's agent, as job_agent.cc joins the parts. Its ranks end as soon as they should.
struct SimulatedHost {
    bool alive = true;
    std::string agent;
    int seat = -1;
    std::optional<Election> election;
    std::unique_ptr<Coordinator> coordinator;
    Time led_since;
    Connection* leader = nullptr;
    bool searches = true;
    std::map<int, Connection*> contacts;
    bool takes_part = false;
    std::string job;
    int term = 0;
    int group_size = 0;
    int restarts = 0;
    std::optional<StartRound> round;  // whose ranks live
    int last_round = -1;
};

class Spares {
   public:
    explicit Spares(unsigned seed) : random_(seed) {
        seats_ = below(2) == 0 ? 3 : 5;
        const int hosts = seats_ + below(3);
        options_.programs.push_back({.command = {"true"}, .ranks = 1 + below(2), .environment = {}});
        options_.max_restarts = 1000;
        options_.hosts = HostOptions{};
        options_.hosts->max_nodes = hosts;
        options_.hosts->min_nodes = 1;
        options_.hosts->join_timeout = std::chrono::hours{1};
        options_.hosts->last_call = milliseconds{2000};
        options_.hosts->silence = silence;
        options_.hosts->spares.resize(static_cast<size_t>(seats_ - 1));
        for (int i = 0; i < hosts; ++i) begin(i);
    }

    void run() {
        for (int turn = 0; turn < 4000; ++turn) {
            if (turn > 100 && turn < 2500) disturb();
            if (turn == 2500) cut_.clear();
            pass();
            if (::testing::Test::HasFailure()) return;
        }
        // More than half of the store hosts live and can reach each other again.
        int leaders = 0;
        for (const SimulatedHost& host : hosts_) {
            if (!host.alive || !host.coordinator) continue;
            ++leaders;
            EXPECT_TRUE(host.coordinator->has_majority());
            ASSERT_TRUE(host.round) << "no round runs";
            EXPECT_TRUE(runs(host));
        }
        EXPECT_EQ(leaders, 1);
    }

   private:
    int below(int bound) { return static_cast<int>(random_() % static_cast<unsigned>(bound)); }
    SimulatedHost& host(int i) { return hosts_.at(static_cast<size_t>(i)); }

    void begin(int i) {
        if (static_cast<size_t>(i) >= hosts_.size()) hosts_.resize(static_cast<size_t>(i) + 1);
        SimulatedHost& h = hosts_.at(static_cast<size_t>(i)) = SimulatedHost{};
        h.agent = fmt::format("agent {}", agents_++);
        h.seat = i < seats_ ? i : -1;
        if (i == 0) {
            coordinate(0, fmt::format("job {}", h.agent), {});
        }
    }

    Hello hello_of(int i) {
        const SimulatedHost& h = host(i);
        Hello hello;
        hello.agent = h.agent;
        hello.host = fmt::format("h{}", i);
        hello.ranks = {options_.ranks()};
        hello.job = h.takes_part ? h.job : "";
        hello.seat = h.seat;
        if (h.election) {
            hello.ballot = h.job;
            hello.term = h.election->term();
        }
        return hello;
    }

    void coordinate(int i, const std::string& job, const Coordinator::Succession& succession) {
        SimulatedHost& h = host(i);
        h.job = job;
        h.coordinator = std::make_unique<Coordinator>(options_, job, 0, now_, succession);
        h.led_since = now_;
        h.coordinator->take(0, hello_of(i), now_);
    }

    void disturb() {
        if (below(60) == 0) {  // a host or a direction between two is cut off, or everything heals
            const int what = below(4);
            const int one = below(static_cast<int>(hosts_.size()));
            const int other = below(static_cast<int>(hosts_.size()));
            if (what == 0) cut_.clear();
            if (what == 1) cut_.insert({one, other});
            for (int i = 0; what > 1 && i < static_cast<int>(hosts_.size()); ++i) {
                cut_.insert({one, i});
                cut_.insert({i, one});
            }
        }
        if (below(400) != 0) return;
        const int one = below(static_cast<int>(hosts_.size()));
        if (!host(one).alive) return begin(one);  // its agent starts again, and has no vote
        if (one < seats_ && 2 * (dead_voters_ + 1) >= seats_) return;
        if (one < seats_ && voters_lost_.insert(one).second) ++dead_voters_;
        for (Connection& c : connections_) {
            if (c.client == one) c.client_open = false;
            if (c.server == one) c.server_open = false;
        }
        host(one).alive = false;
        host(one).leader = nullptr;
        host(one).coordinator.reset();
        host(one).round.reset();
    }

    bool arrives(int from, int to) const { return !cut_.contains({from, to}); }

    void pass() {
        now_ += step;
        for (int i = 0; i < static_cast<int>(hosts_.size()); ++i) {
            if (host(i).alive) act(i);
        }
        for (const Connection& c : connections_) {
            if (c.client_open || c.server_open) continue;
            for (SimulatedHost& h : hosts_) {
                if (h.leader == &c) ADD_FAILURE() << "follows by a closed connection";
            }
        }
        connections_.remove_if([](const Connection& c) { return !c.client_open && !c.server_open; });
        std::set<std::pair<std::string, int>> running;
        for (const SimulatedHost& h : hosts_) {
            if (h.round && runs(h)) running.insert({h.job, h.round->round});
        }
        EXPECT_LE(running.size(), 1U) << "two rounds run with all of their ranks";
    }

    // All ranks of its round live.
    bool runs(const SimulatedHost& of) const {
        int ranks = 0;
        for (const SimulatedHost& h : hosts_) {
            if (!h.alive || !h.round || h.job != of.job || h.round->round != of.round->round) continue;
            ranks += static_cast<int>(h.round->seats.size());
        }
        return ranks == of.round->world_size;
    }

    void act(int i) {
        SimulatedHost& h = host(i);
        const bool beats = (now_.time_since_epoch() / step) % (beat / step) == i % (beat / step);
        for (Connection& c : connections_) {
            if (c.server == i && c.server_open) serve(i, c, beats);
        }
        if (h.coordinator) {
            const bool late = h.term > 0 && h.coordinator->round() < Coordinator::first_round(h.term) &&
                              !h.coordinator->has_majority() && now_ - h.led_since > silence;
            if (h.coordinator->deposed() || late) {
                stand_down(i);
            } else {
                h.coordinator->tick(now_);
            }
        }
        deliver(i);
        if (h.leader != nullptr) follow(i, beats);
        if (h.searches) search(i, beats);
        deliver(i);
    }

    void serve(int i, Connection& c, bool beats) {
        SimulatedHost& h = host(i);
        while (!c.up.empty() && c.up.front().first <= now_ && arrives(c.client, i) && c.server_open) {
            const Report report = std::move(c.up.front().second);
            c.up.pop_front();
            c.server_heard = now_;
            if (const auto* stand = std::get_if<Stand>(&report)) {
                const bool may = c.hello && c.hello->ballot == h.job && h.election && !h.coordinator;
                const Vote no{stand->term, stand->binding, false, h.election ? h.election->term() : 0};
                send_down(c, may ? h.election->answer(*stand, now_) : no);
            } else if (const auto* hello = std::get_if<Hello>(&report)) {
                if (!hello->job.empty() && hello->job != h.job) {
                    c.server_open = false;
                } else {
                    c.hello = *hello;
                    if (h.coordinator) h.coordinator->take(c.node, report, now_);
                }
            } else if (h.coordinator && !std::holds_alternative<Beat>(report)) {
                h.coordinator->take(c.node, report, now_);
            }
        }
        const bool ended = !c.client_open && c.up.empty() && arrives(c.client, i);
        if (c.server_open && !ended && now_ - c.server_heard <= silence) {
            if (beats) send_down(c, Beat{});
            return;
        }
        c.server_open = false;
        if (h.coordinator) h.coordinator->lose(c.node, "silence", now_);
    }

    void send_down(Connection& c, const Order& order) { c.down.emplace_back(now_ + delay(), order); }
    void send_up(Connection& c, const Report& report) { c.up.emplace_back(now_ + delay(), report); }
    milliseconds delay() { return milliseconds{below(20) == 0 ? below(2000) : below(100)}; }

    // The orders of a coordinator.
    void deliver(int i) {
        SimulatedHost& h = host(i);
        while (h.coordinator) {
            auto orders = h.coordinator->take_orders();
            if (orders.empty()) return;
            for (auto& [node, order] : orders) {
                if (const auto* start = std::get_if<StartRound>(&order)) note_start(i, *start);
                if (node == 0) {
                    obey(i, order);
                } else {
                    const auto c = std::ranges::find_if(connections_, [&, node = node](const Connection& each) {
                        return each.server == i && each.node == node && each.server_open;
                    });
                    if (c != connections_.end()) send_down(*c, order);
                }
            }
        }
    }

    void note_start(int i, const StartRound& start) {
        const std::string leader = host(i).agent;
        const std::string& job = host(i).job;
        const auto [known, fresh] = leaders_.try_emplace({job, start.round}, leader);
        EXPECT_EQ(known->second, leader) << "two leaders of epoch " << start.round;
        for (const Seat& seat : start.seats) {
            EXPECT_TRUE(ranks_.insert({job, start.round, seat.rank}).second) << "rank " << seat.rank << " twice";
            EXPECT_LT(seat.rank, start.world_size);
        }
    }

    void obey(int i, const Order& order) {
        SimulatedHost& h = host(i);
        if (const auto* welcome = std::get_if<Welcome>(&order)) {
            if (welcome->job != h.job) h.election.reset();
            h.job = welcome->job;
            h.term = welcome->term;
            if (!welcome->votes) h.election.reset();
            if (welcome->votes && !h.election) h.election.emplace(h.seat, seats_);
            if (h.election) h.election->follow(h.term);
        } else if (const auto* start = std::get_if<StartRound>(&order)) {
            EXPECT_FALSE(h.round) << "ranks of two rounds on one host";
            EXPECT_GT(start->round, h.last_round) << "epochs only grow";
            h.last_round = start->round;
            h.round = *start;
            h.takes_part = true;
            h.group_size = start->group_size;
            h.restarts = start->restarts;
        } else if (std::holds_alternative<EndRanks>(order) && h.round) {
            report(i, RoundOver{h.round->round, true, 1});
            h.round.reset();
        } else if (std::holds_alternative<Finish>(order) || std::holds_alternative<Refused>(order)) {
            ADD_FAILURE() << "the job ended";
        }
    }

    void report(int i, const Report& report) {
        SimulatedHost& h = host(i);
        if (h.coordinator) {
            h.coordinator->take(0, report, now_);
        } else if (h.leader != nullptr) {
            send_up(*h.leader, report);
        }
    }

    void stand_down(int i) {
        SimulatedHost& h = host(i);
        h.coordinator.reset();
        for (Connection& c : connections_) {
            if (c.server == i) c.server_open = false;
        }
        begin_search(i);
    }

    void begin_search(int i) {
        SimulatedHost& h = host(i);
        h.round.reset();
        h.searches = true;
        if (h.election) h.election->lose(now_);
    }

    void follow(int i, bool beats) {
        SimulatedHost& h = host(i);
        Connection& c = *h.leader;
        while (!c.down.empty() && c.down.front().first <= now_ && arrives(c.server, i)) {
            const Order order = std::move(c.down.front().second);
            c.down.pop_front();
            c.client_heard = now_;
            obey(i, order);
        }
        const bool ended = !c.server_open && c.down.empty() && arrives(c.server, i);
        if (!ended && now_ - c.client_heard <= silence) {
            if (beats) send_up(c, Beat{});
            return;
        }
        c.client_open = false;
        h.leader = nullptr;
        begin_search(i);
    }

    void end_search(int i) {
        SimulatedHost& h = host(i);
        for (auto& [seat, c] : h.contacts) c->client_open = false;
        h.contacts.clear();
        h.searches = false;
    }

    void search(int i, bool beats) {
        SimulatedHost& h = host(i);
        if (h.coordinator && h.coordinator->round() >= 0) return end_search(i);
        for (int seat = 0; seat < seats_; ++seat) {
            if (seat == i || h.contacts.contains(seat) || below(6) != 0) continue;
            if (!host(seat).alive || !arrives(i, seat) || !arrives(seat, i)) continue;
            Connection& c = connections_.emplace_back(Connection{i, seat, next_node_++});
            c.client_heard = c.server_heard = now_;
            h.contacts[seat] = &c;
            send_up(c, hello_of(i));
            if (h.election && !h.coordinator && h.election->question()) send_up(c, *h.election->question());
        }
        for (int seat = 0; seat < seats_ && h.searches; ++seat) {
            const auto found = h.contacts.find(seat);
            if (found != h.contacts.end()) hear_contact(i, seat, *found->second, beats);
        }
        if (!h.searches || h.coordinator || !h.election) return;
        h.election->tick(now_);
        ask(i);
    }

    void ask(int i) {
        SimulatedHost& h = host(i);
        const auto question = h.election->new_question();
        if (!question) return;
        for (auto& [seat, c] : h.contacts) send_up(*c, *question);
    }

    void hear_contact(int i, int seat, Connection& c, bool beats) {
        SimulatedHost& h = host(i);
        const auto drop = [&] {
            c.client_open = false;
            h.contacts.erase(seat);
        };
        while (!c.down.empty() && c.down.front().first <= now_ && arrives(seat, i)) {
            const Order order = std::move(c.down.front().second);
            c.down.pop_front();
            c.client_heard = now_;
            if (const auto* welcome = std::get_if<Welcome>(&order)) {
                const bool old = welcome->job == h.job &&
                                 (welcome->term < h.term || (h.election && welcome->term < h.election->term()));
                if (old || (h.takes_part && welcome->job != h.job)) return drop();
                if (h.coordinator) {
                    h.coordinator.reset();
                    h.election.reset();
                    for (Connection& each : connections_) {
                        if (each.server == i) each.server_open = false;
                    }
                }
                h.contacts.erase(seat);
                end_search(i);
                h.leader = &c;
                return obey(i, order);
            }
            if (const auto* vote = std::get_if<Vote>(&order); vote != nullptr && h.election && !h.coordinator) {
                if (h.election->count(seat, *vote)) return lead(i);
                ask(i);
            }
        }
        const bool ended = !c.server_open && c.down.empty() && arrives(seat, i);
        if (ended || now_ - c.client_heard > silence) return drop();
        if (beats) send_up(c, Beat{});
    }

    void lead(int i) {
        SimulatedHost& h = host(i);
        h.election->follow(h.election->term());
        end_search(i);
        coordinate(i, h.job, {h.election->term(), h.restarts, std::max(h.group_size - 1, 0)});
        for (Connection& c : connections_) {
            if (c.server == i && c.server_open && c.hello) h.coordinator->take(c.node, *c.hello, now_);
        }
    }

    std::mt19937 random_;
    RunOptions options_;
    int seats_ = 3;
    Time now_;
    std::vector<SimulatedHost> hosts_;
    std::list<Connection> connections_;
    std::set<std::pair<int, int>> cut_;
    std::set<int> voters_lost_;
    int dead_voters_ = 0;
    int agents_ = 0;
    Coordinator::Node next_node_ = 1;
    std::map<std::pair<std::string, int>, std::string> leaders_;  // of a job's epoch
    std::set<std::tuple<std::string, int, int>> ranks_;
};

TEST(Election, OneLeaderAnEpochWhateverTheNetworkDoes) {
    const testing::Seed seed;
    const unsigned count = testing::takes_all() ? 10000 : 60;
    for (unsigned i = 0; i < count; ++i) {
        SCOPED_TRACE(fmt::format("simulation {}", seed + i));
        Spares(seed + i).run();
        if (HasFailure()) return;
    }
}

}  // namespace
}  // namespace tsr
