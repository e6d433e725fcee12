#include "trace/merge.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <limits>
#include <set>

#include "base/json.hpp"
#include "tensor/dtype.hpp"
#include "trace_events.hpp"

namespace tsr::cli {

namespace {

Json operation_event(const Flown& flown, int rank, int lane, double zero, double end) {
    Json::Object of = trace_event("X", rank, lane, flown.headline());
    of.push_back({"cat", std::string(name_of(flown.operation.collective))});
    of.push_back({"ts", *flown.started - zero});
    of.push_back({"dur", std::max(0.0, end - *flown.started)});
    Json::Object arguments{{"what", describe(flown.operation)},
                           {"state", name_of(flown.state)},
                           {"bytes", flown.operation.size_bytes()},
                           {"waited_in_queue_us", *flown.started - flown.issued}};
    of.push_back({"args", std::move(arguments)});
    return Json(std::move(of));
}

}  // namespace

std::string trace_of(const Flights& flights) {
    double zero = std::numeric_limits<double>::max();
    for (const auto& [id, ranks] : flights) {
        for (const auto& [rank, flight] : ranks) {
            for (const Flown& flown : flight.operations) zero = std::min(zero, flown.issued);
        }
    }
    Json::Array events;
    std::map<int, int> lanes;  // how many each rank has
    std::set<int> named_ranks;
    for (const auto& [id, ranks] : flights) {
        for (const auto& [rank, flight] : ranks) {
            const std::string process = fmt::format("rank {} ({}, pid {})", rank, flight.host, flight.pid);
            if (named_ranks.insert(rank).second) {
                events.push_back(trace_name("process_name", rank, 0, process));
            }
            std::vector<double> busy;  // until when each lane of this communicator is taken
            int& next = lanes[rank];
            const int base = next;
            std::vector<const Flown*> begun;
            for (const Flown& flown : flight.operations) {
                if (flown.begun()) begun.push_back(&flown);
            }
            std::ranges::stable_sort(begun, {}, [](const Flown* flown) { return *flown->started; });
            for (const Flown* flown : begun) {
                const double end = flown->ended.value_or(flight.last_time());
                auto free = std::ranges::find_if(busy, [&](double until) { return until <= *flown->started; });
                if (free == busy.end()) {
                    const std::string which = busy.empty() ? "" : fmt::format(" ({})", busy.size() + 1);
                    events.push_back(trace_name("thread_name", rank, base + static_cast<int>(busy.size()),
                                                flight.origin.name + which));
                    free = busy.insert(busy.end(), 0);
                    ++next;
                }
                *free = end;
                const int lane = base + static_cast<int>(free - busy.begin());
                events.push_back(operation_event(*flown, rank, lane, zero, end));
            }
        }
    }
    return trace_text(std::move(events));
}

}  // namespace tsr::cli
