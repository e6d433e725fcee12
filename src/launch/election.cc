#include "launch/election.hpp"

#include <algorithm>
#include <utility>

namespace tsr {

// Those before it in the list have time to win first.
Election::Time Election::next_attempt(Time now) const { return now + pause * (seats_ + seat_); }

void Election::follow(int term) {
    term_ = std::max(term_, term);
    next_.reset();
    phase_ = Phase::idle;
}

void Election::lose(Time now) {
    phase_ = Phase::idle;
    next_ = now + pause * seat_;
}

Vote Election::answer(const Stand& stand, Time now) {
    const bool yes = next_ && stand.term > term_;
    if (yes && stand.binding) {
        term_ = stand.term;
        phase_ = Phase::idle;
        next_ = next_attempt(now);
    }
    return {stand.term, stand.binding, yes, term_};
}

bool Election::count(int seat, const Vote& vote) {
    heard_ = std::max(heard_, vote.highest);
    if (phase_ == Phase::idle || vote.term != trial_ || vote.binding != (phase_ == Phase::standing)) return false;
    if (!vote.yes) return false;
    voters_.insert(seat);
    if (static_cast<int>(voters_.size()) < majority_of(seats_)) return false;
    if (phase_ == Phase::standing) return true;
    phase_ = Phase::standing;
    is_new_ = true;
    term_ = trial_;
    voters_ = {seat_};
    return false;
}

void Election::tick(Time now) {
    if (!next_ || now < *next_) return;
    next_ = next_attempt(now);
    trial_ = std::max(term_, heard_) + 1;
    phase_ = trial_ <= max_term ? Phase::asking : Phase::idle;
    is_new_ = true;
    voters_ = {seat_};
}

std::optional<Stand> Election::question() const {
    if (phase_ == Phase::idle) return std::nullopt;
    return Stand{trial_, phase_ == Phase::standing};
}

std::optional<Stand> Election::new_question() { return std::exchange(is_new_, false) ? question() : std::nullopt; }

}  // namespace tsr
