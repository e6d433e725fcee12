// The least multiple of a unit that holds a size.
#pragma once

namespace tsr {

template <class T>
[[nodiscard]] constexpr T round_up(T value, T unit) {
    return (value + unit - 1) / unit * unit;
}

}  // namespace tsr
