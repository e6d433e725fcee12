// NCCL's functions, found in a library when they are first needed, so that neither building nor loading this library needs
// NCCL. Types, names and numbers are those of nccl.h (2.18 on); tests/interop/test_torch_cuda_headers.py compares them with that
// header. A function that came later than 2.18 may be null.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "base/error.hpp"
#include "comm/request.hpp"
#include "tensor/dtype.hpp"

struct ncclComm;

namespace tsr::nccl {

using Result = int;  // ncclResult_t
using Comm = ncclComm*;
using StreamHandle = void*;  // cudaStream_t

struct UniqueId {
    char bytes[128];
};

// The fields of ncclConfig_t that 2.18 has; newer versions accept the shorter struct by its size and version.
struct Config {
    size_t size = sizeof(Config);
    unsigned magic = 0xcafebeef;
    unsigned version = oldest_version;
    int blocking = undefined;
    int cga_cluster_size = undefined;
    int min_ctas = undefined;
    int max_ctas = undefined;
    const char* net_name = nullptr;
    int split_share = undefined;

    static constexpr unsigned oldest_version = 21800;
    static constexpr int undefined = INT32_MIN;
};

constexpr Result success = 0;
constexpr Result remote_error = 6;
constexpr Result in_progress = 7;
constexpr int no_color = -1;  // NCCL_SPLIT_NOCOLOR
constexpr int oldest_with_f8 = 22400;

enum class Type : int { i8, u8, i32, u32, i64, u64, f16, f32, f64, bf16, f8_e4m3, f8_e5m2 };  // ncclDataType_t
enum class Op : int { sum, prod, max, min, avg };                                             // ncclRedOp_t

// (member, symbol, parameters)
#define TSR_NCCL(X)                                                                                           \
    X(get_version, ncclGetVersion, (int* version))                                                            \
    X(get_unique_id, ncclGetUniqueId, (UniqueId * id))                                                        \
    X(init_rank, ncclCommInitRankConfig, (Comm * comm, int ranks, UniqueId id, int rank, Config* config))     \
    X(split, ncclCommSplit, (Comm comm, int color, int key, Comm* part, Config* config))                      \
    X(destroy, ncclCommDestroy, (Comm comm))                                                                  \
    X(finalize, ncclCommFinalize, (Comm comm))                                                                \
    X(abort, ncclCommAbort, (Comm comm))                                                                      \
    X(async_error, ncclCommGetAsyncError, (Comm comm, Result * error))                                        \
    X(group_start, ncclGroupStart, ())                                                                        \
    X(group_end, ncclGroupEnd, ())                                                                            \
    X(all_reduce, ncclAllReduce,                                                                              \
      (const void* in, void* out, size_t count, int dtype, int op, Comm comm, StreamHandle stream))           \
    X(reduce, ncclReduce,                                                                                     \
      (const void* in, void* out, size_t count, int dtype, int op, int root, Comm comm, StreamHandle stream)) \
    X(broadcast, ncclBroadcast,                                                                               \
      (const void* in, void* out, size_t count, int dtype, int root, Comm comm, StreamHandle stream))         \
    X(reduce_scatter, ncclReduceScatter,                                                                      \
      (const void* in, void* out, size_t out_count, int dtype, int op, Comm comm, StreamHandle stream))       \
    X(all_gather, ncclAllGather,                                                                              \
      (const void* in, void* out, size_t in_count, int dtype, Comm comm, StreamHandle stream))                \
    X(send, ncclSend, (const void* in, size_t count, int dtype, int peer, Comm comm, StreamHandle stream))    \
    X(recv, ncclRecv, (void* out, size_t count, int dtype, int peer, Comm comm, StreamHandle stream))

// (member, symbol, parameters): returns text
#define TSR_NCCL_TEXT(X)                                 \
    X(error_string, ncclGetErrorString, (Result result)) \
    X(last_error, ncclGetLastError, (Comm comm))

struct Library {
#define TSR_MEMBER(member, symbol, parameters) Result(*member) parameters = nullptr;
    TSR_NCCL(TSR_MEMBER)
#undef TSR_MEMBER
#define TSR_MEMBER(member, symbol, parameters) const char*(*member)parameters = nullptr;
    TSR_NCCL_TEXT(TSR_MEMBER)
#undef TSR_MEMBER
    std::string path;  // of the file
    int version = 0;   // 22907 for 2.29.7
};

// Loaded once a process: TESSERA_NCCL, a path, if it is set, else libnccl.so.2 as the program has loaded it already (PyTorch's)
// or as the system finds it. Throws UNSUPPORTED, saying what was tried. Any thread.
[[nodiscard]] const Library& library();

[[nodiscard]] std::string version_text(int version);  // "2.29.7"

// Of a failed call: NCCL's text, and what it wrote about its last error; the number is the native code. PEER_LOST if NCCL
// blames a remote process, which it cannot name.
[[nodiscard]] Error error_of(Result result, Comm comm, const std::string& what);

// Throws UNSUPPORTED for what NCCL lacks.
[[nodiscard]] int number_of(DType dtype);
[[nodiscard]] int number_of(ReduceOp op);

}  // namespace tsr::nccl
