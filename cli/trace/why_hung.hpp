// Finds out which ranks a job waits for, from the flight records of its ranks.
#pragma once

#include <string>
#include <vector>

#include "trace/flights.hpp"

namespace tsr::cli {

// What the ranks of one communicator wait for.
struct Hang {
    std::string name;
    std::string id;
    std::string operation;     // "all_reduce #412 (bucket 5, 25.0 MiB)"
    std::vector<int> waiting;  // ranks that are in it
    std::vector<int> absent;   // ranks that never entered it, or entered another
    double since = 0;          // when the first of them entered, microseconds since 1970
    std::string sentence;
};

// The communicators with unfinished operations, the one that has waited longest first.
[[nodiscard]] std::vector<Hang> find_hangs(const Flights& flights);

}  // namespace tsr::cli
