// The layouts in which DeepSpeed saves parameters and what its optimizer keeps for them, by the stage of ZeRO. Each adds all of them
// to the parts.
#pragma once

#include "checkpoint/formats/deepspeed/parts.hpp"

namespace tsr {

// Without ZeRO: the optimizer's tensors are complete, but have numbers, not names. Returns the settings of its groups; no_ref:
// there are none.
[[nodiscard]] pickle::Ref add_stage_0(DeepSpeedParts& parts);
// Each group of parameters is one vector, cut into a partition for each rank.
void add_stages_1_and_2(DeepSpeedParts& parts);
// Each parameter is cut into a part for each rank, in vectors for groups; so are frozen ones, one by one.
void add_stage_3(DeepSpeedParts& parts);

}  // namespace tsr
