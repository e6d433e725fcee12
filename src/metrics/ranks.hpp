// The collectives that metrics need, over the ranks of a communicator or, without one, over this rank alone. Every method is
// collective. A fault of one rank's own goes through `agree`, so that no other waits for it.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "comm/communicator.hpp"
#include "comm/peers.hpp"

namespace tsr::metrics {

class Ranks {
   public:
    // `label` names the collectives, and lives as long.
    explicit Ranks(std::shared_ptr<Communicator> comm, std::string_view label = "metric")
        : comm_(std::move(comm)), label_(label), peers_(comm_, {}, label) {}

    [[nodiscard]] int rank() const { return peers_.rank(); }
    [[nodiscard]] int size() const { return peers_.world_size(); }

    // Throws, on every rank, the error of the lowest rank that has one, or MISMATCH unless all pass the same text.
    void agree(const std::optional<Error>& own, std::string_view text);

    void sum(std::span<int64_t> values) { reduce(values, ReduceOp::sum); }
    void max(std::span<int64_t> values) { reduce(values, ReduceOp::max); }
    // Every rank's values, of equal number, in order of ranks.
    [[nodiscard]] std::vector<int64_t> gather(std::span<const int64_t> values);
    // The same with numbers that differ. T has 4 or 8 bytes.
    template <class T>
    [[nodiscard]] std::vector<T> gather_all(std::span<const T> values);
    // Only rank 0 gets them; the others get nothing.
    template <class T>
    [[nodiscard]] std::vector<T> gather_to_first(std::span<const T> values);
    // Values of each rank, one after the other.
    template <class T>
    struct Parts {
        std::vector<T> values;
        std::vector<size_t> ends;
    };
    // Sends the values from ends[r - 1] to ends[r] to rank r. Returns what the ranks sent to this one.
    template <class T>
    [[nodiscard]] Parts<T> exchange(std::span<const T> values, std::span<const size_t> ends);

   private:
    void reduce(std::span<int64_t> values, ReduceOp op);
    void send(const Tensor& tensor, int peer);
    void receive(const Tensor& tensor, int peer);

    std::shared_ptr<Communicator> comm_;
    std::string_view label_;
    Peers peers_;
};

}  // namespace tsr::metrics
