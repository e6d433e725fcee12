#include "launch/node_message.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <limits>
#include <optional>
#include <string_view>
#include <utility>

#include "base/error.hpp"
#include "launch/job.hpp"

namespace tsr {

namespace {

constexpr size_t kept_text = size_t{64} << 10;  // of a message or traceback: JSON may need six bytes for one
constexpr size_t kept_line = 1000;
constexpr size_t most_lines = 100;
constexpr size_t most_strings = 4096;

template <class... Fs>
struct Overloaded : Fs... {
    using Fs::operator()...;
};
template <class... Fs>
Overloaded(Fs...) -> Overloaded<Fs...>;  // clang 14 does not deduce it

// --- writing

std::string short_text(std::string_view text) { return readable_utf8(text.substr(0, kept_text)); }

Json strings(const std::vector<std::string>& texts, size_t most = most_strings, size_t bytes = kept_text) {
    Json::Array array;
    const size_t skipped = texts.size() - std::min(texts.size(), most);
    for (size_t i = skipped; i < texts.size(); ++i) {
        array.emplace_back(readable_utf8(std::string_view(texts[i]).substr(0, bytes)));
    }
    return array;
}

Json numbers(const std::vector<int>& values) {
    Json::Array array;
    for (const int value : values) array.emplace_back(value);
    return array;
}

Json error_json(const std::optional<RecordedError>& error) {
    if (!error) return {};
    return Json::Object{{"message", short_text(error->message)},
                        {"traceback", short_text(error->traceback)},
                        {"timestamp", error->timestamp},
                        {"code", short_text(error->code)},
                        {"peer", error->peer},
                        {"rank", error->rank},
                        {"job_rank", error->job_rank}};
}

Json end_json(const RankEnd& end) {
    return Json::Object{{"rank", end.rank},
                        {"host", short_text(end.host)},
                        {"pid", static_cast<int64_t>(end.pid)},
                        {"status", end.wait_status},
                        {"time", end.time},
                        {"order", end.order},
                        {"by_agent", end.by_agent},
                        {"log", short_text(end.log_file)},
                        {"error", error_json(end.error)},
                        {"failure", error_json(end.failure)},
                        {"last_lines", strings(end.last_lines, most_lines, kept_line)}};
}

std::string text_of(const char* kind, Json::Object fields) {
    Json message{Json::Object{}};
    message.set("kind", kind);
    for (Json::Member& field : fields) message.set(field.key, std::move(field.value));
    return message.dump();
}

// --- reading

int number(const Json& json, int least, int most, const char* what) {
    const int64_t value = json.as_int();
    if (value < least || value > most) {
        throw Error(Code::corrupt, fmt::format("{} is {}, not from {} to {}", what, value, least, most));
    }
    return static_cast<int>(value);
}

constexpr int any = std::numeric_limits<int>::max();

int number_at(const Json& message, const char* key, int least = 0, int most = any) {
    return number(message.at(key), least, most, key);
}

uint16_t port_at(const Json& message, const char* key) {
    return static_cast<uint16_t>(number_at(message, key, 0, 65535));
}

std::vector<std::string> strings_at(const Json& message, const char* key) {
    const Json::Array& array = message.at(key).as_array();
    if (array.size() > most_strings) throw Error(Code::corrupt, fmt::format("{} has {} entries", key, array.size()));
    std::vector<std::string> texts;
    for (const Json& text : array) texts.push_back(text.as_string());
    return texts;
}

std::optional<RecordedError> error_at(const Json& message, const char* key) {
    const Json& json = message.at(key);
    if (json.is(Json::Kind::null)) return std::nullopt;
    RecordedError error;
    error.message = json.at("message").as_string();
    error.traceback = json.at("traceback").as_string();
    error.timestamp = seconds_at(json, "timestamp");
    error.code = json.at("code").as_string();
    error.peer = number_at(json, "peer", -1);
    error.rank = number_at(json, "rank", -1);
    error.job_rank = number_at(json, "job_rank", -1);
    return error;
}

RankEnd end_at(const Json& message) {
    const Json& json = message.at("end");
    RankEnd end;
    end.rank = number_at(json, "rank", 0, max_ranks - 1);
    end.host = json.at("host").as_string();
    end.pid = number_at(json, "pid");
    end.wait_status = number_at(json, "status", 0, 0xffff);
    end.time = seconds_at(json, "time");
    end.order = number_at(json, "order");
    end.by_agent = json.at("by_agent").as_bool();
    end.log_file = json.at("log").as_string();
    end.error = error_at(json, "error");
    end.failure = error_at(json, "failure");
    end.last_lines = strings_at(json, "last_lines");
    return end;
}

[[noreturn]] void throw_unknown(const std::string& kind) {
    throw Error(Code::corrupt, fmt::format("a message between agents has the unknown kind '{}'", kind.substr(0, 32)));
}

}  // namespace

std::string encode(const Report& report) {
    return std::visit(
        Overloaded{
            [](const Hello& hello) {
                return text_of("hello", {{"agent", hello.agent},
                                         {"host", short_text(hello.host)},
                                         {"address", hello.address},
                                         {"version", hello.version},
                                         {"architecture", hello.architecture},
                                         {"node_rank", hello.node_rank},
                                         {"ranks", numbers(hello.ranks)},
                                         {"agreed", strings(hello.agreed)},
                                         {"master_port", hello.master_port},
                                         {"job", hello.job},
                                         {"seat", hello.seat},
                                         {"ballot", hello.ballot},
                                         {"term", hello.term}});
            },
            [](const RankEnded& ended) {
                return text_of("ended", {{"round", ended.round}, {"end", end_json(ended.end)}});
            },
            [](const RankDetails& details) {
                return text_of("details", {{"round", details.round}, {"end", end_json(details.end)}});
            },
            [](const RoundOver& over) {
                return text_of(
                    "over", {{"round", over.round}, {"cut_short", over.cut_short}, {"master_port", over.master_port}});
            },
            [](const StopAsked& stop) { return text_of("stop", {{"signal", stop.signal}}); },
            [](const FlightsAsked&) { return text_of("flights", {}); },
            [](const Listening&) { return text_of("listening", {}); },
            [](const NodeFailed& failed) {
                return text_of("failed", {{"message", short_text(failed.message)}, {"exit_code", failed.exit_code}});
            },
            [](const Stand& stand) { return text_of("stand", {{"term", stand.term}, {"binding", stand.binding}}); },
            [](const Beat& beat) { return text_of("beat", {{"time", beat.time}}); },
            [](const Figures& figures) {
                Json::Array ranks;
                for (const RankStatus& rank : figures.ranks) ranks.push_back(to_json(rank));
                return text_of("figures", {{"round", figures.round}, {"ranks", std::move(ranks)}});
            }},
        report);
}

std::string encode(const Order& order) {
    return std::visit(
        Overloaded{
            [](const Welcome& welcome) {
                return text_of("welcome", {{"job", welcome.job},
                                           {"run", welcome.run},
                                           {"host", short_text(welcome.host)},
                                           {"term", welcome.term},
                                           {"votes", welcome.votes}});
            },
            [](const Refused& refused) { return text_of("refused", {{"why", short_text(refused.why)}}); },
            [](const StartRound& start) {
                Json::Array seats;
                for (const Seat& seat : start.seats) {
                    seats.emplace_back(Json::Array{Json(seat.rank), Json(seat.program), Json(seat.instance),
                                                   Json(seat.role_rank), Json(seat.role_size)});
                }
                return text_of("start", {{"round", start.round},
                                         {"restarts", start.restarts},
                                         {"world_size", start.world_size},
                                         {"group_rank", start.group_rank},
                                         {"group_size", start.group_size},
                                         {"seats", std::move(seats)},
                                         {"master_address", start.master_address},
                                         {"master_port", start.master_port},
                                         {"store_port", start.store_port}});
            },
            [](const EndRanks& end) {
                return text_of("end", {{"manner", static_cast<int>(end.manner)}, {"signal", end.signal}});
            },
            [](const ReplaceRank& replace) {
                return text_of("replace", {{"round", replace.round}, {"rank", replace.rank}});
            },
            [](const WriteFlights&) { return text_of("flights", {}); },
            [](const Listening&) { return text_of("listening", {}); },
            [](const Say& say) {
                return text_of("say", {{"text", short_text(say.text)}, {"event", say.event}, {"fields", say.fields}});
            },
            [](const Finish& finish) {
                return text_of("finish", {{"exit_code", finish.exit_code}, {"text", short_text(finish.text)}});
            },
            [](const Vote& vote) {
                return text_of(
                    "vote",
                    {{"term", vote.term}, {"binding", vote.binding}, {"yes", vote.yes}, {"highest", vote.highest}});
            },
            [](const Beat& beat) { return text_of("beat", {{"time", beat.time}}); }},
        order);
}

Report decode_report(const Json& message) {
    const std::string& kind = message.at("kind").as_string();
    if (kind == "hello") {
        Hello hello;
        hello.agent = message.at("agent").as_string();
        hello.host = message.at("host").as_string();
        hello.address = message.at("address").as_string();
        hello.version = message.at("version").as_string();
        hello.architecture = message.at("architecture").as_string();
        hello.node_rank = number_at(message, "node_rank", -1, max_ranks - 1);
        for (const Json& ranks : message.at("ranks").as_array()) {
            hello.ranks.push_back(number(ranks, 0, max_ranks, "the ranks of a program"));
        }
        if (hello.ranks.size() > static_cast<size_t>(max_ranks)) throw Error(Code::corrupt, "too many programs");
        hello.agreed = strings_at(message, "agreed");
        hello.master_port = port_at(message, "master_port");
        hello.job = message.at("job").as_string();
        hello.seat = number_at(message, "seat", -1, max_ranks - 1);
        hello.ballot = message.at("ballot").as_string();
        hello.term = number_at(message, "term", 0, max_term);
        return hello;
    }
    if (kind == "ended") return RankEnded{number_at(message, "round"), end_at(message)};
    if (kind == "details") return RankDetails{number_at(message, "round"), end_at(message)};
    if (kind == "over") {
        return RoundOver{number_at(message, "round"), message.at("cut_short").as_bool(),
                         port_at(message, "master_port")};
    }
    if (kind == "stop") return StopAsked{number_at(message, "signal", 1, 64)};
    if (kind == "flights") return FlightsAsked{};
    if (kind == "listening") return Listening{};
    if (kind == "stand") return Stand{number_at(message, "term", 0, max_term), message.at("binding").as_bool()};
    if (kind == "failed") return NodeFailed{message.at("message").as_string(), number_at(message, "exit_code", 1, 255)};
    if (kind == "beat") return Beat{seconds_at(message, "time")};
    if (kind == "figures") {
        Figures figures{number_at(message, "round"), {}};
        for (const Json& rank : message.at("ranks").as_array()) figures.ranks.push_back(rank_status_of(rank));
        return figures;
    }
    throw_unknown(kind);
}

Order decode_order(const Json& message) {
    const std::string& kind = message.at("kind").as_string();
    if (kind == "welcome") {
        return Welcome{message.at("job").as_string(), message.at("run").as_string(), message.at("host").as_string(),
                       number_at(message, "term", 0, max_term), message.at("votes").as_bool()};
    }
    if (kind == "refused") return Refused{message.at("why").as_string()};
    if (kind == "start") {
        StartRound start;
        start.round = number_at(message, "round");
        start.restarts = number_at(message, "restarts");
        start.world_size = number_at(message, "world_size", 1, max_ranks);
        start.group_size = number_at(message, "group_size", 1, max_ranks);
        start.group_rank = number_at(message, "group_rank", 0, start.group_size - 1);
        for (const Json& entry : message.at("seats").as_array()) {
            const Json::Array& seat = entry.as_array();
            if (seat.size() != 5) throw Error(Code::corrupt, "a seat has other than five numbers");
            start.seats.push_back({number(seat[0], 0, start.world_size - 1, "a rank"),
                                   number(seat[1], 0, max_ranks, "a program"),
                                   number(seat[2], 0, max_ranks, "an instance"),
                                   number(seat[3], 0, start.world_size - 1, "a role's rank"),
                                   number(seat[4], 1, start.world_size, "a role's size")});
        }
        start.master_address = message.at("master_address").as_string();
        start.master_port = port_at(message, "master_port");
        start.store_port = port_at(message, "store_port");
        return start;
    }
    if (kind == "end") {
        return EndRanks{static_cast<EndRanks::Manner>(number_at(message, "manner", 0, 2)),
                        number_at(message, "signal", 0, 64)};
    }
    if (kind == "replace") {
        return ReplaceRank{number_at(message, "round"), number_at(message, "rank", 0, max_ranks - 1)};
    }
    if (kind == "flights") return WriteFlights{};
    if (kind == "listening") return Listening{};
    if (kind == "say") {
        return Say{message.at("text").as_string(), message.at("event").as_string(), message.at("fields").as_object()};
    }
    if (kind == "finish") return Finish{number_at(message, "exit_code", 0, 255), message.at("text").as_string()};
    if (kind == "vote") {
        return Vote{number_at(message, "term", 0, max_term), message.at("binding").as_bool(),
                    message.at("yes").as_bool(), number_at(message, "highest", 0, max_term)};
    }
    if (kind == "beat") return Beat{seconds_at(message, "time")};
    throw_unknown(kind);
}

}  // namespace tsr
