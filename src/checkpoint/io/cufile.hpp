// Reads of files straight into the memory of CUDA devices, by NVIDIA's cuFile (GPUDirect Storage). It is found in a library when
// it is first needed, so that neither building nor loading this library needs it. Types, names and numbers are those of
// cufile.h; tests/interop/test_torch_cuda_headers.py compares them with that header.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <memory>

#include "device/device.hpp"

namespace tsr::cufile {

// CUfileError_t
struct Status {
    int error;  // CUfileOpError
    int cuda;   // CUresult
};

// CUfileDescr_t, of a file descriptor
struct Description {
    int type = 1;  // CU_FILE_HANDLE_TYPE_OPAQUE_FD
    union {
        int descriptor;
        void* pointer;
    } file{};
    const void* operations = nullptr;
};

// CUfileDrvProps_t, with room for what later versions add.
struct Properties {
    unsigned major = 0;
    unsigned minor = 0;
    size_t poll_size = 0;
    size_t direct_size = 0;
    unsigned supported = 0;  // kinds of storage
    unsigned control = 0;    // 1 << one of the numbers below
    unsigned rest[64] = {};
};

using Handle = void*;  // CUfileHandle_t

constexpr int driver_already_open = 5026;  // CU_FILE_DRIVER_ALREADY_OPEN
constexpr unsigned allow_compat_mode = 1;  // CU_FILE_ALLOW_COMPAT_MODE

// (member, symbol, result, parameters)
#define TSR_CUFILE(X)                                                                       \
    X(use_count, cuFileUseCount, long, ())                                                  \
    X(driver_open, cuFileDriverOpen, Status, ())                                            \
    X(properties, cuFileDriverGetProperties, Status, (Properties * properties))             \
    X(handle_register, cuFileHandleRegister, Status, (Handle * handle, Description * file)) \
    X(handle_deregister, cuFileHandleDeregister, void, (Handle handle))                     \
    X(read, cuFileRead, ssize_t, (Handle handle, void* to, size_t size, off_t offset, off_t skipped))

struct Library {
#define TSR_MEMBER(member, symbol, result, parameters) result(*member) parameters = nullptr;
    TSR_CUFILE(TSR_MEMBER)
#undef TSR_MEMBER
};

// nullptr, saying why in the log, where files cannot be read into this device: the program has not asked for it
// (TESSERA_GDS), there is no library or driver, or cuFile is allowed to read through the host where it cannot do otherwise,
// so that nobody could tell which files it really reads into the device. Any thread.
[[nodiscard]] const Library* library_for(DeviceApi& device);

// A file that is open past the page cache, while it is read into devices. Thread-safe.
class Registered {
   public:
    // nullptr, saying why in the log, if its file system cannot do it. The descriptor must stay open for the object's life.
    [[nodiscard]] static std::unique_ptr<Registered> of(int descriptor, DeviceApi& device);
    ~Registered() { library_.handle_deregister(handle_); }
    Registered(const Registered&) = delete;
    Registered& operator=(const Registered&) = delete;

    // Returns the number of bytes that are in the device's memory, or a negative errno. In the order of no stream.
    [[nodiscard]] int64_t read(DeviceApi& device, std::byte* to, int64_t size, int64_t offset) const;

   private:
    Registered(const Library& library, Handle handle) : library_(library), handle_(handle) {}

    const Library& library_;
    const Handle handle_;
};

}  // namespace tsr::cufile
