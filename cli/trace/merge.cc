#include "trace/merge.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <limits>
#include <map>
#include <vector>

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

// The lanes of one rank's process: as many for a communicator as it had operations in flight, and as many for what was
// computed beside them.
class Lanes {
   public:
    Lanes(int rank, Json::Array& events) : rank_(rank), events_(&events) {}

    void add(const std::string& name, const std::vector<const Flown*>& flown, double zero, double last_time) {
        std::vector<double> busy;  // until when each of these lanes is taken
        const int base = count_;
        for (const Flown* one : flown) {
            const double end = one->ended.value_or(last_time);
            auto free = std::ranges::find_if(busy, [&](double until) { return until <= *one->started; });
            if (free == busy.end()) {
                const std::string which = busy.empty() ? "" : fmt::format(" ({})", busy.size() + 1);
                events_->push_back(trace_name("thread_name", rank_, count_++, name + which));
                free = busy.insert(busy.end(), 0);
            }
            *free = end;
            events_->push_back(operation_event(*one, rank_, base + static_cast<int>(free - busy.begin()), zero, end));
        }
    }

   private:
    int rank_;
    Json::Array* events_;
    int count_ = 0;
};

}  // namespace

std::string trace_of(const Flights& flights) {
    double zero = std::numeric_limits<double>::max();
    for (const auto& [id, ranks] : flights) {
        for (const auto& [rank, flight] : ranks) {
            for (const Flown& flown : flight.operations) zero = std::min(zero, flown.issued);
        }
    }
    Json::Array events;
    std::map<int, Lanes> processes;
    for (const auto& [id, ranks] : flights) {
        for (const auto& [rank, flight] : ranks) {
            const auto [lanes, is_new] = processes.try_emplace(rank, rank, events);
            if (is_new) {
                const std::string process = fmt::format("rank {} ({}, pid {})", rank, flight.host, flight.pid);
                events.push_back(trace_name("process_name", rank, 0, process));
            }
            std::vector<const Flown*> computed;
            std::vector<const Flown*> moved;
            for (const Flown& flown : flight.operations) {
                const bool computes = flown.operation.collective == Collective::compute;
                if (flown.begun()) (computes ? computed : moved).push_back(&flown);
            }
            for (auto* begun : {&computed, &moved}) {
                std::ranges::stable_sort(*begun, {}, [](const Flown* flown) { return *flown->started; });
            }
            lanes->second.add(flight.origin.name + ": stages", computed, zero, flight.last_time());
            lanes->second.add(flight.origin.name, moved, zero, flight.last_time());
        }
    }
    return trace_text(std::move(events));
}

}  // namespace tsr::cli
