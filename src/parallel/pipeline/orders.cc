#include "parallel/pipeline/orders.hpp"

#include <algorithm>
#include <deque>

namespace tsr::pipeline {

namespace {

// Writes one rank's order. Each kind of work takes the micro-batches of a stage from 0 up.
class Writer {
   public:
    explicit Writer(const Seat& seat) : ranks_(seat.ranks), next_(static_cast<size_t>(seat.stages_per_rank)) {}

    // The stage's next micro-batch. `limit`: micro-batches from there on are left out, but counted.
    void forward(int stage, int limit = max_microbatches) { add(Work::forward, stage, next(stage).forward++, limit); }
    void backward(int stage, int limit = max_microbatches) {
        add(Work::backward, stage, next(stage).backward++, limit);
    }
    // Its weights' gradients are owed to weight().
    void input(int stage, int limit = max_microbatches) {
        const int microbatch = next(stage).backward++;
        add(Work::backward_input, stage, microbatch, limit);
        if (microbatch < limit)
            owed_.push_back(
                {Work::backward_weight, false, static_cast<uint16_t>(stage), static_cast<uint32_t>(microbatch)});
    }
    // The oldest that are owed, if any.
    void weight() {
        if (owed_.empty()) return;
        order_.push_back(owed_.front());
        owed_.pop_front();
    }
    void weight_of(int stage, int limit) { add(Work::backward_weight, stage, next(stage).weight++, limit); }
    void overlap(int forward_stage, int backward_stage) {
        forward(forward_stage);
        order_.back().overlaps_next = true;
        backward(backward_stage);
    }
    void add(Work work, int stage, int microbatch, int limit = max_microbatches) {
        if (microbatch < limit)
            order_.push_back({work, false, static_cast<uint16_t>(stage), static_cast<uint32_t>(microbatch)});
    }

    [[nodiscard]] size_t owed() const { return owed_.size(); }
    [[nodiscard]] int forwards(int stage) { return next(stage).forward; }
    [[nodiscard]] int backwards(int stage) { return next(stage).backward; }
    [[nodiscard]] int weights(int stage) { return next(stage).weight; }
    [[nodiscard]] Order take() { return std::move(order_); }

   private:
    struct Next {
        int forward = 0;
        int backward = 0;
        int weight = 0;
    };
    // Both placements put a rank's stages into different rounds of `ranks_` stages.
    Next& next(int stage) { return next_[static_cast<size_t>(stage / ranks_)]; }

    Order order_;
    int ranks_;
    std::vector<Next> next_;
    std::deque<Action> owed_;
};

// The stages of an interleaved schedule take turns: `round` micro-batches of each.
struct Turns {
    Seat seat;
    int round;

