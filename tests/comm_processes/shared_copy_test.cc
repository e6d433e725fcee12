// One copy of parameters and moments a host (DdpOptions::share_params) between processes, one of which is killed in a step:
// the others know whether what they share is of one step, save it or go back to the last checkpoint, and end with the bits
// of a job in which nobody died.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <signal.h>
#include <time.h>

#include <array>
#include <random>
#include <set>
#include <sstream>
#include <string_view>

#include "checkpoint/save/saver.hpp"
#include "parallel/ddp/shared_model.hpp"
#include "patience.hpp"
#include "processes.hpp"
#include "ranks.hpp"
#include "seed.hpp"

namespace tsr::testing {
namespace {

using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr int world = 4;
constexpr int victim = 3;
constexpr int samples = 12;

// A whole number for each sample, so that their sum has the same bits however many ranks add them up.
void write_gradients(const Ddp& ddp, const Communicator& comm, int64_t step) {
    for (size_t i = 0; i < ddp.params().size(); ++i) {
        Params::set(ddp.grad(i), [&](size_t k) {
            int sum = 0;
            for (int sample = comm.rank(); sample < samples; sample += comm.world_size()) {
                sum +=
                    (sample * 7 + static_cast<int>(step) * 3 + static_cast<int>(i) * 5 + static_cast<int>(k)) % 17 - 8;
            }
            return sum;
        });
    }
}

std::string bits_of(const Ddp& ddp, const Optimizer& optimizer) {
    const Bytes all = all_of(ddp, optimizer);
    const std::string_view text(reinterpret_cast<const char*>(all.data()), all.size());
    return fmt::format("{:016x}", std::hash<std::string_view>{}(text));
}

// Of three buckets: the f64 parameter, the small ones, the rest.
DdpOptions three_buckets() {
    DdpOptions options = small_buckets(true, {.op = ReduceOp::sum});
    options.first_bucket_bytes = 100;
    return options;
}

// What a rank has, from the last checkpoint on.
struct Job {
    Job(const std::shared_ptr<Communicator>& comm, const std::string& root)
        : ddp(comm, model.tensors(), three_buckets()),
          optimizer(make(Kind::adamw, ddp)),
          state(state_of(ddp, *optimizer)),
          saver(std::in_place, comm, root, SaverOptions{}) {
        step = saver->resume(state);
        Settings settings = optimizer->settings();  // the count of steps is taken from the moments
        std::erase_if(settings, [](const auto& setting) { return setting.first == "step"; });
        optimizer->load_settings(settings);
    }

    Params model;
    Ddp ddp;
    std::shared_ptr<Optimizer> optimizer;
    State state;
    std::optional<Saver> saver;
    int64_t step = 0;
};

// Kills its process when a step is about to change the parameter at this place in the order in which they are changed.
class Killer final : public LateCopy {
   public:
    Killer(const Ddp& ddp, size_t place) : ddp_(ddp), place_(place) {}
    void copy_now(Memory memory) noexcept override {
        for (const NamedTensor& param : ddp_.params()) {
            if (memory.empty() || memory.data() != param.tensor.data) continue;
            asked_.insert(memory.data());
            if (asked_.size() > place_) (void)::kill(::getpid(), SIGKILL);
        }
    }

