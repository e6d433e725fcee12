// A rank of ours, through the C API: a call that fails ends the process.
#pragma once

#include <tessera/tessera.h>
#include <unistd.h>

#include <cstdio>
#include <functional>
#include <string>

namespace bench {

inline void check(tsr_status status) {
    if (status == TSR_OK) return;
    std::fprintf(stderr, "%s: %s\n", tsr_status_name(status), tsr_error_message(tsr_error_last()));
    _exit(1);
}

// A body for fork_ranks: `work` with the communicator of the ranks that meet in `directory`.
inline int with_comm(int rank, int ranks, const std::string& directory, const std::function<void(tsr_comm*)>& work) {
    tsr_store_options options;
    check(tsr_store_options_init(&options, sizeof options));
    options.insecure = 1;
    tsr_store* store = nullptr;
    check(tsr_store_open(("file://" + directory).c_str(), &options, &store));
    tsr_comm* comm = nullptr;
    check(tsr_comm_create(store, rank, ranks, nullptr, &comm));
    work(comm);
    check(tsr_comm_finalize(comm));
    tsr_comm_destroy(comm);
    tsr_store_destroy(store);
    return 0;
}

// `*count` floats; both must outlive the view.
inline tsr_tensor floats(void* data, const int64_t* count) {
    tsr_tensor tensor{};
    tensor.data = data;
    tensor.shape = count;
    tensor.ndim = 1;
    tensor.dtype = TSR_DTYPE_F32;
    tensor.device_type = TSR_DEVICE_CPU;
    return tensor;
}

}  // namespace bench
