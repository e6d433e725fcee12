// What holds of each collective alike: ranks that call differently are named with their calls, a late rank is named, nothing
// works after an abort, and random sequences on overlapping groups give what they must.
#include <fmt/format.h>
#include <gmock/gmock.h>

#include <atomic>
#include <map>
#include <random>

#include "comm/any_call.hpp"
#include "comm/communicator.hpp"
#include "comm/plan.hpp"
#include "comm/rendezvous.hpp"
#include "ranks.hpp"
#include "sampling.hpp"
#include "sanitized.hpp"
#include "seed.hpp"
#include "soon.hpp"

namespace tsr::testing {
namespace {

using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::Each;
using ::testing::HasSubstr;
using ::testing::StartsWith;

// --- ranks that call differently

// What a rank does, and what the others are told of it.
struct Issued {
    std::string told;
    std::function<void(Communicator&)> issue;
};

constexpr int disagreeing_world = 3;

// No memory changes.
Issued asking(const Asked& asked) {
    std::vector<std::byte> memory(asked.bytes(disagreeing_world));
    const AnyCall of_rank_0(asked, 0, disagreeing_world, memory.data(), memory.data());
    return {describe(operation_of(of_rank_0.request())), [asked](Communicator& comm) {
                std::vector<std::byte> input(asked.bytes(disagreeing_world));
                std::vector<std::byte> output(input.size());
                const AnyCall call(asked, comm.rank(), disagreeing_world, input.data(), output.data());
                call.fill(comm.rank());
                const auto before = std::pair(input, output);
                try {
                    comm.run(call.request());
                } catch (...) {
                    EXPECT_EQ(std::pair(input, output), before) << "data has moved";
                    throw;
                }
            }};
}

// What is collective, too, but no collective over tensors.
std::vector<Issued> other_calls() {
    return {{"allocate of 100 bytes", [](Communicator& comm) { static_cast<void>(comm.allocate(100)); }},
            {"(split)", [](Communicator& comm) { static_cast<void>(comm.split(0, 0, comm.options())); }},
            {"called finalize (as operation #2)", [](Communicator& comm) { comm.finalize(); }}};
}

// Rank 1 of three does `other`, the rest do `asked`: every rank learns both.
void expect_pair_named(const Issued& asked, const Issued& other) {
    SCOPED_TRACE(asked.told + " beside " + other.told);
    const auto outcomes = run_ranks(disagreeing_world, test_options(), [&](Communicator& comm) {
        comm.run({});
        (comm.rank() == 1 ? other : asked).issue(comm);
    });
    for (const auto& outcome : outcomes) {
        ASSERT_TRUE(outcome) << "no rank noticed";
        EXPECT_EQ(outcome->code(), Code::mismatch) << outcome->what();
        EXPECT_THAT(outcome->what(), AllOf(HasSubstr("operation #2"), HasSubstr(asked.told), HasSubstr(other.told)));
        // Who did which: the name of rank 1 is before what it did, with nothing but that it did so between them.
        const std::string text = outcome->what();
        const size_t name = text.rfind("rank 1 ", text.rfind(other.told));
        ASSERT_NE(name, std::string::npos) << text;
        const std::string between = text.substr(name, text.rfind(other.told) - name);
        EXPECT_THAT(between, AnyOf("rank 1 ", "rank 1 called ", "rank 1 has ", StartsWith("rank 1 all_gather of "),
                                   StartsWith("rank 1 called all_gather of ")));
        EXPECT_GE(outcome->record()->peer, 0);
    }
}

// Of each pair. Some at once, since across hosts what takes long is to connect and to take leave, which is waiting.
void expect_named(const std::vector<std::pair<Issued, Issued>>& pairs) {
    std::atomic<size_t> next{0};
    std::vector<std::thread> threads;
    for (int k = 0; k < 8; ++k) {
        threads.emplace_back([&] {
            for (size_t i = next++; i < pairs.size(); i = next++) {
                EXPECT_NO_THROW(expect_pair_named(pairs[i].first, pairs[i].second)) << "pair " << i;
            }
        });
    }
    for (std::thread& thread : threads) thread.join();
}

void expect_named(const std::vector<std::pair<Asked, Asked>>& pairs) {
    std::vector<std::pair<Issued, Issued>> issued;
    for (const auto& [asked, other] : pairs) issued.emplace_back(asking(asked), asking(other));
    expect_named(issued);
}

TEST(EveryCollective, BesideEachOtherIsNamed) {
    std::vector<std::pair<Asked, Asked>> pairs;
    for (const Collective collective : every_collective) {
        for (const Collective other : every_collective) {
            if (collective != other) pairs.push_back({{.collective = collective}, {.collective = other}});
        }
    }
    expect_named(pairs);
}

TEST(EveryCollective, BesideAnAllocationASplitOrAFinalizeIsNamed) {
    std::vector<std::pair<Issued, Issued>> pairs;
    const auto both_ways = [&](const Issued& one, const Issued& other) {
        pairs.emplace_back(one, other);
        pairs.emplace_back(other, one);
    };
    const std::vector<Issued> others = other_calls();
    for (size_t k = 0; k < others.size(); ++k) {
        for (const Collective collective : every_collective) both_ways(asking({.collective = collective}), others[k]);
        both_ways(others[k], others[(k + 1) % others.size()]);
    }
    expect_named(pairs);
}

// What a split says to its peers is an all_gather. A program's of as many bytes is none.
TEST(EveryCollective, OfAsManyBytesAsASplitIsNotTakenForOne) {
    const auto outcomes = run_ranks(disagreeing_world, test_options(), [](Communicator& comm) {
        if (comm.rank() == 1) {
            static_cast<void>(comm.split(0, 0, comm.options()));
            return;
        }
        std::vector<uint8_t> own(sizeof(Peer), 7);
        std::vector<uint8_t> all(own.size() * disagreeing_world, 9);
        const Tensor input = tensor_of(std::span(own), DType::u8);
        const Tensor output = tensor_of(std::span(all), DType::u8);
        try {
            comm.run({.collective = Collective::all_gather, .inputs = {&input, 1}, .outputs = {&output, 1}});
        } catch (...) {
            EXPECT_THAT(all, Each(9)) << "data has moved";
            throw;
        }
    });
    const std::string call = fmt::format("all_gather of {} u8", sizeof(Peer));
    for (const auto& outcome : outcomes) {
        ASSERT_TRUE(outcome) << "no rank noticed";
        EXPECT_EQ(outcome->code(), Code::mismatch) << outcome->what();
        EXPECT_THAT(outcome->what(), HasSubstr("rank 1 "));
        EXPECT_THAT(outcome->what(), HasSubstr(call + " (split)"));
        // Where ranks of one host disagree they say nothing of the others.
        EXPECT_THAT(outcome->what(), AnyOf(HasSubstr(call + ", rank 1"), HasSubstr(call + ". No data")));
    }
}

TEST(EveryCollective, OfAnotherReductionIsNamed) {
    constexpr ReduceOp ops[] = {ReduceOp::sum, ReduceOp::avg, ReduceOp::min, ReduceOp::max, ReduceOp::prod};
    std::vector<std::pair<Asked, Asked>> pairs;
    for (const Collective collective : every_collective) {
        if (!is_reduction(collective)) continue;
        for (const ReduceOp op : ops) {
            for (const ReduceOp other : ops) {
                if (op == other) continue;
                pairs.push_back({{.collective = collective, .op = op}, {.collective = collective, .op = other}});
            }
        }
    }
    expect_named(pairs);
}

// Of the same size, of another, and of other bits for the same numbers.
TEST(EveryCollective, OfAnotherDtypeIsNamed) {
    constexpr std::pair<DType, DType> dtypes[] = {{DType::f32, DType::i32},
                                                  {DType::f16, DType::bf16},
                                                  {DType::f32, DType::f64},
                                                  {DType::i8, DType::u8},
                                                  {DType::i64, DType::f16}};
    std::vector<std::pair<Asked, Asked>> pairs;
    for (const Collective collective : every_collective) {
        if (collective == Collective::barrier) continue;
        for (const auto& [dtype, other] : dtypes) {
            pairs.push_back({{.collective = collective, .dtype = dtype}, {.collective = collective, .dtype = other}});
        }
    }
    expect_named(pairs);
}

TEST(EveryCollective, OfAnotherLengthIsNamed) {
    std::vector<std::pair<Asked, Asked>> pairs;
    for (const Collective collective : every_collective) {
        if (collective == Collective::barrier) continue;
        for (const size_t count : {size_t{4}, size_t{60000}}) {  // beside the stamps, and in segments
            pairs.push_back(
                {{.collective = collective, .count = count}, {.collective = collective, .count = count + 2}});
        }
    }
    expect_named(pairs);
}

TEST(EveryCollective, InAnotherNumberOfTensorsIsNamed) {
    std::vector<std::pair<Asked, Asked>> pairs;
    for (const Collective collective : every_collective) {
        if (!takes_lists(collective)) continue;
        for (const size_t tensors : {2, 4}) {
            pairs.push_back({{.collective = collective, .count = 999, .tensors = 3},
                             {.collective = collective, .count = 999, .tensors = tensors}});
        }
    }
    expect_named(pairs);
}

TEST(EveryCollective, WithAnotherRootIsNamed) {
    std::vector<std::pair<Asked, Asked>> pairs;
    for (const Collective collective : every_collective) {
        if (!is_rooted(collective)) continue;
        for (const auto& [root, other] : {std::pair{0, 1}, {1, 0}, {2, 1}, {0, 2}}) {
            pairs.push_back({{.collective = collective, .root = root}, {.collective = collective, .root = other}});
        }
    }
    expect_named(pairs);
}

// --- what no transport reduces

TEST(EveryCollective, OfADtypeThatCannotBeReducedIsUnsupportedAndTheRanksGoOn) {
    expect_all_well(run_ranks(3, test_options(), [](Communicator& comm) {
        for (const Collective collective : every_collective) {
            if (!is_reduction(collective)) continue;
            for (const DType dtype : {DType::i16, DType::boolean, DType::u16, DType::u32, DType::u64, DType::f8_e4m3,
                                      DType::f8_e5m2, DType::f8_e8m0, DType::c64, DType::c128}) {
                const Asked asked{.collective = collective, .dtype = dtype};
                std::vector<std::byte> input(asked.bytes(3), std::byte{1});
                std::vector<std::byte> output(asked.bytes(3), std::byte{2});
                const auto before = std::pair(input, output);
                const AnyCall call(asked, comm.rank(), 3, input.data(), output.data());
                const Request request = call.request();
                for (const std::function<void()>& ask : std::initializer_list<std::function<void()>>{
                         [&] { comm.run(request); }, [&] { static_cast<void>(comm.submit(request)); },
                         [&] { static_cast<void>(comm.prepare(request)); }}) {
                    try {
                        ask();
                        ADD_FAILURE() << describe(operation_of(request)) << " went well";
                    } catch (const Error& error) {
                        EXPECT_EQ(error.code(), Code::unsupported) << error.what();
                        EXPECT_THAT(error.what(), HasSubstr(std::string(name_of(dtype)) + " cannot be reduced"));
                    }
                }
                EXPECT_EQ(std::pair(input, output), before) << "data has moved";
            }
        }
        comm.run({});
    }));
}

// --- a rank that is late; an abort

// All at once, since each waits for its deadline.
TEST(EveryCollective, NamesALateRank) {
    const auto late = [](Collective collective) {
        const Asked asked{.collective = collective};
        std::atomic<int> failed{0};
        const auto outcomes = run_ranks(3, test_options(), [&](Communicator& comm) {
            comm.set_timeout(milliseconds{3000});
            std::vector<std::byte> input(asked.bytes(3));
            std::vector<std::byte> output(asked.bytes(3));
            const AnyCall call(asked, comm.rank(), 3, input.data(), output.data());
            call.fill(0);
            if (comm.rank() == 1) {
                wait_until([&] { return failed.load() == 2; }, soon(), "the timeouts");
            }
            try {
                comm.run(call.request());
            } catch (...) {
                ++failed;
                throw;
            }
        });
        for (const int rank : {0, 2}) {
            const auto& outcome = outcomes[static_cast<size_t>(rank)];
            ASSERT_TRUE(outcome) << name_of(collective);
            EXPECT_EQ(outcome->code(), Code::timeout) << outcome->what();
            EXPECT_EQ(outcome->record()->peer, 1) << outcome->what();
            EXPECT_THAT(outcome->what(), AllOf(HasSubstr(std::string(name_of(collective)) + " #1"),
                                               HasSubstr("timed out after 3 s"), HasSubstr("rank 1")));
        }
    };
    std::vector<std::thread> threads;
    for (const Collective collective : every_collective) threads.emplace_back(late, collective);
    for (std::thread& thread : threads) thread.join();
}

TEST(EveryCollective, AfterAnAbortIsRefusedWithItsReason) {
    const auto outcomes = run_ranks(2, test_options(), [](Communicator& comm) {
        if (comm.rank() == 0) comm.abort("the loss is NaN");
        EXPECT_THROW(comm.run({}), Error);  // of rank 1 the one that learns of it
        const auto expect_aborted = [&](const char* what, const std::function<void()>& call) {
            try {
                call();
                ADD_FAILURE() << what << " went well";
            } catch (const Error& error) {
                EXPECT_EQ(error.code(), Code::aborted) << what << ": " << error.what();
                EXPECT_THAT(error.what(), HasSubstr("the loss is NaN"));
            }
        };
        for (const Collective collective : every_collective) {
            const Asked asked{.collective = collective};
            std::vector<std::byte> input(asked.bytes(2));
            std::vector<std::byte> output(asked.bytes(2));
            const AnyCall call(asked, comm.rank(), 2, input.data(), output.data());
            const std::string name(name_of(collective));
            expect_aborted(name.c_str(), [&] { comm.run(call.request()); });
            expect_aborted(name.c_str(), [&] { static_cast<void>(comm.submit(call.request())); });
        }
        std::vector<float> values(3);
        const Tensor tensor = tensor_of(std::span(values), DType::f32);
        const int other = 1 - comm.rank();
        expect_aborted("send",
                       [&] { comm.run({.collective = Collective::send, .inputs = {&tensor, 1}, .peer = other}); });
        expect_aborted("recv",
                       [&] { comm.run({.collective = Collective::recv, .outputs = {&tensor, 1}, .peer = other}); });
        expect_aborted("allocate", [&] { static_cast<void>(comm.allocate(100)); });
        expect_aborted("split", [&] { static_cast<void>(comm.split(0, 0, comm.options())); });
        expect_aborted("finalize", [&] { comm.finalize(); });
        expect_aborted("submit_job", [&] { static_cast<void>(comm.submit_job([] {})); });
    });
    expect_all_well(outcomes);
}

// --- two threads

TEST(EveryCollective, OfASecondThreadIsRefusedAndTheFirstGoesOn) {
    std::atomic<bool> refused{false};
    expect_all_well(run_ranks(2, test_options(), [&](Communicator& comm) {
        if (comm.rank() == 1) {
            wait_until([&] { return refused.load(); }, soon(), "the refusal");
            comm.run({});
        } else {
            std::thread first([&] {
                while (true) {
                    try {
                        return comm.run({});
                    } catch (const Error& error) {  // a call of the other thread was in at that moment
                        ASSERT_EQ(error.code(), Code::invalid_state) << error.what();
                    }
                }
            });
            // The first thread waits for rank 1 until a call here was refused; before it has begun, none is made: a
            // request that is refused for itself has no effect, and tells by its error whether the first is in.
            wait_until(
                [&] {
                    try {
                        comm.run({static_cast<Collective>(77), {}, {}});
                    } catch (const Error& error) {
                        if (error.code() != Code::invalid_state) return false;
                        EXPECT_THAT(error.what(), HasSubstr("two threads use communicator 'world' at once"));
                        return true;
                    }
                    return false;
                },
                soon(), "the first thread");
            EXPECT_THROW(static_cast<void>(comm.submit({})), Error);
            EXPECT_THROW(static_cast<void>(comm.allocate(10)), Error);
            refused = true;
            first.join();
        }
        comm.run({});
        comm.finalize();
    }));
}

// --- random sequences on overlapping groups

constexpr int random_world = 5;

// Colors by rank; -1: not in it. Groups of one row are apart, those of different rows overlap.
constexpr int colors[][random_world] = {{0, 0, 0, 0, 0}, {0, 1, 0, 1, 0}, {0, 0, 1, 1, 1}, {-1, 0, 0, 0, 0}};

enum class Way { run, submit, plan };

struct Step {
    size_t row = 0;
    Asked asked;
    unsigned sender = 0;  // of a message, modulo the group's size; the receiver is so many ranks after it
    unsigned distance = 0;
    int64_t salt = 0;
    Way way = Way::run;
    unsigned buffers = 0;  // bit r: rank r of the world uses the communicator's memory

