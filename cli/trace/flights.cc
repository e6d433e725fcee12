#include "trace/flights.hpp"

#include <fcntl.h>
#include <fmt/core.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <functional>
#include <iterator>
#include <list>
#include <set>
#include <system_error>
#include <tuple>
#include <utility>

#include "base/fd.hpp"
#include "base/json.hpp"
#include "comm/communicator.hpp"
#include "tensor/dtype.hpp"

namespace tsr::cli {

namespace {

constexpr std::string_view suffix = ".jsonl";
constexpr int highest_dtype = 63;  // unused numbers have the name "unknown"

// A record has at most FlightRecorder::capacity operations of some 500 bytes each, and perhaps an error of many ranks.
constexpr size_t max_record_bytes = size_t{16} << 20;
constexpr double latest_us = 2.5e17;  // in the year 9892; later times are invalid

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
    if (value.is(Json::Kind::null)) return std::nullopt;
    const double time = value.as_double();
    if (!(time >= 0 && time <= latest_us)) throw Error(Code::corrupt, fmt::format("{} is {:g}", key, time));
    return time;
}

double required_time_of(const Json& object, std::string_view key) {
    const auto time = time_of(object, key);
    if (!time) throw Error(Code::corrupt, fmt::format("{} is null", key));
    return *time;
}

Flight header_of(const Json& line) {
    const Json* version = line.find("tessera_flight");
    if (version == nullptr) throw Error(Code::corrupt, "this is not a flight record");
    if (version->as_int() != 1) {
        throw Error(Code::version,
                    fmt::format("the flight record has version {}, but this command reads version 1; use a "
                                "newer one",
                                version->as_int()));
    }
    Flight flight;
    flight.origin = {line.at("name").as_string(), line.at("id").as_string(), int_of(line, "rank", -1),
                     int_of(line, "world_size", -1), line.at("transport").as_string()};
    const int world_size = flight.origin.world_size;
    if (flight.origin.rank < 0 || flight.origin.rank >= world_size || world_size > max_world_size) {
        throw Error(Code::corrupt, fmt::format("rank {} of {}", flight.origin.rank, flight.origin.world_size));
    }
    flight.host = line.at("host").as_string();
    flight.pid = line.at("pid").as_int();
    if (const Json* job = line.find("job")) flight.job = job->as_string();
    if (line.find("process_started") != nullptr) flight.process_started = count_of(line, "process_started");
    if (line.find("written_us") != nullptr) flight.written = required_time_of(line, "written_us");
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
                                             static_cast<int>(Collective::compute));
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
    flown.issued = required_time_of(line, "issued_us");
    flown.started = time_of(line, "started_us");
    flown.ended = time_of(line, "ended_us");
    const bool begun = flown.state == FlightState::started || flown.state == FlightState::finished;
    const bool over = flown.state == FlightState::finished || flown.state == FlightState::failed;
    if ((begun && !flown.started) || over != flown.ended.has_value()) {
        throw Error(Code::corrupt,
                    fmt::format("the operation is {}, but its times contradict that", name_of(flown.state)));
    }
    return flown;
}

// Anyone who can write to the directory may have put anything there.
std::string read_record(const std::string& path) {
    const Fd file(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY));
    struct stat info{};
    if (!file.valid() || ::fstat(file.get(), &info) != 0) throw os_error(fmt::format("cannot open {}", path), errno);
    if (!S_ISREG(info.st_mode)) throw Error(Code::corrupt, fmt::format("{} is not a regular file", path));
    if (static_cast<size_t>(info.st_size) > max_record_bytes) {
        throw Error(Code::corrupt, fmt::format("{} has {} bytes; a flight record has at most {}", path, info.st_size,
                                               max_record_bytes));
    }
    std::string text(static_cast<size_t>(info.st_size), '\0');
    size_t filled = 0;
    while (filled < text.size()) {
        const ssize_t got = ::pread(file.get(), text.data() + filled, text.size() - filled, static_cast<off_t>(filled));
        if (got < 0 && errno == EINTR) continue;
        if (got < 0) throw os_error(fmt::format("cannot read {}", path), errno);
        if (got == 0) break;
        filled += static_cast<size_t>(got);
    }
    text.resize(filled);
    return text;
}

Flight read_flight(const std::string& path) {
    const std::string text = read_record(path);
    std::optional<Flight> flight;
    size_t begin = 0;
    for (int number = 1; begin < text.size(); ++number) {
        const size_t end = std::min(text.find('\n', begin), text.size());
        try {
            const Json line = Json::parse(std::string_view(text).substr(begin, end - begin), "the line");
            if (flight) {
                flight->operations.push_back(operation_from(line));
            } else {
                flight = header_of(line);
            }
        } catch (const Error& error) {
            throw Error(error.code(), fmt::format("{}, line {}: {}", path, number, error.what()));
        }
        begin = end + 1;
    }
    if (!flight) throw Error(Code::corrupt, fmt::format("{} is empty", path));
    return std::move(*flight);
}

