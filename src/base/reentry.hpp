// Refuses a call on an object in the middle of another call on it by the same thread. That happens in callbacks only: an
// interrupt's runs user code (a Python signal handler, say) wherever a call waits, a state's source in a save or load,
// and the object is then in a state that nobody else should see.
#pragma once

#include <string_view>

namespace tsr {

class Reentry {
   public:
    // The calling thread is inside `object` while this lives. Throws INVALID_STATE if it is so already; `kind` and `name`
    // are the message's: "communicator", "world"; the name may be empty.
    Reentry(const void* object, std::string_view kind, std::string_view name);
    ~Reentry() { innermost_ = outer_; }
    Reentry(const Reentry&) = delete;
    Reentry& operator=(const Reentry&) = delete;

    // Whether the calling thread is inside `object`.
    [[nodiscard]] static bool is_inside(const void* object);

   private:
    const void* object_;
    const Reentry* outer_;
    static thread_local const Reentry* innermost_;
};

}  // namespace tsr
