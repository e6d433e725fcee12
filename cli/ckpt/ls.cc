// `tessera ckpt ls`: the checkpoints under a root, oldest first; for the path of a checkpoint, that one.
#include <fmt/core.h>

#include <algorithm>
#include <memory>
#include <set>
#include <vector>

#include "base/error.hpp"
#include "checkpoint/io/file_system.hpp"
#include "checkpoint/root/root.hpp"
#include "ckpt/command.hpp"
#include "ckpt/print.hpp"

namespace tsr::cli {

namespace {

struct Line {
    std::string path;
    std::shared_ptr<const Checkpoint> checkpoint;  // nullptr: not committed, or damaged
    std::string fault;                             // if damaged
    bool latest = false;

    [[nodiscard]] const char* state() const {
        return checkpoint ? "committed" : fault.empty() ? "not committed" : "damaged";
    }
};

// Files that are missing or whose size is not the manifest's; "" if there are none. Nothing is opened.
std::string fault_in_files(const Checkpoint& checkpoint) {
    const Manifest& manifest = checkpoint.manifest();
    if (manifest.save_id.empty()) return "";  // of a format without a manifest, whose sizes are those of the files
    const HeldDirectory held(posix_file_system(), checkpoint.path());
    std::string first;
    size_t count = 0;
    for (const SavedFile& file : manifest.files) {
        const std::string path = join(checkpoint.path(), file.name);
        FileStatus status;
        const int64_t result = held.files().status(path, status);
        if (result < 0 && result != -ENOENT) {
            throw os_error(fmt::format("cannot stat {}", path), static_cast<int>(-result));
        }
        if (result == 0 && status.kind == FileStatus::Kind::file && status.size == file.size) continue;
        if (count++ > 0) continue;
        first = result < 0 ? fmt::format("{} is missing", path)
                : status.kind != FileStatus::Kind::file
                    ? fmt::format("{} is not a file", path)
                    : fmt::format("{} has {} bytes, expected {}", path, status.size, file.size);
    }
    if (count < 2) return first;
    return fmt::format("{}; {} files are missing or have another size", first, count);
}

Line line_of(const std::string& path) {
    Line line{path, nullptr, "", false};
    try {
        const auto checkpoint = Checkpoint::open(path, posix_file_system(), Checkpoint::Hold::no);  // there may be many
        line.fault = fault_in_files(*checkpoint);
        if (line.fault.empty()) line.checkpoint = checkpoint;
        // A save that retention removes meanwhile loses its manifest first.
        if (!line.fault.empty() && !exists(posix_file_system(), join(path, manifest_name))) line.fault.clear();
    } catch (const Error& error) {
        line.fault = error.what();
    }
    return line;
}

std::vector<Line> lines_of_root(FileSystem& files, const std::string& root) {
    std::vector<Line> lines;
    for (const SavedStep& save : scan_root(files, root)) {
        const std::string path = join(root, save.directory);
        lines.push_back(save.committed ? line_of(path) : Line{path, nullptr, "", false});
    }
    const auto newest =
        std::find_if(lines.rbegin(), lines.rend(), [](const Line& line) { return line.checkpoint != nullptr; });
    if (newest != lines.rend()) newest->latest = true;
    return lines;
}

// One checkpoint, named by its own path.
Line line_of_checkpoint(FileSystem& files, const std::string& path) {
    Line line = line_of(path);
    try {
        line.latest = line.checkpoint && newest_save(files, parent_of(path)) == name_in_path(path);
    } catch (const Error&) {
        line.latest = false;  // its root cannot be read
    }
    return line;
}

bool is_foreign(FileSystem& files, const std::string& directory) {
    try {
        return resolve_checkpoint(files, directory).format != Format::native;
    } catch (const Error&) {
        return false;
    }
}

// The message for a directory without saves: why, and where saves may be.
std::string advice_for(FileSystem& files, const std::string& root) {
    std::string why;
    try {
        (void)resolve_checkpoint(files, root);
    } catch (const Error& error) {
        why = error.what();
    }
    std::vector<std::string> names;
    (void)files.list(root, names);
    for (const std::string& name : names) {
        const std::string below = join(root, name);
        FileStatus status;
        if (files.status(below, status) < 0 || status.kind != FileStatus::Kind::directory) continue;
        try {
            const size_t count = scan_root(files, below).size();
            if (count > 0)
                return fmt::format("{}; {} holds {}: run `tessera ckpt ls {}`", why, below, count_text(count, "save"),
                                   below);
        } catch (const Error&) {
            continue;  // not ours to read
        }
    }
    return fmt::format("{}; pass the root of the trainer's saver, which has step-... directories", why);
}

void print_list(const std::vector<Line>& lines) {
    Json::Array list;
    for (const Line& line : lines) {
        Json json;
        if (line.checkpoint) {
            json = summary_json(*line.checkpoint);
        } else {
            json.set("path", line.path);
        }
        json.set("state", line.state());
        json.set("latest", line.latest);
        if (!line.fault.empty()) json.set("fault", line.fault);
        list.push_back(std::move(json));
    }
    print_json(Json(std::move(list)));
}

void print_table(const std::vector<Line>& lines) {
    std::set<std::string> metrics;
    for (const Line& line : lines) {
        if (!line.checkpoint) continue;
        for (const auto& [name, value] : line.checkpoint->manifest().metrics) metrics.insert(name);
    }
    Table table;
    table.column("step", Table::Align::right);
    table.column("committed", Table::Align::left);
    table.column("ranks", Table::Align::right);
    table.column("size", Table::Align::right);
    for (const std::string& name : metrics) table.column(printable(name), Table::Align::right);
    table.column("path", Table::Align::left);
    table.column("", Table::Align::left);
    for (const Line& line : lines) {
        std::vector<std::string> cells{"-", line.state(), "-", "-"};
        if (line.checkpoint) {
            const Manifest& manifest = line.checkpoint->manifest();
            cells = {manifest.step < 0 ? "-" : std::to_string(manifest.step), time_text(manifest.committed),
                     std::to_string(manifest.world_size), size_text(manifest.size_bytes())};
        }
        for (const std::string& name : metrics) {
            const Json* value = nullptr;
            if (line.checkpoint) {
                const Values& found = line.checkpoint->manifest().metrics;
                if (const auto at = found.find(name); at != found.end()) value = &at->second;
            }
            cells.push_back(value == nullptr ? "-" : metric_text(*value));
        }
        cells.push_back(line.path);
        cells.emplace_back(line.latest ? "latest" : "");
        table.row(std::move(cells));
    }
    table.print();
}

int list_saves(const std::string& path, Output output) {
    FileSystem& files = posix_file_system();
    FileStatus status;
    const bool is_directory = files.status(path, status) >= 0 && status.kind == FileStatus::Kind::directory;
    const bool is_root =
        is_directory && !exists(files, join(path, manifest_name)) && !exists(files, join(path, dcp_metadata_name));
    std::vector<Line> lines;
    if (is_root) lines = lines_of_root(files, path);
    // A directory without saves may be a checkpoint of another format itself.
    const bool is_one = !is_root || (lines.empty() && is_foreign(files, path));
    if (is_one) lines.push_back(line_of_checkpoint(files, resolve_checkpoint(files, path).path));
    if (output == Output::json) {
        print_list(lines);
    } else if (!lines.empty()) {
        print_table(lines);
    }
    if (lines.empty()) {
        complain(advice_for(files, path));
        return exit_faulty;
    }
    if (is_one) {
        complain(
            fmt::format("{} is a checkpoint, not a root; `tessera ckpt tree {}` shows its contents, `tessera ckpt ls "
                        "{}` all of its root",
                        lines.front().path, lines.front().path, parent_of(lines.front().path)));
    }
    bool damaged = false;
    for (const Line& line : lines) {
        if (line.fault.empty()) continue;
        complain(line.fault);
        damaged = true;
    }
    return damaged ? exit_faulty : exit_sound;
}

}  // namespace

void add_ls(Command& ckpt) {
    add_command(ckpt, "ls", "List the checkpoints under a root, oldest first", "The root directory, or one checkpoint",
                list_saves);
}

}  // namespace tsr::cli
