#include "base/reentry.hpp"

#include <fmt/format.h>

#include "base/error.hpp"

namespace tsr {

thread_local const Reentry* Reentry::innermost_ = nullptr;

Reentry::Reentry(const void* object, std::string_view kind, std::string_view name)
    : object_(object), outer_(innermost_) {
    for (const Reentry* call = innermost_; call != nullptr; call = call->outer_) {
        if (call->object_ != object) continue;
        throw Error(Code::invalid_state,
                    fmt::format("{} '{}' is used in an interrupt callback (a signal handler, say) while a call on it "
                                "waits: set a flag there, and act on it when the call has returned",
                                kind, name));
    }
    innermost_ = this;
}

}  // namespace tsr
