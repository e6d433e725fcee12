#include "optim/on_device.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <cstring>

#include "base/error.hpp"
#include "device/launch.hpp"
#include "kernels/list.hpp"

namespace tsr {

namespace {

// Of a wait for what the stream still has to do before a number is known: the program's backward pass, maybe its collectives,
// whose own deadlines are at most as long by default.
constexpr milliseconds number_deadline{std::chrono::minutes{30}};
constexpr size_t host_bytes = size_t{1} << 20;

size_t chunks_of(std::span<const OptimizerParam> params) {
    size_t chunks = 0;
    for (const OptimizerParam& param : params) {
        const auto elements = static_cast<size_t>(param.grad.numel());
        chunks += (elements + kernels::chunk_elements - 1) / kernels::chunk_elements;
    }
    return chunks;
}

// Runs a kernel over the gradients of its dtype that are `wanted`.
template <class T, class K, class Wanted>
void over_grads(OverTensors<K>& all, std::span<const OptimizerParam> params, Wanted&& wanted) {
    constexpr DType dtype = sizeof(T) == sizeof(double) ? DType::f64 : DType::f32;
    for (const OptimizerParam& param : params) {
        if (param.grad.dtype == dtype && wanted(param))
            all.add(static_cast<size_t>(param.grad.numel()), param.grad.data);
    }
    all.finish();
}
constexpr auto every = [](const OptimizerParam& /*param*/) { return true; };

}  // namespace

OnDevice::OnDevice(Device device, std::span<const OptimizerParam> params)
    : api_(device_api(device)), chunks_(chunks_of(params)) {
    for (const OptimizerParam& param : params) {
        for (const Tensor* tensor : {&param.value, &param.grad}) {
            if (tensor->numel() == 0) continue;
            try {
                api_.check_memory(tensor->data);
            } catch (const Error& error) {
                if (error.code() != Code::invalid_argument) throw;
                const char* const what = tensor == &param.value ? "" : "the gradient of ";
                throw Error(Code::invalid_argument,
                            fmt::format("{}parameter \"{}\" {}", what, param.name, error.what()));
            }
        }
    }
    api_.require_kernels();
    scratch_ = api_.allocate((chunks_ + 1) * sizeof(double));
    host_ = api_.allocate_host(host_bytes);
}

void OnDevice::set_stream(StreamHandle stream) {
    api_.check_stream(stream);
    api_.wait(stream, *api_.record(stream_));
    stream_ = stream;
}

void OnDevice::adam(std::span<const Updated> tensors, const AdamStep<float>& in_float,
                    const AdamStep<double>& in_double) {
    OverTensors<kernels::AdamUpdate<float>> floats(api_, {{}, in_float}, stream_);
    OverTensors<kernels::AdamUpdate<double>> doubles(api_, {{}, in_double}, stream_);
    for (const Updated& one : tensors) {
        const auto add = [&](auto& to) { to.add(one.elements, one.param, one.grad, one.moments[0], one.moments[1]); };
        one.dtype == DType::f32 ? add(floats) : add(doubles);
    }
    floats.finish();
    doubles.finish();
}

void OnDevice::sgd(std::span<const Updated> tensors, const SgdStep<float>& in_float, const SgdStep<double>& in_double) {
    OverTensors<kernels::SgdUpdate<float>> floats(api_, {{}, in_float}, stream_);
    OverTensors<kernels::SgdUpdate<double>> doubles(api_, {{}, in_double}, stream_);
    for (const Updated& one : tensors) {
        std::byte* const buffer = one.moments[0] != nullptr ? one.moments[0] : one.param;  // which is not accessed then
        const auto add = [&](auto& to) { to.add(one.elements, one.param, one.grad, buffer); };
        one.dtype == DType::f32 ? add(floats) : add(doubles);
    }
    floats.finish();
    doubles.finish();
}

template <template <class> class Step>
void OnDevice::one_moment(std::span<const Updated> tensors, const Step<float>& in_float,
                          const Step<double>& in_double) {
    OverTensors<kernels::OneMomentUpdate<float, Step<float>>> floats(api_, {{}, in_float}, stream_);
    OverTensors<kernels::OneMomentUpdate<double, Step<double>>> doubles(api_, {{}, in_double}, stream_);
    for (const Updated& one : tensors) {
        const auto add = [&](auto& to) { to.add(one.elements, one.param, one.grad, one.moments[0]); };
        one.dtype == DType::f32 ? add(floats) : add(doubles);
    }
    floats.finish();
    doubles.finish();
}

template void OnDevice::one_moment(std::span<const Updated>, const AdagradStep<float>&, const AdagradStep<double>&);
template void OnDevice::one_moment(std::span<const Updated>, const LionStep<float>&, const LionStep<double>&);

void OnDevice::fill(const Tensor& tensor, double value) {
    const size_t size = tensor.size_bytes();
    const size_t piece = std::min(size, host_bytes);
    const auto set = [&]<class T>(T number) {
        std::fill_n(reinterpret_cast<T*>(host_.get()), piece / sizeof(T), number);
    };
    tensor.dtype == DType::f32 ? set(static_cast<float>(value)) : set(value);
    for (size_t done = 0; done < size; done += piece) {
        api_.copy(tensor.data + done, host_.get(), std::min(piece, size - done), stream_);
    }
    api_.record(stream_)->wait(Deadline::in(number_deadline));
}

void OnDevice::zero_grads(std::span<const OptimizerParam> params) {
    OverTensors<kernels::Zero> all(api_, {}, stream_);
    for (const OptimizerParam& param : params) all.add(param.grad.size_bytes() / sizeof(unsigned), param.grad.data);
    all.finish();
}

double OnDevice::power_sum(std::span<const OptimizerParam> params, double p) {
    const auto counts = [](const OptimizerParam& param) {
        return param.counted && (!param.held || param.held->replica == 0);
    };
    const kernels::Power power{p};
    OverTensors<kernels::PowerOfChunks<float>> floats(api_, {{}, power, scratch_.get()}, stream_);
    over_grads<float>(floats, params, counts);
    OverTensors<kernels::PowerOfChunks<double>> doubles(api_, {{}, power, floats.kernel().parts}, stream_);
    over_grads<double>(doubles, params, counts);
    const auto parts = static_cast<const std::byte*>(doubles.kernel().parts) - scratch_.get();
    std::byte* const result = scratch_.get() + chunks_ * sizeof(double);
    launch(api_, kernels::PowerOfParts{scratch_.get(), static_cast<unsigned>(parts / sizeof(double)), power, result},
           stream_);
    return fetched<double>(result);
}

void OnDevice::scale(std::span<const OptimizerParam> params, double factor, const std::byte* overflow) {
    OverTensors<kernels::Scale<float>> floats(api_, {{}, static_cast<float>(factor), overflow}, stream_);
    over_grads<float>(floats, params, every);
    OverTensors<kernels::Scale<double>> doubles(api_, {{}, factor, overflow}, stream_);
    over_grads<double>(doubles, params, every);
}

bool OnDevice::scale_grads_finitely(std::span<const OptimizerParam> params, double factor) {
    std::byte* const overflow = scratch_.get();
    api_.zero(overflow, sizeof(unsigned), stream_);
    scale(params, factor, overflow);
    return fetched<unsigned>(overflow) == 0;
}

void OnDevice::bound_grads(std::span<const OptimizerParam> params, double most) {
    OverTensors<kernels::Bound<float>> floats(api_, {{}, static_cast<float>(most)}, stream_);
    over_grads<float>(floats, params, every);
    OverTensors<kernels::Bound<double>> doubles(api_, {{}, most}, stream_);
    over_grads<double>(doubles, params, every);
}

bool OnDevice::is_any_set(std::span<const std::byte> memory) {
    while (!memory.empty()) {
        const size_t size = std::min(memory.size(), host_bytes);
        fetch(memory.data(), size);
        if (std::any_of(host_.get(), host_.get() + size, [](std::byte b) { return b != std::byte{0}; })) return true;
        memory = memory.subspan(size);
    }
    return false;
}

void OnDevice::fetch(const std::byte* from, size_t size) {
    api_.copy(host_.get(), from, size, stream_);
    api_.record(stream_)->wait(Deadline::in(number_deadline));
}

template <class T>
T OnDevice::fetched(const std::byte* from) {
    fetch(from, sizeof(T));
    T value;
    std::memcpy(&value, host_.get(), sizeof value);
    return value;
}

}  // namespace tsr
