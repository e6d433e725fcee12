#include "comm/flight_recorder.hpp"

#include <fmt/core.h>
#include <unistd.h>

#include <cctype>
#include <cstring>
#include <thread>

#include "base/env.hpp"
#include "base/json.hpp"
#include "base/proc.hpp"
#include "base/write_whole.hpp"
#include "comm/host.hpp"
#include "tensor/dtype.hpp"

namespace tsr {

std::string_view name_of(FlightState state) {
    switch (state) {
        case FlightState::queued: return "queued";
        case FlightState::started: return "started";
        case FlightState::finished: return "finished";
        case FlightState::failed: return "failed";
    }
    return "?";
}

FlightRecorder::FlightRecorder() : slots_(std::make_unique<Slot[]>(capacity)) {}

uint64_t FlightRecorder::queued(const Operation& operation) { return record(FlightState::queued, 0, operation); }

uint64_t FlightRecorder::started(const Operation& operation, uint64_t sequence) {
    return record(FlightState::started, sequence, operation);
}

namespace {

// Two operations `capacity` apart may need the same slot at once: one of them waits for a few stores of the other.
uint64_t take(std::atomic<uint64_t>& version) {
    uint64_t seen = version.load(std::memory_order_relaxed);
    while (seen % 2 != 0 || !version.compare_exchange_weak(seen, seen + 1, std::memory_order_acquire)) {
        if (seen % 2 == 0) continue;
        std::this_thread::yield();
        seen = version.load(std::memory_order_relaxed);
    }
    return seen;
}

template <class Slot>
void set(Slot& place, size_t offset, uint64_t value) {
    place.word(offset).store(value, std::memory_order_release);
}

}  // namespace

// Once a collective: each word is stored where it belongs, without an entry in between.
uint64_t FlightRecorder::record(FlightState state, uint64_t sequence, const Operation& operation) {
    constexpr size_t operation_at = offsetof(FlightEntry, operation) / sizeof(uint64_t);
    const uint64_t ticket = last_.fetch_add(1, std::memory_order_relaxed) + 1;
    Slot& place = slot(ticket);
    const uint64_t version = take(place.version);
    // A thread that slept here while others wrapped around the ring is too late: newer entries stay.
    if (place.word(offsetof(FlightEntry, ticket)).load(std::memory_order_relaxed) > ticket) {
        place.version.store(version + 2, std::memory_order_release);
        return ticket;
    }
    const uint64_t now = ticks();
    set(place, offsetof(FlightEntry, ticket), ticket);
    set(place, offsetof(FlightEntry, state), static_cast<uint64_t>(state));
    set(place, offsetof(FlightEntry, sequence), sequence);
    set(place, offsetof(FlightEntry, issued), now);
    set(place, offsetof(FlightEntry, started), state == FlightState::queued ? 0 : now);
    set(place, offsetof(FlightEntry, ended), 0);
    store_words(std::span(place.entry).subspan<operation_at, words_of<Operation>>(), operation);
    place.version.store(version + 2, std::memory_order_release);
    return ticket;
}

template <class Change>
void FlightRecorder::update(uint64_t ticket, Change&& change) {
    Slot& place = slot(ticket);
    const uint64_t version = take(place.version);
    if (place.word(offsetof(FlightEntry, ticket)).load(std::memory_order_relaxed) == ticket) {
        change(place);
    }
    place.version.store(version + 2, std::memory_order_release);
}

void FlightRecorder::started(uint64_t ticket, uint64_t sequence) {
    update(ticket, [&](Slot& place) {
        set(place, offsetof(FlightEntry, state), static_cast<uint64_t>(FlightState::started));
        set(place, offsetof(FlightEntry, sequence), sequence);
        set(place, offsetof(FlightEntry, started), ticks());
    });
}

uint64_t FlightRecorder::ended(uint64_t ticket, bool well) {
    uint64_t took = 0;
    update(ticket, [&](Slot& place) {
        const uint64_t now = ticks();
        set(place, offsetof(FlightEntry, state),
            static_cast<uint64_t>(well ? FlightState::finished : FlightState::failed));
        set(place, offsetof(FlightEntry, ended), now);
        took = now - place.word(offsetof(FlightEntry, started)).load(std::memory_order_relaxed);
    });
    return took;
}

std::vector<FlightEntry> FlightRecorder::entries() const {
    std::vector<FlightEntry> result;
    const uint64_t last = last_.load(std::memory_order_acquire);
    for (uint64_t ticket = last > capacity ? last - capacity + 1 : 1; ticket <= last; ++ticket) {
        const Slot& place = slot(ticket);
        for (int attempt = 0; attempt < 1000; ++attempt) {
            const uint64_t before = place.version.load(std::memory_order_acquire);
            FlightEntry entry;
            load_words(entry, std::span(place.entry));
            if (before % 2 != 0 || place.version.load(std::memory_order_acquire) != before) continue;
            if (entry.ticket == ticket) result.push_back(entry);
            break;
        }
    }
    return result;
}

TickScale FlightRecorder::scale() const {
    // A shorter interval would give an inaccurate rate.
    constexpr int64_t least_ns = 10'000'000;
    TickScale::Mark now = TickScale::Mark::now();
    if (now.monotonic_ns - begun_.monotonic_ns < least_ns) {
        std::this_thread::sleep_for(std::chrono::nanoseconds{least_ns});
        now = TickScale::Mark::now();
    }
    return {begun_, now};
}

namespace {

// With one decimal.
double micros(int64_t ns) {
    const int64_t tenths = ns / 100;
    return static_cast<double>(tenths) / 10;
}

std::string header_line(const FlightOrigin& origin, size_t count, const std::optional<Error>& error) {
    Json::Object header{{"tessera_flight", 1},
                        {"name", readable_utf8(origin.name)},
                        {"id", origin.id},
                        {"rank", origin.rank},
                        {"world_size", origin.world_size},
                        {"transport", origin.transport},
                        {"host", host_name()},
                        {"pid", int64_t{::getpid()}},
                        // A pid is given again, to a later job's rank in a container of the same name, say.
                        {"process_started", process_start_time(::getpid()).value_or(0)},
                        {"entries", static_cast<uint64_t>(count)},
                        {"written_us", micros(TickScale::Mark::now().utc_ns)}};
    if (const auto job = env_text("TESSERA_JOB_ID")) {
        header.push_back({"job", readable_utf8(fmt::format("{}/{}", *job, env_text("TESSERA_EPOCH").value_or("0")))});
    }
    if (error) {
        header.push_back(
            {"error", Json::Object{{"code", code_name(error->code())}, {"message", readable_utf8(error->what())}}});
    }
    return Json(std::move(header)).dump();
}

std::string entry_line(const FlightEntry& entry, const TickScale& scale) {
    const Operation& operation = entry.operation;
    const auto us = [&](uint64_t ticks) {
        if (ticks == 0) return Json();
        return Json(micros(scale.utc_ns(ticks)));
    };
    Json::Object line{{"number", entry.ticket},
                      {"operation", name_of(operation.collective)},
                      {"state", name_of(entry.state)},
                      {"sequence", entry.sequence}};
    const auto dtype = static_cast<DType>(operation.dtype);
    if (operation.dtype != 0 && is_known(dtype)) line.push_back({"dtype", name_of(dtype)});
    if (operation.op != ReduceOp::none) line.push_back({"op", name_of(operation.op)});
    if (operation.peer >= 0) line.push_back({"peer", operation.peer});
    if (is_point_to_point(operation.collective)) line.push_back({"tag", operation.tag});
    line.push_back({"tensors", int64_t{operation.tensors}});
    line.push_back({"count", operation.count});
    line.push_back({"bytes", operation.size_bytes()});
    const std::string_view label(operation.label.data(), ::strnlen(operation.label.data(), operation.label.size()));
    if (!label.empty()) line.push_back({"label", readable_utf8(label)});
    line.push_back({"issued_us", us(entry.issued)});
    line.push_back({"started_us", us(entry.started)});
    line.push_back({"ended_us", us(entry.ended)});
    return Json(std::move(line)).dump();
}

}  // namespace

void write_flight(const std::string& path, const FlightOrigin& origin, const FlightRecorder& recorder,
                  const std::optional<Error>& error) {
    const std::vector<FlightEntry> entries = recorder.entries();
    const TickScale scale = recorder.scale();
    std::string text = header_line(origin, entries.size(), error) + '\n';
    for (const FlightEntry& entry : entries) text += entry_line(entry, scale) + '\n';

    write_whole_file(path, text, 0644);
}

std::string flight_file_name(const FlightOrigin& origin) {
    std::string name = origin.name;
    for (char& c : name) {
        if (std::isalnum(static_cast<unsigned char>(c)) == 0 && c != '-' && c != '_') c = '_';
    }
    return fmt::format("{}-{}.rank-{}.jsonl", name, origin.id, origin.rank);
}

}  // namespace tsr
