#include "base/error.hpp"

#include <cerrno>
#include <new>
#include <optional>
#include <stdexcept>
#include <system_error>

#include "base/file_limit.hpp"

namespace tsr {

std::string_view code_name(Code code) {
    switch (code) {
        case Code::ok: return "OK";
        case Code::invalid_argument: return "INVALID_ARGUMENT";
        case Code::invalid_state: return "INVALID_STATE";
        case Code::timeout: return "TIMEOUT";
        case Code::aborted: return "ABORTED";
        case Code::peer_lost: return "PEER_LOST";
        case Code::mismatch: return "MISMATCH";
        case Code::io: return "IO";
        case Code::corrupt: return "CORRUPT";
        case Code::not_found: return "NOT_FOUND";
        case Code::not_ready: return "NOT_READY";
        case Code::interrupted: return "INTERRUPTED";
        case Code::commit_unknown: return "COMMIT_UNKNOWN";
        case Code::no_memory: return "NO_MEMORY";
        case Code::unsupported: return "UNSUPPORTED";
        case Code::version: return "VERSION";
        case Code::permission: return "PERMISSION";
        case Code::cuda: return "CUDA";
        case Code::nccl: return "NCCL";
        case Code::user: return "USER";
        case Code::internal: return "INTERNAL";
    }
    return "UNKNOWN";
}

namespace {

template <class Change>
Error changed(const std::shared_ptr<const ErrorRecord>& record, Change change) {
    auto copy = std::make_shared<ErrorRecord>(*record);
    change(*copy);
    return Error(std::move(copy));
}

}  // namespace

Error::Error(Code code, std::string message) {
    auto record = std::make_shared<ErrorRecord>();
    record->code = code;
    record->message = std::move(message);
    record_ = std::move(record);
}

Error Error::with_rank(int rank) const {
    return changed(record_, [&](ErrorRecord& r) { r.rank = rank; });
}

Error Error::with_peer(int peer) const {
    return changed(record_, [&](ErrorRecord& r) { r.peer = peer; });
}

Error Error::with_launcher_rank(int rank) const {
    return changed(record_, [&](ErrorRecord& r) { r.launcher_rank = rank; });
}

Error Error::with_launcher_peer(int rank) const {
    return changed(record_, [&](ErrorRecord& r) { r.launcher_peer = rank; });
}

Error Error::with_operation(std::string operation, int64_t sequence) const {
    return changed(record_, [&](ErrorRecord& r) {
        r.operation = std::move(operation);
        r.sequence = sequence;
    });
}

Error Error::with_native(NativeDomain domain, int code) const {
    return changed(record_, [&](ErrorRecord& r) {
        r.native_domain = domain;
        r.native_code = code;
    });
}

Error Error::with_advice(const std::string& advice) const {
    return changed(record_, [&](ErrorRecord& r) { r.message += "; " + advice; });
}

Error Error::retry_may_help() const {
    return changed(record_, [](ErrorRecord& r) { r.retriable = true; });
}

Error Error::caused_by(const Error& cause) const {
    return changed(record_, [&](ErrorRecord& r) { r.cause = cause.record(); });
}

namespace {

constexpr int kept_errno = 4096;  // the kernel's go to 4095
thread_local std::optional<Error> kept;

}  // namespace

int keep_error(const Error& error) {
    kept = error;
    return kept_errno;
}

Error os_error(std::string what, int errno_value) {
    if (errno_value == kept_errno && kept) {
        return Error(changed(kept->record(), [&](ErrorRecord& r) { r.message = std::move(what) + ": " + r.message; }));
    }
    Code code = Code::io;
    if (errno_value == EACCES || errno_value == EPERM) code = Code::permission;
    if (errno_value == ENOMEM) code = Code::no_memory;
    std::string reason = std::generic_category().message(errno_value);
    if (errno_value == EFBIG) reason += file_limit_text();
    return Error(code, std::move(what) + ": " + reason).with_native(NativeDomain::os, errno_value);
}

Error current_error() noexcept {
    try {
        throw;
    } catch (const Error& e) {
        return e;
    } catch (const std::bad_alloc&) {
        return Error(Code::no_memory, "out of memory");
    } catch (const std::length_error& e) {  // a size that no container can have
        return Error(Code::no_memory, std::string("out of memory: ") + e.what());
    } catch (const std::system_error& e) {
        if (e.code() != std::errc::resource_unavailable_try_again) {
            return Error(Code::internal, std::string("unexpected exception: ") + e.what());
        }
        // The standard library's error for a thread that cannot be started.
        return Error(Code::no_memory,
                     std::string("cannot start a thread: the user has too many processes and threads (`ulimit -u`), or "
                                 "there is not enough memory for its stack (`ulimit -v`): ") +
                         e.what())
            .with_native(NativeDomain::os, e.code().value());
    } catch (const std::exception& e) {
        return Error(Code::internal, std::string("unexpected exception: ") + e.what());
    } catch (...) {
        return Error(Code::internal, "unexpected exception of unknown type");
    }
}

}  // namespace tsr
