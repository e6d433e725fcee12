// `tessera ckpt info`: what one checkpoint is.
#include <fmt/core.h>

#include "ckpt/command.hpp"
#include "ckpt/print.hpp"

namespace tsr::cli {

namespace {

int show_info(const std::string& path, Output output) {
    const auto checkpoint = Checkpoint::open(path);
    const Manifest& manifest = checkpoint->manifest();
    int64_t elements = 0;
    for (const auto& [name, tensor] : manifest.tensors) elements += tensor->shape.product();
    if (output == Output::json) {
        Json json = summary_json(*checkpoint);
        json.set("element_count", elements);
        Json::Array files;
        for (const SavedFile& file : manifest.files) {
            Json one;
            one.set("name", file.name);
            one.set("size_bytes", file.size);
            files.push_back(std::move(one));
        }
        json.set("files", Json(std::move(files)));
        json.set("values", values_json(shown_values(manifest)));
        if (!manifest.unreadable.empty()) json.set("unreadable", unreadable_json(manifest.unreadable));
        print_json(json);
        return exit_sound;
    }
    const auto line = [](const char* name, const std::string& value) { fmt::print("{:<11}{}\n", name, value); };
    line("path", checkpoint->path());
    line("format", manifest.format);
    if (manifest.step >= 0) line("step", std::to_string(manifest.step));
    line("committed", time_text(manifest.committed));
    if (!manifest.save_id.empty()) line("save id", printable(manifest.save_id));
    const WrittenBy& writer = manifest.writer;
    if (!writer.language.empty()) {
        line("written by", printable(fmt::format("{} from {}{}{}", writer.library, writer.language,
                                                 writer.version.empty() ? "" : " ", writer.version)));
    }
    line("ranks", std::to_string(manifest.world_size));
    line("tensors", fmt::format("{}, {} elements{}", manifest.tensors.size(), elements,
                                manifest.aliases.empty() ? "" : ", " + count_text(manifest.aliases.size(), "alias")));
    line("files", fmt::format("{}, {}", manifest.files.size(), size_text(manifest.size_bytes())));
    for (const auto& [name, value] : manifest.metrics)
        line("metric", fmt::format("{} = {}", printable(name), metric_text(value)));
    for (const auto& [name, value] : shown_values(manifest))
        line("value", fmt::format("{} = {}", printable(name), value_text(value)));
    for (const auto& [name, why] : manifest.unreadable)
        line("unreadable", fmt::format("{}: {}", printable(name), printable(why)));
    return exit_sound;
}

}  // namespace

void add_info(Command& ckpt) {
    add_command(ckpt, "info", "Show a checkpoint's step, writer, sizes and values", checkpoint_path_what, show_info);
}

}  // namespace tsr::cli
