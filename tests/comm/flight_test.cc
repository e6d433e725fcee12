// The flight recorder, and what communicators write into it.
#include <gmock/gmock.h>

#include <cstdlib>
#include <thread>

#include "comm/flight_recorder.hpp"
#include "json_lines.hpp"
#include "ranks.hpp"
#include "soon.hpp"
#include "temporary_directory.hpp"

namespace tsr::testing {
namespace {

using ::testing::HasSubstr;

Operation operation(uint64_t count) {
    Operation result;
    result.collective = Collective::all_reduce;
    result.dtype = static_cast<int32_t>(DType::f32);
    result.op = ReduceOp::sum;
    result.count = count;
    return result;
}

TEST(FlightRecorder, TellsStatesAndTimesInOrder) {
    FlightRecorder recorder;
    const uint64_t queued = recorder.queued(operation(1));
    const uint64_t inline_one = recorder.started(operation(2), 1);
    recorder.ended(inline_one, true);
    recorder.started(queued, 2);
    recorder.ended(queued, false);
    const auto entries = recorder.entries();
    ASSERT_EQ(entries.size(), 2u);
    EXPECT_EQ(entries[0].state, FlightState::failed);
    EXPECT_EQ(entries[0].sequence, 2u);
    EXPECT_EQ(entries[0].operation.count, 1u);
    EXPECT_LT(entries[0].issued, entries[0].started);
    EXPECT_LE(entries[0].started, entries[0].ended);
    EXPECT_EQ(entries[1].state, FlightState::finished);
    EXPECT_EQ(entries[1].issued, entries[1].started);
}

TEST(FlightRecorder, KeepsTheNewestAndIgnoresTheEndOfWhatItLost) {
    FlightRecorder recorder;
    const uint64_t first = recorder.queued(operation(0));
    for (uint64_t i = 1; i <= FlightRecorder::capacity; ++i) (void)recorder.queued(operation(i));
    recorder.ended(first, true);  // its place is another's
    const auto entries = recorder.entries();
    ASSERT_EQ(entries.size(), FlightRecorder::capacity);
    EXPECT_EQ(entries.front().operation.count, 1u);
    EXPECT_EQ(entries.back().operation.count, FlightRecorder::capacity);
    for (const FlightEntry& entry : entries) EXPECT_EQ(entry.state, FlightState::queued);
}

TEST(FlightRecorder, MayBeReadWhileTwoThreadsWrite) {
    FlightRecorder recorder;
    constexpr uint64_t rounds = 5 * FlightRecorder::capacity;
    const auto write = [&](uint64_t parity) {
        for (uint64_t i = 0; i < rounds; ++i) {
            const uint64_t ticket = recorder.started(operation(2 * i + parity), 2 * i + parity);
            recorder.ended(ticket, true);
        }
    };
    std::thread even(write, 0);
    std::thread odd(write, 1);
    size_t seen = 0;
    for (int i = 0; i < 20; ++i) {
        for (const FlightEntry& entry : recorder.entries()) {
            ASSERT_EQ(entry.operation.count, entry.sequence);  // of one writer, whole
            ++seen;
        }
    }
    even.join();
    odd.join();
    EXPECT_EQ(recorder.entries().size(), FlightRecorder::capacity);
    EXPECT_LE(seen, 20 * FlightRecorder::capacity);
}

TEST(Flight, TextThatIsNotUtf8StaysReadable) {
    const TemporaryDirectory directory;
    CommOptions options = test_options();
    options.name = "w\xf6rld";  // Latin-1
    const auto outcomes = run_ranks(2, options, [&](Communicator& comm) {
        std::string reason;
        for (int i = 0; i < 1000; ++i) reason += "\u20ac";  // more than a peer is told
        if (comm.rank() == 0) return comm.abort(reason);
        try {
            comm.run({});
        } catch (const Error&) {
            comm.write_trace((directory.path() / "record").string());
            throw;
        }
    });
    ASSERT_TRUE(outcomes[1]);
    EXPECT_EQ(outcomes[1]->code(), Code::aborted) << outcomes[1]->what();
    const Json header = lines_of((directory.path() / "record").string()).at(0);
    EXPECT_EQ(header.at("name").as_string(), "w?rld");
    EXPECT_THAT(header.at("error").at("message").as_string(), HasSubstr("aborted communicator 'w?rld': \u20ac\u20ac"));
}

TEST(Flight, CommunicatorsWriteWhatTheyDid) {
    TemporaryDirectory directory;
    const auto outcomes = run_ranks(2, test_options(), [&](Communicator& comm) {
        std::vector<float> values(10, 1.0F);
        const Tensor tensor = tensor_of(std::span(values), DType::f32);
        Request reduce;
        reduce.collective = Collective::all_reduce;
        reduce.outputs = std::span(&tensor, 1);
        reduce.op = ReduceOp::sum;
        reduce.label = "bucket 5";
        comm.run(reduce);
        comm.submit(reduce)->wait(soon());
        Request transfer;
        transfer.collective = comm.rank() == 0 ? Collective::send : Collective::recv;
        (comm.rank() == 0 ? transfer.inputs : transfer.outputs) = std::span(&tensor, 1);
        transfer.peer = 1 - comm.rank();
        transfer.tag = 7;
        comm.run(transfer);
        comm.write_trace((directory.path() / ("rank-" + std::to_string(comm.rank()))).string());
    });
    for (const auto& outcome : outcomes) EXPECT_FALSE(outcome) << outcome->what();
    const std::vector<Json> lines = lines_of((directory.path() / "rank-1").string());
    ASSERT_EQ(lines.size(), 4u);
    EXPECT_EQ(lines[0].at("rank").as_int(), 1);
    EXPECT_EQ(lines[0].at("id"), lines_of((directory.path() / "rank-0").string())[0].at("id"));
    EXPECT_EQ(lines[1].at("label").as_string(), "bucket 5");
    EXPECT_EQ(lines[1].at("bytes").as_int(), 40);
    EXPECT_EQ(lines[2].at("sequence").as_int(), 2);
    EXPECT_EQ(lines[3].at("operation").as_string(), "recv");
    EXPECT_EQ(lines[3].at("tag").as_int(), 7);
    for (size_t i = 1; i < lines.size(); ++i) EXPECT_EQ(lines[i].at("state").as_string(), "finished");
}

TEST(Flight, AFileThatCannotBeWrittenIsAnError) {
    TemporaryDirectory directory;
    const auto comm = Communicator::self();
    try {
        comm->write_trace((directory.path() / "none/file").string());
        FAIL() << "written into a directory that is not there";
    } catch (const Error& error) {
        EXPECT_EQ(error.code(), Code::io);
        EXPECT_THAT(error.what(), HasSubstr("none/file"));
    }
}

}  // namespace
}  // namespace tsr::testing
