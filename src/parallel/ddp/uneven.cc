// Ranks with different numbers of steps: a rank without data joins the steps of the others until none has data left.
#include <fmt/core.h>

#include <algorithm>
#include <array>

#include "base/reentry.hpp"
#include "parallel/ddp/ddp.hpp"

namespace tsr {

void Ddp::shadow_step() {
    step_.begin = Clock::now();
    step_.begun = true;
    if (reducer_->device() != nullptr) begin_step_on_device();
    zero_memory();
    std::fill(has_grad_.begin(), has_grad_.end(), char{0});
    for (; step_.launched < buckets_.size(); ++step_.launched) launch(step_.launched, Role::shadow);
    launch_used();
    launch_order();
    await_works();
    finish_step(Role::shadow);
}

void Ddp::join(bool sync_params) {
    const Reentry once(this, "the model of communicator", comm_->name());
    if (options_.join == DdpJoin::off) {
        throw refusal(Code::invalid_state, "this rank cannot join: the model was created without the join option");
    }
    check_idle("this rank cannot join");
    comm_->in_one_call([&] { take_part_until_all_joined(sync_params); });
}

void Ddp::take_part_until_all_joined(bool sync_params) {
    try {
        while (reducer_->announce(Reducer::Presence::joined) > 0) {
            if (reducer_->all_do() == Reducer::Presence::broadcasts_buffers) {
                move_buffers(reducer_->first_active());
            } else {
                shadow_step();
            }
        }
        // Twice the number of steps, plus 1 if this rank wants the parameters of the rank with the most steps.
        const int64_t own = 2 * own_steps_ + (sync_params ? 1 : 0);
        std::vector<int64_t> all(static_cast<size_t>(comm_->world_size()));
        std::array<int64_t, 1> one{own};
        const Tensor input = tensor_of(std::span<int64_t>(one), DType::i64);
        const Tensor output = tensor_of(std::span<int64_t>(all), DType::i64);
        comm_->run({.collective = Collective::all_gather,
                    .inputs = {&input, 1},
                    .outputs = {&output, 1},
                    .label = "steps until join"});
        for (size_t r = 0; r < all.size(); ++r) {
            if ((all[r] & 1) == (all[0] & 1)) continue;
            throw refusal(Code::mismatch, fmt::format("rank {} joins with sync_params {}, but rank 0 with {}", r,
                                                      all[r] & 1, all[0] & 1))
                .with_peer(static_cast<int>(r));
        }
        own_steps_ = 0;
        const auto last = std::max_element(all.begin(), all.end());
        if (sync_params && *last != *std::min_element(all.begin(), all.end())) {
            const auto from = static_cast<int>(last - all.begin());
            broadcast_values(from);
            if (!buffers_.empty()) move_buffers(from);
        }
        zero_memory();
        if (reducer_->device() != nullptr) reducer_->device()->await(*comm_);
    } catch (const Error& error) {
        if (error.code() != Code::mismatch || comm_->error()) failed_ = error;
        throw;
    }
}

}  // namespace tsr
