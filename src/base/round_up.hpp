// Rounds a size up to a multiple of a unit.
#pragma once

namespace tsr {

template <class T>
[[nodiscard]] constexpr T round_up(T value, T unit) {
    return (value + unit - 1) / unit * unit;
}

}  // namespace tsr