    [[nodiscard]] Asked asked_of(int world) const {
        Asked result = asked;
        if (asked.collective != Collective::send) return result;
        const auto n = static_cast<unsigned>(world);
        result.root = static_cast<int>(sender % n);
        result.to = static_cast<int>((sender + 1 + distance % (n - 1)) % n);
        return result;
    }
};

std::vector<Step> steps_of(unsigned seed) {
    std::mt19937 random(seed);
    const auto below = [&](size_t n) { return static_cast<size_t>(random() % n); };
    constexpr DType dtypes[] = {DType::f16, DType::bf16, DType::f32, DType::f64,
                                DType::i8,  DType::u8,   DType::i32, DType::i64};
    constexpr size_t counts[] = {0, 1, 2, 7, 100, 1000, 3001, 9000};
    std::vector<Step> steps(1 + below(8));
    for (Step& step : steps) {
        step.row = below(std::size(colors));
        step.asked.collective = below(4) == 0 ? Collective::send : every_collective[below(std::size(every_collective))];
        step.asked.dtype = dtypes[below(std::size(dtypes))];
        step.asked.op = static_cast<ReduceOp>(1 + below(5));
        step.asked.root = static_cast<int>(below(2));  // each group has two ranks at least
        step.asked.count = counts[below(std::size(counts))];
        step.asked.tensors = 1 + below(4);
        step.asked.tag = static_cast<int>(below(3));
        step.sender = static_cast<unsigned>(below(64));
        step.distance = static_cast<unsigned>(below(64));
        step.salt = static_cast<int64_t>(below(1000));
        step.way = static_cast<Way>(below(3));
        step.buffers = static_cast<unsigned>(random());
    }
    return steps;
}

// With messages between them, and lists.
TEST(EveryCollective, InRandomSequencesOnOverlappingGroups) {
    // Over Gloo each takes some 15 ms, and a sanitizer makes that ten times as long.
    const bool near = test_placement().empty() && std::string_view(test_backend()) != "gloo";
    const unsigned sequences = takes_all() ? 1000 : near ? 250 : sanitized ? 50 : 150;
    const Seed first_seed;
    constexpr size_t most_bytes = 9000 * random_world * sizeof(double);
    expect_all_well(run_ranks(random_world, test_options(), [&](Communicator& world) {
        const auto rank = static_cast<size_t>(world.rank());
        std::map<size_t, std::shared_ptr<Communicator>> groups;
        std::map<size_t, std::shared_ptr<Buffer>> buffers;
        for (size_t row = 0; row < std::size(colors); ++row) {
            const auto group = world.split(colors[row][rank], 0, world.options());
            if (!group) continue;
            groups[row] = group;
            buffers[row] = group->allocate(2 * most_bytes);
        }
        for (unsigned k = 0; k < sequences; ++k) {
            const unsigned seed = first_seed + k;
            struct Running {
                std::vector<std::byte> own;
                std::unique_ptr<AnyCall> call;
                WorkPtr work;
                int64_t salt = 0;
            };
            std::vector<Running> running;
            std::map<size_t, bool> taken;  // whose buffer is in use by queued work
            for (const Step& step : steps_of(seed)) {
                if (!groups.contains(step.row)) continue;
                Communicator& comm = *groups[step.row];
                const Asked asked = step.asked_of(comm.world_size());
                if (!asked.concerns(comm.rank())) continue;
                const size_t bytes = asked.bytes(comm.world_size());
                Running one;
                one.salt = step.salt;
                std::byte* memory = nullptr;
                if (((step.buffers >> rank) & 1) != 0 && !taken[step.row]) {
                    memory = buffers[step.row]->data();
                    taken[step.row] = step.way == Way::submit;
                } else {
                    one.own.resize(2 * bytes + 16);
                    memory = one.own.data();
                }
                one.call = std::make_unique<AnyCall>(asked, comm.rank(), comm.world_size(), memory,
                                                     memory + (bytes + 7) / 8 * 8);
                one.call->fill(step.salt);
                if (step.way == Way::submit) {
                    one.work = comm.submit(one.call->request());
                    running.push_back(std::move(one));
                    continue;
                }
                if (step.way == Way::plan && asked.collective != Collective::send) {
                    comm.prepare(one.call->request())->run();
                } else {
                    comm.run(one.call->request());
                }
                ASSERT_EQ(one.call->first_wrong(step.salt), -1)
                    << "TESSERA_TEST_SEED=" << seed
                    << " begins with it: " << describe(operation_of(one.call->request()));
            }
            for (Running& one : running) {
                one.work->wait(soon());
                ASSERT_EQ(one.call->first_wrong(one.salt), -1)
                    << "TESSERA_TEST_SEED=" << seed
                    << " begins with it: " << describe(operation_of(one.call->request()));
            }
        }
    }));
}

}  // namespace
}  // namespace tsr::testing
