// One copy of parameters and moments a host (DdpOptions::share_params).
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <barrier>
#include <cmath>
#include <cstring>
#include <map>
#include <mutex>
#include <set>

#include "base/log.hpp"
#include "checkpoint/load/checkpoint.hpp"
#include "checkpoint/save/saver.hpp"
#include "parallel/ddp/host_copy.hpp"
#include "ranks.hpp"
#include "shared_model.hpp"
#include "soon.hpp"
#include "temporary_directory.hpp"

namespace tsr {
namespace {

using testing::all_of;
using testing::append;
using testing::Bytes;
using testing::expect_all_well;
using testing::expect_error;
using ::testing::HasSubstr;
using testing::Kind;
using testing::make;
using testing::Outcomes;
using testing::Params;
using testing::run_ranks;
using testing::shared;
using testing::small_buckets;
using testing::state_of;
using testing::TemporaryDirectory;
using testing::test_options;

double gradient(int rank, int step, size_t param, size_t k) {
    return std::sin(rank * 1.7 + step * 0.9 + static_cast<double>(param) + 0.01 * static_cast<double>(k));
}

void write_gradients(const Ddp& ddp, int rank, int step) {
    for (size_t i = 0; i < ddp.params().size(); ++i) {
        Params::set(ddp.grad(i), [&](size_t k) { return gradient(rank, step, i, k); });
    }
}

void make_step(Ddp& ddp, Optimizer& optimizer, int rank, int step) {
    write_gradients(ddp, rank, step);
    ddp.ready_all();
    ddp.wait();
    if (!ddp.host_copy()) optimizer.step();
}

Bytes trained(Communicator& comm, Kind kind, const DdpOptions& options, int steps, bool micro_steps = false) {
    Params model;
    Ddp ddp(shared(comm), model.tensors(), options);
    const auto optimizer = make(kind, ddp);
    for (int step = 0; step < steps; ++step) {
        if (micro_steps) {
            ddp.set_sync(false);
            write_gradients(ddp, comm.rank() + 10, step);
            ddp.ready_all();
            ddp.wait();
            ddp.set_sync(true);
            for (size_t i = 0; i < ddp.params().size(); ++i) {
                if (ddp.grad(i).dtype != DType::f32) continue;
                for (float& g : ddp.grad(i).as<float>()) g *= 0.5F;
            }
            ddp.ready_all();
            ddp.wait();
            if (!ddp.host_copy()) optimizer->step();
        } else {
            make_step(ddp, *optimizer, comm.rank(), step);
        }
    }
    EXPECT_EQ(optimizer->steps(), steps);
    Bytes result = all_of(ddp, *optimizer);
    comm.run({});  // before it others' copies may not go on
    return result;
}

// ---- the same bits ---------------------------------------------------------------------------------------------------

class DdpShared : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, DdpShared, ::testing::Range(1, 6));

TEST_P(DdpShared, EveryOptimizerGivesTheBitsOfThePlainPath) {
    expect_all_well(run_ranks(GetParam(), test_options(), [](Communicator& comm) {
        for (const Kind kind : {Kind::sgd, Kind::momentum, Kind::adam, Kind::adamw, Kind::adagrad, Kind::lion}) {
            EXPECT_TRUE(trained(comm, kind, small_buckets(false), 3) == trained(comm, kind, small_buckets(true), 3))
                << static_cast<int>(kind);
        }
    }));
}

TEST_P(DdpShared, OptionsThatGoWithItGiveTheBitsOfThePlainPath) {
    const std::map<std::string, DdpOptions> cases{
        {"sum", {.op = ReduceOp::sum}},
        {"pre_divide", {.pre_divide = 3}},
        {"rebuild", {.rebuild_buckets = true}},
        {"bf16", {.reduce_dtype = DType::bf16}},
        {"power_sgd", {.hook = DdpHook::power_sgd, .power_sgd_start_step = 1}}};
    expect_all_well(run_ranks(GetParam(), test_options(), [&](Communicator& comm) {
        for (const auto& [name, options] : cases) {
            EXPECT_TRUE(trained(comm, Kind::adamw, small_buckets(false, options), 3) ==
                        trained(comm, Kind::adamw, small_buckets(true, options), 3))
                << name;
        }
        EXPECT_TRUE(trained(comm, Kind::adam, small_buckets(false), 3, true) ==
                    trained(comm, Kind::adam, small_buckets(true), 3, true))
            << "no_sync";
    }));
}

TEST_P(DdpShared, AHookThatAveragesGivesTheBitsOfThePlainPath) {
    expect_all_well(run_ranks(GetParam(), test_options(), [](Communicator& comm) {
        const auto with_hook = [&](bool share) {
            Params model;
            Ddp ddp(shared(comm), model.tensors(), small_buckets(share));
            ddp.set_hook([&](const BucketView& bucket) {
                comm.run({.collective = Collective::all_reduce, .outputs = bucket.ranges, .op = ReduceOp::avg});
            });
            const auto optimizer = make(Kind::adam, ddp);
            for (int step = 0; step < 2; ++step) make_step(ddp, *optimizer, comm.rank(), step);
            Bytes result = all_of(ddp, *optimizer);
            comm.run({});
            return result;
        };
        EXPECT_TRUE(with_hook(false) == with_hook(true));
    }));
}

// ---- the memory ------------------------------------------------------------------------------------------------------

// Ranks that are threads share one mapping: what lies at one address is one.
TEST(DdpSharedMemory, TheRanksOfAHostHaveOneCopy) {
    std::mutex mutex;
    std::map<std::string, std::set<std::byte*>> values;
    std::map<std::string, std::set<std::byte*>> moments;
    std::set<std::string> hosts;
    const bool shares = std::string_view(testing::test_backend()) != "gloo";
    expect_all_well(run_ranks(3, test_options(), [&](Communicator& comm) {
        Params model;
        Ddp ddp(shared(comm), model.tensors(), small_buckets(true));
        const auto optimizer = make(Kind::adam, ddp);
        const std::string host = shares ? comm.options().host_id : std::to_string(comm.rank());
        {
            const std::lock_guard lock(mutex);
            values[host].insert(ddp.param(0).tensor.data);
            moments[host].insert(optimizer->moments()[0].tensor.data);
        }
        comm.run({});
    }));
    for (const auto& [host, places] : values) EXPECT_EQ(places.size(), 1U) << host;
    for (const auto& [host, places] : moments) EXPECT_EQ(places.size(), 1U) << host;
}

TEST(DdpSharedMemory, WhatWasRegisteredIsNotUsedAnyMore) {
    expect_all_well(run_ranks(2, test_options(), [](Communicator& comm) {
        auto model = std::make_unique<Params>();
        Ddp ddp(shared(comm), model->tensors(), small_buckets(true));
        const auto optimizer = make(Kind::sgd, ddp);
        const float before = ddp.param(0).tensor.as<float>()[5];
        EXPECT_EQ(before, static_cast<float>(std::cos(1.5)));
        for (Bytes& bytes : model->memory) std::fill(bytes.begin(), bytes.end(), std::byte{0xff});
        model.reset();
        make_step(ddp, *optimizer, comm.rank(), 0);
        EXPECT_NEAR(ddp.param(0).tensor.as<float>()[5], before, 0.2);
        comm.run({});
    }));
}

TEST(DdpSharedMemory, AllRanksBeginWithTheValuesOfRank0) {
    expect_all_well(run_ranks(3, test_options(), [](Communicator& comm) {
        Params model;
        auto tensors = model.tensors();
        for (const auto& [name, tensor] : tensors) {
            Params::set(tensor, [&](size_t k) { return comm.rank() * 1000 + static_cast<double>(k); });
        }
        Ddp ddp(shared(comm), tensors, small_buckets(true));
        for (const auto& [name, tensor] : ddp.params()) {
            if (tensor.dtype != DType::f32) continue;
            for (size_t k = 0; k < tensor.as<float>().size(); ++k) {
                ASSERT_EQ(tensor.as<float>()[k], static_cast<float>(k)) << name;
            }
        }
    }));
}

// ---- what is refused -------------------------------------------------------------------------------------------------

TEST(DdpSharedRefuses, WhatWouldUpdateOneCopyWithDifferentGradients) {
    const std::map<std::string, DdpOptions> cases{{"find_unused", {.find_unused = true}},
                                                  {"static_graph", {.static_graph = true}},
                                                  {"join", {.join = DdpJoin::divide_by_world}},
                                                  {"hook NOOP", {.hook = DdpHook::noop}}};
    expect_all_well(run_ranks(2, test_options(), [&](Communicator& comm) {
        for (const auto& [name, given] : cases) {
            const DdpOptions& options = given;
            Params model;
            const Error error = expect_error([&] { Ddp(shared(comm), model.tensors(), small_buckets(true, options)); },
                                             Code::unsupported);
            EXPECT_THAT(error.what(), HasSubstr("share_params cannot be combined with " + name));
        }
        Params model;
        model.specs = {{"half", {4}, DType::bf16}};
        EXPECT_THAT(
            expect_error([&] { Ddp(shared(comm), model.tensors(), small_buckets(true)); }, Code::unsupported).what(),
            HasSubstr("parameter \"half\", which is bf16"));
    }));
}

TEST(DdpSharedRefuses, AStepBeforeThereIsAnOptimizer) {
    expect_all_well(run_ranks(2, test_options(), [](Communicator& comm) {
        Params model;
        Ddp ddp(shared(comm), model.tensors(), small_buckets(true));
        EXPECT_THAT(expect_error([&] { ddp.ready_all(); }, Code::invalid_state).what(),
                    HasSubstr("needs an optimizer, which updates the parameters during the step"));
        const auto optimizer = make(Kind::sgd, ddp);  // the model is as good as before
        make_step(ddp, *optimizer, comm.rank(), 0);
        EXPECT_THAT(expect_error([&] { optimizer->step(); }, Code::invalid_state).what(),
                    HasSubstr("steps in the backward pass"));
        EXPECT_EQ(ddp.shared_step(), 1);
        comm.run({});
    }));
}

TEST(DdpSharedRefuses, OnOneRankAndNotOnAnotherIsAMismatch) {
    const Outcomes outcomes = run_ranks(2, test_options(), [](Communicator& comm) {
        Params model;
        Ddp(shared(comm), model.tensors(), small_buckets(comm.rank() == 1));
    });
    for (const auto& outcome : outcomes) {
        ASSERT_TRUE(outcome);
        EXPECT_EQ(outcome->code(), Code::mismatch);
        EXPECT_THAT(outcome->what(), HasSubstr("share_params"));
    }
}

// ---- failures and stamps ---------------------------------------------------------------------------------------------

// Rank 1's hook fails at this bucket of the second step; returns what rank 0 finds in its copy then.
std::optional<Error> after_a_failure_at(size_t bucket, int64_t* step) {
    std::optional<Error> found;
    std::atomic<int> ended{0};
    CommOptions options = test_options();
    options.host_id = "one";  // also where the tests pretend several
    const auto outcomes = run_ranks(2, options, [&](Communicator& comm) {
        Params model;
        Ddp ddp(shared(comm), model.tensors(), small_buckets(true));
        const auto optimizer = make(Kind::adam, ddp);
        int steps = 0;
        ddp.set_hook([&](const BucketView& view) {
            if (comm.rank() == 1 && steps == 1 && view.bucket == bucket) throw Error(Code::user, "on purpose");
            comm.run({.collective = Collective::all_reduce, .outputs = view.ranges, .op = ReduceOp::avg});
        });
        make_step(ddp, *optimizer, comm.rank(), steps);
        EXPECT_EQ(ddp.shared_step(), 1);
        ++steps;
        EXPECT_THROW(make_step(ddp, *optimizer, comm.rank(), steps), Error);
        ++ended;
        wait_until([&] { return ended.load() == 2; }, testing::soon(), "the other rank");
        if (comm.rank() != 0) return;
        try {
            *step = ddp.shared_step();
        } catch (const Error& error) {
            found = error;
        }
        // A save is of one step, or none.
        const TemporaryDirectory directory;
        State state;
        for (const auto& [name, tensor] : ddp.params()) state.add_shared(name, tensor, ddp.host_copy());
        Saver saver(nullptr, directory.path().string(), {});
        if (found) {
            EXPECT_EQ(expect_error([&] { saver.save(1, state); }, Code::corrupt).code(), Code::corrupt);
        } else {
            saver.save(1, state);
        }
    });
    expect_all_well(outcomes);
    return found;
}

TEST(DdpSharedStamps, AStepThatFailedInBetweenLeavesATornCopy) {
    if (std::string_view(testing::test_backend()) == "gloo")
        return;  // a copy of a rank's own cannot be torn by another
    int64_t step = -1;
    const auto error = after_a_failure_at(1, &step);
    ASSERT_TRUE(error);
    EXPECT_EQ(error->code(), Code::corrupt);
    EXPECT_THAT(error->what(), HasSubstr("this rank finished step 1"));
    EXPECT_THAT(error->what(), HasSubstr("the slice of local rank 0 is between step 1 and step 2"));
    EXPECT_THAT(error->what(), HasSubstr("load the last checkpoint"));
}

TEST(DdpSharedStamps, AStepThatFailedBeforeAnyUpdateLeavesTheCopyWhole) {
    int64_t step = -1;
    const auto error = after_a_failure_at(0, &step);
    EXPECT_FALSE(error) << error->what();
    EXPECT_EQ(step, 1);
}

// A rank that is stopped for a while behind a meeting: it goes on when another has aborted the communicator.
class Stopped final : public Communicator {
   public:
    explicit Stopped(Communicator& comm) : comm_(comm) {}
    void run(const Request& request) override {
        comm_.run(request);
        if (request.collective != Collective::barrier) return;
        wait_until([&] { return comm_.error().has_value(); }, testing::soon(), "the other's abort");
    }
    [[nodiscard]] int rank() const override { return comm_.rank(); }
    [[nodiscard]] int world_size() const override { return comm_.world_size(); }
    [[nodiscard]] const std::string& name() const override { return comm_.name(); }
    [[nodiscard]] std::string_view transport() const override { return comm_.transport(); }
    [[nodiscard]] CommOptions options() const override { return comm_.options(); }
    void set_timeout(milliseconds timeout) override { comm_.set_timeout(timeout); }
    WorkPtr submit(const Request& request) override { return comm_.submit(request); }
    std::shared_ptr<Plan> prepare(const Request& request) override { return comm_.prepare(request); }
    WorkPtr submit_job(std::function<void()> job) override { return comm_.submit_job(std::move(job)); }
    std::shared_ptr<Communicator> split(int color, int key, const CommOptions& options) override {
        return comm_.split(color, key, options);
    }
    std::shared_ptr<Communicator> shrink(const CommOptions& options) override { return comm_.shrink(options); }
    std::shared_ptr<Buffer> allocate(size_t size) override { return comm_.allocate(size); }
    void finalize() override { comm_.finalize(); }
    void abort(const std::string& reason) override { comm_.abort(reason); }
    [[nodiscard]] std::optional<Error> error() const override { return comm_.error(); }
    void write_trace(const std::string& path) const override { comm_.write_trace(path); }

