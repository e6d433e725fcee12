#include "launch/metrics_text.hpp"

#include <fmt/format.h>

#include <functional>
#include <string_view>
#include <utility>
#include <vector>

namespace tsr {

namespace {

std::string escaped(std::string_view value) {
    std::string text;
    for (const char c : value) {
        if (c == '\\' || c == '"') text += '\\';
        if (c == '\n') {
            text += "\\n";
        } else {
            text += c;
        }
    }
    return text;
}

using Labels = std::vector<std::pair<const char*, std::string>>;

class Text {
   public:
    void family(std::string_view name, std::string_view type, std::string_view help) {
        name_ = name;
        text_ += fmt::format("# HELP {} {}\n# TYPE {} {}\n", name, help, name, type);
    }
    template <class Number>
    void sample(const Labels& labels, Number value) {
        text_ += name_;
        for (size_t i = 0; i < labels.size(); ++i) {
            text_ += fmt::format("{}{}=\"{}\"", i == 0 ? "{" : ",", labels[i].first, escaped(labels[i].second));
        }
        text_ += fmt::format("{} {}\n", labels.empty() ? "" : "}", value);
    }
    [[nodiscard]] std::string take() { return std::move(text_); }

   private:
    std::string text_;
    std::string_view name_;
};

}  // namespace

std::string metrics_text(const JobStatus& job) {
    Text text;
    const auto one = [&](std::string_view name, std::string_view type, std::string_view help, double value) {
        text.family(name, type, help);
        text.sample({}, value);
    };
    text.family("tessera_job_info", "gauge", "The job that this agent runs; always 1.");
    text.sample({{"job", readable_utf8(job.job)}, {"run", readable_utf8(job.run)}, {"host", readable_utf8(job.host)}},
                1);
    one("tessera_job_start_time_seconds", "gauge", "When this agent started, in seconds since 1970.", job.started);
    one("tessera_job_world_size", "gauge", "Ranks of the round, on all hosts.", job.world_size);
    one("tessera_job_rounds_total", "counter", "Rounds that have begun.", job.rounds);
    one("tessera_job_restarts_total", "counter", "Restarts that --max-restarts counts.", job.restarts);
    if (job.save) {
        one("tessera_job_checkpoint_time_seconds", "gauge", "When the newest checkpoint was committed, since 1970.",
            job.save->time);
        one("tessera_job_checkpoint_duration_seconds", "gauge",
            "From the save call of the newest checkpoint to its commit.", job.save->duration_s);
    }
    std::vector<std::pair<Labels, const RankStatus*>> ranks;
    for (const RankStatus& rank : job.ranks) {
        if (rank.host != job.host || !rank.figures) continue;
        ranks.push_back({{{"rank", std::to_string(rank.rank)}, {"program", readable_utf8(rank.program)}}, &rank});
    }
    text.family("tessera_rank_up", "gauge", "1 while the rank's process runs.");
    for (const auto& [labels, rank] : ranks) text.sample(labels, rank->state == "running" ? 1 : 0);
    const auto each = [&](std::string_view name, std::string_view type, std::string_view help, auto&& value) {
        text.family(name, type, help);
        for (const auto& [labels, rank] : ranks) text.sample(labels, value(*rank->figures));
    };
    each("tessera_rank_steps_total", "counter", "Training steps of the rank's process.",
         [](const RankFigures& f) { return f.steps; });
    each("tessera_rank_step", "gauge", "Number of the last training step, which a resume continues.",
         [](const RankFigures& f) { return f.step; });
    each("tessera_rank_step_duration_seconds", "gauge", "Time between the last two steps.",
         [](const RankFigures& f) { return f.step_s; });
    each("tessera_rank_exposed_communication_seconds_total", "counter",
         "Time that the program's threads spent in communication or waiting for it.",
         [](const RankFigures& f) { return f.exposed_s; });
    each("tessera_rank_communication_bytes_total", "counter", "Bytes of the tensors of collectives and messages.",
         [](const RankFigures& f) { return f.bytes; });
    each("tessera_rank_checkpoints_total", "counter", "Committed checkpoints.",
         [](const RankFigures& f) { return f.saves; });
    each("tessera_rank_checkpoint_failures_total", "counter", "Saves that failed.",
         [](const RankFigures& f) { return f.failed_saves; });
    each("tessera_rank_checkpoint_bytes_total", "counter", "Bytes that the rank wrote to committed checkpoints.",
         [](const RankFigures& f) { return f.saved_bytes; });
    return text.take();
}

}  // namespace tsr