// Whether `name` is a round's directory of `tessera run`, such as "round-0".
bool is_round(std::string_view name) {
    constexpr std::string_view begin = "round-";
    return name.starts_with(begin) && name.size() > begin.size() &&
           name.find_first_not_of("0123456789", begin.size()) == std::string_view::npos;
}

// Every record in `directory`; its rounds are added to `rounds`, if that is given.
Flights read_flights(const std::string& directory, std::vector<std::string>* rounds) {
    std::error_code error;
    const std::filesystem::directory_iterator files(directory, error);
    if (error) throw os_error(fmt::format("cannot list {}", directory), error.value());
    Flights flights;
    for (const auto& entry : files) {
        if (rounds != nullptr && is_round(entry.path().filename().native()) && entry.is_directory(error)) {
            rounds->push_back(entry.path().string());
        }
        if (entry.path().extension() != suffix) continue;
        Flight flight = read_flight(entry.path().string());
        auto& ranks = flights[flight.origin.id];
        const auto found = ranks.find(flight.origin.rank);
        if (found != ranks.end() && found->second.last_time() > flight.last_time()) continue;
        ranks.insert_or_assign(flight.origin.rank, std::move(flight));
    }
    return flights;
}

// Communicators belong to one job if they name the same job of a launcher or share a process, directly or through
// others.
std::vector<Job> jobs_of(const std::string& directory, Flights flights) {
    using Process = std::tuple<std::string, int64_t, uint64_t>;
    struct Part {
        Job job;
        std::set<Process> processes;
        std::set<std::string> names;

        [[nodiscard]] bool meets(const Part& other) const {
            const auto common = [](const auto& a, const auto& b) {
                return std::ranges::any_of(a, [&](const auto& one) { return b.contains(one); });
            };
            return common(processes, other.processes) || common(names, other.names);
        }
    };
    std::list<Part> parts;
    for (auto& [id, ranks] : flights) {
        Part part{{directory, {}}, {}, {}};
        for (const auto& [rank, flight] : ranks) {
            part.processes.insert({flight.host, flight.pid, flight.process_started});
            if (!flight.job.empty()) part.names.insert(flight.job);
        }
        part.job.flights.emplace(id, std::move(ranks));
        for (auto other = parts.begin(); other != parts.end();) {
            if (!part.meets(*other)) {
                ++other;
                continue;
            }
            part.job.flights.merge(other->job.flights);
            part.processes.merge(other->processes);
            part.names.merge(other->names);
            other = parts.erase(other);
        }
        parts.push_back(std::move(part));
    }
    std::vector<Job> jobs;
    for (Part& part : parts) jobs.push_back(std::move(part.job));
    return jobs;
}

}  // namespace

double Flight::last_time() const {
    double last = written;
    for (const Flown& flown : operations) {
        last = std::max({last, flown.issued, flown.started.value_or(0), flown.ended.value_or(0)});
    }
    return last;
}

std::string Job::id() const {
    const Flight* first = nullptr;
    const auto begun = [](const Flight& flight) {
        return flight.operations.empty() ? flight.last_time() : flight.operations.front().issued;
    };
    for (const auto& [id, ranks] : flights) {
        for (const auto& [rank, flight] : ranks) {
            const int size = flight.origin.world_size;
            if (first == nullptr || size > first->origin.world_size ||
                (size == first->origin.world_size && begun(flight) < begun(*first))) {
                first = &flight;
            }
        }
    }
    return first != nullptr ? first->origin.id : std::string();
}

bool Job::has(std::string_view id) const {
    return std::ranges::any_of(flights, [&](const auto& of) { return of.first.starts_with(id); });
}

size_t Job::ranks() const { return flights.at(id()).size(); }

double Job::last_time() const {
    double last = 0;
    for (const auto& [id, ranks] : flights) {
        for (const auto& [rank, flight] : ranks) last = std::max(last, flight.last_time());
    }
    return last;
}

std::vector<Job> read_jobs(const std::string& directory) {
    std::vector<std::string> rounds;
    std::vector<Job> jobs = jobs_of(directory, read_flights(directory, &rounds));
    for (const std::string& round : rounds) {
        std::ranges::move(jobs_of(round, read_flights(round, nullptr)), std::back_inserter(jobs));
    }
    if (jobs.empty()) {
        throw Error(Code::not_found,
                    fmt::format("{} contains no flight records (*.jsonl), nor does a round-R in it; set "
                                "TESSERA_TRACE_DIR or `tessera run --trace-dir` to write them",
                                directory));
    }
    std::ranges::stable_sort(jobs, std::ranges::greater(), &Job::last_time);
    return jobs;
}

}  // namespace tsr::cli
