#include "base/reentry.hpp"

#include <fmt/core.h>

#include "base/error.hpp"

namespace tsr {

thread_local const Reentry* Reentry::innermost_ = nullptr;

Reentry::Reentry(const void* object, std::string_view kind, std::string_view name)
    : object_(object), outer_(innermost_) {
    if (is_inside(object)) {
        throw Error(
            Code::invalid_state,
            fmt::format(
                "{}{} is used in a callback (an interrupt callback such as a signal handler, one of a pipeline, or one "
                "of a "
                "state's source) while another call on it is running; set a flag in the callback, and act on it "
                "after the call has returned",
                kind, name.empty() ? "" : fmt::format(" '{}'", name)));
    }
    innermost_ = this;
}

bool Reentry::is_inside(const void* object) {
    const Reentry* call = innermost_;
    while (call != nullptr && call->object_ != object) call = call->outer_;
    return call != nullptr;
}

}  // namespace tsr
