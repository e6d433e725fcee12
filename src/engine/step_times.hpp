// The mean times of the parts of a step, for wall_clock_breakdown. Owned by one thread.
#pragma once

#include <fmt/core.h>

#include <array>
#include <cstdint>
#include <string>

#include "base/clock.hpp"

namespace tsr {

class StepTimes {
   public:
    enum Part : uint8_t { forward, backward, step, count };

    void begin(Part part) {
        end();
        part_ = part;
        since_ = Clock::now();
    }
    // Ends the part that has begun, if any.
    void end() {
        if (part_ == count) return;
        spent_[part_] += std::chrono::duration<double, std::milli>(Clock::now() - since_).count();
        part_ = count;
    }
    void count_pass() { ++passes_; }
    void count_step() { ++steps_; }

    // Of the passes and steps since the last call. They begin anew.
    std::string take_means() {
        const auto mean = [&](Part part, int64_t times) {
            return times == 0 ? 0.0 : spent_[part] / static_cast<double>(times);
        };
        std::string text = fmt::format("mean times: forward {:.3f} ms, backward {:.3f} ms, step {:.3f} ms",
                                       mean(forward, passes_), mean(backward, passes_), mean(step, steps_));
        *this = {};
        return text;
    }

   private:
    std::array<double, count> spent_{};  // ms
    Part part_ = count;                  // none
    Clock::time_point since_;
    int64_t passes_ = 0;
    int64_t steps_ = 0;
};

}  // namespace tsr