   private:
    const Ddp& ddp_;
    size_t place_;
    std::set<const std::byte*> asked_;
};

// Has the kernel kill this process after a time, whatever it is doing then.
void die_within(std::chrono::microseconds time) {
    sigevent event{};
    event.sigev_notify = SIGEV_SIGNAL;
    event.sigev_signo = SIGKILL;
    timer_t timer{};
    const itimerspec once{{0, 0}, {0, std::chrono::nanoseconds(time).count()}};
    if (::timer_create(CLOCK_MONOTONIC, &event, &timer) != 0 || ::timer_settime(timer, 0, &once, nullptr) != 0) {
        throw std::runtime_error("no timer");
    }
}

// How the victim dies: in the step after `step` ones.
struct Death {
    int64_t step = -1;
    std::optional<size_t> place;        // Killer's
    std::chrono::microseconds time{1};  // else: after this
};

struct Script {
    int64_t steps;
    int64_t save_every;
    Death death;
};

// The step that what the ranks share is of, on all hosts; torn: on one of them it is.
constexpr int64_t torn = -1;
std::optional<int64_t> shared_by_all(const Job& job, Communicator& rest, const Processes::Say& say) {
    int64_t own = torn;
    try {
        own = job.ddp.shared_step();
        say(fmt::format("whole {} {}", own, bits_of(job.ddp, *job.optimizer)));
    } catch (const Error& error) {
        if (error.code() != Code::corrupt) throw;
        say(fmt::format("torn: {}", error.what()));
    }
    std::array<int64_t, 2> bounds{own, -own};
    const Tensor tensor = tensor_of(std::span<int64_t>(bounds), DType::i64);
    rest.run({.collective = Collective::all_reduce, .outputs = {&tensor, 1}, .op = ReduceOp::min});
    if (bounds[0] == torn) return torn;
    return bounds[0] == -bounds[1] ? std::optional(own) : std::nullopt;
}

void train(Job& job, Communicator& comm, const Script& script, const Processes::Say& say, bool dies) {
    const auto tell = [&](const char* when) {
        if (comm.rank() == 0) say(fmt::format("{} {} {}", when, job.step, bits_of(job.ddp, *job.optimizer)));
    };
    tell("begins");
    std::shared_ptr<Killer> killer;
    while (job.step < script.steps) {
        if (dies && job.step == script.death.step) {
            if (script.death.place) {
                killer = std::make_shared<Killer>(job.ddp, *script.death.place);
                job.optimizer->barrier()->add(killer);
            } else {
                die_within(script.death.time);
            }
        }
        write_gradients(job.ddp, comm, job.step);
        job.ddp.ready_all();
        job.ddp.wait();
        ++job.step;
        tell("step");
        if (job.step % script.save_every == 0) job.saver->save(job.step, job.state);
    }
    if (dies) ::pause();  // the time may not be over
    comm.run({});
}

// A rank: trains to the end, with those that are left.
void live(int rank, const std::shared_ptr<Store>& store, const Processes::Say& say, const std::string& root,
          const Script& script) {
    auto comm = join_job(store, rank, world, test_options());
    auto job = std::make_unique<Job>(comm, root);
    while (true) {
        try {
            train(*job, *comm, script, say, script.death.step >= 0 && rank == victim);
            break;
        } catch (const Error& error) {
            say(fmt::format("lost: {} {}", code_name(error.code()), error.what()));
        }
        const auto rest = comm->shrink(comm->options());  // from here on nobody writes
        job->saver.reset();                               // a root has one
        if (const auto step = shared_by_all(*job, *rest, say)) {
            Saver saver(rest, root, {});
            if (*step != torn) {
                saver.save(*step, job->state);
            } else {
                EXPECT_EQ(expect_error([&] { saver.save(script.steps, job->state); }, Code::corrupt).code(),
                          Code::corrupt);
            }
        }
        job.reset();
        comm = rest;
        job = std::make_unique<Job>(comm, root);
    }
    say(fmt::format("ends {} {}", job->step, bits_of(job->ddp, *job->optimizer)));
    job.reset();
    comm->finalize();
}

std::vector<std::string> lines_with(const std::string& text, const std::string& beginning) {
    std::vector<std::string> found;
    std::istringstream lines(text);
    for (std::string line; std::getline(lines, line);) {
        if (line.starts_with(beginning)) found.push_back(line);
    }
    return found;
}

bool all_share() { return test_placement().empty() && std::string_view(test_backend()) != "gloo"; }

class SharedCopyOfProcesses : public ::testing::Test {
   protected:
    // What each rank said.
    static std::vector<std::string> run(const Script& script) {
        const TemporaryDirectory root;
        Processes processes(world, [&](int rank, const auto& store, const auto& say) {
            live(rank, store, say, root.path().string(), script);
        });
        std::vector<std::string> said;
        for (int rank = 0; rank < world; ++rank) {
            const Outcome& outcome = processes.join(rank, patience(milliseconds{60000}));
            said.push_back(outcome.text);
            if (script.death.step >= 0 && rank == victim) {
                EXPECT_TRUE(WIFSIGNALED(outcome.status)) << outcome.status << outcome.text;
                continue;
            }
            EXPECT_TRUE(outcome.well()) << "rank " << rank << ": status " << outcome.status << ": " << outcome.text;
        }
        return said;
    }
    // "N BITS" after each step of a job in which nobody dies.
    static std::set<std::string> undisturbed(Script script) {
        script.death = {};
        const std::vector<std::string> said = run(script);
        std::set<std::string> steps;
        for (const std::string& line : lines_with(said[0], "begins ")) steps.insert(line.substr(7));
        for (const std::string& line : lines_with(said[0], "step ")) steps.insert(line.substr(5));
        EXPECT_EQ(steps.size(), static_cast<size_t>(script.steps + 1));
        for (const std::string& of_rank : said) expect_end(of_rank, script, steps);
        return steps;
    }
    static void expect_end(const std::string& said, const Script& script, const std::set<std::string>& steps) {
        const auto ends = lines_with(said, "ends ");
        ASSERT_EQ(ends.size(), 1U) << said;
        EXPECT_THAT(ends[0], HasSubstr(fmt::format("ends {} ", script.steps)));
        EXPECT_EQ(steps.count(ends[0].substr(5)), 1U) << said;
    }
    // Whoever is left has learnt of the death, calls nothing whole that is not, and ends as if nobody had died.
    static void expect_survival(const std::vector<std::string>& said, const Script& script,
                                const std::set<std::string>& steps) {
        for (int rank = 0; rank < world; ++rank) {
            if (rank == victim) continue;
            const std::string& of_rank = said[static_cast<size_t>(rank)];
            const auto lost = lines_with(of_rank, "lost: ");
            ASSERT_EQ(lost.size(), 1U) << of_rank;
            EXPECT_THAT(lost[0], AnyOf(HasSubstr("PEER_LOST"), HasSubstr("ABORTED"))) << of_rank;
            EXPECT_THAT(lost[0], AnyOf(HasSubstr(fmt::format("rank {}", victim)), HasSubstr("left the communicator")));
            for (const std::string& line : lines_with(of_rank, "whole ")) {
                EXPECT_EQ(steps.count(line.substr(6)), 1U) << "rank " << rank << ": " << line << "\n" << of_rank;
            }
            expect_end(of_rank, script, steps);
        }
        const auto begins = lines_with(said[0], "begins ");
        ASSERT_EQ(begins.size(), 2U) << said[0];
        EXPECT_EQ(steps.count(begins[1].substr(7)), 1U) << begins[1];
    }
};

TEST_F(SharedCopyOfProcesses, ADeathBetweenBucketsTearsItAndTheJobGoesOnFromTheLastCheckpoint) {
    Script script{.steps = 6, .save_every = 2, .death = {}};
    const std::set<std::string> steps = undisturbed(script);
    for (const size_t place : {1, 3}) {  // the first of the small parameters, and of the rest
        SCOPED_TRACE(place);
        script.death = {.step = 3, .place = place};
        const std::vector<std::string> said = run(script);
        expect_survival(said, script, steps);
        if (all_share()) {
            for (const int rank : {0, 1, 2}) {
                EXPECT_THAT(said[static_cast<size_t>(rank)],
                            AllOf(HasSubstr("torn: "), HasSubstr("this rank finished step 3"),
                                  HasSubstr("the slice of local rank 3 is between step 3 and step 4"),
                                  Not(HasSubstr("whole "))));
            }
            EXPECT_THAT(said[0], HasSubstr("begins 2 "));
        }
    }
}

TEST_F(SharedCopyOfProcesses, ADeathBeforeAnyUpdateLeavesItWholeAndItIsGoneOnFrom) {
    Script script{.steps = 6, .save_every = 2, .death = {}};
    const std::set<std::string> steps = undisturbed(script);
    script.death = {.step = 3, .place = 0};
    const std::vector<std::string> said = run(script);
    expect_survival(said, script, steps);
    for (const int rank : {0, 1, 2}) {
        EXPECT_THAT(said[static_cast<size_t>(rank)], AllOf(HasSubstr("whole 3 "), Not(HasSubstr("torn: "))));
    }
    EXPECT_THAT(said[0], HasSubstr("begins 3 ")) << "no step is lost";
}

TEST_F(SharedCopyOfProcesses, ADeathAtAnyTimeLeavesNothingTornThatSeemsWhole) {
    Script script{.steps = 30, .save_every = 5, .death = {}};
    const std::set<std::string> steps = undisturbed(script);
    const Seed seed;
    std::mt19937 random(seed);
    for (int i = 0; i < (all_share() ? 8 : 3); ++i) {  // over Gloo it takes some seconds for ranks to meet again
        script.death = {.step = static_cast<int64_t>(random() % 25),
                        .time = std::chrono::microseconds(1 + random() % 3000)};
        SCOPED_TRACE(fmt::format("step {}, after {} us", script.death.step, script.death.time.count()));
        expect_survival(run(script), script, steps);
    }
}

}  // namespace
}  // namespace tsr::testing
