#include "guard.hpp"

#include <algorithm>
#include <deque>
#include <mutex>

namespace tsr::capi {

namespace {

struct Quarantine {
    struct Entry {
        void* memory;
        void (*release)(void*);
    };
    std::mutex mutex;  // guards entries
    std::deque<Entry> entries;
};

constexpr size_t quarantine_length = 1024;

}  // namespace

void quarantine(void* memory, void (*release)(void*)) noexcept {
    // Never destroyed: threads may still destroy handles while the process exits.
    static auto& instance = *new Quarantine;
    Quarantine::Entry oldest{nullptr, nullptr};
    try {
        const std::lock_guard lock(instance.mutex);
        instance.entries.push_back({memory, release});
        if (instance.entries.size() > quarantine_length) {
            oldest = instance.entries.front();
            instance.entries.pop_front();
        }
    } catch (...) {
        oldest = {memory, release};
    }
    if (oldest.release != nullptr) oldest.release(oldest.memory);
}

void throw_bad_handle(const char* what, uint64_t magic) {
    if (magic == dead_magic) {
        throw Error(Code::invalid_state, fmt::format("{} was destroyed before this call", what));
    }
    throw Error(Code::invalid_argument, fmt::format("{} is not a handle of the expected type", what));
}

void throw_of_parent(const char* what) {
    throw Error(
        Code::invalid_state,
        fmt::format("{} belongs to the parent of this forked process; create a new one here, or start children with "
                    "exec (spawn)",
                    what));
}

void text_out(const std::string& value, char* buf, size_t capacity, size_t* size) {
    required(size, "size") = value.size() + 1;
    if (capacity > 0 && buf == nullptr) throw Error(Code::invalid_argument, "the text buffer is NULL");
    if (capacity > value.size()) std::memcpy(buf, value.c_str(), value.size() + 1);
}

Tensor tensor_in(const tsr_tensor* tensor, const char* what) {
    const tsr_tensor& in = required(tensor, what);
    Tensor out;
    out.dtype = static_cast<DType>(in.dtype);
    if (!is_known(out.dtype)) {
        throw Error(Code::invalid_argument, fmt::format("{} has the unknown dtype {}", what, in.dtype));
    }
    if (in.device_type != TSR_DEVICE_CPU && in.device_type != TSR_DEVICE_CUDA) {
        throw Error(Code::invalid_argument, fmt::format("{} has the unknown device type {}", what, in.device_type));
    }
    out.device = {static_cast<DeviceType>(in.device_type), in.device_index};
    if (in.ndim < 0 || in.ndim > TSR_MAX_NDIM) {
        throw Error(Code::invalid_argument,
                    fmt::format("{} has {} dimensions; 0 to {} are supported", what, in.ndim, TSR_MAX_NDIM));
    }
    if (in.ndim > 0 && in.shape == nullptr) throw Error(Code::invalid_argument, fmt::format("{} has no shape", what));
    for (const uint64_t word : in.reserved) {
        if (word != 0) throw Error(Code::invalid_argument, fmt::format("{} has non-zero reserved words", what));
    }
    out.shape = Dims(std::span<const int64_t>(in.shape, static_cast<size_t>(in.ndim)));
    try {
        check_shape(out.shape, out.dtype, {});  // its name is built only for an error
    } catch (const Error& error) {
        throw Error(Code::invalid_argument, fmt::format("{}{}", what, error.what()));
    }
    const int64_t numel = out.numel();
    if (in.strides != nullptr && numel > 0) {
        int64_t expected = 1;
        for (int d = in.ndim - 1; d >= 0; --d) {
            if (out.shape[d] != 1 && in.strides[d] != expected) {
                throw Error(Code::invalid_argument,
                            fmt::format("{} is not contiguous: stride {} of dimension {}, expected {}; make a "
                                        "contiguous copy",
                                        what, in.strides[d], d, expected));
            }
            expected *= out.shape[d];
        }
    }
    if (in.data == nullptr && numel > 0) throw Error(Code::invalid_argument, fmt::format("{} has no data", what));
    if (in.data != nullptr) out.data = static_cast<std::byte*>(in.data) + in.byte_offset;
    return out;
}

Tensor described_in(const tsr_tensor& tensor, const std::string& what) {
    if (tensor.data != nullptr) return tensor_in(&tensor, what.c_str());
    alignas(16) std::byte anything{};
    tsr_tensor described = tensor;
    described.data = &anything;
    Tensor result = tensor_in(&described, what.c_str());
    result.data = nullptr;
    return result;
}

std::vector<Tensor> tensors_in(const tsr_tensor* tensors, size_t n, const char* what) {
    if (n > 0) required(tensors, what);
    std::vector<Tensor> out;
    out.reserve(n);
    // The usual single tensor avoids formatting a name that only an error would show.
    if (n == 1) out.push_back(tensor_in(tensors, what));
    for (size_t i = 0; n > 1 && i < n; ++i) {
        out.push_back(tensor_in(&tensors[i], fmt::format("{}[{}]", what, i).c_str()));
    }
    return out;
}

namespace {

void require_cpu(const Tensor& tensor, const std::string& what) {
    if (tensor.device.type == DeviceType::cpu) return;
    throw Error(Code::unsupported, fmt::format("{} is on CUDA device {}; this call supports tensors on the CPU only",
                                               what, tensor.device.index));
}

}  // namespace

Tensor cpu_tensor_in(const tsr_tensor* tensor, const char* what) {
    const Tensor out = tensor_in(tensor, what);
    require_cpu(out, what);
    return out;
}

std::vector<Tensor> cpu_tensors_in(const tsr_tensor* tensors, size_t n, const char* what) {
    std::vector<Tensor> out = tensors_in(tensors, n, what);
    for (size_t i = 0; i < n; ++i) require_cpu(out[i], fmt::format("{}[{}]", what, i));
    return out;
}

tsr_tensor tensor_out(const Tensor& tensor, const Dims& shape) {
    tsr_tensor out = tensor_out(tensor);
    out.shape = shape.data();
    return out;
}

tsr_tensor tensor_out(const Tensor& tensor) {
    tsr_tensor out{};
    out.data = tensor.data;
    out.shape = tensor.shape.data();
    out.ndim = tensor.shape.ndim();
    out.dtype = static_cast<tsr_dtype>(tensor.dtype);
    out.device_type = static_cast<int32_t>(tensor.device.type);
    out.device_index = tensor.device.index;
    return out;
}

// A larger struct_size cannot be valid in any version: it was never initialised.
constexpr size_t most_struct_bytes = 4096;

void read_options(const void* from, void* defaults, size_t own_size, const char* what) {
    if (from == nullptr) return;
    size_t given = 0;
    std::memcpy(&given, from, sizeof given);
    if (given < sizeof given || given > most_struct_bytes) {
        throw Error(Code::invalid_argument,
                    fmt::format("{}.struct_size is {}; call its _init function first", what, given));
    }
    if (given > own_size) {
        const auto* bytes = static_cast<const unsigned char*>(from);
        if (!std::all_of(bytes + own_size, bytes + given, [](unsigned char b) { return b == 0; })) {
            throw Error(Code::unsupported,
                        fmt::format("{} sets fields that this library ({} bytes of options, not {}) does not know",
                                    what, own_size, given));
        }
    }
    std::memcpy(defaults, from, std::min(given, own_size));
    std::memcpy(defaults, &own_size, sizeof own_size);
}

void write_options(void* to, size_t struct_size, const void* defaults, size_t own_size, const char* what) {
    if (to == nullptr) throw Error(Code::invalid_argument, fmt::format("{} is NULL", what));
    if (struct_size < sizeof struct_size || struct_size > most_struct_bytes) {
        throw Error(Code::invalid_argument, fmt::format("struct_size of {} is {}; pass its sizeof", what, struct_size));
    }
    std::memset(to, 0, struct_size);
    std::memcpy(to, defaults, std::min(struct_size, own_size));
    std::memcpy(to, &struct_size, sizeof struct_size);
}

}  // namespace tsr::capi
