// The last operations of a communicator on this rank, always recorded: the request and when it was issued, started and
// finished. Written as JSON lines (docs/COMMAND.md) when the communicator fails, on request, and at its end if
// TESSERA_TRACE_DIR is set; `tessera trace` reads the files of all ranks together. Recording takes a few dozen
// nanoseconds and takes no lock: any thread may read while others record.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/atomic_words.hpp"
#include "base/error.hpp"
#include "base/ticks.hpp"
#include "comm/request.hpp"

namespace tsr {

enum class FlightState : uint64_t { queued = 1, started, finished, failed };

[[nodiscard]] std::string_view name_of(FlightState state);

struct FlightEntry {
    uint64_t ticket = 0;  // counts the operations of this rank, from 1
    FlightState state = FlightState::queued;
    uint64_t sequence = 0;  // of collectives: the same on every rank; of transfers: this rank's; 0: not started
    uint64_t issued = 0;    // ticks
    uint64_t started = 0;
    uint64_t ended = 0;
    Operation operation;
};

class FlightRecorder {
   public:
    static constexpr size_t capacity = 1024;

    FlightRecorder();

    // Each returns or takes the ticket of one operation. Entries that the ring has overwritten are ignored.
    uint64_t queued(const Operation& operation);
    uint64_t started(const Operation& operation, uint64_t sequence);
    void started(uint64_t ticket, uint64_t sequence);
    // Returns the ticks since it started; 0 if unknown.
    uint64_t ended(uint64_t ticket, bool well);

    // The newest `capacity` entries, oldest first. An entry that is being written may be missing.
    [[nodiscard]] std::vector<FlightEntry> entries() const;
    // Converts the ticks of the entries.
    [[nodiscard]] TickScale scale() const;

   private:
    // A sequence lock: a writer takes `version`, a reader reads it twice.
    struct Slot {
        std::atomic<uint64_t> version{0};
        std::array<AtomicWord, words_of<FlightEntry>> entry{};

        [[nodiscard]] AtomicWord& word(size_t offset) { return entry[offset / sizeof(uint64_t)]; }
    };

    [[nodiscard]] Slot& slot(uint64_t ticket) const { return slots_[ticket % capacity]; }
    uint64_t record(FlightState state, uint64_t sequence, const Operation& operation);
    template <class Change>
    void update(uint64_t ticket, Change&& change);

    const TickScale::Mark begun_ = TickScale::Mark::now();
    std::atomic<uint64_t> last_{0};
    std::unique_ptr<Slot[]> slots_;
};

// Identifies a communicator and a rank; `id` is unique to the communicator and the same on all its ranks.
struct FlightOrigin {
    std::string name;
    std::string id;
    int rank = 0;
    int world_size = 1;
    std::string transport;
};

// Writes the entries to `path`, completely or not at all. `error` is the failure of the communicator, if any.
void write_flight(const std::string& path, const FlightOrigin& origin, const FlightRecorder& recorder,
                  const std::optional<Error>& error);
// The name of this rank's file in a directory with the files of all ranks.
[[nodiscard]] std::string flight_file_name(const FlightOrigin& origin);

}  // namespace tsr