   private:
    Communicator& comm_;
};

TEST(DdpSharedStamps, ARankThatWasGivenUpChangesNothing) {
    if (std::string_view(testing::test_backend()) == "gloo") return;  // a rank shares with itself
    CommOptions options = test_options();
    options.host_id = "one";
    std::barrier both_have_a_copy(2);
    expect_all_well(run_ranks(2, options, [&](Communicator& comm) {
        if (comm.rank() == 0) {
            HostCopy copy(shared(comm));
            both_have_a_copy.arrive_and_wait();
            copy.meet("load begins");
            comm.abort("rank 0 gives up");
            return;
        }
        HostCopy copy(std::make_shared<Stopped>(comm));
        both_have_a_copy.arrive_and_wait();
        for (const auto& change :
             std::vector<std::function<void()>>{[&] { copy.begin_load(); }, [&] { copy.begin_step(0); }}) {
            EXPECT_THAT(expect_error(change, Code::aborted).what(), HasSubstr("rank 0 gives up"));
        }
    }));
}

TEST(DdpSharedStamps, AnOptimizerThatGoesInAStepFailsIt) {
    const auto outcomes = run_ranks(2, test_options(), [](Communicator& comm) {
        Params model;
        Ddp ddp(shared(comm), model.tensors(), small_buckets(true));
        auto optimizer = make(Kind::adam, ddp);
        make_step(ddp, *optimizer, comm.rank(), 0);
        write_gradients(ddp, comm.rank(), 1);
        ddp.ready(0);
        if (comm.rank() == 1) optimizer.reset();
        for (size_t i = 1; i < ddp.params().size(); ++i) ddp.ready(i);
        ddp.wait();
    });
    ASSERT_TRUE(outcomes[1]);
    EXPECT_THAT(outcomes[1]->what(), HasSubstr("optimizer"));
    ASSERT_TRUE(outcomes[0]) << "a rank whose neighbour updates nothing has no whole copy";
}

// ---- checkpoints -----------------------------------------------------------------------------------------------------

class DdpSharedCheckpoint : public ::testing::Test {
   protected:
    // Makes steps on `world` ranks, saves after the third, makes a fourth; returns rank 0's values after the third.
    Bytes save(int world, bool share, Copies copies, bool in_background) {
        Bytes saved;
        expect_all_well(run_ranks(world, test_options(), [&](Communicator& comm) {
            Params model;
            Ddp ddp(shared(comm), model.tensors(), small_buckets(share));
            const auto optimizer = make(Kind::adam, ddp);
            for (int step = 0; step < 3; ++step) make_step(ddp, *optimizer, 0, step);  // alike in any world
            if (comm.rank() == 0) saved = all_of(ddp, *optimizer);
            State state = state_of(ddp, *optimizer);
            SaverOptions options;
            options.copies = copies;
            options.plan.split_bytes = 4096;  // so that every rank writes
            Saver saver(shared(comm), directory_.path().string(), options);
            if (in_background) {
                (void)saver.save_async(3, state);
            } else {
                saver.save(3, state);
            }
            make_step(ddp, *optimizer, 0, 3);
            saver.wait();
            comm.run({});
        }));
        return saved;
    }
    // Loads on `world` ranks; every rank's values.
    std::vector<Bytes> load(int world, bool share) {
        std::vector<Bytes> loaded(static_cast<size_t>(world));
        expect_all_well(run_ranks(world, test_options(), [&](Communicator& comm) {
            Params model;
            Ddp ddp(shared(comm), model.tensors(), small_buckets(share));
            const auto optimizer = make(Kind::adam, ddp);
            make_step(ddp, *optimizer, comm.rank(), 7);  // not what was saved
            State state = state_of(ddp, *optimizer);
            (void)Checkpoint::open(directory_.path().string())->load(state);
            loaded[static_cast<size_t>(comm.rank())] = all_of(ddp, *optimizer);
            if (share) {
                EXPECT_EQ(ddp.shared_step(), 1);
            }
            comm.run({});
        }));
        return loaded;
    }

