// tessera/error.h: status names and error objects.
#include "tessera/error.h"

#include "guard.hpp"

struct tsr_error {
    static constexpr uint64_t type_magic = 0x54535245524f5231;
    uint64_t magic = type_magic;
    std::shared_ptr<const tsr::ErrorRecord> record;
    std::unique_ptr<tsr_error> cause;
};

namespace tsr::capi {

namespace {

static_assert(static_cast<int>(Code::internal) == TSR_E_INTERNAL);
static_assert(static_cast<int>(Code::commit_unknown) == TSR_E_COMMIT_UNKNOWN);
static_assert(static_cast<int>(Code::timeout) == TSR_E_TIMEOUT);
static_assert(static_cast<int>(NativeDomain::user) == TSR_NATIVE_USER);

std::unique_ptr<tsr_error> wrap(std::shared_ptr<const ErrorRecord> record) {
    auto error = std::make_unique<tsr_error>();
    if (record->cause) error->cause = wrap(record->cause);
    error->record = std::move(record);
    return error;
}

thread_local std::unique_ptr<tsr_error> last;
thread_local std::shared_ptr<const ErrorRecord> newest;  // stays when `last` is taken

const ErrorRecord* record_of(const tsr_error* error) {
    return error != nullptr && error->magic == tsr_error::type_magic ? error->record.get() : nullptr;
}

}  // namespace

tsr_status fail(const Error& error) noexcept {
    newest = error.record();
    try {
        last = wrap(error.record());
    } catch (...) {
        last.reset();  // no memory even for the error: only the code is returned
    }
    return static_cast<tsr_status>(error.code());
}

std::shared_ptr<const ErrorRecord> newest_record() noexcept { return newest; }

std::shared_ptr<const ErrorRecord> last_record() noexcept { return last != nullptr ? last->record : nullptr; }

tsr_error* detached(const Error& error) { return wrap(error.record()).release(); }

extern "C" {

const char* tsr_status_name(tsr_status status) { return code_name(static_cast<Code>(status)).data(); }

const tsr_error* tsr_error_last(void) { return last.get(); }

tsr_status tsr_error_take(tsr_error** out) {
    return guard([&] {
        tsr_error*& slot = required(out, "out");
        slot = last.release();
    });
}

void tsr_error_destroy(tsr_error* error) {
    if (record_of(error) == nullptr) return;
    error->magic = dead_magic;
    delete error;
}

tsr_status tsr_error_code(const tsr_error* error) {
    const auto* record = record_of(error);
    return record != nullptr ? static_cast<tsr_status>(record->code) : TSR_OK;
}

const char* tsr_error_message(const tsr_error* error) {
    const auto* record = record_of(error);
    return record != nullptr ? record->message.c_str() : "";
}

const tsr_error* tsr_error_cause(const tsr_error* error) {
    return record_of(error) != nullptr ? error->cause.get() : nullptr;
}

int32_t tsr_error_rank(const tsr_error* error) {
    const auto* record = record_of(error);
    return record != nullptr ? record->rank : -1;
}

int32_t tsr_error_peer(const tsr_error* error) {
    const auto* record = record_of(error);
    return record != nullptr ? record->peer : -1;
}

const char* tsr_error_operation(const tsr_error* error) {
    const auto* record = record_of(error);
    return record != nullptr ? record->operation.c_str() : "";
}

int64_t tsr_error_sequence(const tsr_error* error) {
    const auto* record = record_of(error);
    return record != nullptr ? record->sequence : -1;
}

int32_t tsr_error_native(const tsr_error* error, int32_t* domain) {
    const auto* record = record_of(error);
    if (domain != nullptr) *domain = record != nullptr ? static_cast<int32_t>(record->native_domain) : TSR_NATIVE_NONE;
    return record != nullptr ? record->native_code : 0;
}

int32_t tsr_error_retriable(const tsr_error* error) {
    const auto* record = record_of(error);
    return record != nullptr && record->retriable ? 1 : 0;
}

}  // extern "C"

}  // namespace tsr::capi
