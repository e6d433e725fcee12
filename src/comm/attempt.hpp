// What shrink.cc and grow.cc share: members that have announced themselves in the store make a communicator, and agree on
// whether all of them have it. The outcome ("state") is decided by a compare_set, so that all ranks see the same: the
// communicator is committed when all have made it; the attempt has failed when one could not, or died.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/error.hpp"
#include "comm/peer_watch.hpp"
#include "comm/rendezvous.hpp"
#include "store/store.hpp"

namespace tsr {

class Group;

[[nodiscard]] std::string packed(const std::vector<Peer>& peers);
// Throws VERSION.
[[nodiscard]] std::vector<Peer> unpacked_peers(const std::string& bytes);

// The members whose ends this process can see.
[[nodiscard]] PeerWatch watch_of(std::vector<Peer> members, int place);

// Pauses between two looks at the store and the peers. Throws what ends a wait.
void rest();

class Attempt {
   public:
    // The store has only keys of this attempt.
    explicit Attempt(Store& store) : store_(store) {}

    // Of any of them; empty: undecided.
    static constexpr std::string_view state_key = "state";

    [[nodiscard]] Store& store() const { return store_; }
    // A look at the store is not cut short by a deadline that has just passed.
    [[nodiscard]] static Deadline grace() { return Deadline::in(milliseconds{5000}); }

    // This rank cannot make the communicator. Returns false if the attempt has succeeded nevertheless.
    bool give_up();
    // This rank has made it: returns whether all `count` have.
    [[nodiscard]] bool commit(size_t count, Deadline deadline);
    [[nodiscard]] bool has_failed() const;

   private:
    std::string decide(std::string_view outcome);

    Store& store_;
};

// Neither if another rank has ended the attempt.
struct Made {
    std::shared_ptr<Group> group;
    std::optional<Error> error;  // of this rank
};

// Collective over the members, the peers of `bootstrap`: makes their communicator, unless one of `processes` dies. `store`
// is the one at which they met. Throws INTERRUPTED, and what went wrong here after all others were done.
[[nodiscard]] Made make_together(Attempt& attempt, const PeerWatch& processes, const std::shared_ptr<Store>& store,
                                 Bootstrap bootstrap);

}  // namespace tsr
