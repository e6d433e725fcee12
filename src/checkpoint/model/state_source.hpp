// An object whose values belong to a state: an optimizer's settings, a sampler's position, an object of the program.
// checkpoint/ does not know the classes; capi/ adapts each to this interface. Its tensors, if any, are added to the
// state as plain tensors. All methods are called on the thread of the save or load and must not use the state.
#pragma once

#include <string>
#include <string_view>

#include "checkpoint/model/value.hpp"

namespace tsr {

class StateSource {
   public:
    virtual ~StateSource() = default;

    // Every value of the source is named "<prefix>.<...>"; nothing else may set such a value.
    [[nodiscard]] virtual const std::string& prefix() const = 0;
    // The values as they are now, with full names. Called before each save, and before a load to learn the names.
    [[nodiscard]] virtual Values collect() const = 0;
    // Throws if apply() would refuse these values; called before a load overwrites anything.
    virtual void check(const Values& values) const { (void)values; }
    // Called after the tensors of a load are in place, with one value for each of collect(): the saved value, or the
    // current one if none was saved (a load may allow that).
    virtual void apply(const Values& values) = 0;
    // Whether its values are the same on all ranks.
    [[nodiscard]] virtual bool is_replicated() const { return true; }
    // Whether it also has tensors in the state that it depends on; then a load never leaves it alone.
    [[nodiscard]] virtual bool has_tensors() const { return false; }

   protected:
    // A value's full name.
    [[nodiscard]] std::string full(std::string_view name) const { return prefix() + "." + std::string(name); }
};

}  // namespace tsr
