#include "comm/turn.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <span>
#include <string_view>

#include "base/json.hpp"
#include "base/log.hpp"

namespace tsr {

namespace {

constexpr std::chrono::seconds between_lines{10};

// While it exists, the communicator has another timeout on this rank.
class Patience {
   public:
    Patience(Communicator& comm, milliseconds timeout) : comm_(comm), before_(comm.options().timeout) {
        comm.set_timeout(timeout);
    }
    ~Patience() { comm_.set_timeout(before_); }
    Patience(const Patience&) = delete;
    Patience& operator=(const Patience&) = delete;

   private:
    Communicator& comm_;
    const milliseconds before_;
};

// Afterwards the communicator can be used again, also if the end failed.
class Ending {
   public:
    explicit Ending(Communicator& comm) : comm_(comm) {}
    ~Ending() { comm_.end_turn(); }
    Ending(const Ending&) = delete;
    Ending& operator=(const Ending&) = delete;

   private:
    Communicator& comm_;
};

std::string progress_text(int64_t done, int64_t total) {
    return total > 0 ? fmt::format("{} of {}", done, total) : fmt::format("{}", done);
}

}  // namespace

Turn::Turn(std::shared_ptr<Communicator> comm, int rank, milliseconds patience)
    : comm_(std::move(comm)),
      rank_(rank),
      patience_(patience),
      bytes_(tensor_of(std::span(reinterpret_cast<uint8_t*>(news_.get()), sizeof *news_), DType::u8)) {
    if (rank < 0 || rank >= comm_->world_size()) {
        throw Error(Code::invalid_argument,
                    fmt::format("rank {} cannot have a turn in communicator '{}'; its ranks are 0 to {}", rank,
                                comm_->name(), comm_->world_size() - 1));
    }
    if (patience.count() <= 0) {
        throw Error(Code::invalid_argument,
                    fmt::format("the timeout of a turn is {} ms; it must be positive", patience.count()));
    }
    if (const auto error = comm_->error()) throw Error(*error);  // or in a forked child, by itself
    comm_->begin_turn(rank);
}

Request Turn::broadcast(const Tensor& bytes) const {
    Request request;
    request.collective = Collective::broadcast;
    request.outputs = {&bytes, 1};
    request.peer = rank_;
    request.label = "turn";
    request.of_turn = true;
    return request;
}

void Turn::progress(int64_t done, int64_t total) {
    if (!is_own()) {
        throw Error(Code::invalid_state,
                    fmt::format("rank {} reports progress in the turn of rank {}", comm_->rank(), rank_))
            .with_rank(comm_->rank());
    }
    if (done < 0 || total < 0 || (total > 0 && done > total)) {
        throw Error(
            Code::invalid_argument,
            fmt::format("progress of {} of {}: both must not be negative, and the first not larger", done, total));
    }
    if (ended_) throw Error(Code::invalid_state, "this turn has ended");
    if (const auto error = comm_->error()) throw Error(*error);
    if (on_its_way_ && !on_its_way_->done()) return;
    *news_ = {Kind::progress, done, total, {}};
    const Patience patience(*comm_, std::max(patience_, comm_->options().timeout));  // for those that come late
    on_its_way_ = comm_->submit(broadcast(bytes_));
    on_its_way_->on_done([news = news_](const auto&) {});
}

void Turn::end(const std::optional<std::string>& failure) {
    if (ended_) throw Error(Code::invalid_state, "this turn has ended already");
    ended_ = true;
    const Ending ending(*comm_);
    if (is_own()) {
        tell(failure);
    } else {
        listen();
    }
}

void Turn::tell(const std::optional<std::string>& failure) {
    if (on_its_way_) on_its_way_->wait(Deadline::in(no_timeout));
    *news_ = {failure ? Kind::failure : Kind::end, news_->done, news_->total, {}};
    if (failure) failure->copy(news_->text.data(), news_->text.size() - 1);
    comm_->run(broadcast(bytes_));
}

void Turn::listen() {
    do {
        try {
            const Patience patience(*comm_, patience_);
            comm_->run(broadcast(bytes_));
        } catch (const Error& error) {
            if (error.code() != Code::timeout || error.record()->peer != rank_) throw;
            const std::string elsewhere = comm_->doing_elsewhere(rank_);
            const std::string last = news_->kind == Kind::progress && has_news_
                                         ? fmt::format("last reported {}", progress_text(news_->done, news_->total))
                                         : "has not reported anything";
            throw Error(
                Code::timeout,
                fmt::format("rank {}: rank {} did not end its turn within {} s, and {}; {}", comm_->rank(), rank_,
                            static_cast<double>(patience_.count()) / 1000, last,
                            elsewhere.empty()
                                ? "give the turn a longer timeout, or report progress more often"
                                : fmt::format("it {}: end the turn before what needs waiting ranks", elsewhere)))
                .with_rank(comm_->rank())
                .with_peer(rank_)
                .caused_by(error);
        }
        has_news_ = true;
        show();
    } while (news_->kind == Kind::progress);
    if (news_->kind == Kind::failure) {
        throw Error(Code::user, fmt::format("rank {} failed in its turn: {}", rank_, readable_utf8(news_->text.data())))
            .with_rank(comm_->rank())
            .with_peer(rank_);
    }
}

// The first of the waiting ranks speaks for all.
void Turn::show() {
    if (comm_->rank() != (rank_ == 0 ? 1 : 0) || news_->kind != Kind::progress || Clock::now() < next_line_) return;
    next_line_ = Clock::now() + between_lines;
    log::info("communicator '{}' waits for the turn of rank {}: {} done", comm_->name(), rank_,
              progress_text(news_->done, news_->total));
}

}  // namespace tsr
