// Registering a model with DDP: prefixes of wrappers, models and options that differ between ranks, and bad ones, of
// which every rank is told.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <functional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "parallel/ddp/ddp.hpp"
#include "parallel/model.hpp"
#include "ranks.hpp"

namespace tsr {
namespace {

using testing::expect_all_well;
using testing::expect_error;
using ::testing::HasSubstr;
using testing::Model;
using testing::Outcomes;
using testing::run_ranks;
using testing::shared;
using testing::test_options;
using testing::three_layers;

TEST(Ddp, WrappersPrefixesAreStripped) {
    EXPECT_EQ(without_wrappers("module.fc1.weight"), "fc1.weight");
    EXPECT_EQ(without_wrappers("module._orig_mod.fc1.weight"), "fc1.weight");
    EXPECT_EQ(without_wrappers("fc.module.weight"), "fc.module.weight");
    expect_all_well(run_ranks(2, test_options(), [](Communicator& comm) {
        Model model;
        model.add(comm.rank() == 0 ? "module.w" : "w", {4});
        const Ddp ddp(shared(comm), model.params(), {});
        EXPECT_EQ(ddp.param(0).name, "w");
    }));
}

TEST(Ddp, DifferentModelsAreNamedAlikeOnEveryRank) {
    struct Case {
        std::function<void(Model&)> change;  // what rank 2 registers otherwise
        std::string said;
    };
    const std::vector<Case> cases{
        {[](Model& m) { m.entries[1].name = "bb"; },
         R"(rank 2 has parameter 1 "bb" f32 [20, 15], rank 0 has parameter 1 "b")"},
        {[](Model& m) { m.entries[1].shape = {15, 20}; }, R"(rank 2 has parameter 1 "b" f32 [15, 20])"},
        {[](Model& m) { m.entries.pop_back(); }, R"(rank 2 has nothing, rank 0 has parameter 2 "c" f32 [7])"},
        {[](Model& m) { m.add("d", {3}); }, R"(rank 2 has parameter 3 "d" f32 [3], rank 0 has nothing)"},
        {[](Model& m) { std::swap(m.entries[0], m.entries[2]); }, R"(rank 2 has parameter 0 "c" f32 [7])"},
    };
    for (const Case& one : cases) {
        const Outcomes outcomes = run_ranks(3, test_options(), [&](Communicator& comm) {
            Model model = three_layers();
            if (comm.rank() == 2) one.change(model);
            const Ddp ddp(shared(comm), model.params(), {});
        });
        for (const auto& outcome : outcomes) {
            ASSERT_TRUE(outcome);
            EXPECT_EQ(outcome->code(), Code::mismatch);
            EXPECT_THAT(outcome->what(), HasSubstr(one.said));
            EXPECT_EQ(outcome->record()->peer, 2);
        }
    }
}

TEST(Ddp, DifferentDtypesAndOptionsAreNamed) {
    const Outcomes dtypes = run_ranks(2, test_options(), [](Communicator& comm) {
        std::array<double, 4> memory{};
        const DType dtype = comm.rank() == 0 ? DType::f32 : DType::f64;
        const Tensor tensor{reinterpret_cast<std::byte*>(memory.data()), Dims{4}, dtype, {}};
        const Ddp ddp(shared(comm), {{"w", tensor}}, {});
    });
    for (const auto& outcome : dtypes) {
        ASSERT_TRUE(outcome);
        EXPECT_THAT(outcome->what(),
                    HasSubstr(R"(rank 1 has parameter 0 "w" f64 [4], rank 0 has parameter 0 "w" f32 [4])"));
    }
    const Outcomes options = run_ranks(2, test_options(), [](Communicator& comm) {
        Model model = three_layers();
        const Ddp ddp(shared(comm), model.params(), {.op = comm.rank() == 0 ? ReduceOp::avg : ReduceOp::sum});
    });
    for (const auto& outcome : options) {
        ASSERT_TRUE(outcome);
        EXPECT_EQ(outcome->code(), Code::mismatch);
        EXPECT_THAT(outcome->what(), HasSubstr("rank 1 has the option op sum, rank 0 has the option op avg;"));
    }
}

TEST(Ddp, CommunicatorIsUsableAfterAMismatch) {
    expect_all_well(run_ranks(2, test_options(), [](Communicator& comm) {
        Model model = three_layers();
        Model other = three_layers();
        if (comm.rank() == 1) other.entries[0].name = "x";
        expect_error([&] { const Ddp ddp(shared(comm), other.params(), {}); }, Code::mismatch);
        Ddp ddp(shared(comm), model.params(), {});
        ddp.ready_all();
        ddp.wait();
    }));
}

TEST(Ddp, BadRegistrationsAreRefused) {
    expect_all_well(run_ranks(1, test_options(), [](Communicator& comm) {
        const auto own = shared(comm);
        std::array<int32_t, 2> integers{};
        Model twice;
        twice.add("w", {2});
        twice.add("module.w", {2});
        Model model = three_layers();
        expect_error([&] { const Ddp ddp(own, {}, {}); }, Code::invalid_argument);
        EXPECT_THAT(expect_error([&] { const Ddp ddp(own, twice.params(), {}); }, Code::invalid_argument).what(),
                    HasSubstr("two parameters are named \"w\"; names must be unique in the model"));
        EXPECT_THAT(
            expect_error([&] { const Ddp ddp(own, {{"i", tensor_of(std::span<int32_t>(integers), DType::i32)}}, {}); },
                         Code::invalid_argument)
                .what(),
            HasSubstr("\"i\" is i32"));
        expect_error([&] { const Ddp ddp(own, model.params(), {.op = ReduceOp::max}); }, Code::invalid_argument);
    }));
}

// The others would wait for it until their deadline.
TEST(Ddp, WhatOneRankAloneRegistersBadlyIsToldToAll) {
    for (const int bad : {0, 1}) {
        expect_all_well(run_ranks(3, test_options(), [&](Communicator& comm) {
            const bool is_bad = comm.rank() == bad;
            Model model = three_layers();
            const auto refused = [&](const std::function<void()>& call, const char* said) {
                const Error error = expect_error(call, Code::invalid_argument);
                EXPECT_THAT(error.what(), HasSubstr(said));
                if (!is_bad) {
                    EXPECT_THAT(error.what(), HasSubstr(fmt::format("rank {}: ", bad)));
                }
            };
            auto params = model.params();
            if (is_bad) params[2].name = "a";
            refused([&] { const Ddp ddp(shared(comm), params, {}); }, "two parameters are named \"a\"");
            refused([&] { const Ddp ddp(shared(comm), model.params(), {.pre_divide = is_bad ? -1.0 : 1.0}); },
                    "pre_divide is -1");
            Ddp ddp(shared(comm), model.params(), {});  // nothing else has happened
            Model others = three_layers();
            auto buffers = others.params();
            if (is_bad) buffers[1].name = "module.";
            refused([&] { ddp.register_buffers(buffers); }, "a buffer's name is empty");
            buffers[1].name = "b";
            ddp.register_buffers(buffers);
        }));
    }
}

}  // namespace
}  // namespace tsr
