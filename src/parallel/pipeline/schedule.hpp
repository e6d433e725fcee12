// Pipeline schedules as data: the order in which each rank computes micro-batches of its stages. A schedule is a pure
// function of its name, the ranks, the stages per rank and the micro-batches; the executor (pipeline.hpp), the simulator
// (simulate.hpp) and the drawings of `tessera pipeline show` all read the same lists.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace tsr::pipeline {

enum class Work : uint8_t {
    forward,          // F
    backward,         // B: input and weight gradients
    backward_input,   // I: the gradient that the previous stage waits for
    backward_weight,  // W: the weights' gradients, from what I kept
};

// The letter of PyTorch's notation.
[[nodiscard]] char letter_of(Work work);

struct Action {
    Work work;
    bool overlaps_next = false;  // this and the next action of the rank may run at the same time
    uint16_t stage;
    uint32_t microbatch;

    bool operator==(const Action&) const = default;
};

// "2F0", as PyTorch writes it.
[[nodiscard]] std::string text_of(const Action& action);

struct Schedule {
    int microbatches = 0;
    std::vector<int> rank_of_stage;           // for each stage, in the model's order
    std::vector<std::vector<Action>> orders;  // for each rank

    [[nodiscard]] int ranks() const { return static_cast<int>(orders.size()); }
    [[nodiscard]] int stages() const { return static_cast<int>(rank_of_stage.size()); }
    [[nodiscard]] size_t actions() const;  // of all ranks

    // Places in an array with one element for each micro-batch of each stage.
    [[nodiscard]] size_t cells() const { return cell(static_cast<size_t>(stages()), 0); }
    [[nodiscard]] size_t cell(size_t stage, size_t microbatch) const {
        return stage * static_cast<size_t>(microbatches) + microbatch;
    }
};

inline constexpr int max_stages = 65535;
inline constexpr int max_microbatches = 1 << 24;
inline constexpr int64_t max_computations = int64_t{1} << 26;  // stages times micro-batches

// A schedule by name. Sources: PyTorch 2.15's torch.distributed.pipelining for all but zb_h2, in its order; Huang et al.
// 2019 (GPipe); Narayanan et al. 2019 and 2021 (1F1B, interleaved); Lamy-Poirier 2023 (looped BFS); Qi et al. 2023 and
// 2024 (zero bubble, ZBV); DeepSeek-AI 2024 (DualPipe), cut in half by Sea AI Lab (DualPipeV).
struct Name {
    std::string_view name;        // "interleaved_1f1b"
    std::string_view torch_name;  // "Interleaved1F1B", which PyTorch's get_schedule_class takes; empty if it has none
    std::string_view summary;
};
[[nodiscard]] std::span<const Name> schedule_names();

// `name` in the spelling of either column, any case. 0 `stages_per_rank`: 2 for the schedules that place two stages on a
// rank in a V (zbv, dualpipev), 1 for the others. Throws INVALID_ARGUMENT, naming the smallest value that works.
[[nodiscard]] Schedule make_schedule(std::string_view name, int ranks, int stages_per_rank, int microbatches);

// Checks that each stage lies on one rank and computes each micro-batch once: F, then either B or I and W; and that the
// ranks, each in its own order, never wait for each other in a circle. Throws INVALID_ARGUMENT naming rank and action.
void validate(const Schedule& schedule);

// PyTorch's CSV: a line per rank, a cell per slot ("2F0", "(0F7;7B3)OVERLAP_F_B", or empty). Reads both of its formats:
// cells of communication ("0SEND_F1", "2UNSHARD") are left out, since messages and collectives follow from the order.
// Throws INVALID_ARGUMENT naming line and cell; the result is validated.
[[nodiscard]] Schedule from_csv(std::string_view text);
enum class Csv { compute_only, compute_comms };
// Of a valid schedule.
[[nodiscard]] std::string to_csv(const Schedule& schedule, Csv format);
inline constexpr size_t max_csv_bytes = size_t{256} << 20;

}  // namespace tsr::pipeline