    [[nodiscard]] int forward_stage(int k) const { return k / round % seat.stages_per_rank * seat.ranks + seat.rank; }
    [[nodiscard]] int backward_stage(int k) const {
        return (seat.stages_per_rank - 1 - k / round % seat.stages_per_rank) * seat.ranks + seat.rank;
    }
};

}  // namespace

int round_of(int ranks, int microbatches) {
    const int rounds = std::max(1, microbatches / ranks);
    return microbatches % rounds == 0 ? microbatches / rounds : 0;
}

Order gpipe(const Seat& seat) {
    Writer writer(seat);
    for (int i = 0; i < seat.microbatches; ++i) writer.forward(seat.rank);
    for (int i = 0; i < seat.microbatches; ++i) writer.backward(seat.rank);
    return writer.take();
}

Order one_f_one_b(const Seat& seat) {
    Writer writer(seat);
    const int warm_up = std::min(seat.microbatches, seat.ranks - seat.rank);
    for (int i = 0; i < warm_up; ++i) writer.forward(seat.rank);
    for (int i = warm_up; i < seat.microbatches; ++i) {
        writer.backward(seat.rank);
        writer.forward(seat.rank);
    }
    for (int i = 0; i < warm_up; ++i) writer.backward(seat.rank);
    return writer.take();
}

Order looped_bfs(const Seat& seat) {
    Writer writer(seat);
    for (int turn = 0; turn < seat.stages_per_rank; ++turn) {
        for (int i = 0; i < seat.microbatches; ++i) writer.forward(turn * seat.ranks + seat.rank);
    }
    for (int turn = seat.stages_per_rank - 1; turn >= 0; --turn) {
        for (int i = seat.microbatches - 1; i >= 0; --i) {
            writer.add(Work::backward, turn * seat.ranks + seat.rank, i);
        }
    }
    return writer.take();
}

Order interleaved(const Seat& seat) {
    Writer writer(seat);
    const Turns turns{seat, round_of(seat.ranks, seat.microbatches)};
    const int total = seat.microbatches * seat.stages_per_rank;
    const int warm_up = std::min(total, (seat.stages_per_rank - 1) * turns.round + 2 * (seat.ranks - 1 - seat.rank));
    for (int k = 0; k < total + warm_up; ++k) {
        if (k < total) writer.forward(turns.forward_stage(k));
        if (k >= warm_up) writer.backward(turns.backward_stage(k - warm_up));
    }
    return writer.take();
}

Order interleaved_zero_bubble(const Seat& seat) {
    Writer writer(seat);
    const Turns turns{seat, round_of(seat.ranks, seat.microbatches)};
    const int total = seat.microbatches * seat.stages_per_rank;
    const int warm_up = std::min(total, (seat.stages_per_rank - 1) * turns.round + (seat.ranks - 1 - seat.rank));
    for (int k = 0; k < total + warm_up; ++k) {
        if (k < total) writer.forward(turns.forward_stage(k));
        if (k < warm_up) continue;
        writer.input(turns.backward_stage(k - warm_up));
        if (k - warm_up >= seat.rank) writer.weight();
    }
    while (writer.owed() > 0) writer.weight();
    return writer.take();
}

// Each rank runs so many forwards ahead that its first gradient arrives as they end, and keeps so many weight gradients
// back that they fill its end: no rank waits between its first and its last action, for the activations of 2P - 1
// micro-batches.
Order zb_h2(const Seat& seat) {
    Writer writer(seat);
    const int warm_up = std::min(seat.microbatches, 2 * (seat.ranks - seat.rank) - 1);
    for (int i = 0; i < warm_up; ++i) writer.forward(seat.rank);
    for (int i = 0; i < seat.microbatches; ++i) {
        writer.input(seat.rank);
        if (i >= 2 * seat.rank) writer.weight();
        if (warm_up + i < seat.microbatches) writer.forward(seat.rank);
    }
    while (writer.owed() > 0) writer.weight();
    return writer.take();
}

Order zbv(const Seat& seat) {
    const int m = seat.microbatches;
    const int a = seat.rank;
    const int b = 2 * seat.ranks - 1 - seat.rank;
    const int count = std::max(m, 2 * seat.ranks - 1);
    Writer writer(seat);
    const auto backward = [&](int stage) {
        writer.input(stage, m);
        writer.weight_of(stage, m);
    };
    for (int i = 0; i < 2 * (seat.ranks - seat.rank) - 1; ++i) writer.forward(a, m);
    for (int i = 0; i < seat.rank; ++i) {
        writer.forward(b, m);
        writer.forward(a, m);
    }
    for (int i = 0; i < seat.ranks - seat.rank; ++i) {
        writer.forward(b, m);
        backward(b);
    }
    while (writer.forwards(b) < writer.forwards(a) || writer.forwards(a) < count) {
        if (writer.forwards(a) < count) writer.forward(a, m);
        backward(a);
        writer.forward(b, m);
        backward(b);
    }
    for (int i = 0; i < seat.rank; ++i) {
        writer.input(a, m);
        writer.input(b, m);
    }
    for (int i = 0; i < seat.ranks - seat.rank; ++i) backward(a);
    while (writer.weights(b) < writer.backwards(b)) writer.weight_of(b, m);
    while (writer.weights(a) < writer.backwards(a)) writer.weight_of(a, m);
    return writer.take();
}

Order dual_pipe_v(const Seat& seat) {
    const int a = seat.rank;
    const int b = 2 * seat.ranks - 1 - seat.rank;
    const int behind = seat.ranks - seat.rank - 1;  // ranks
    Writer writer(seat);
    for (int i = 0; i < 2 * behind; ++i) writer.forward(a);
    for (int i = 0; i < seat.rank + 1; ++i) {
        writer.forward(a);
        writer.forward(b);
    }
    for (int i = 0; i < behind; ++i) {
        writer.input(b);
        writer.weight();
        writer.forward(b);
    }
    for (int i = 0; i < seat.microbatches - 2 * seat.ranks + seat.rank + 1; ++i) {
        if (i == 0 && behind == 0) {
            writer.forward(a);
            writer.backward(b);
        } else {
            writer.overlap(a, b);
        }
        writer.overlap(b, a);
    }
    for (int i = 0; i < behind; ++i) {
        writer.backward(b);
        writer.overlap(b, a);
    }
    // From the middle on, weights' gradients wait: they fill what would be a bubble at the end.
    const int middle = (seat.rank + 1) / 2;
    for (int i = 0; i < seat.rank + 1; ++i) {
        const bool split_b = i > middle || (i == middle && seat.rank % 2 == 1);
        split_b ? writer.input(b) : writer.backward(b);
        i >= middle ? writer.input(a) : writer.backward(a);
    }
    for (int i = 0; i < behind; ++i) {
        writer.weight();
        writer.input(a);
    }
    while (writer.owed() > 0) writer.weight();
    return writer.take();
}

}  // namespace tsr::pipeline
