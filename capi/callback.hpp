// Common code for callbacks of the program that return a status: the message buffer and the resulting error.
#pragma once

#include <array>
#include <memory>
#include <string>

#include "base/error.hpp"
#include "base/json.hpp"
#include "guard.hpp"
#include "tessera/error.h"

namespace tsr::capi {

// The reply of one callback call. If the callback writes no message but returns the code of a library call that failed
// in it, that call's message is used.
class Reply {
   public:
    [[nodiscard]] char* message() { return text_.data(); }

    // Throws unless the callback returned 0; `what()` then describes what failed.
    template <class What>
    void check(int32_t returned, What&& what) const {
        if (returned != TSR_OK) throw error(returned, what());
    }

   private:
    [[nodiscard]] Error error(int32_t returned, const std::string& what) const {
        const std::string message = fmt::format("{}: {}", what, said(returned));
        if (returned > TSR_OK && returned <= TSR_E_INTERNAL && returned != TSR_E_USER) {
            return {static_cast<Code>(returned), message};
        }
        return Error(Code::user, message).with_native(NativeDomain::user, returned);
    }

    [[nodiscard]] std::string said(int32_t returned) const {
        const std::string text(text_.data(), ::strnlen(text_.data(), text_.size()));
        if (!is_utf8(text)) return "(its message is not UTF-8)";
        if (!text.empty()) return text;
        const auto last = last_record();
        if (last != nullptr && last != before_ && static_cast<int32_t>(last->code) == returned) return last->message;
        return fmt::format("it returned {}", returned);
    }

    std::array<char, TSR_MESSAGE_BYTES> text_{};
    std::shared_ptr<const ErrorRecord> before_ = last_record();
};

}  // namespace tsr::capi