    TemporaryDirectory directory_;
};

TEST_F(DdpSharedCheckpoint, ResumesAtAnyWorldSizeWithAndWithout) {
    const Bytes saved = save(3, true, Copies::at_once, false);
    for (const bool share : {true, false}) {
        for (const int world : {1, 2, 5}) {
            for (const Bytes& loaded : load(world, share)) EXPECT_TRUE(loaded == saved) << world << share;
        }
    }
}

TEST_F(DdpSharedCheckpoint, OfThePlainPathIsLoadedIntoOneCopy) {
    const Bytes saved = save(2, false, Copies::at_once, false);
    for (const Bytes& loaded : load(4, true)) EXPECT_TRUE(loaded == saved);
}

TEST_F(DdpSharedCheckpoint, InTheBackgroundIsOfTheStepAtWhichItWasAskedFor) {
    for (const Copies copies : {Copies::at_once, Copies::on_demand}) {
        const Bytes saved = save(3, true, copies, true);
        for (const Bytes& loaded : load(2, true)) EXPECT_TRUE(loaded == saved);
    }
}

// What is yet to be copied of a rank's save, which begins when it is asked for.
class Recorder final : public LateCopy {
   public:
    explicit Recorder(const Ddp& ddp) : ddp_(ddp) {}
    void copy_now(Memory memory) noexcept override {
        if (memory.empty()) return;
        for (size_t i = 0; i < ddp_.params().size(); ++i) {
            const Tensor& tensor = ddp_.param(i).tensor;
            if (memory.data() != tensor.data || memory.size() != tensor.size_bytes() || copied_.contains(i)) continue;
            append(copied_[i], tensor);
        }
    }
    [[nodiscard]] const std::map<size_t, Bytes>& copied() const { return copied_; }

