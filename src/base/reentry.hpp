// Refuses a call on an object during another call on it by the same thread. This happens only in callbacks: an
// interrupt callback runs user code (such as a Python signal handler) wherever a call waits, a state's source runs it
// in a save or load, a pipeline in a step, and the object may then be in an inconsistent state.
#pragma once

#include <string_view>

namespace tsr {

class Reentry {
   public:
    // Marks the calling thread as inside `object` during this object's lifetime. Throws INVALID_STATE if it already is;
    // `kind` and `name` are for the message: "communicator", "world"; the name may be empty.
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
