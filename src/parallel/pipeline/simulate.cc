#include "parallel/pipeline/simulate.hpp"

#include <algorithm>
#include <cmath>
#include <map>

#include "base/error.hpp"

namespace tsr::pipeline {

namespace {

constexpr double never = -1;

class Walk {
   public:
    Walk(const Schedule& schedule, const Costs& costs, OnAction on_action)
        : schedule_(schedule),
          costs_(costs),
          on_action_(on_action),
          activations_(schedule.cells(), never),
          gradients_(schedule.cells(), never),
          done_(static_cast<size_t>(schedule.ranks())),
          now_(static_cast<size_t>(schedule.ranks())),
          links_(static_cast<size_t>(schedule.ranks())) {
        std::fill_n(activations_.begin(), schedule.microbatches, 0.0);
    }

    std::vector<size_t> run() {
        for (int rank = 0; rank < schedule_.ranks(); ++rank) runnable_.push_back(rank);
        while (!runnable_.empty()) {
            const int rank = runnable_.back();
            runnable_.pop_back();
            while (run_next(rank)) {
            }
        }
        return std::move(done_);
    }

   private:
    // When what the action needs from other stages is there.
    [[nodiscard]] double ready_at(const Action& action) const {
        switch (action.work) {
            case Work::forward: return activations_[schedule_.cell(action.stage, action.microbatch)];
            case Work::backward:
            case Work::backward_input: return gradients_[schedule_.cell(action.stage, action.microbatch)];
            case Work::backward_weight: return 0;  // I, earlier in the same order
        }
        return never;
    }

    [[nodiscard]] double duration(const Action& action) const {
        switch (action.work) {
            case Work::forward: return costs_.forward;
            case Work::backward: return costs_.input + costs_.weight;
            case Work::backward_input: return costs_.input;
            case Work::backward_weight: return costs_.weight;
        }
        return 0;
    }

    bool run_next(int rank) {
        const auto r = static_cast<size_t>(rank);
        const auto& order = schedule_.orders[r];
        if (done_[r] == order.size()) return false;
        const Action& action = order[done_[r]];
        const double ready = ready_at(action);
        if (ready == never) return false;
        const double begin = std::max(now_[r], ready);
        const double end = begin + duration(action);
        now_[r] = end;
        on_action_(rank, done_[r], begin, end);
        ++done_[r];
        hand_on(rank, action, end);
        return true;
    }

    // What the action makes goes to the neighbouring stage.
    void hand_on(int rank, const Action& action, double end) {
        if (action.work == Work::backward_weight) return;
        const bool is_forward = action.work == Work::forward;
        if (is_forward && action.stage + 1 == schedule_.stages()) {  // the loss
            gradients_[schedule_.cell(action.stage, action.microbatch)] = end;
            return;
        }
        const int stage = is_forward ? action.stage + 1 : action.stage - 1;
        if (stage < 0) return;
        const int receiver = schedule_.rank_of_stage[static_cast<size_t>(stage)];
        double& arrival =
            (is_forward ? activations_ : gradients_)[schedule_.cell(static_cast<size_t>(stage), action.microbatch)];
        if (receiver == rank) {
            arrival = end;
            return;
        }
        double& link = links_[static_cast<size_t>(rank)][receiver];
        link = std::max(link, end) + costs_.transfer;
        arrival = link + costs_.latency;
        runnable_.push_back(receiver);
    }

    const Schedule& schedule_;
    const Costs& costs_;
    OnAction on_action_;
    std::vector<double> activations_;  // when the input of each stage and micro-batch is there
    std::vector<double> gradients_;    // when the gradient of its output is there
    std::vector<size_t> done_;
    std::vector<double> now_;
    std::vector<std::map<int, double>> links_;  // of each sender, when its link to a receiver is free
    std::vector<int> runnable_;
};

}  // namespace

double Simulation::idle() const {
    double most = 0;
    for (const RankTimes& rank : ranks) most = std::max(most, makespan - rank.busy);
    return most;
}

int Simulation::peak() const {
    int most = 0;
    for (const RankTimes& rank : ranks) most = std::max(most, rank.peak);
    return most;
}

std::vector<size_t> walk(const Schedule& schedule, const Costs& costs, OnAction on_action) {
    return Walk(schedule, costs, on_action).run();
}

Simulation simulate(const Schedule& schedule, const Costs& costs, OnAction on_action) {
    Simulation result;
    result.ranks.resize(static_cast<size_t>(schedule.ranks()));
    std::vector<int> kept(result.ranks.size());
    (void)walk(schedule, costs, [&](int rank, size_t index, double begin, double end) {
        const auto r = static_cast<size_t>(rank);
        RankTimes& times = result.ranks[r];
        if (index == 0) times.first = begin;
        times.last = end;
        times.busy += end - begin;
        const Work work = schedule.orders[r][index].work;
        if (work == Work::forward) times.peak = std::max(times.peak, ++kept[r]);
        if (work == Work::backward || work == Work::backward_weight) --kept[r];
        result.makespan = std::max(result.makespan, end);
        on_action(rank, index, begin, end);
    });
    if (!std::isfinite(result.makespan)) {
        throw Error(Code::invalid_argument, "the times are too large: the makespan is not a finite number");
    }
    return result;
}

Simulation simulate(const Schedule& schedule, const Costs& costs) {
    return simulate(schedule, costs, [](int, size_t, double, double) {});
}

}  // namespace tsr::pipeline
