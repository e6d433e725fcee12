// What a kernel is: a trivially copyable struct of its arguments with a body that nvcc compiles for devices (cuda/kernels.cu)
// and the host's compiler for the tests, which run it thread by thread (tests/simulated_cuda).
//
//   static constexpr unsigned threads   of a block
//   unsigned blocks() const             of the grid; 0: there is nothing to do
//   void memory(visit)                  calls visit(pointer, bytes) for all memory that it touches
//
// and either `void operator()(const Thread&) const`, or phases with memory that the threads of a block share: `phases`, a
// trivial struct `Shared`, and `template <int phase> void run(const Thread&, Shared&) const`. All threads of a block end a phase
// before the next one begins. Arithmetic is written as the CPU's and compiled without fused multiply-add, so that both give the
// same bits. No result depends on the order of threads or blocks.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/host_device.hpp"

namespace tsr::kernels {

// The place of a thread.
struct Thread {
    unsigned block;
    unsigned index;  // in its block
    unsigned count;  // of threads in a block
};

// Elements that are read and written at once.
template <class T, int n>
struct alignas(sizeof(T) * n) Pack {
    T values[n];
};

inline constexpr size_t pack_bytes = 16;  // the widest access of a thread

TSR_HD inline bool is_aligned(const void* address, size_t bytes) {
    return reinterpret_cast<uintptr_t>(address) % bytes == 0;
}

template <int n, class T>
TSR_HD inline Pack<T, n> load(const T* from) {
    return *reinterpret_cast<const Pack<T, n>*>(from);
}
template <int n, class T>
TSR_HD inline void store(T* to, const Pack<T, n>& pack) {
    *reinterpret_cast<Pack<T, n>*>(to) = pack;
}

// Divides `count` elements among the threads of a block: calls body.operator()<n>(i) for n elements from i on. n is `width`
// where `packed` says that all addresses allow it, and 1 for the rest.
template <int width, class Body>
TSR_HD inline void for_elements(const Thread& thread, unsigned count, bool packed, Body&& body) {
    const unsigned begin = packed ? count / width * width : 0;
    for (unsigned i = thread.index * width; i < begin; i += thread.count * width) body.template operator()<width>(i);
    for (unsigned i = begin + thread.index; i < count; i += thread.count) body.template operator()<1>(i);
}

}  // namespace tsr::kernels
