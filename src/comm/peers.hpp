// Communication between the ranks of a save or a metric, in small, fixed-size messages: votes that carry a record, and the exchange
// of errors after which every rank has the same one. Uses a private communicator, or none (one rank). Methods throw
// only if the communicator fails; a rank's "no" is a result.
#pragma once

#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "base/attempt.hpp"
#include "base/error.hpp"
#include "comm/communicator.hpp"

namespace tsr {

class Peers {
   public:
    // `names`: the number of each rank in messages; empty: the rank itself. `label`: of the collectives; lives as long as
    // the program.
    explicit Peers(std::shared_ptr<Communicator> comm, std::vector<int> names = {},
                   std::string_view label = "checkpoint vote")
        : comm_(std::move(comm)), names_(std::move(names)), label_(label) {}

    [[nodiscard]] int rank() const { return comm_ ? comm_->rank() : 0; }
    [[nodiscard]] int world_size() const { return comm_ ? comm_->world_size() : 1; }

    [[nodiscard]] int name(int rank) const { return names_.empty() ? rank : names_[static_cast<size_t>(rank)]; }

    // Every rank's text, in order of ranks.
    [[nodiscard]] std::vector<std::string> gather(std::string_view mine);
    // Rank 0's text.
    [[nodiscard]] std::string from_rank0(std::string_view mine);

    // Every rank votes yes (no error) or no. Returns the error of the lowest rank that voted no: the same on every
    // rank, except that the others have only the beginning of a long list.
    [[nodiscard]] std::optional<Error> vote(const std::optional<Error>& mine) {
        std::vector<char> records;
        return vote(mine, '\0', records);
    }
    // Likewise, and exchanges every rank's record with its vote.
    template <class Record>
    [[nodiscard]] std::optional<Error> vote(const std::optional<Error>& mine, const Record& record,
                                            std::vector<Record>& records) {
        static_assert(std::is_trivially_copyable_v<Record>);
        const size_t size = sizeof(int32_t) + sizeof(Record);
        std::string ballot(size, '\0');
        const int32_t no = mine ? 1 : 0;
        std::memcpy(ballot.data(), &no, sizeof no);
        std::memcpy(ballot.data() + sizeof no, &record, sizeof record);
        const std::string all = gather_fixed(ballot);
        records.resize(static_cast<size_t>(world_size()));
        bool all_well = true;
        for (size_t rank = 0; rank < records.size(); ++rank) {
            int32_t said = 0;
            std::memcpy(&said, all.data() + rank * size, sizeof said);
            std::memcpy(static_cast<void*>(&records[rank]), all.data() + rank * size + sizeof said, sizeof(Record));
            all_well = all_well && said == 0;
        }
        if (all_well) return std::nullopt;
        return exchange(mine);
    }

    // Runs `body`, here and on every rank; throws, on every rank, the error of the lowest rank whose `body` threw.
    template <class Body>
    void all_or_none(const char* operation, Body&& body) {
        const auto agreed = vote(attempt(std::forward<Body>(body)));
        if (agreed) throw Error(agreed->with_operation(operation));
    }

   private:
    [[nodiscard]] std::string gather_fixed(std::string_view mine);  // equal sizes on all ranks
    [[nodiscard]] std::optional<Error> exchange(const std::optional<Error>& mine);

    std::shared_ptr<Communicator> comm_;
    std::vector<int> names_;
    std::string_view label_;
};

}  // namespace tsr
