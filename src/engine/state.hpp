// Adds an engine to a state: its model, optimizer and schedule as train/state_of.hpp does, its counters and its loss scale.
#pragma once

#include <memory>
#include <string>

#include "checkpoint/model/state.hpp"
#include "engine/engine.hpp"

namespace tsr {

// "<prefix>.model", "<prefix>.optim", "<prefix>.schedule", "<prefix>.engine". Adds everything or, if it throws, nothing.
void add_engine(State& state, const std::string& prefix, const std::shared_ptr<Engine>& engine);

}  // namespace tsr
