#include "checkpoint/model/file_names.hpp"

#include <fmt/core.h>

namespace tsr {

std::string rank_file_name(int rank, int index) {
    return index == 0 ? fmt::format("rank-{:05}.safetensors", rank)
                      : fmt::format("rank-{:05}.{}.safetensors", rank, index);
}

bool is_rank_file_name(std::string_view name) {
    constexpr std::string_view begin = "rank-";
    constexpr std::string_view end = ".safetensors";
    if (name.size() > 64 || !name.starts_with(begin) || !name.ends_with(end)) return false;
    if (name.size() < begin.size() + end.size()) return false;
    std::string_view middle = name.substr(begin.size(), name.size() - begin.size() - end.size());
    const auto digits = [](std::string_view text) {
        return !text.empty() && text.size() < 10 && text.find_first_not_of("0123456789") == std::string_view::npos;
    };
    if (const size_t dot = middle.find('.'); dot != std::string_view::npos) {
        if (!digits(middle.substr(dot + 1))) return false;
        middle = middle.substr(0, dot);
    }
    return middle.size() >= 5 && digits(middle);
}

std::string dcp_file_name(int rank) { return fmt::format("__{}_0.distcp", rank); }

bool is_dcp_file_name(std::string_view name) {
    if (!name.starts_with("__") || !name.ends_with("_0.distcp")) return false;
    name.remove_prefix(2);
    name.remove_suffix(9);
    return !name.empty() && name.find_first_not_of("0123456789") == std::string_view::npos;
}

bool is_save_file_name(std::string_view name) {
    // An interrupted replacement of a file may leave the new one behind, and is_live() a probe.
    const auto is = [&](std::string_view own, std::string_view left) {
        return name == own || (name.starts_with(own) && name.substr(own.size()).starts_with(left));
    };
    // A storage that writes beside an object's place and renames may leave an unfinished file.
    const std::string_view whole = name.substr(0, name.find(".tmp-"));
    return is_rank_file_name(whole) || is_dcp_file_name(whole) || is(manifest_name, ".tmp-") ||
           is(dcp_metadata_name, ".tmp-") || is(writing_name, ".probe-") || is(writing_name, ".tmp-");
}

}  // namespace tsr
