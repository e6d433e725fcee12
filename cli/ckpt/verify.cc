// `tessera ckpt verify`: checks that a checkpoint matches its manifest, to the last byte.
#include <fmt/core.h>

#include <memory>
#include <vector>

#include "ckpt/command.hpp"
#include "ckpt/print.hpp"
#include "ckpt/progress.hpp"

namespace tsr::cli {

namespace {

int verify(const std::string& path, Checkpoint::Depth depth, Output output) {
    const auto checkpoint = Checkpoint::open(path);
    const Manifest& manifest = checkpoint->manifest();
    std::vector<std::string> faults;
    {
        Progress progress("verify", manifest.size_bytes());
        faults = checkpoint->verify(depth, [&](int64_t bytes) { progress.add(bytes); });
    }
    const bool headers = depth == Checkpoint::Depth::headers;
    if (output == Output::json) {
        Json json;
        json.set("path", checkpoint->path());
        json.set("sound", faults.empty());
        json.set("checked", headers ? "headers" : "everything");
        json.set("checksums", checkpoint->has_checksums());
        json.set("file_count", static_cast<int64_t>(manifest.files.size()));
        json.set("size_bytes", manifest.size_bytes());
        Json::Array list;
        for (const std::string& fault : faults) list.emplace_back(fault);
        json.set("faults", Json(std::move(list)));
        print_json(json);
    } else if (faults.empty()) {
        const bool has_checksums = checkpoint->has_checksums();
        fmt::print("{} is sound: {}, {}, {}\n", checkpoint->path(), count_text(manifest.files.size(), "file"),
                   size_text(manifest.size_bytes()),
                   headers         ? "sizes and headers checked"
                   : has_checksums ? "every byte checked"
                                   : "headers checked and every byte read");
        if (!has_checksums) {
            complain(
                fmt::format("this {} checkpoint has no checksums: changed data cannot be detected", manifest.format));
        }
    } else {
        for (const std::string& fault : faults) fmt::print("{}\n", printable(fault));
        fmt::print("{} is damaged: {}\n", checkpoint->path(), count_text(faults.size(), "fault"));
    }
    return faults.empty() ? exit_sound : exit_faulty;
}

}  // namespace

void add_verify(Command& ckpt) {
    const auto fast = std::make_shared<bool>(false);
    add_command(ckpt, "verify", "Check every byte of a checkpoint", checkpoint_path_what,
                [fast](const std::string& path, Output output) {
                    return verify(path, *fast ? Checkpoint::Depth::headers : Checkpoint::Depth::everything, output);
                })
        .add_flag("--fast", *fast, "Check only sizes and headers, not the data");
}

}  // namespace tsr::cli
