// The boundary between C and C++: the only place where exceptions become status codes and pointers become objects.
// Every function of capi/ is one guard() over src/. A handle carries a magic word, which is poisoned on destroy;
// destroyed handles stay in a bounded quarantine, so that a late use reads the poison instead of freed memory. A handle
// belongs to its process: a forked child may read (const handles) and destroy what it inherits, but not use it.
#pragma once

#include <fmt/core.h>

#include <cstring>
#include <memory>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

#include "base/clock.hpp"
#include "base/error.hpp"
#include "base/fork_mark.hpp"
#include "base/json.hpp"
#include "tensor/tensor.hpp"
#include "tessera/tessera.h"

namespace tsr::capi {

// Sets the calling thread's last error; returns its code.
tsr_status fail(const Error& error) noexcept;

// The record of the calling thread's last error; nullptr if there is none.
std::shared_ptr<const ErrorRecord> last_record() noexcept;
// The same, even if the caller has taken the error.
std::shared_ptr<const ErrorRecord> newest_record() noexcept;

// A detached error object for the caller, freed by tsr_error_destroy.
tsr_error* detached(const Error& error);

// Runs `body`; returns TSR_OK or the status of the exception.
template <class Body>
tsr_status guard(Body&& body) noexcept {
    try {
        body();
        return TSR_OK;
    } catch (...) {
        return fail(current_error());
    }
}

inline constexpr uint64_t dead_magic = 0xdeaddeaddeaddead;

// How calls on a non-const handle are treated in a forked child of its process.
enum class InChild { refused, left_to_object };

// The layout of every handle: a magic word of its type, then a shared pointer to the object.
template <class T, uint64_t Magic, InChild Use = InChild::refused>
struct Handle {
    static constexpr uint64_t type_magic = Magic;
    static constexpr InChild in_child = Use;
    uint64_t magic = Magic;
    std::shared_ptr<T> object;
    ForkMark fork;
};

// Keeps `memory` alive for a while after destroy; `release` frees it.
void quarantine(void* memory, void (*release)(void*)) noexcept;

[[noreturn]] void throw_bad_handle(const char* what, uint64_t magic);

[[noreturn]] void throw_of_parent(const char* what);

// The object behind a handle argument; throws INVALID_ARGUMENT (NULL, another type) or INVALID_STATE (destroyed).
template <class H>
auto& object_of(const H* handle, const char* what) {
    if (handle == nullptr) throw Error(Code::invalid_argument, fmt::format("{} is NULL", what));
    if (handle->magic != H::type_magic) throw_bad_handle(what, handle->magic);
    return handle->object;
}

// The same; also throws INVALID_STATE in a forked child, where the object's threads, locks and peers belong to the
// parent.
template <class H>
auto& own_object_of(const H* handle, const char* what) {
    auto& object = object_of(handle, what);
    if (H::in_child == InChild::refused && handle->fork.in_child()) throw_of_parent(what);
    return object;
}
template <class H>
    requires(!std::is_const_v<H>)
auto& object_of(H* handle, const char* what) {
    return own_object_of(handle, what);
}

template <class T>
T& required(T* out, const char* what) {
    if (out == nullptr) throw Error(Code::invalid_argument, fmt::format("{} is NULL", what));
    return *out;
}

// Stores a handle for the object from `make` in `*out`, which is NULL if anything throws first.
template <class H, class Make>
void create(H** out, Make&& make) {
    H*& slot = required(out, "out");
    slot = nullptr;
    auto handle = std::make_unique<H>();
    handle->object = make();
    slot = handle.release();
}

// Destroys a handle; NULL and already destroyed handles are ignored.
template <class H>
void destroy(H* handle) noexcept {
    if (handle == nullptr || handle->magic != H::type_magic) return;
    handle->magic = dead_magic;
    handle->object.reset();
    quarantine(handle, [](void* memory) { delete static_cast<H*>(memory); });
}

// A C string argument: not NULL.
inline std::string text(const char* value, const char* what) { return std::string(&required(value, what)); }
// One that is a name, which messages and files show: also UTF-8.
inline std::string name_in(const char* value, const char* what) {
    std::string name = text(value, what);
    if (is_utf8(name)) return name;
    throw Error(Code::invalid_argument, fmt::format("{} is not UTF-8: \"{}\"", what, readable_utf8(name)));
}

// A flag of the options: 0 or 1.
inline bool flag(int32_t value, const char* what) {
    if (value == 0 || value == 1) return value == 1;
    throw Error(Code::invalid_argument, fmt::format("{} is {}; it must be 0 or 1", what, value));
}

// The deadline of a wait; negative: a year, which is longer than any operation may take.
inline Deadline patience(int32_t timeout_ms) {
    return Deadline::in(timeout_ms < 0 ? milliseconds{std::chrono::hours{24 * 365}} : milliseconds{timeout_ms});
}

// Copies `value` and a terminating 0 into buf if it fits; always sets the size.
void text_out(const std::string& value, char* buf, size_t capacity, size_t* size);

// Checks and converts a tensor argument: known dtype, sane shape, contiguous, not NULL unless empty.
Tensor tensor_in(const tsr_tensor* tensor, const char* what);
// The same for a tensor that may have no data yet: then NULL is allowed, and the result's data is nullptr.
Tensor described_in(const tsr_tensor& tensor, const std::string& what);
std::vector<Tensor> tensors_in(const tsr_tensor* tensors, size_t n, const char* what);
// The same for calls that reach the CPU's memory alone. Throws UNSUPPORTED for a tensor on a device.
Tensor cpu_tensor_in(const tsr_tensor* tensor, const char* what);
std::vector<Tensor> cpu_tensors_in(const tsr_tensor* tensors, size_t n, const char* what);
// A view of `tensor`; `tensor.shape` must outlive it.
tsr_tensor tensor_out(const Tensor& tensor);
// The same with `shape`, if `tensor` itself does not live long enough.
tsr_tensor tensor_out(const Tensor& tensor, const Dims& shape);

// Copies min(struct_size, sizeof) bytes of the caller's options over the defaults. Non-zero bytes beyond the fields
// that this library knows are UNSUPPORTED; struct_size 0 is INVALID_ARGUMENT; NULL gives the defaults.
void read_options(const void* from, void* defaults, size_t own_size, const char* what);
template <class O>
O options_in(const O* from, O defaults, const char* what) {
    read_options(from, &defaults, sizeof(O), what);
    return defaults;
}
// Writes `defaults` into the caller's struct of `struct_size` bytes and sets its struct_size.
void write_options(void* to, size_t struct_size, const void* defaults, size_t own_size, const char* what);
template <class O>
tsr_status options_init(O* to, size_t struct_size, const O& defaults, const char* what) noexcept {
    return guard([&] { write_options(to, struct_size, &defaults, sizeof(O), what); });
}

}  // namespace tsr::capi