   private:
    const Ddp& ddp_;
    std::map<size_t, Bytes> copied_;
};

TEST_F(DdpSharedCheckpoint, ARankCopiesAllOfABucketBeforeAnyOtherChangesASliceOfIt) {
    expect_all_well(run_ranks(4, test_options(), [](Communicator& comm) {
        Params model;
        Ddp ddp(shared(comm), model.tensors(), small_buckets(true));
        const auto optimizer = make(Kind::adam, ddp);
        for (int step = 0; step < 20; ++step) {
            const auto recorder = std::make_shared<Recorder>(ddp);
            std::map<size_t, Bytes> before;
            for (size_t i = 0; i < ddp.params().size(); ++i) {
                if (ddp.param(i).tensor.size_bytes() > 0) append(before[i], ddp.param(i).tensor);
            }
            comm.run({});
            optimizer->barrier()->add(recorder);
            make_step(ddp, *optimizer, comm.rank(), step);
            optimizer->barrier()->remove(recorder.get());
            EXPECT_TRUE(recorder->copied() == before) << step;
        }
        comm.run({});
    }));
}

// Each rank loads its rows: of a tensor that another does not load, some would be old.
TEST_F(DdpSharedCheckpoint, OfWhichRanksLoadOtherNamesIsLoadedByNone) {
    if (std::string_view(testing::test_backend()) == "gloo") return;  // each loads all of a copy of its own
    (void)save(1, false, Copies::at_once, false);
    CommOptions options = test_options();
    options.host_id = "one";
    expect_all_well(run_ranks(2, options, [&](Communicator& comm) {
        Params model;
        Ddp ddp(shared(comm), model.tensors(), small_buckets(true));
        const auto optimizer = make(Kind::adam, ddp);
        make_step(ddp, *optimizer, comm.rank(), 7);  // not what was saved
        State state = state_of(ddp, *optimizer);
        const Bytes before = all_of(ddp, *optimizer);
        const auto checkpoint = Checkpoint::open(directory_.path().string());
        const std::string first = ddp.params().front().name;
        LoadOptions load;
        load.only = {comm.rank() == 0 ? "model.*" : "model." + first};
        EXPECT_THAT(
            expect_error([&] { (void)checkpoint->load(state, load); }, Code::mismatch).what(),
            HasSubstr(
                "local rank 1 of this host loads different tensors into the shared parameters than local rank 0"));
        comm.run({});
        EXPECT_TRUE(all_of(ddp, *optimizer) == before);
        EXPECT_EQ(ddp.shared_step(), 1);
        comm.run({});
        load.only = {"model.*"};  // the same on all: the moments stay
        (void)checkpoint->load(state, load);
        State whole = state_of(ddp, *optimizer);
        const Bytes partly = all_of(ddp, *optimizer);
        comm.run({});
        (void)checkpoint->load(whole);
        const Bytes all = all_of(ddp, *optimizer);
        size_t size = 0;
        for (const NamedTensor& param : ddp.params()) size += param.tensor.size_bytes();
        EXPECT_TRUE(std::equal(all.begin(), all.begin() + static_cast<ptrdiff_t>(size), partly.begin()));
        EXPECT_TRUE(std::equal(before.begin() + static_cast<ptrdiff_t>(size), before.end(),
                               partly.begin() + static_cast<ptrdiff_t>(size)));
        EXPECT_FALSE(partly == all);
        comm.run({});
    }));
}

TEST_F(DdpSharedCheckpoint, ThatOneRankCannotLoadIsLoadedByNone) {
    if (std::string_view(testing::test_backend()) == "gloo") return;  // each loads all of a copy of its own
    (void)save(1, false, Copies::at_once, false);
    std::atomic<int> failed{0};
    std::atomic<int> aborted{0};
    CommOptions options = test_options();
    options.host_id = "one";
    expect_all_well(run_ranks(2, options, [&](Communicator& comm) {
        Params model;
        Ddp ddp(shared(comm), model.tensors(), small_buckets(true));
        const auto optimizer = make(Kind::adam, ddp);
        State state = state_of(ddp, *optimizer);
        const auto copy = ddp.host_copy();
        copy->begin_load();
        try {
            copy->end_load(comm.rank() == 1 ? std::optional(Error(Code::corrupt, "a block")) : std::nullopt);
        } catch (const Error& error) {
            ++(error.code() == Code::corrupt ? failed : aborted);
            if (comm.rank() == 0) {
                EXPECT_THAT(error.what(), HasSubstr("local rank 1 of this host could not load"));
            }
        }
        EXPECT_THAT(expect_error([&] { (void)ddp.shared_step(); }, Code::corrupt).what(),
                    HasSubstr("the slice of local rank 1 was being loaded"));
        EXPECT_EQ(expect_error([&] { ddp.ready_all(); }, Code::corrupt).code(), Code::corrupt);
        comm.run({});
        (void)Checkpoint::open(directory_.path().string())->load(state);  // again, on all
        EXPECT_EQ(ddp.shared_step(), 0);
        comm.run({});
    }));
    EXPECT_EQ(failed, 1);
    EXPECT_EQ(aborted, 1);
}

}  // namespace
}  // namespace tsr
