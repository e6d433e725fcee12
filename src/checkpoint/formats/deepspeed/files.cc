#include "checkpoint/formats/deepspeed/files.hpp"

#include <fmt/core.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>
#include <iterator>

#include "base/error.hpp"
#include "checkpoint/root/root.hpp"
#include "tensor/layout.hpp"

namespace tsr {

namespace {

constexpr std::string_view zero_prefixes[] = {"", "bf16_", "fp16_"};
constexpr std::string_view model_ending = "_model_states";
constexpr std::string_view optimizer_ending = "_optim_states";

bool take(std::string_view& text, std::string_view begin) {
    if (!text.starts_with(begin)) return false;
    text.remove_prefix(begin.size());
    return true;
}

std::optional<int> take_number(std::string_view& text) {
    int number = -1;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
    if (error != std::errc{} || number < 0 || number >= max_layout_ranks || text.starts_with('-')) return std::nullopt;
    text.remove_prefix(static_cast<size_t>(end - text.data()));
    return number;
}

bool is_directory(FileSystem& files, const std::string& path) {
    FileStatus status;
    return files.status(path, status) == 0 && status.kind == FileStatus::Kind::directory;
}

// In the order of their ranks, of which none may be missing.
void check_ranks(const std::string& directory, std::vector<DeepSpeedName>& names) {
    std::ranges::sort(names, {}, &DeepSpeedName::rank);
    for (size_t i = 0; i < names.size(); ++i) {
        if (names[i].prefix != names[0].prefix || (names[i].rank < 0) != (names[0].rank < 0)) {
            throw Error(Code::corrupt, fmt::format("{} has files of several saves: {} and {}; remove those of one",
                                                   directory, names[0].str(), names[i].str()));
        }
        if (names[i].rank < 0 || names[i].rank == static_cast<int>(i)) continue;
        DeepSpeedName missing = names[i];
        missing.rank = static_cast<int>(i);
        throw Error(Code::not_found, fmt::format("{} is missing, but {} exists: copy the files of all ranks",
                                                 join(directory, missing.str()), names[i].str()));
    }
}

void refuse_others(const std::string& directory, const std::string& name) {
    const auto refuse = [&](std::string_view what, std::string_view advice) {
        throw Error(Code::unsupported,
                    fmt::format("{} is a file of {}, which is not supported{}", join(directory, name), what, advice));
    };
    if (name.starts_with("expp_rank_") || (name.starts_with("layer_") && name.find("_expert_") != std::string::npos)) {
        refuse("a mixture of experts", "");
    }
    if (name.starts_with("layer_") && name.ends_with("model_states.pt")) refuse("pipeline parallelism", "");
    const auto parsed = DeepSpeedName::parse(name);
    if (parsed && parsed->model_parallel != 0) {
        refuse("model parallelism", "; only checkpoints with one model-parallel rank are");
    }
}

}  // namespace

std::optional<DeepSpeedName> DeepSpeedName::parse(std::string_view name) {
    DeepSpeedName found;
    if (name.ends_with(".pt")) name.remove_suffix(3);
    for (const std::string_view prefix : zero_prefixes) {
        std::string_view rest = name;
        if (!take(rest, prefix) || !take(rest, "zero_pp_rank_")) continue;
        const auto rank = take_number(rest);
        if (!rank || !take(rest, "_")) return std::nullopt;
        found.prefix = prefix;
        found.rank = *rank;
        name = rest;
        break;
    }
    if (!take(name, "mp_rank_")) return std::nullopt;
    const auto model_parallel = take_number(name);
    if (!model_parallel || (name != model_ending && name != optimizer_ending)) return std::nullopt;
    found.model_parallel = *model_parallel;
    found.part = name == model_ending ? Part::model : Part::optimizer;
    if (found.part == Part::optimizer && found.rank < 0) return std::nullopt;
    return found;
}

std::string DeepSpeedName::str() const {
    const std::string of_rank = rank < 0 ? "" : fmt::format("{}zero_pp_rank_{}_", prefix, rank);
    return fmt::format("{}mp_rank_{:02d}{}.pt", of_rank, model_parallel,
                       part == Part::model ? model_ending : optimizer_ending);
}

bool has_deepspeed(const std::vector<std::string>& names) {
    return std::ranges::any_of(
        names, [](const std::string& name) { return name.ends_with(".pt") && DeepSpeedName::parse(name); });
}

std::optional<std::string> newest_deepspeed(FileSystem& files, const std::string& root,
                                            const std::vector<std::string>& names) {
    if (std::ranges::find(names, latest_name) == names.end()) return std::nullopt;
    const std::string latest = join(root, latest_name);
    if (is_directory(files, latest)) return std::nullopt;
    std::string tag = first_bytes(files, latest, 1024);
    while (!tag.empty() && (tag.back() == '\n' || tag.back() == '\r' || tag.back() == ' ')) tag.pop_back();
    const auto is_checkpoint = [&](const std::string& name) {
        const std::string path = join(root, name);
        return is_directory(files, path) && has_deepspeed(list_directory(files, path));
    };
    if (std::ranges::find(names, tag) != names.end() && is_checkpoint(tag)) return join(root, tag);
    std::vector<std::string> tags;
    std::ranges::copy_if(names, std::back_inserter(tags), is_checkpoint);
    if (tags.empty()) return std::nullopt;
    throw Error(Code::not_found, fmt::format("{} names '{}', which is not a DeepSpeed checkpoint in {}; there are: {}",
                                             latest, tag.substr(0, 100), root, fmt::join(tags, ", ")));
}

DeepSpeedFiles find_deepspeed(FileSystem& files, const std::string& directory) {
    DeepSpeedFiles found;
    for (const std::string& name : list_directory(files, directory)) {
        refuse_others(directory, name);
        const auto parsed = name.ends_with(".pt") ? DeepSpeedName::parse(name) : std::nullopt;
        if (!parsed || parsed->str() != name) continue;
        (parsed->part == DeepSpeedName::Part::model ? found.model : found.optimizer).push_back(*parsed);
    }
    check_ranks(directory, found.model);
    check_ranks(directory, found.optimizer);
    if (found.model.empty()) {
        throw Error(Code::not_found,
                    fmt::format("{} has no *{}.pt, which lists the parameters: copy the files of all ranks", directory,
                                model_ending));
    }
    return found;
}

}  // namespace tsr
