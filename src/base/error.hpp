// The only exception type of src/: what failed, where and why. It is converted to tsr_status and tsr_error only in
// capi/guard.hpp. An Error is immutable and cheap to copy (a shared record), so that it can be kept in a work handle,
// reported to several waiters, and chained as the cause of another.
#pragma once

#include <cstdint>
#include <exception>
#include <memory>
#include <string>
#include <string_view>
#include <utility>

namespace tsr {

// Numbers are the TSR_E_ codes of tessera/error.h; capi/error.cc asserts it.
enum class Code : int32_t {
    ok = 0,
    invalid_argument = 1,
    invalid_state = 2,
    timeout = 3,
    aborted = 4,
    peer_lost = 5,
    mismatch = 6,
    io = 7,
    corrupt = 8,
    not_found = 9,
    not_ready = 10,
    interrupted = 11,
    commit_unknown = 12,
    no_memory = 13,
    unsupported = 14,
    version = 15,
    permission = 16,
    cuda = 17,
    nccl = 18,
    user = 19,
    internal = 20,
};

enum class NativeDomain : int32_t { none = 0, os = 1, cuda = 2, nccl = 3, user = 4 };

[[nodiscard]] std::string_view code_name(Code code);

struct ErrorRecord {
    Code code = Code::internal;
    std::string message;
    std::shared_ptr<const ErrorRecord> cause;
    int rank = -1;
    int peer = -1;
    int launcher_rank = -1;  // the launcher's numbers of `rank` and `peer`; -1: unknown
    int launcher_peer = -1;
    std::string operation;
    int64_t sequence = -1;
    NativeDomain native_domain = NativeDomain::none;
    int native_code = 0;
    bool retriable = false;
};

class Error : public std::exception {
   public:
    Error(Code code, std::string message);
    explicit Error(std::shared_ptr<const ErrorRecord> record) : record_(std::move(record)) {}

    [[nodiscard]] const char* what() const noexcept override { return record_->message.c_str(); }
    [[nodiscard]] Code code() const { return record_->code; }
    [[nodiscard]] const std::shared_ptr<const ErrorRecord>& record() const { return record_; }

    // Each returns a changed copy: throw Error(...).with_rank(r).caused_by(e).
    [[nodiscard]] Error with_rank(int rank) const;
    [[nodiscard]] Error with_peer(int peer) const;
    [[nodiscard]] Error with_launcher_rank(int rank) const;
    [[nodiscard]] Error with_launcher_peer(int rank) const;
    [[nodiscard]] Error with_operation(std::string operation, int64_t sequence = -1) const;
    [[nodiscard]] Error with_native(NativeDomain domain, int code) const;
    [[nodiscard]] Error with_advice(const std::string& advice) const;  // after a semicolon
    [[nodiscard]] Error retry_may_help() const;
    [[nodiscard]] Error caused_by(const Error& cause) const;

   private:
    std::shared_ptr<const ErrorRecord> record_;
};

// An IO error (PERMISSION for EACCES and EPERM, NO_MEMORY for ENOMEM): "<what>: <strerror>", native code errno.
[[nodiscard]] Error os_error(std::string what, int errno_value);
// Passes an error through an interface that returns errno: keeps `error` for this thread and returns a number that no
// system call returns. os_error() turns that number into "<what>: <message>" with the error's own code.
[[nodiscard]] int keep_error(const Error& error);

// The exception being handled in a catch clause, as an Error (bad_alloc: NO_MEMORY, others: INTERNAL).
[[nodiscard]] Error current_error() noexcept;

}  // namespace tsr
