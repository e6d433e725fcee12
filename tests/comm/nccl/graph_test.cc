// Collectives that are captured into CUDA graphs.
#include <gmock/gmock.h>

#include <functional>

#include "comm/nccl/nccl_ranks.hpp"
#include "comm/plan.hpp"
#include "device/captured_graph.hpp"

namespace tsr::testing {
namespace {

using ::testing::HasSubstr;

// Collective: a rank that allocates memory would disturb the captures of the others in its process.
CapturedGraph captured(Communicator& comm, DeviceApi& api, StreamHandle stream, FunctionRef<void()> body) {
    comm.run({.collective = Collective::barrier});
    return CapturedGraph(api, stream, body);
}

// One f64 on a rank's device.
class Number : public DeviceMemory {
   public:
    Number(int device, double value) : DeviceMemory(device, sizeof value), device_(device) { set(value); }

    void set(double value) {
        std::vector<std::byte> bytes(sizeof value);
        std::memcpy(bytes.data(), &value, sizeof value);
        write(bytes);
        static_cast<void>(read());
    }
    [[nodiscard]] double get(StreamHandle stream) const {
        double value = 0;
        std::memcpy(&value, read(stream).data(), sizeof value);
        return value;
    }
    [[nodiscard]] Tensor tensor() const { return on_device(*this, 1, DType::f64, device_); }

   private:
    int device_;
};

Request sum_over(const Tensor& tensor, StreamHandle stream) {
    return {.collective = Collective::all_reduce, .outputs = {&tensor, 1}, .op = ReduceOp::sum, .stream = stream};
}

class NcclGraphs : public Nccl {};

TEST_F(NcclGraphs, RunTheirCollectivesEachTimeTheyAreLaunched) {
    simulated_cuda_delay(200, 3);
    expect_all_well(run_ranks(3, nccl_options(), [](Communicator& comm) {
        DeviceApi& api = cuda_device(comm.rank());
        const auto stream = api.new_stream();
        const auto other = api.new_stream();
        const Number number(comm.rank(), 1);
        const Number eager(comm.rank(), 1);
        const Tensor in_graph = number.tensor();
        const Tensor beside = eager.tensor();
        const auto plan = comm.prepare(sum_over(in_graph, stream.get()));
        // Is watched, by a thread that asks the driver, while the graph is captured.
        const WorkPtr work = comm.submit(sum_over(beside, other.get()));
        {
            const CapturedGraph graph = captured(comm, api, stream.get(), [&] {
                plan->run();
                comm.run(sum_over(in_graph, stream.get()));
                work->wait(soon());
            });
            EXPECT_EQ(number.get(stream.get()), 1) << "a capture runs nothing";
            for (int round = 0; round < 3; ++round) graph.launch();
            EXPECT_EQ(number.get(stream.get()), 729);
            plan->run();
            EXPECT_EQ(number.get(stream.get()), 2187) << "outside a capture the plan runs at once";
            EXPECT_EQ(eager.get(other.get()), 3);
        }
        comm.finalize();
    }));
}

TEST_F(NcclGraphs, HaveNothingWhoseEndMustBeKnown) {
    expect_all_well(run_ranks(2, nccl_options(), [](Communicator& comm) {
        DeviceApi& api = cuda_device(comm.rank());
        const auto stream = api.new_stream();
        const Number number(comm.rank(), 1);
        const Tensor tensor = number.tensor();
        const auto plan = comm.prepare(sum_over(tensor, stream.get()));
        const auto is_refused = [](const std::function<void()>& body) {
            try {
                body();
                ADD_FAILURE() << "no error";
            } catch (const Error& error) {
                EXPECT_EQ(error.code(), Code::invalid_state);
                EXPECT_THAT(error.what(), HasSubstr("is being captured into a CUDA graph"));
            }
        };
        {
            const CapturedGraph graph = captured(comm, api, stream.get(), [&] {
                is_refused([&] { static_cast<void>(comm.submit(sum_over(tensor, stream.get()))); });
                is_refused([&] { plan->start(); });
                is_refused([&] { static_cast<void>(api.record(stream.get())); });
                comm.run(sum_over(tensor, stream.get()));
            });
            graph.launch();
            EXPECT_EQ(number.get(stream.get()), 2);
        }
        comm.finalize();
    }));
}

TEST_F(NcclGraphs, EndWhenAPeerIsLost) {
    const auto outcomes = run_ranks(2, nccl_options(), [](Communicator& comm) {
        DeviceApi& api = cuda_device(comm.rank());
        const auto stream = api.new_stream();
        const Number number(comm.rank(), 1);
        const Tensor tensor = number.tensor();
        const CapturedGraph graph =
            captured(comm, api, stream.get(), [&] { comm.run(sum_over(tensor, stream.get())); });
        if (comm.rank() == 1) return comm.abort("out of ink");
        graph.launch();
        api.record(stream.get())->wait(soon());
        wait_until([&] { return comm.error().has_value(); }, soon(), "the communicator to notice it");
        throw Error(*comm.error());
    });
    const Error error = only_error(outcomes, 0);
    EXPECT_THAT(error.what(), HasSubstr("out of ink"));
}

}  // namespace
}  // namespace tsr::testing
