// One rank's turn: it works alone, as in an evaluation on rank 0, while the others wait for it. The wait has a deadline of
// its own, which starts again with each report of progress, and it watches the peers like any other. Every rank creates one;
// until it has ended or is destroyed, the communicator refuses everything else. Used by one thread.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "base/clock.hpp"
#include "base/error.hpp"
#include "comm/communicator.hpp"

namespace tsr {

class Turn {
   public:
    // Not collective. `patience`: how long the others wait for a sign of `rank`. Throws INVALID_STATE inside another turn.
    Turn(std::shared_ptr<Communicator> comm, int rank, milliseconds patience);
    Turn(const Turn&) = delete;
    Turn& operator=(const Turn&) = delete;
    ~Turn() {
        if (!ended_) comm_->end_turn();
    }

    [[nodiscard]] bool is_own() const { return comm_->rank() == rank_; }
    // On the rank whose turn it is: `done` of `total` steps are made; total 0: unknown. Does not wait: a report is left out
    // while the last one is on its way. Throws what the communicator failed with.
    void progress(int64_t done, int64_t total);
    // Collective: returns on all ranks once the rank whose turn it is has called it. If that one gives the text of a
    // failure, the others throw it, as USER.
    void end(const std::optional<std::string>& failure);

   private:
    enum class Kind : int64_t { progress = 1, end, failure };
    // What the rank broadcasts to the others.
    struct News {
        Kind kind = Kind::progress;
        int64_t done = 0;
        int64_t total = 0;
        std::array<char, 488> text{};  // of a failure, ended by a zero
    };

    void tell(const std::optional<std::string>& failure);
    void listen();
    void show();
    [[nodiscard]] Request broadcast(const Tensor& bytes) const;

    const std::shared_ptr<Communicator> comm_;
    const int rank_;
    const milliseconds patience_;
    const std::shared_ptr<News> news_ = std::make_shared<News>();  // on its way, which keeps it, or the last that came
    const Tensor bytes_;                                           // of it
    WorkPtr on_its_way_;                                           // null: nothing was sent
    bool has_news_ = false;
    bool ended_ = false;                          // or its end was tried
    Clock::time_point next_line_ = Clock::now();  // of the log
};

}  // namespace tsr
