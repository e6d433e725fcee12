#include "comm/attempt.hpp"

#include <atomic>
#include <cstring>
#include <thread>
#include <utility>

#include "base/thread.hpp"
#include "comm/group.hpp"

namespace tsr {

namespace {

constexpr milliseconds pause{20};
constexpr std::string_view committed = "committed";
constexpr std::string_view failed = "failed";

// Ends an attempt when a member dies, and says when another member has ended it.
class FailureWatch {
   public:
    FailureWatch(const Attempt& attempt, const PeerWatch& members)
        : thread_(start_thread("tsr-attempt", [this, attempt, &members] { watch(attempt, members); })) {}
    ~FailureWatch() {
        stop_ = true;
        thread_.join();
    }
    FailureWatch(const FailureWatch&) = delete;
    FailureWatch& operator=(const FailureWatch&) = delete;

    // Becomes true once the attempt has failed.
    [[nodiscard]] const std::atomic<bool>& attempt_failed() const { return failed_; }

   private:
    void watch(Attempt attempt, const PeerWatch& members) {
        const InterruptedBy stopped(stop_);
        while (!failed_ && !stop_) {
            try {
                rest();
                if (!members.dead().empty()) attempt.give_up();
                failed_ = attempt.has_failed();
            } catch (...) {  // NOLINT(bugprone-empty-catch): stopped, or the store did not answer: it is asked again
            }
        }
    }

    std::atomic<bool> stop_{false};
    std::atomic<bool> failed_{false};
    std::thread thread_;  // last: it uses the others
};

}  // namespace

void rest() {
    poll_interrupt();
    std::this_thread::sleep_for(pause);
}

std::string packed(const std::vector<Peer>& peers) {
    return {reinterpret_cast<const char*>(peers.data()), peers.size() * sizeof(Peer)};
}

std::vector<Peer> unpacked_peers(const std::string& bytes) {
    std::vector<Peer> peers(bytes.size() / sizeof(Peer));
    std::memcpy(static_cast<void*>(peers.data()), bytes.data(), peers.size() * sizeof(Peer));
    for (const Peer& peer : peers) {
        if (peer.magic != Peer::current_magic || bytes.size() % sizeof(Peer) != 0) {
            throw Error(Code::version, "another rank uses a different version of Tessera");
        }
    }
    return peers;
}

PeerWatch watch_of(std::vector<Peer> members, int place) {
    const Peer own = members[static_cast<size_t>(place)];
    for (Peer& member : members) {
        if (!member.same_host(own)) member.pid_namespace = 0;
    }
    return {members, place};
}

bool Attempt::give_up() { return decide(failed) == failed; }

bool Attempt::commit(size_t count, Deadline deadline) {
    if (store_.add("made", 1, grace()) == static_cast<int64_t>(count)) return decide(committed) == committed;
    while (!deadline.expired()) {
        if (const auto state = store_.get(state_key, grace())) return *state == committed;
        rest();
    }
    return decide(failed) == committed;
}

bool Attempt::has_failed() const { return store_.get(state_key, grace()) == failed; }

std::string Attempt::decide(std::string_view outcome) {
    (void)store_.compare_set(state_key, std::nullopt, outcome, grace());
    return store_.wait(state_key, grace());
}

Made make_together(Attempt& attempt, const PeerWatch& processes, const std::shared_ptr<Store>& store,
                   Bootstrap bootstrap) {
    const Deadline deadline = bootstrap.deadline;
    const size_t count = bootstrap.peers.size();
    try {
        const FailureWatch watch(attempt, processes);
        const auto group = [&] {
            const InterruptedBy failure(watch.attempt_failed(), Code::aborted);
            return make_group(store, std::move(bootstrap));
        }();
        if (attempt.commit(count, deadline)) return {group, std::nullopt};
        group->abort("a rank was lost while the communicator was created");
        group->leave();
        return {};
    } catch (...) {
        const Error error = current_error();
        if (!attempt.give_up() || error.code() == Code::interrupted) throw;
        return {nullptr, error};
    }
}

}  // namespace tsr
