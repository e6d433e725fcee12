#include "launch/job_status.hpp"

#include <fmt/format.h>
#include <sys/wait.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "base/error.hpp"
#include "launch/job.hpp"
#include "launch/process.hpp"

namespace tsr {

namespace {

constexpr size_t most_entries = 4096;

Json time_json(double time) { return time > 0 ? Json(time) : Json(); }

// Times are shifted and written again: what follows must be numbers.
constexpr double most_seconds = 1e12;

int int_at(const Json& json, std::string_view key) {
    const int64_t value = json.at(key).as_int();
    if (value >= 0 && value <= std::numeric_limits<int>::max()) return static_cast<int>(value);
    throw Error(Code::corrupt, fmt::format("{} is {}", key, value));
}

const Json::Array& array_at(const Json& json, std::string_view key) {
    const Json::Array& array = json.at(key).as_array();
    if (array.size() > most_entries) throw Error(Code::corrupt, fmt::format("{} has {} entries", key, array.size()));
    return array;
}

Json save_json(const std::optional<SaveFigures>& save) {
    if (!save || save->time <= 0) return {};
    return Json::Object{{"step", save->step}, {"time", save->time}, {"duration_s", save->duration_s}};
}

SaveFigures save_of(const Json& json) {
    if (json.is(Json::Kind::null)) return {};
    return {json.at("step").as_int(), seconds_at(json, "time"), seconds_at(json, "duration_s")};
}

Json figures_json(const RankFigures& figures) {
    return Json::Object{{"steps", figures.steps},
                        {"step", figures.step},
                        {"step_time", time_json(figures.step_time)},
                        {"step_s", figures.step_s},
                        {"exposed_communication_s", figures.exposed_s},
                        {"communication_bytes", figures.bytes},
                        {"checkpoints", figures.saves},
                        {"failed_checkpoints", figures.failed_saves},
                        {"checkpoint_bytes", figures.saved_bytes},
                        {"checkpoint", save_json(figures.save)}};
}

RankFigures figures_of(const Json& json) {
    RankFigures figures;
    figures.steps = json.at("steps").as_int();
    figures.step = json.at("step").as_int();
    figures.step_time = seconds_at(json, "step_time");
    figures.step_s = seconds_at(json, "step_s");
    figures.exposed_s = seconds_at(json, "exposed_communication_s");
    figures.bytes = json.at("communication_bytes").as_int();
    figures.saves = json.at("checkpoints").as_int();
    figures.failed_saves = json.at("failed_checkpoints").as_int();
    figures.saved_bytes = json.at("checkpoint_bytes").as_int();
    figures.save = save_of(json.at("checkpoint"));
    return figures;
}

RankRates rates_of(const RankFigures& before, const RankFigures& now, double span) {
    RankRates rates;
    if (now.steps < before.steps || now.bytes < before.bytes || now.exposed_s < before.exposed_s) return rates;
    // From step to step, so that a look in between does not matter.
    const double between = now.step_time - before.step_time;
    if (before.steps > 0 && now.steps > before.steps && between > 0) {
        rates.steps_a_second = static_cast<double>(now.steps - before.steps) / between;
    } else if (now.step_s > 0) {
        rates.steps_a_second = 1 / now.step_s;
    }
    if (span > 0) {
        rates.exposed = std::min((now.exposed_s - before.exposed_s) / span, 1.0);
        rates.bytes_a_second = static_cast<double>(now.bytes - before.bytes) / span;
    }
    return rates;
}

}  // namespace

double seconds_at(const Json& json, std::string_view key) {
    const Json& value = json.at(key);
    if (value.is(Json::Kind::null)) return 0;
    const double time = value.as_double();
    if (!(std::abs(time) <= most_seconds)) throw Error(Code::corrupt, fmt::format("{} is out of range", key));
    return time;
}

std::string state_of(const RankEnd& end) {
    if (!end.gone.empty()) return "lost";
    return WIFSIGNALED(end.wait_status) ? signal_name(WTERMSIG(end.wait_status))
                                        : fmt::format("exit {}", WEXITSTATUS(end.wait_status));
}

Json to_json(const RankStatus& rank) {
    return Json::Object{{"rank", rank.rank},
                        {"host", readable_utf8(rank.host)},
                        {"program", readable_utf8(rank.program)},
                        {"pid", rank.pid > 0 ? Json(static_cast<int64_t>(rank.pid)) : Json()},
                        {"state", rank.state},
                        {"figures", rank.figures ? figures_json(*rank.figures) : Json()}};
}

RankStatus rank_status_of(const Json& json) {
    RankStatus rank;
    rank.rank = int_at(json, "rank");
    if (rank.rank >= max_ranks) throw Error(Code::corrupt, fmt::format("rank is {}", rank.rank));
    rank.host = json.at("host").as_string();
    rank.program = json.at("program").as_string();
    rank.pid = json.at("pid").is(Json::Kind::null) ? 0 : int_at(json, "pid");
    rank.state = json.at("state").as_string();
    if (!json.at("figures").is(Json::Kind::null)) rank.figures = figures_of(json.at("figures"));
    return rank;
}

Json to_json(const JobStatus& job) {
    Json::Array programs;
    for (const std::string& program : job.programs) programs.emplace_back(readable_utf8(program));
    Json::Array hosts;
    for (const HostStatus& host : job.hosts) {
        hosts.emplace_back(
            Json::Object{{"host", readable_utf8(host.host)}, {"ranks", host.ranks}, {"coordinates", host.coordinates}});
    }
    Json::Array ranks;
    for (const RankStatus& rank : job.ranks) ranks.push_back(to_json(rank));
    return Json::Object{{"job", readable_utf8(job.job)},
                        {"run", readable_utf8(job.run)},
                        {"host", readable_utf8(job.host)},
                        {"launcher_pid", static_cast<int64_t>(job.launcher)},
                        {"coordinates", job.coordinates},
                        {"state", job.state},
                        {"time", job.time},
                        {"started", job.started},
                        {"round", job.round},
                        {"restarts", job.restarts},
                        {"max_restarts", job.max_restarts},
                        {"world_size", job.world_size},
                        {"programs", std::move(programs)},
                        {"checkpoint", save_json(job.save)},
                        {"hosts", std::move(hosts)},
                        {"ranks", std::move(ranks)}};
}

JobStatus job_status_of(const Json& json) {
    JobStatus job;
    job.job = json.at("job").as_string();
    job.run = json.at("run").as_string();
    job.host = json.at("host").as_string();
    job.launcher = int_at(json, "launcher_pid");
    job.coordinates = json.at("coordinates").as_bool();
    job.state = json.at("state").as_string();
    job.time = json.at("time").as_double();
    job.started = json.at("started").as_double();
    job.round = int_at(json, "round");
    job.restarts = int_at(json, "restarts");
    job.max_restarts = int_at(json, "max_restarts");
    job.world_size = int_at(json, "world_size");
    for (const Json& program : array_at(json, "programs")) job.programs.push_back(program.as_string());
    for (const Json& host : array_at(json, "hosts")) {
        job.hosts.push_back({host.at("host").as_string(), int_at(host, "ranks"), host.at("coordinates").as_bool()});
    }
    for (const Json& rank : array_at(json, "ranks")) job.ranks.push_back(rank_status_of(rank));
    if (const SaveFigures save = save_of(json.at("checkpoint")); save.time > 0) job.save = save;
    return job;
}

std::optional<SaveFigures> newest_save(const std::vector<RankStatus>& ranks, std::optional<SaveFigures> known) {
    for (const RankStatus& rank : ranks) {
        if (!rank.figures || rank.figures->save.time <= 0) continue;
        if (!known || rank.figures->save.time > known->time) known = rank.figures->save;
    }
    return known;
}

std::vector<RankRates> rates_between(const JobStatus& before, const JobStatus& now) {
    std::vector<RankRates> rates(now.ranks.size());
    if (before.round != now.round) return rates;
    for (size_t i = 0; i < rates.size(); ++i) {
        const RankStatus& rank = now.ranks[i];
        const auto earlier = std::ranges::find(before.ranks, rank.rank, &RankStatus::rank);
        if (earlier == before.ranks.end() || earlier->pid != rank.pid || !earlier->figures || !rank.figures ||
            rank.state != "running")
            continue;
        rates[i] = rates_of(*earlier->figures, *rank.figures, now.time - before.time);
    }
    return rates;
}

}  // namespace tsr
