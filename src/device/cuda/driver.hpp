// The functions of the CUDA driver that this library calls. They are looked up in libcuda.so.1 when a device is first used,
// so that neither building nor loading this library needs CUDA. Types, names and numbers are those of the driver's API
// (cuda.h, version 12.0 on); tests/interop/test_torch_cuda_headers.py compares them with that header.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "base/function_ref.hpp"

struct CUctx_st;
struct CUstream_st;
struct CUevent_st;
struct CUmod_st;
struct CUfunc_st;

namespace tsr::cuda {

using Result = int;                      // CUresult
using Number = int;                      // CUdevice
using Address = uint64_t;                // CUdeviceptr
using PagesHandle = unsigned long long;  // CUmemGenericAllocationHandle
using Context = CUctx_st*;
using Stream = CUstream_st*;
using EventHandle = CUevent_st*;
using Module = CUmod_st*;
using Function = CUfunc_st*;

// CUDA_MEMCPY2D: rows at equal distances, with `memory_type_unified` on both sides.
struct Copy2D {
    size_t from_x = 0;
    size_t from_y = 0;
    int from_type = 0;
    const void* from_host = nullptr;
    Address from = 0;
    void* from_array = nullptr;
    size_t from_pitch = 0;
    size_t to_x = 0;
    size_t to_y = 0;
    int to_type = 0;
    void* to_host = nullptr;
    Address to = 0;
    void* to_array = nullptr;
    size_t to_pitch = 0;
    size_t width = 0;
    size_t height = 0;
};

// CUmemLocation
struct Location {
    int type = 1;  // CU_MEM_LOCATION_TYPE_DEVICE
    Number device = 0;
};

// CUmemAllocationProp: the kind and place of pages, which have no address until a range shows them.
struct PagesKind {
    int type = 1;       // CU_MEM_ALLOCATION_TYPE_PINNED
    int shared_as = 0;  // CU_MEM_HANDLE_TYPE_NONE
    Location location;
    void* windows = nullptr;
    struct {
        unsigned char compression = 0;
        unsigned char gpu_direct_rdma = 0;
        unsigned short usage = 0;
        unsigned char reserved[4] = {};
    } flags;
};

// CUmemAccessDesc
struct Access {
    Location location;
    int flags = 3;  // CU_MEM_ACCESS_FLAGS_PROT_READWRITE
};

constexpr Result success = 0;
constexpr Result invalid_value = 1;      // CUDA_ERROR_INVALID_VALUE
constexpr Result out_of_memory = 2;      // CUDA_ERROR_OUT_OF_MEMORY
constexpr Result not_initialized = 3;    // CUDA_ERROR_NOT_INITIALIZED
constexpr Result no_device = 100;        // CUDA_ERROR_NO_DEVICE
constexpr Result invalid_context = 201;  // CUDA_ERROR_INVALID_CONTEXT
constexpr Result no_binary = 209;        // CUDA_ERROR_NO_BINARY_FOR_GPU
constexpr Result newer_ptx = 222;        // CUDA_ERROR_UNSUPPORTED_PTX_VERSION
constexpr Result not_ready = 600;        // CUDA_ERROR_NOT_READY
constexpr int memory_type_unified = 4;   // CU_MEMORYTYPE_UNIFIED
constexpr unsigned stream_non_blocking = 1;
constexpr unsigned event_default = 0;
constexpr unsigned event_disable_timing = 2;
constexpr unsigned host_portable = 1;       // CU_MEMHOSTALLOC_PORTABLE, CU_MEMHOSTREGISTER_PORTABLE
constexpr int pointer_memory_type = 2;      // CU_POINTER_ATTRIBUTE_MEMORY_TYPE
constexpr int pointer_device_ordinal = 9;   // CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
constexpr unsigned memory_type_device = 2;  // CU_MEMORYTYPE_DEVICE
constexpr int smallest_granularity = 0;     // CU_MEM_ALLOC_GRANULARITY_MINIMUM
constexpr int capture_relaxed = 2;          // CU_STREAM_CAPTURE_MODE_RELAXED
constexpr int capture_none = 0;             // CU_STREAM_CAPTURE_STATUS_NONE
constexpr int capability_major = 75;        // CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR
constexpr int capability_minor = 76;        // CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR
constexpr int link_rank = 1;                // CU_DEVICE_P2P_ATTRIBUTE_PERFORMANCE_RANK
constexpr int link_atomics = 3;             // CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED
constexpr int oldest_version = 12000;

// (member, symbol, parameters)
#define TSR_CUDA_DRIVER(X)                                                                              \
    X(init, cuInit, (unsigned flags))                                                                   \
    X(driver_version, cuDriverGetVersion, (int* version))                                               \
    X(error_name, cuGetErrorName, (Result error, const char** name))                                    \
    X(error_string, cuGetErrorString, (Result error, const char** text))                                \
    X(device_count, cuDeviceGetCount, (int* count))                                                     \
    X(device_get, cuDeviceGet, (Number * device, int index))                                            \
    X(device_name, cuDeviceGetName, (char* name, int size, Number device))                              \
    X(device_total_memory, cuDeviceTotalMem_v2, (size_t* bytes, Number device))                         \
    X(device_attribute, cuDeviceGetAttribute, (int* value, int attribute, Number device))               \
    X(device_reaches, cuDeviceCanAccessPeer, (int* reaches, Number device, Number peer))                \
    X(link_attribute, cuDeviceGetP2PAttribute, (int* value, int attribute, Number device, Number peer)) \
    X(primary_context_retain, cuDevicePrimaryCtxRetain, (Context * context, Number device))             \
    X(context_get, cuCtxGetCurrent, (Context * context))                                                \
    X(context_set, cuCtxSetCurrent, (Context context))                                                  \
    X(allocate, cuMemAlloc_v2, (Address * address, size_t size))                                        \
    X(free, cuMemFree_v2, (Address address))                                                            \
    X(host_allocate, cuMemHostAlloc, (void** memory, size_t size, unsigned flags))                      \
    X(host_free, cuMemFreeHost, (void* memory))                                                         \
    X(host_register, cuMemHostRegister_v2, (void* memory, size_t size, unsigned flags))                 \
    X(host_unregister, cuMemHostUnregister, (void* memory))                                             \
    X(copy, cuMemcpyAsync, (Address to, Address from, size_t size, Stream stream))                      \
    X(copy_rows, cuMemcpy2DAsync_v2, (const Copy2D* copy, Stream stream))                               \
    X(set_bytes, cuMemsetD8Async, (Address to, unsigned char value, size_t size, Stream stream))        \
    X(stream_create, cuStreamCreateWithPriority, (Stream * stream, unsigned flags, int priority))       \
    X(stream_destroy, cuStreamDestroy_v2, (Stream stream))                                              \
    X(stream_context, cuStreamGetCtx, (Stream stream, Context * context))                               \
    X(stream_wait, cuStreamWaitEvent, (Stream stream, EventHandle event, unsigned flags))               \
    X(stream_is_capturing, cuStreamIsCapturing, (Stream stream, int* status))                           \
    X(thread_capture_mode, cuThreadExchangeStreamCaptureMode, (int* mode))                              \
    X(event_create, cuEventCreate, (EventHandle * event, unsigned flags))                               \
    X(event_destroy, cuEventDestroy_v2, (EventHandle event))                                            \
    X(event_record, cuEventRecord, (EventHandle event, Stream stream))                                  \
    X(event_query, cuEventQuery, (EventHandle event))                                                   \
    X(event_elapsed, cuEventElapsedTime, (float* ms, EventHandle from, EventHandle to))                 \
    X(pointer_attribute, cuPointerGetAttribute, (void* value, int attribute, Address address))          \
    X(module_load, cuModuleLoadData, (Module * loaded, const void* image))                              \
    X(module_function, cuModuleGetFunction, (Function * function, Module module, const char* name))     \
    X(launch_kernel, cuLaunchKernel,                                                                    \
      (Function function, unsigned blocks_x, unsigned blocks_y, unsigned blocks_z, unsigned threads_x,  \
       unsigned threads_y, unsigned threads_z, unsigned shared_bytes, Stream stream, void** arguments, void** extra))

// Memory that is mapped at addresses.
#define TSR_CUDA_MAPPING(X)                                                                                           \
    X(granularity, cuMemGetAllocationGranularity, (size_t* size, const PagesKind* kind, int option))                  \
    X(pages_create, cuMemCreate, (PagesHandle * pages, size_t size, const PagesKind* kind, unsigned long long flags)) \
    X(pages_release, cuMemRelease, (PagesHandle pages))                                                               \
    X(addresses_reserve, cuMemAddressReserve,                                                                         \
      (Address * at, size_t size, size_t alignment, Address wish, unsigned long long flags))                          \
    X(addresses_free, cuMemAddressFree, (Address at, size_t size))                                                    \
    X(map, cuMemMap, (Address at, size_t size, size_t offset, PagesHandle pages, unsigned long long flags))           \
    X(unmap, cuMemUnmap, (Address at, size_t size))                                                                   \
    X(set_access, cuMemSetAccess, (Address at, size_t size, const Access* access, size_t count))

struct Driver {
#define TSR_MEMBER(member, symbol, parameters) Result(*member) parameters = nullptr;
    TSR_CUDA_DRIVER(TSR_MEMBER)
    TSR_CUDA_MAPPING(TSR_MEMBER)
#undef TSR_MEMBER
};

// The driver, initialised. Throws UNSUPPORTED, saying why this process cannot use one: there is no libcuda.so.1, it is older
// than 12.0, it finds no device. Any thread. A driver that was initialised before a fork cannot be used in the child.
[[nodiscard]] const Driver& driver();

[[nodiscard]] std::string version_text(int version);  // "13.0"

// "CUDA_ERROR_ILLEGAL_ADDRESS (700): an illegal memory access was encountered"
[[nodiscard]] std::string describe(Result result);

// Throws for a failed call; `what`, called only then, begins the message ("CUDA device 0: copying 4096 bytes"). NO_MEMORY for a device that has
// no memory left, else CUDA, with the driver's number as the native code.
void check(Result result, FunctionRef<std::string()> what);

}  // namespace tsr::cuda
