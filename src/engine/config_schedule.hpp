// DeepSpeed's learning-rate schedules, by the names and parameters that they have in a configuration.
#pragma once

#include <string>

#include "engine/config_section.hpp"
#include "optim/lr_curve.hpp"

namespace tsr {

// `scheduler` is the section, `params` its parameters. `cycles_momentum`: the optimizer has one that OneCycle may set. Throws
// UNSUPPORTED for another type.
[[nodiscard]] LrCurvePtr schedule_of(const ConfigSection& scheduler, const std::string& type, ConfigSection& params,
                                     bool cycles_momentum);

}  // namespace tsr
