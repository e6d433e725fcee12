// Checkpoints that real DeepSpeed wrote (tests/interop/deepspeed_files.py), unpacked once for all tests.
#pragma once

#include <string>
#include <vector>

#include "checkpoint/fixture.hpp"
#include "checkpoint/load/checkpoint.hpp"

namespace tsr::testing {

inline constexpr const char* written_cases[] = {"stage0-bf16-1", "stage0-fp32-2", "stage1-bf16-2", "stage1-fp32-3",
                                                "stage2-bf16-3", "stage2-fp16-2", "stage2-fp32-2", "stage2-tiny-3",
                                                "stage3-bf16-3", "stage3-fp32-1", "stage3-fp32-2"};
// Their directory.
const std::string& written();

// The directory of a case's tag.
std::string tag_of(const std::string& name);
// A copy of it in `dir`, to be damaged.
std::string copy_of(const std::string& name, const TempDir& dir);
// What DeepSpeed's accessors said of a case.
std::shared_ptr<const Checkpoint> expected_of(const std::string& name);

// A part of a tensor, read with its own dtype.
std::string bytes_of(const Checkpoint& checkpoint, const std::string& name, const Box& box,
                     Verify verify = Verify::blocks);
std::string bytes_of(const Checkpoint& checkpoint, const std::string& name);

}  // namespace tsr::testing
