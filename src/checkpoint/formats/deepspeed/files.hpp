// The names of the files of a DeepSpeed checkpoint: `mp_rank_00_model_states.pt` up to ZeRO stage 2,
// `zero_pp_rank_<rank>_mp_rank_00_model_states.pt` in stage 3, and from stage 1 on for each data-parallel rank
// `[bf16_]zero_pp_rank_<rank>_mp_rank_00_optim_states.pt`.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/io/file_system.hpp"

namespace tsr {

struct DeepSpeedName {
    enum class Part { model, optimizer };
    Part part = Part::model;
    std::string prefix;      // before the data-parallel rank: "", "bf16_" or "fp16_"
    int rank = -1;           // data-parallel; -1: the file is of all of them
    int model_parallel = 0;  // rank

    // A file's name, with or without ".pt"; nullopt for others.
    [[nodiscard]] static std::optional<DeepSpeedName> parse(std::string_view name);
    [[nodiscard]] std::string str() const;
    friend bool operator==(const DeepSpeedName&, const DeepSpeedName&) = default;
};

struct DeepSpeedFiles {
    std::vector<DeepSpeedName> model;      // one, or in stage 3 one for each data-parallel rank, in order
    std::vector<DeepSpeedName> optimizer;  // one for each data-parallel rank, in order; none without ZeRO
};

// Whether a directory with these file names is such a checkpoint, or was before files of it were lost.
[[nodiscard]] bool has_deepspeed(const std::vector<std::string>& names);
// The newest checkpoint in the directory `root` with these file names, as its `latest` says; nullopt if there is no
// such file or it is not DeepSpeed's. NOT_FOUND lists the tags that there are instead of the one it names.
[[nodiscard]] std::optional<std::string> newest_deepspeed(FileSystem& files, const std::string& root,
                                                          const std::vector<std::string>& names);
// UNSUPPORTED for files of model or pipeline parallelism, experts and universal checkpoints; NOT_FOUND for a rank whose
// file is missing while those of later ranks exist; CORRUPT for files of several saves.
[[nodiscard]] DeepSpeedFiles find_deepspeed(FileSystem& files, const std::string& directory);

}  // namespace tsr
