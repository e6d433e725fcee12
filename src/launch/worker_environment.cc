#include "launch/worker_environment.hpp"

#include <fmt/format.h>

#include <string>
#include <string_view>
#include <vector>

#include "base/env.hpp"
#include "base/error.hpp"
#include "launch/hosts/text_file.hpp"
#include "launch/process.hpp"

namespace tsr {

namespace {

// The device of a local rank: the device of that number, or the entry of that number in the list that is visible.
std::string device_of(int local_rank, const char* list_name) {
    const auto list = env_text(list_name);
    if (!list) return std::to_string(local_rank);
    const std::vector<std::string_view> devices = pieces_of(*list, ',');
    if (static_cast<size_t>(local_rank) >= devices.size()) {
        throw Error(Code::invalid_argument,
                    fmt::format("--virtual-local-rank: local rank {} has no device, because {}={} lists {}", local_rank,
                                list_name, *list, devices.size()));
    }
    return std::string(trimmed(devices[static_cast<size_t>(local_rank)]));
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
