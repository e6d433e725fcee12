// Buffers under DDP: all ranks take rank 0's values, of any dtype, and register buffers together or not at all.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <span>

#include "comm/fingerprint.hpp"
#include "grads.hpp"
#include "parallel/ddp/ddp.hpp"
#include "parallel/model.hpp"
#include "ranks.hpp"

namespace tsr {
namespace {

using ::testing::Each;
using testing::expect_all_well;
using testing::expect_error;
using ::testing::HasSubstr;
using testing::Model;
using testing::Outcomes;
using testing::run_ranks;
using testing::shared;
using testing::test_options;
using testing::three_layers;

TEST(DdpBuffers, OfAllDtypesComeFromRankZero) {
    expect_all_well(run_ranks(3, test_options(), [](Communicator& comm) {
        Model model = three_layers();
        Ddp ddp(shared(comm), model.params(), {});
        expect_error([&] { ddp.broadcast_buffers(); }, Code::invalid_state);
        std::array<float, 5> mean{};
        std::array<int64_t, 1> batches{};
        std::array<uint8_t, 3> mask{};
        const auto set = [&](int value) {
            mean.fill(static_cast<float>(value));
            batches.fill(value);
            mask.fill(static_cast<uint8_t>(value));
        };
        set(10 + comm.rank());
        ddp.register_buffers({{"mask", tensor_of(std::span<uint8_t>(mask), DType::u8)},
                              {"module.mean", tensor_of(std::span<float>(mean), DType::f32)},
                              {"batches", tensor_of(std::span<int64_t>(batches), DType::i64)}});
        EXPECT_THAT(mean, Each(10.0F));
        set(20 + comm.rank());
        ddp.broadcast_buffers();
        EXPECT_THAT(mean, Each(20.0F));
        EXPECT_THAT(batches, Each(20));
        EXPECT_THAT(mask, Each(20));
        expect_error([&] { ddp.register_buffers({{"mask", tensor_of(std::span<uint8_t>(mask), DType::u8)}}); },
                     Code::invalid_state);
        ddp.ready(0);
        expect_error([&] { ddp.broadcast_buffers(); }, Code::invalid_state);
    }));
}

TEST(DdpBuffers, OnesThatDifferAreNamed) {
    const Outcomes outcomes = run_ranks(2, test_options(), [](Communicator& comm) {
        Model model = three_layers();
        Ddp ddp(shared(comm), model.params(), {});
        std::array<float, 5> mean{};
        ddp.register_buffers({{comm.rank() == 0 ? "mean" : "var", tensor_of(std::span<float>(mean), DType::f32)}});
    });
    for (const auto& outcome : outcomes) {
        ASSERT_TRUE(outcome);
        EXPECT_EQ(outcome->code(), Code::mismatch);
        EXPECT_THAT(outcome->what(), HasSubstr(R"(rank 1 has buffer 0 "var" f32 [5], rank 0 has buffer 0 "mean")"));
    }
}

TEST(DdpBuffers, AreNotRegisteredWithoutMemoryForThem) {
    expect_all_well(run_ranks(2, test_options(), [](Communicator& comm) {
        Model model = three_layers();
        Ddp ddp(shared(comm), model.params(), {});
        std::array<std::byte, 1> first{};
        const Tensor huge{first.data(), Dims{int64_t{1} << 50}, DType::u8, {}};
        expect_error([&] { ddp.register_buffers({{"huge", huge}}); }, Code::no_memory);
        expect_error([&] { ddp.broadcast_buffers(); }, Code::invalid_state);
        std::array<float, 5> mean{};
        mean.fill(static_cast<float>(10 + comm.rank()));
        ddp.register_buffers({{"mean", tensor_of(std::span<float>(mean), DType::f32)}});
        EXPECT_THAT(mean, Each(10.0F));
    }));
}

TEST(DdpBuffers, AreNotRegisteredIfTheirValuesDoNotCome) {
    const Outcomes outcomes = run_ranks(2, test_options(), [](Communicator& comm) {
        Model model = three_layers();
        Ddp ddp(shared(comm), model.params(), {});
        if (comm.rank() == 1) {  // as far as the values of rank 0
            check_same_on_all_ranks(comm, Compared::buffers, {R"(buffer 0 "mean" f32 [5])"}, "");
            (void)comm.allocate(4096);
            return comm.abort("enough");
        }
        {
            std::array<float, 5> mean{};
            expect_error([&] { ddp.register_buffers({{"mean", tensor_of(std::span<float>(mean), DType::f32)}}); },
                         Code::aborted);
        }
        expect_error([&] { ddp.broadcast_buffers(); }, Code::invalid_state);
    });
    expect_all_well(outcomes);
}

}  // namespace
}  // namespace tsr
