// Which agent coordinates a job with spares (--store-hosts). The agents at the store hosts, the endpoint's and the spares',
// each have one vote in a term. One that has lost the coordinating agent stands for the next term; with the votes of more
// than half of all store hosts it leads. Any two majorities share a voter, a voter never votes twice in a term, and a
// voter is one process for the life of the job (an agent that starts again has no vote): so a term has at most one
// leader. Who follows a coordinating agent votes for nobody else, which is that agent's lease: it ends with the connection
// between the two, or with the silence after which both give it up. Before it stands, an agent asks the others whether
// they would vote for it, which binds nobody: else one that was cut off for a while could not follow an older term again.
// One that voted in a later term all the same cannot follow this one: the coordinating agent stands down when it joins.
//
// One voter's part, as a state machine without input, output or clock of its own.
#pragma once

#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "base/clock.hpp"
#include "launch/node_message.hpp"

namespace tsr {

class Election {
   public:
    using Time = Clock::time_point;

    static constexpr milliseconds pause{1000};  // between a store host's attempt and that of the next in the list

    Election(int seat, int seats) : seat_(seat), seats_(seats) {}

    [[nodiscard]] static int majority_of(int seats) { return seats / 2 + 1; }

    // This voter follows the leader of `term`, or leads in it.
    void follow(int term);
    // It does not any more.
    void lose(Time now);

    // The answer to a voter that stands.
    [[nodiscard]] Vote answer(const Stand& stand, Time now);
    // Another voter's answer. True: this one leads in term().
    [[nodiscard]] bool count(int seat, const Vote& vote);
    void tick(Time now);
    [[nodiscard]] std::optional<Time> next_tick() const { return next_; }
    // What to ask a voter that can be reached now.
    [[nodiscard]] std::optional<Stand> question() const;
    // What to ask all of them: once for each attempt and phase, as those who said no may have lost their leader since.
    [[nodiscard]] std::optional<Stand> new_question();

    [[nodiscard]] int term() const { return term_; }  // the highest one in which it voted, led or followed

   private:
    enum class Phase { idle, asking, standing };

    [[nodiscard]] Time next_attempt(Time now) const;

    int seat_;
    int seats_;
    int term_ = 0;
    int heard_ = 0;             // the highest term of which another voter told
    std::optional<Time> next_;  // to stand; none: it has a leader
    Phase phase_ = Phase::idle;
    int trial_ = 0;         // the term for which it asks or stands
    bool is_new_ = false;   // the question
    std::set<int> voters_;  // for this one, in this phase
};

}  // namespace tsr
