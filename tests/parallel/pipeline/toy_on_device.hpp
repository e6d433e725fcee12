// The toy model on CUDA devices, which are simulated (simulated_cuda/control.h), with a mock of NCCL (mock_nccl/control.h).
// Ranks are threads, each with a device of its own. A callback puts the arithmetic of toy.hpp on a stream, as a kernel,
// and returns; what an operation finds in memory that is not ready for it shows in the results.
#pragma once

#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "base/attempt.hpp"
#include "device/device.hpp"
#include "mock_nccl/fixture.hpp"
#include "simulated_cuda/control.h"
#include "simulated_cuda/hold.hpp"
#include "soon.hpp"
#include "toy.hpp"

namespace tsr::testing {

// Ranks with a device each, whatever hosts they pretend to be on.
inline Outcomes run_on_devices(int world_size, const std::function<void(Communicator& comm)>& body,
                               CommOptions options = test_options()) {
    const auto store = make_memory_store(patience(milliseconds{30000}));
    options.backend = "cpu:" + std::string(test_backend()) + ",cuda:nccl";
    return run_threads(world_size, [&](int rank) {
        CommOptions own = options;
        own.device = rank;
        const auto comm = join_job(store, rank, world_size, own);
        body(*comm);
    });
}

// Runs `body` as a kernel of the stream.
inline void enqueue(StreamHandle stream, std::function<void()> body) {
    const auto run = [](void* argument) {
        (*static_cast<std::function<void()>*>(argument))();
        return 0;
    };
    const auto ended = [](void* argument) { delete static_cast<std::function<void()>*>(argument); };
    auto* kernel = new std::function<void()>(std::move(body));
    if (simulated_cuda_launch_until(stream, run, ended, kernel) == 0) return;
    delete kernel;
    throw Error(Code::cuda, "a kernel cannot be launched");
}

// A kernel's view of a tensor. An address that is not allocated ends the test.
inline std::span<double> seen(const Tensor& tensor) {
    void* bytes = simulated_cuda_bytes(tensor.data, tensor.size_bytes());
    if (bytes == nullptr && tensor.size_bytes() > 0) std::abort();
    return {static_cast<double*>(bytes), static_cast<size_t>(tensor.numel())};
}

inline PipelineOptions on_devices(PipelineOptions options) {
    options.on_device = true;
    return options;
}

// One rank's trainer. Its results are there when the stream has done all. The pipeline must not outlive it.
class DeviceTrainer {
   public:
    DeviceTrainer(Communicator& comm, const std::vector<int>& stages, PipelineOptions options)
        : api(device_api(comm.device().value())), stream(api.new_stream()), device_(comm.device().value()) {
        for (const int stage : stages) results.layers.emplace(stage, layer_of(stage));
        const auto backward_of = [this](bool input, bool weight) {
            return [=, this](const StageCall& call) { backward(call, input, weight); };
        };
        pipe = std::make_unique<Pipeline>(
            shared(comm), stages, on_devices(std::move(options)),
            Callbacks{[this](const StageCall& call) { forward(call); }, backward_of(true, true),
                      backward_of(true, false), backward_of(false, true)});
        pipe->set_stream(stream.get());
        results.losses.resize(static_cast<size_t>(pipe->schedule().microbatches));
    }
    ~DeviceTrainer() {
        pipe.reset();
        static_cast<void>(attempt([this] { settle(); }));  // not of a device that has failed
    }
    DeviceTrainer(const DeviceTrainer&) = delete;
    DeviceTrainer& operator=(const DeviceTrainer&) = delete;

    // A pass whose batch is on the device.
    void step(Data& data) { run(&Pipeline::step, data); }
    void eval(Data& data) { run(&Pipeline::eval, data); }
    // A step whose batch is on the CPU.
    void step_from_cpu(Data& data) const {
        const Tensor x = matrix(data.inputs, data.rows);
        const Tensor t = matrix(data.targets, data.rows);
        static_cast<void>(pipe->step({{&x, 1}, {&t, 1}, {}}));
    }
    // Returns when the stream has done all.
    void settle() const { api.record(stream.get())->wait(soon()); }

    DeviceApi& api;
    std::shared_ptr<void> stream;
    Results results;
    std::function<void(const StageCall&)> before_each;
    std::unique_ptr<Pipeline> pipe;

   private:
    Tensor upload(Values& values, size_t rows) {
        Tensor tensor = matrix(values, rows);
        batches_.push_back(api.allocate(tensor.size_bytes()));
        api.copy(batches_.back().get(), tensor.data, tensor.size_bytes(), stream.get());
        tensor.data = batches_.back().get();
        tensor.device = device_;
        return tensor;
    }
    void run(std::span<const double> (Pipeline::*pass)(const Batch&), Data& data) {
        const Tensor x = upload(data.inputs, data.rows);
        const Tensor t = upload(data.targets, data.rows);
        static_cast<void>((pipe.get()->*pass)({{&x, 1}, {&t, 1}, {}}));
    }

    void forward(const StageCall& call) {
        if (before_each) before_each(call);
        Layer& layer = results.layers.at(call.stage);
        const Tensor x = call.inputs[0];
        const Tensor y = pipe->output(DType::f64, Dims{x.shape[0], static_cast<int64_t>(layer.out)});
        EXPECT_EQ(y.device, device_);
        enqueue(stream.get(), [&layer, x, y] { layer.forward(seen(x), seen(y)); });
        if (call.targets.empty()) return;
        double& loss = results.losses[static_cast<size_t>(call.microbatch)];
        enqueue(stream.get(), [&loss, y, goal = call.targets[0]] {
            loss = loss_of(seen(y), seen(goal), static_cast<size_t>(y.shape[0]));
        });
    }
    void backward(const StageCall& call, bool input, bool weight) {
        if (before_each) before_each(call);
        Layer& layer = results.layers.at(call.stage);
        const Tensor x = call.inputs[0];
        const Tensor y = call.outputs[0];
        const Tensor next = call.targets.empty() ? call.output_grads[0] : call.targets[0];
        const bool is_last = !call.targets.empty();
        const Tensor dx = input && call.stage > 0 ? call.input_grads[0] : Tensor{};
        Values* const kept = dx.data != nullptr ? &results.input_grads[{call.stage, call.microbatch}] : nullptr;
        enqueue(stream.get(), [=, &layer, factor = call.weight] {
            const auto given = seen(next);
            const Values dy = is_last ? loss_grad(seen(y), given, static_cast<size_t>(y.shape[0]), factor)
                                      : Values(given.begin(), given.end());
            if (kept != nullptr) {
                layer.backward_input(seen(y), dy, seen(dx));
                *kept = Values(seen(dx).begin(), seen(dx).end());
            }
            if (weight) layer.backward_weight(seen(x), seen(y), dy);
        });
    }

    const Device device_;
    std::vector<std::shared_ptr<std::byte>> batches_;
};

class PipelineOnDevices : public MockNcclTest {};

}  // namespace tsr::testing
