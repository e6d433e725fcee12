// Messages between two ranks, the other of which sends what it likes.
#include "parallel/pipeline/messages.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstring>

#include "base/attempt.hpp"
#include "parallel/model.hpp"
#include "ranks.hpp"
#include "seed.hpp"

namespace tsr::testing {
namespace {

using pipeline::Bundle;
using pipeline::bytes_tag;
using pipeline::header_tag;
using pipeline::Held;
using pipeline::Kind;
using pipeline::MessageHeader;
using pipeline::Messages;
using pipeline::Pass;
using pipeline::Pool;
using pipeline::Route;
using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr int microbatches = 3;
constexpr uint64_t max_bytes = 1000;

// Stages 0 and 2 are on rank 0, stage 1 is on rank 1.
std::unique_ptr<Messages> messages_of(Communicator& comm) {
    return std::make_unique<Messages>(shared(comm), std::vector<Route>{{0, 1, 0, 1}, {1, 2, 1, 0}}, microbatches,
                                      max_bytes, std::make_shared<Pool>(cpu_device()));
}

// Three f64 for stage 1.
MessageHeader valid_header() {
    MessageHeader header;
    header.step = 1;
    header.count = 1;
    header.dtype = static_cast<int32_t>(DType::f64);
    header.ndim = 1;
    header.shape[0] = 3;
    return header;
}

void send_raw(Communicator& comm, const void* data, size_t size, int tag) {
    std::vector<uint8_t> bytes(size);
    std::memcpy(bytes.data(), data, size);
    const Tensor tensor = tensor_of(std::span(bytes), DType::u8);
    comm.run({.collective = Collective::send, .inputs = {&tensor, 1}, .peer = 1, .tag = tag});
}

constexpr std::array<double, 3> sent{1.5, 2.5, 3.5};

void send_tensor(Communicator& comm, const MessageHeader& header) {
    send_raw(comm, &header, sizeof header, header_tag);
    send_raw(comm, sent.data(), sizeof sent, bytes_tag);
}

// Rank 0 sends by hand; rank 1 waits for micro-batch 0 of stage 0. What rank 1 gets, or fails with.
struct Received {
    Bundle bundle;
    std::optional<Error> error;
};
Received received(const std::function<void(Communicator&)>& send, Pass pass = Pass::training,
                  milliseconds timeout = patience(milliseconds{20000})) {
    Received result;
    const Outcomes outcomes = run_ranks(2, test_options(), [&](Communicator& comm) {
        const auto messages = messages_of(comm);
        if (comm.rank() == 0) {
            static_cast<void>(attempt([&] {
                send(comm);
                comm.run({.collective = Collective::barrier});  // rank 1 fails meanwhile, or comes
            }));
            return;
        }
        messages->begin(pass, timeout);
        result.bundle = messages->take({Kind::activation, 0, 0});
        messages->fail(Error(Code::aborted, "the test is over"));
    });
    result.error = outcomes[1];
    return result;
}

TEST(Messages, CarryWhatTheirHeadersSay) {
    const Received result = received([](Communicator& comm) { send_tensor(comm, valid_header()); });
    ASSERT_FALSE(result.error) << result.error->what();
    ASSERT_EQ(result.bundle.size(), 1U);
    const Tensor& tensor = result.bundle[0].tensor;
    EXPECT_EQ(tensor.dtype, DType::f64);
    EXPECT_EQ(tensor.shape, Dims{3});
    EXPECT_TRUE(std::ranges::equal(tensor.as<double>(), sent));
}

TEST(Messages, RefuseHeadersThatCannotBe) {
    struct Case {
        std::function<void(MessageHeader&)> change;
        Code code;
        const char* says;
    };
    const std::vector<Case> cases{
        {[](auto& h) { h.magic = 7; }, Code::corrupt, "does not begin as one of a pipeline (magic 0x7)"},
        {[](auto& h) { h.kind = static_cast<Kind>(9); }, Code::corrupt, "has the unknown kind 9"},
        {[](auto& h) { h.edge = 2; }, Code::corrupt, "there are 3 micro-batches and 2 edges"},
        {[](auto& h) { h.microbatch = 3; }, Code::corrupt, "is for micro-batch 3 and edge 0"},
        {[](auto& h) { h.microbatch = UINT32_MAX; }, Code::corrupt, "is for micro-batch 4294967295"},
        {[](auto& h) { h.edge = 1; }, Code::corrupt,
         "from stage 1 on rank 1, which goes from rank 1 to rank 0, not to rank 1"},
        {[](auto& h) { h.kind = Kind::gradient; }, Code::corrupt,
         "the gradient of micro-batch 0 from stage 1 on rank 1, which goes"},
        {[](auto& h) { h.step = 2; }, Code::mismatch, "of pass 2, a training step; here it is pass 1, a training step"},
        {[](auto& h) { h.pass = Pass::evaluation; }, Code::mismatch, "of pass 1, an evaluation; here"},
        {[](auto& h) { h.count = 1025; }, Code::corrupt, "has 1025 tensors; at most 1024"},
        {[](auto& h) { h.index = 1; }, Code::corrupt,
         "is tensor 1 of 1 of the activation of micro-batch 0 from stage 0 on rank 0"},
        {[](auto& h) { h.index = 1, h.count = 2; }, Code::corrupt, "expected was tensor 0"},
        {[](auto& h) { h.dtype = 99; }, Code::corrupt,
         "tensor 0 of the activation of micro-batch 0 from stage 0 on rank 0 with the unknown dtype 99"},
        {[](auto& h) { h.dtype = 0; }, Code::corrupt, "the unknown dtype 0"},
        {[](auto& h) { h.ndim = 9; }, Code::corrupt, "9 dimensions; 0 to 8"},
        {[](auto& h) { h.ndim = -1; }, Code::corrupt, "-1 dimensions"},
        {[](auto& h) { h.shape[0] = -3; }, Code::corrupt, "negative size"},
        {[](auto& h) { h.ndim = 2, h.shape = {int64_t{1} << 40, int64_t{1} << 40}; }, Code::corrupt,
         "larger than 2^63 bytes"},
        {[](auto& h) { h.shape[0] = 126; }, Code::corrupt, "1008 bytes; max_message_bytes is 1000"},
    };
    for (const Case& one : cases) {
        const Received result = received([&](Communicator& comm) {
            MessageHeader header = valid_header();
            one.change(header);
            send_tensor(comm, header);
        });
        ASSERT_TRUE(result.error) << one.says;
        EXPECT_EQ(result.error->code(), one.code) << result.error->what();
        EXPECT_THAT(result.error->what(), HasSubstr(one.says));
        EXPECT_THAT(result.error->what(),
                    HasSubstr("stage 1 waited for the activation of micro-batch 0 from stage 0 on rank 0: "));
        EXPECT_EQ(result.error->record()->peer, 0);
    }
}

// Whether this rank has heard of the failure yet, or its communicator alone.
TEST(Messages, ThatCannotBeSentAreNamed) {
    for (const bool is_told : {true, false}) {
        const Outcomes outcomes = run_ranks(2, test_options(), [&](Communicator& comm) {
            const auto messages = messages_of(comm);
            if (comm.rank() == 1) return;
            messages->begin(Pass::training, patience(milliseconds{20000}));
            if (is_told) {
                messages->fail(Error(Code::user, "enough"));
            } else {
                comm.abort("enough");
            }
            messages->send({Kind::activation, 0, 2}, {});
        });
        ASSERT_TRUE(outcomes[0]);
        EXPECT_THAT(outcomes[0]->what(),
                    AllOf(HasSubstr("could not send the activation of micro-batch 2 from stage 0 on rank 0: "),
                          HasSubstr("enough")));
    }
}

TEST(Messages, RefuseABundleThatComesTwice) {
    const Received result = received([](Communicator& comm) {
        MessageHeader second = valid_header();
        second.microbatch = 1;
        send_tensor(comm, second);
        send_tensor(comm, second);
    });
    ASSERT_TRUE(result.error);
    EXPECT_EQ(result.error->code(), Code::mismatch);
    EXPECT_THAT(result.error->what(),
                HasSubstr("is the activation of micro-batch 1 from stage 0 on rank 0, which has come before"));
}

TEST(Messages, RefuseABundleThatChangesItsCount) {
    const Received result = received([](Communicator& comm) {
        MessageHeader header = valid_header();
        header.count = 3;
        send_tensor(comm, header);
        header.index = 1;
        header.count = 2;
        send_tensor(comm, header);
    });
    ASSERT_TRUE(result.error);
    EXPECT_EQ(result.error->code(), Code::corrupt);
    EXPECT_THAT(result.error->what(), HasSubstr("is tensor 1 of 2 of the activation"));
    EXPECT_THAT(result.error->what(), HasSubstr("expected was tensor 1 of 3"));
}

TEST(Messages, RefuseGradientsInAnEvaluation) {
    const Received result = received(
        [](Communicator& comm) {
            MessageHeader header = valid_header();
            header.pass = Pass::evaluation;
            header.kind = Kind::gradient;
            header.edge = 1;
            send_tensor(comm, header);
        },
        Pass::evaluation);
    ASSERT_TRUE(result.error);
    EXPECT_EQ(result.error->code(), Code::mismatch);
    EXPECT_THAT(result.error->what(),
                HasSubstr("is the gradient of micro-batch 0 from stage 2 on rank 0; an evaluation has no gradients"));
}

TEST(Messages, SurviveEveryDamagedByteOfAHeader) {
    const Seed seed;
    std::mt19937_64 random(seed);
    for (int trial = 0; trial < 30; ++trial) {
        const size_t at = random() % sizeof(MessageHeader);
        const auto with = static_cast<uint8_t>(1 + random() % 255);
        const Received result = received(
            [&](Communicator& comm) {
                MessageHeader header = valid_header();
                reinterpret_cast<uint8_t*>(&header)[at] ^= with;
                send_tensor(comm, header);
            },
            Pass::training, patience(milliseconds{100}));
        if (!result.error) {
            ASSERT_EQ(result.bundle.size(), 1U) << "byte " << at;
            EXPECT_LE(result.bundle[0].tensor.size_bytes(), max_bytes) << "byte " << at;
            continue;
        }
        EXPECT_THAT(result.error->code(), ::testing::AnyOf(Code::corrupt, Code::mismatch, Code::timeout))
            << result.error->what();
    }
}

TEST(Messages, BetweenStagesOfOneRankGoByReference) {
    expect_all_well(run_ranks(1, test_options(), [](Communicator& comm) {
        const auto pool = std::make_shared<Pool>(cpu_device());
        Messages messages(shared(comm), {{0, 1, 0, 0}}, 1, max_bytes, pool);
        messages.begin(Pass::training, milliseconds{1000});
        Held held{{nullptr, Dims{2}, DType::f32, {}}, pool->take(8)};
        held.tensor.data = held.memory.get();
        messages.send({Kind::activation, 0, 0}, {held});
        const Bundle bundle = messages.take({Kind::activation, 0, 0});
        ASSERT_EQ(bundle.size(), 1U);
        EXPECT_EQ(bundle[0].tensor.data, held.tensor.data);
        messages.finish();
    }));
}

TEST(Messages, GoneWithTheirOwnerNeverHang) {
    const Outcomes outcomes = run_ranks(2, test_options(), [](Communicator& comm) {
        const auto messages = messages_of(comm);
        messages->begin(Pass::training, milliseconds{1000});
        if (comm.rank() == 1) return;  // with receives posted
        static_cast<void>(messages->take({Kind::activation, 1, 0}));
    });
    ASSERT_TRUE(outcomes[0]);
    EXPECT_THAT(outcomes[0]->what(),
                HasSubstr("stage 2 waited for the activation of micro-batch 0 from stage 1 on rank 1: "));
}

}  // namespace
}  // namespace tsr::testing
