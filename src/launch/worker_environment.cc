#include "launch/worker_environment.hpp"

#include <fmt/format.h>

#include <string>
#include <string_view>

#include "base/env.hpp"
#include "base/error.hpp"
#include "launch/process.hpp"

namespace tsr {

namespace {

// The device of a local rank: the device of that number, or the entry of that number in the list that is visible.
std::string device_of(int local_rank, const char* list_name) {
    const auto list = env_text(list_name);
    if (!list) return std::to_string(local_rank);
    std::string_view left = *list;
    for (int i = 0;; ++i) {
        const size_t comma = left.find(',');
        std::string_view device = left.substr(0, comma);
        while (device.starts_with(' ')) device.remove_prefix(1);
        while (device.ends_with(' ')) device.remove_suffix(1);
        if (i == local_rank) return std::string(device);
        if (comma == std::string_view::npos) {
            throw Error(Code::invalid_argument,
                        fmt::format("--virtual-local-rank: local rank {} has no device, because {}={} lists {}",
                                    local_rank, list_name, *list, i + 1));
        }
        left.remove_prefix(comma + 1);
    }
}

}  // namespace

void set_torchrun_variables(Variables& variables, const RunOptions& options, const Seat& seat, int local_rank) {
    variables.set("ROLE_NAME", options.programs.at(static_cast<size_t>(seat.program)).role);
    variables.set("ROLE_RANK", seat.role_rank);
    variables.set("ROLE_WORLD_SIZE", seat.role_size);
    std::vector<std::string> names;
    for (const int signal : options.stop_signals) names.push_back(signal_name(signal));
    variables.set("TORCHELASTIC_SIGNALS_TO_HANDLE", fmt::format("{}", fmt::join(names, ",")));
    variables.set_default("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1");
    if (!options.virtual_local_rank) return;
    variables.set("LOCAL_RANK", 0);
    const bool is_rocm = env_text("HIP_VISIBLE_DEVICES").has_value();
    const std::string device = device_of(local_rank, is_rocm ? "HIP_VISIBLE_DEVICES" : "CUDA_VISIBLE_DEVICES");
    variables.set("CUDA_VISIBLE_DEVICES", device);
    if (is_rocm) variables.set("HIP_VISIBLE_DEVICES", device);
}

}  // namespace tsr
