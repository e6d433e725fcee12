// Our declarations of the CUDA driver's, NCCL's and cuFile's functions against their own headers. Compiling this is the test.
#include <cuda.h>
#include <cufile.h>
#include <nccl.h>

#include <cstddef>
#include <type_traits>

#include "checkpoint/io/cufile.hpp"
#include "comm/nccl/library.hpp"
#include "device/cuda/driver.hpp"

namespace {

// An enum is passed as its number, a handle as a pointer, a struct by its bytes.
template <class Ours, class Theirs>
constexpr bool passes = sizeof(Ours) == sizeof(Theirs) && std::is_pointer_v<Ours> == std::is_pointer_v<Theirs> &&
                        std::is_class_v<Ours> == std::is_class_v<Theirs> &&
                        std::is_floating_point_v<Ours> == std::is_floating_point_v<Theirs>;
template <>
constexpr bool passes<void, void> = true;

template <class Result, class... Ours, class TheirResult, class... Theirs>
constexpr bool alike(Result (*)(Ours...), TheirResult (*)(Theirs...)) {
    if constexpr (sizeof...(Ours) != sizeof...(Theirs)) {
        return false;
    } else {
        return passes<Result, TheirResult> && (passes<Ours, Theirs> && ...);
    }
}

#define TSR_ALIKE(member, symbol, parameters) \
    static_assert(alike(decltype(tsr::cuda::Driver::member){}, decltype(&symbol){}), #symbol);
TSR_CUDA_DRIVER(TSR_ALIKE)
TSR_CUDA_MAPPING(TSR_ALIKE)
#undef TSR_ALIKE
#define TSR_ALIKE(member, symbol, parameters) \
    static_assert(alike(decltype(tsr::nccl::Library::member){}, decltype(&symbol){}), #symbol);
TSR_NCCL(TSR_ALIKE)
TSR_NCCL_TEXT(TSR_ALIKE)
#undef TSR_ALIKE
#define TSR_ALIKE(member, symbol, result, parameters) \
    static_assert(alike(decltype(tsr::cufile::Library::member){}, decltype(&symbol){}), #symbol);
TSR_CUFILE(TSR_ALIKE)
#undef TSR_ALIKE

static_assert(tsr::cuda::success == CUDA_SUCCESS);
static_assert(tsr::cuda::invalid_value == CUDA_ERROR_INVALID_VALUE);
static_assert(tsr::cuda::out_of_memory == CUDA_ERROR_OUT_OF_MEMORY);
static_assert(tsr::cuda::not_initialized == CUDA_ERROR_NOT_INITIALIZED);
static_assert(tsr::cuda::no_device == CUDA_ERROR_NO_DEVICE);
static_assert(tsr::cuda::invalid_context == CUDA_ERROR_INVALID_CONTEXT);
static_assert(tsr::cuda::no_binary == CUDA_ERROR_NO_BINARY_FOR_GPU);
static_assert(tsr::cuda::newer_ptx == CUDA_ERROR_UNSUPPORTED_PTX_VERSION);
static_assert(tsr::cuda::not_ready == CUDA_ERROR_NOT_READY);
static_assert(tsr::cuda::memory_type_unified == CU_MEMORYTYPE_UNIFIED);
static_assert(tsr::cuda::memory_type_device == CU_MEMORYTYPE_DEVICE);
static_assert(tsr::cuda::stream_non_blocking == CU_STREAM_NON_BLOCKING);
static_assert(tsr::cuda::event_default == CU_EVENT_DEFAULT);
static_assert(tsr::cuda::event_disable_timing == CU_EVENT_DISABLE_TIMING);
static_assert(tsr::cuda::host_portable == CU_MEMHOSTALLOC_PORTABLE &&
              tsr::cuda::host_portable == CU_MEMHOSTREGISTER_PORTABLE);
static_assert(tsr::cuda::pointer_memory_type == CU_POINTER_ATTRIBUTE_MEMORY_TYPE);
static_assert(tsr::cuda::pointer_device_ordinal == CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL);
static_assert(tsr::cuda::capability_major == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR);
static_assert(tsr::cuda::capability_minor == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR);
static_assert(tsr::cuda::link_rank == CU_DEVICE_P2P_ATTRIBUTE_PERFORMANCE_RANK);
static_assert(tsr::cuda::link_atomics == CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED);
static_assert(tsr::cuda::capture_relaxed == CU_STREAM_CAPTURE_MODE_RELAXED);
static_assert(tsr::cuda::capture_none == CU_STREAM_CAPTURE_STATUS_NONE);

static_assert(tsr::cuda::smallest_granularity == CU_MEM_ALLOC_GRANULARITY_MINIMUM);
static_assert(tsr::cuda::Location{}.type == CU_MEM_LOCATION_TYPE_DEVICE);
static_assert(tsr::cuda::Access{}.flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
static_assert(tsr::cuda::PagesKind{}.type == CU_MEM_ALLOCATION_TYPE_PINNED);
static_assert(tsr::cuda::PagesKind{}.shared_as == CU_MEM_HANDLE_TYPE_NONE);
static_assert(sizeof(tsr::cuda::Location) == sizeof(CUmemLocation));
static_assert(sizeof(tsr::cuda::Access) == sizeof(CUmemAccessDesc));
static_assert(sizeof(tsr::cuda::PagesKind) == sizeof(CUmemAllocationProp));
static_assert(offsetof(tsr::cuda::Location, device) == offsetof(CUmemLocation, id));
static_assert(offsetof(tsr::cuda::Access, flags) == offsetof(CUmemAccessDesc, flags));
static_assert(offsetof(tsr::cuda::PagesKind, location) == offsetof(CUmemAllocationProp, location));
static_assert(offsetof(tsr::cuda::PagesKind, flags) == offsetof(CUmemAllocationProp, allocFlags));

#define TSR_AT(ours, theirs)                                                              \
    static_assert(offsetof(tsr::cuda::Copy2D, ours) == offsetof(CUDA_MEMCPY2D, theirs) && \
                      sizeof(tsr::cuda::Copy2D::ours) == sizeof(CUDA_MEMCPY2D::theirs),   \
                  #theirs);
TSR_AT(from_x, srcXInBytes)
TSR_AT(from_y, srcY)
TSR_AT(from_type, srcMemoryType)
TSR_AT(from_host, srcHost)
TSR_AT(from, srcDevice)
TSR_AT(from_array, srcArray)
TSR_AT(from_pitch, srcPitch)
TSR_AT(to_x, dstXInBytes)
TSR_AT(to_y, dstY)
TSR_AT(to_type, dstMemoryType)
TSR_AT(to_host, dstHost)
TSR_AT(to, dstDevice)
TSR_AT(to_array, dstArray)
TSR_AT(to_pitch, dstPitch)
TSR_AT(width, WidthInBytes)
TSR_AT(height, Height)
#undef TSR_AT
static_assert(sizeof(tsr::cuda::Copy2D) == sizeof(CUDA_MEMCPY2D));

static_assert(tsr::nccl::success == ncclSuccess);
static_assert(tsr::nccl::in_progress == ncclInProgress);
#define TSR_IS(ours, theirs) static_assert(static_cast<int>(tsr::nccl::ours) == static_cast<int>(theirs), #theirs);
TSR_IS(Type::i8, ncclInt8)
TSR_IS(Type::u8, ncclUint8)
TSR_IS(Type::i32, ncclInt32)
TSR_IS(Type::u32, ncclUint32)
TSR_IS(Type::i64, ncclInt64)
TSR_IS(Type::u64, ncclUint64)
TSR_IS(Type::f16, ncclFloat16)
TSR_IS(Type::f32, ncclFloat32)
TSR_IS(Type::f64, ncclFloat64)
TSR_IS(Type::bf16, ncclBfloat16)
TSR_IS(Type::f8_e4m3, ncclFloat8e4m3)
TSR_IS(Type::f8_e5m2, ncclFloat8e5m2)
TSR_IS(Op::sum, ncclSum)
TSR_IS(Op::prod, ncclProd)
TSR_IS(Op::max, ncclMax)
TSR_IS(Op::min, ncclMin)
TSR_IS(Op::avg, ncclAvg)
#undef TSR_IS

// A shorter config is one of an earlier version, with the same fields in front.
#define TSR_AT(ours, theirs) \
    static_assert(offsetof(tsr::nccl::Config, ours) == offsetof(ncclConfig_t, theirs), #theirs);
TSR_AT(size, size)
TSR_AT(magic, magic)
TSR_AT(version, version)
TSR_AT(blocking, blocking)
TSR_AT(cga_cluster_size, cgaClusterSize)
TSR_AT(min_ctas, minCTAs)
TSR_AT(max_ctas, maxCTAs)
TSR_AT(net_name, netName)
TSR_AT(split_share, splitShare)
#undef TSR_AT
static_assert(tsr::nccl::Config{}.magic == NCCL_API_MAGIC);
static_assert(tsr::nccl::Config::undefined == NCCL_CONFIG_UNDEF_INT);

static_assert(tsr::cufile::driver_already_open == CU_FILE_DRIVER_ALREADY_OPEN);
static_assert(tsr::cufile::allow_compat_mode == CU_FILE_ALLOW_COMPAT_MODE);
static_assert(sizeof(tsr::cufile::Status) == sizeof(CUfileError_t));
static_assert(sizeof(tsr::cufile::Description) == sizeof(CUfileDescr_t));
static_assert(tsr::cufile::Description{}.type == CU_FILE_HANDLE_TYPE_OPAQUE_FD);
static_assert(offsetof(tsr::cufile::Description, file) == offsetof(CUfileDescr_t, handle));
static_assert(offsetof(tsr::cufile::Description, operations) == offsetof(CUfileDescr_t, fs_ops));
static_assert(sizeof(tsr::cufile::Properties) > sizeof(CUfileDrvProps_t));  // later versions have more
static_assert(offsetof(tsr::cufile::Properties, supported) == offsetof(CUfileDrvProps_t, nvfs.dstatusflags));
static_assert(offsetof(tsr::cufile::Properties, control) == offsetof(CUfileDrvProps_t, nvfs.dcontrolflags));

}  // namespace
