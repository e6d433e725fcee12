#include "trace/flights.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <system_error>

#include "base/json.hpp"
#include "tensor/dtype.hpp"

namespace tsr::cli {

namespace {

constexpr std::string_view suffix = ".jsonl";
constexpr int highest_dtype = 63;  // numbers that are none have the name of none

// The enumerator from `first` to `last` with this name.
template <class Enum>
Enum named(std::string_view name, int first, int last) {
    for (int i = first; i <= last; ++i) {
        if (name_of(static_cast<Enum>(i)) == name) return static_cast<Enum>(i);
    }
    throw Error(Code::corrupt, fmt::format("'{}' is not known to this version", name));
}

int int_of(const Json& object, std::string_view key, int otherwise) {
    const Json* found = object.find(key);
    if (found == nullptr) return otherwise;
    const int64_t value = found->as_int();
    if (value < INT32_MIN || value > INT32_MAX) throw Error(Code::corrupt, fmt::format("{} is {}", key, value));
    return static_cast<int>(value);
}

uint64_t count_of(const Json& object, std::string_view key) {
    const int64_t value = object.at(key).as_int();
    if (value < 0) throw Error(Code::corrupt, fmt::format("{} is {}", key, value));
    return static_cast<uint64_t>(value);
}

std::optional<double> time_of(const Json& object, std::string_view key) {
    const Json& value = object.at(key);
    return value.is(Json::Kind::null) ? std::nullopt : std::optional(value.as_double());
}

Flight header_of(const Json& line) {
    const Json* version = line.find("tessera_flight");
    if (version == nullptr) throw Error(Code::corrupt, "this is no flight record");
    if (version->as_int() != 1) {
        throw Error(Code::version, fmt::format("a flight record of version {}; this command reads version 1: use a "
                                               "newer one",
                                               version->as_int()));
    }
    Flight flight;
    flight.origin = {line.at("name").as_string(), line.at("id").as_string(), int_of(line, "rank", -1),
                     int_of(line, "world_size", -1), line.at("transport").as_string()};
    if (flight.origin.rank < 0 || flight.origin.rank >= flight.origin.world_size) {
        throw Error(Code::corrupt, fmt::format("rank {} of {}", flight.origin.rank, flight.origin.world_size));
    }
    flight.host = line.at("host").as_string();
    flight.pid = line.at("pid").as_int();
    if (const Json* written = line.find("written_us")) flight.written = written->as_double();
    if (const Json* error = line.find("error")) flight.error = error->at("message").as_string();
    return flight;
}

Flown operation_from(const Json& line) {
    Flown flown;
    flown.number = count_of(line, "number");
    flown.state = named<FlightState>(line.at("state").as_string(), static_cast<int>(FlightState::queued),
                                     static_cast<int>(FlightState::failed));
    flown.sequence = count_of(line, "sequence");
    Operation& operation = flown.operation;
    operation.collective = named<Collective>(line.at("operation").as_string(), static_cast<int>(Collective::barrier),
                                             static_cast<int>(Collective::finalize));
    if (const Json* op = line.find("op")) {
        operation.op =
            named<ReduceOp>(op->as_string(), static_cast<int>(ReduceOp::sum), static_cast<int>(ReduceOp::prod));
    }
    if (const Json* dtype = line.find("dtype")) {
        operation.dtype =
            static_cast<int32_t>(named<DType>(dtype->as_string(), static_cast<int>(DType::f16), highest_dtype));
    }
    operation.peer = int_of(line, "peer", -1);
    operation.tag = int_of(line, "tag", 0);
    operation.tensors = static_cast<uint32_t>(count_of(line, "tensors"));
    operation.count = count_of(line, "count");
    if (const Json* label = line.find("label")) {
        std::strncpy(operation.label.data(), label->as_string().c_str(), operation.label.size() - 1);
    }
    flown.issued = line.at("issued_us").as_double();
    flown.started = time_of(line, "started_us");
    flown.ended = time_of(line, "ended_us");
    return flown;
}

Flight read_flight(const std::string& path) {
    std::ifstream file(path);
    if (!file) throw os_error(fmt::format("cannot open {}", path), errno);
    std::optional<Flight> flight;
    std::string text;
    for (int number = 1; std::getline(file, text); ++number) {
        try {
            const Json line = Json::parse(text, "the line");
            if (flight) {
                flight->operations.push_back(operation_from(line));
            } else {
                flight = header_of(line);
            }
        } catch (const Error& error) {
            throw Error(error.code(), fmt::format("{}, line {}: {}", path, number, error.what()));
        }
    }
    if (!flight) throw Error(Code::corrupt, fmt::format("{} is empty", path));
    return std::move(*flight);
}

}  // namespace

double Flight::last_time() const {
    double last = written;
    for (const Flown& flown : operations) {
        last = std::max({last, flown.issued, flown.started.value_or(0), flown.ended.value_or(0)});
    }
    return last;
}

Flights read_flights(const std::string& directory) {
    std::error_code error;
    const std::filesystem::directory_iterator files(directory, error);
    if (error) throw os_error(fmt::format("cannot list {}", directory), error.value());
    Flights flights;
    for (const auto& entry : files) {
        if (entry.path().extension() != suffix) continue;
        Flight flight = read_flight(entry.path().string());
        const std::string id = flight.origin.id;
        const int rank = flight.origin.rank;
        flights[id].insert_or_assign(rank, std::move(flight));
    }
    if (flights.empty()) {
        throw Error(Code::not_found, fmt::format("{} holds no flight records (*.jsonl): they are written where "
                                                 "TESSERA_TRACE_DIR or `tessera run --trace-dir` says",
                                                 directory));
    }
    return flights;
}

}  // namespace tsr::cli
