// What registration refuses: models that differ between ranks, bad units, bad options. Every rank is told, also of what
// one rank alone did.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "mlp.hpp"
#include "parallel/ddp/ddp.hpp"
#include "parallel/fsdp/fsdp.hpp"
#include "parallel/model.hpp"
#include "ranks.hpp"
#include "units.hpp"

namespace tsr {
namespace {

using testing::a_unit_a_layer;
using testing::expect_all_well;
using testing::expect_error;
using ::testing::HasSubstr;
using testing::Mlp;
using testing::Model;
using testing::run_ranks;
using testing::shared;
using testing::test_options;

TEST(Fsdp, DifferentModelsAreRefusedByName) {
    const std::vector<std::pair<std::function<void(std::vector<FsdpUnit>&)>, std::string>> cases{
        {[](auto& units) { units[1].name = "other"; }, "unit \"other\" of 2 parameters"},
        {[](auto& units) { units[1].params.pop_back(); }, "unit \"fc1\" of 1 parameters"},
        {[](auto& units) { units[1].reshard_after_forward = 0; }, "reshard_after_forward 0"},
        {[](auto& units) { units[1].param_dtype = DType::f16; }, "param_dtype f16"},
        {[](auto& units) { units[2].reduce_dtype = DType::f64; }, "reduce_dtype f64"},
        {[](auto& units) { units[1].trained = {true, false}; }, "\"fc1.bias\" is not trained"},
        {[](auto& units) { units[2].params[0].name = "renamed"; }, "\"renamed\""}};
    for (const auto& [change, said] : cases) {
        for (const auto& outcome : run_ranks(2, test_options(), [&, &change = change](Communicator& comm) {
                 Model model = Mlp::initial();
                 auto units = a_unit_a_layer(model);
                 if (comm.rank() == 1) change(units);
                 const Fsdp fsdp(shared(comm), units, {});
             })) {
            ASSERT_TRUE(outcome);
            EXPECT_EQ(outcome->code(), Code::mismatch);
            EXPECT_THAT(outcome->what(), HasSubstr(said));
        }
    }
}

// The others would wait for it until their deadline.
TEST(Fsdp, WhatOneRankAloneRegistersBadlyIsToldToAll) {
    struct Bad {
        std::function<void(std::vector<FsdpUnit>&, FsdpOptions&)> change;
        std::string said;
    };
    const std::vector<Bad> cases{
        {[](auto& units, auto&) { units[1].name = "fc0"; }, "two units are named \"fc0\""},
        {[](auto& units, auto&) { units[1].params[0] = units[0].params[0]; },
         "two parameters are named \"fc0.weight\""},
        {[](auto& units, auto&) { units[2].row_block = -7; }, "unit \"fc2\": row_block is -7"},
        {[](auto& units, auto&) { units.clear(); }, "the model has no units"},
        {[](auto& units, auto&) { units[0].params[1].tensor.dtype = DType::i64; }, "\"fc0.bias\" is i64"},
        {[](auto&, auto& options) { options.grads_in_flight = 0; }, "grads_in_flight is 0"}};
    for (const auto& [change, said] : cases) {
        for (const int bad : {0, 1}) {
            expect_all_well(run_ranks(3, test_options(), [&, &change = change, &said = said](Communicator& comm) {
                Model model = Mlp::initial();
                auto units = a_unit_a_layer(model);
                FsdpOptions options;
                if (comm.rank() == bad) change(units, options);
                const Error error =
                    expect_error([&] { const Fsdp fsdp(shared(comm), units, options); }, Code::invalid_argument);
                EXPECT_THAT(error.what(), HasSubstr(said));
                if (comm.rank() != bad) {
                    EXPECT_THAT(error.what(), HasSubstr(fmt::format("rank {}: ", bad)));
                    EXPECT_EQ(error.record()->peer, bad);
                }
                const Fsdp another(shared(comm), a_unit_a_layer(model), {});  // nothing else has happened
            }));
        }
    }
}

TEST(Fsdp, OfSeveralBadRegistrationsTheFirstRanksIsToldToTheRest) {
    const auto outcomes = run_ranks(4, test_options(), [](Communicator& comm) {
        Model model = Mlp::initial();
        auto units = a_unit_a_layer(model);
        if (comm.rank() == 1) units[0].name = "other";  // which differs, but that is not what is told
        if (comm.rank() >= 2) units[0].row_block = -comm.rank();
        const Fsdp fsdp(shared(comm), units, {});
    });
    const std::array<std::string, 4> said{"rank 2: unit \"fc0\": row_block is -2",
                                          "rank 2: unit \"fc0\": row_block is -2", "row_block is -2",
                                          "row_block is -3"};
    for (size_t rank = 0; rank < outcomes.size(); ++rank) {
        ASSERT_TRUE(outcomes[rank]);
        EXPECT_EQ(outcomes[rank]->code(), Code::invalid_argument);
        EXPECT_THAT(outcomes[rank]->what(), HasSubstr(said.at(rank))) << rank;
    }
}

TEST(Fsdp, RanksOfWhichSomeTrainUnderDdpAreTold) {
    for (const auto& outcome : run_ranks(2, test_options(), [](Communicator& comm) {
             Model model = Mlp::initial();
             const auto units = a_unit_a_layer(model);
             if (comm.rank() == 0) {
                 const Ddp ddp(shared(comm), units[0].params, {});
             } else {
                 const Fsdp fsdp(shared(comm), units, {});
             }
         })) {
        ASSERT_TRUE(outcome);
        EXPECT_EQ(outcome->code(), Code::mismatch);
        EXPECT_THAT(outcome->what(), HasSubstr("rank 1 has FSDP, rank 0 has DDP"));
    }
}

TEST(Fsdp, BadRegistrationsAreRefused) {
    expect_all_well(run_ranks(1, test_options(), [](Communicator& comm) {
        const auto refused = [&](const std::function<void(std::vector<FsdpUnit>&, FsdpOptions&)>& change) {
            Model model = Mlp::initial();
            auto units = a_unit_a_layer(model);
            FsdpOptions options;
            change(units, options);
            return std::string(
                expect_error([&] { const Fsdp fsdp(shared(comm), units, options); }, Code::invalid_argument).what());
        };
        EXPECT_THAT(refused([](auto& units, auto&) { units.clear(); }), HasSubstr("the model has no units"));
        EXPECT_THAT(refused([](auto& units, auto&) { units[1].params.clear(); }), HasSubstr("\"fc1\" has no param"));
        EXPECT_THAT(refused([](auto& units, auto&) { units[2].name = "fc0"; }),
                    HasSubstr("two units are named \"fc0\""));
        EXPECT_THAT(refused([](auto& units, auto&) { units[1].params[0] = units[0].params[0]; }),
                    HasSubstr("two parameters are named \"fc0.weight\""));
        EXPECT_THAT(refused([](auto& units, auto&) { units[1].params[0].tensor.shape = {}; }), HasSubstr("shape [1]"));
        EXPECT_THAT(refused([](auto& units, auto&) { units[1].reshard_after_forward = 2; }),
                    HasSubstr("unit \"fc1\": reshard_after_forward is 2; it must be 0, 1 or a divisor of the 1 ranks"));
        EXPECT_THAT(refused([](auto& units, auto&) { units[1].row_block = -1; }),
                    HasSubstr("unit \"fc1\": row_block is -1"));
        EXPECT_THAT(refused([](auto& units, auto&) {
                        units[1].row_block = 2;
                        units[1].flat = true;
                    }),
                    HasSubstr("unit \"fc1\" is flat"));
        EXPECT_THAT(refused([](auto&, auto& options) { options.op = ReduceOp::max; }), HasSubstr("AVG or SUM"));
        EXPECT_THAT(refused([](auto&, auto& options) { options.param_dtype = DType::i32; }), HasSubstr("param_dtype"));
        EXPECT_THAT(refused([](auto& units, auto&) { units[1].reduce_dtype = DType::boolean; }),
                    HasSubstr("unit \"fc1\": reduce_dtype is bool"));
        EXPECT_THAT(refused([](auto&, auto& options) { options.forward_prefetch = -1; }), HasSubstr("at least 0"));
        EXPECT_THAT(refused([](auto&, auto& options) { options.grads_in_flight = 0; }), HasSubstr("at least 1"));
        EXPECT_THAT(refused([](auto&, auto& options) { options.shard_ranks = 2; }),
                    HasSubstr("not divisible by shard_ranks 2"));
        EXPECT_THAT(refused([](auto&, auto& options) { options.pre_divide = 0; }), HasSubstr("above 0"));
    }));
}

}  // namespace
}  // namespace tsr
