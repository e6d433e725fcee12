#include "base/ticks.hpp"

namespace tsr {

TickScale::Mark TickScale::Mark::now() {
    using std::chrono::duration_cast;
    using std::chrono::nanoseconds;
    Mark mark;
    mark.ticks = tsr::ticks();
    mark.monotonic_ns = duration_cast<nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count();
    mark.utc_ns = duration_cast<nanoseconds>(std::chrono::system_clock::now().time_since_epoch()).count();
    return mark;
}

TickScale::TickScale(const Mark& early, const Mark& late)
    : late_(late),
      ns_a_tick_(late.ticks > early.ticks ? static_cast<double>(late.monotonic_ns - early.monotonic_ns) /
                                                static_cast<double>(late.ticks - early.ticks)
                                          : 1.0) {}

int64_t TickScale::utc_ns(uint64_t ticks) const {
    const auto ago = static_cast<double>(static_cast<int64_t>(late_.ticks - ticks)) * ns_a_tick_;
    return late_.utc_ns - static_cast<int64_t>(ago);
}

}  // namespace tsr
