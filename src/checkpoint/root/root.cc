#include "checkpoint/root/root.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <ctime>
#include <tuple>

#include "base/error.hpp"
#include "base/log.hpp"
#include "checkpoint/model/manifest.hpp"
#include "checkpoint/root/retention.hpp"

namespace tsr {

namespace {

bool is_digits(std::string_view text, std::string_view digits) {
    return !text.empty() && text.find_first_not_of(digits) == std::string_view::npos;
}

}  // namespace

std::string first_bytes(FileSystem& files, const std::string& path, int64_t most) {
    return first_bytes(*open_file(files, path, OpenMode::read), path, most);
}

std::string first_bytes(File& file, const std::string& path, int64_t most) {
    const int64_t size = file.size();
    if (size < 0) throw os_error(fmt::format("cannot stat {}", path), static_cast<int>(-size));
    std::string text(static_cast<size_t>(std::min(size, most)), '\0');
    read_all(file, path, std::as_writable_bytes(std::span(text)), 0);
    return text;
}

std::string step_directory_name(int64_t step, std::string_view save_id) {
    return fmt::format("step-{:08}-{}", step, save_id.substr(0, 8));
}

bool is_step_directory_name(std::string_view name) {
    if (!name.starts_with("step-")) return false;
    name.remove_prefix(5);
    const size_t dash = name.find('-');
    return dash != std::string_view::npos && dash >= 8 && dash < 20 && is_digits(name.substr(0, dash), "0123456789") &&
           name.size() == dash + 9 && is_digits(name.substr(dash + 1), "0123456789abcdef");
}

std::vector<SavedStep> scan_root(FileSystem& files, const std::string& root) {
    std::vector<SavedStep> saves;
    for (const std::string& name : list_directory(files, root)) {
        if (!is_step_directory_name(name)) continue;
        SavedStep save;
        save.directory = name;
        const std::string manifest = join(join(root, name), manifest_name);
        save.committed = exists(files, manifest);
        if (save.committed) {
            try {
                if (const auto head = parse_manifest_head(first_bytes(files, manifest))) {
                    save.readable = true;
                    save.sequence = head->sequence;
                    save.step = head->step;
                }
            } catch (const Error& error) {
                // Removed since it was listed, by another process's retention. Damage is reported when it is opened.
                if (error.code() == Code::not_found) save.committed = false;
                if (save.committed && error.code() != Code::corrupt) save.unread = error;
            }
        }
        saves.push_back(std::move(save));
    }
    std::sort(saves.begin(), saves.end(), [](const SavedStep& a, const SavedStep& b) {
        return std::tie(a.committed, a.readable, a.sequence, a.step, a.directory) <
               std::tie(b.committed, b.readable, b.sequence, b.step, b.directory);
    });
    return saves;
}

namespace {

// What `latest` names; empty if it cannot be read, since it is only a hint.
std::string latest_of(FileSystem& files, const std::string& root) {
    try {
        std::string name = read_text(files, join(root, latest_name), 4096);
        while (!name.empty() && (name.back() == '\n' || name.back() == ' ')) name.pop_back();
        return name;
    } catch (const Error&) {
        return "";
    }
}

// `hint` is what `latest` named before the scan. That save was committed then, and still exists unless it was removed
// in favour of a newer one.
std::string newest_of(FileSystem& files, const std::string& root, const std::string& hint) {
    const std::vector<SavedStep> saves = scan_root(files, root);
    const std::string newest = saves.empty() || !saves.back().readable ? "" : saves.back().directory;
    const std::string advice =
        newest.empty() ? "" : fmt::format(", or open {} by its path to go back to it", join(root, newest));
    for (const SavedStep& save : saves) {
        const std::string manifest = join(join(root, save.directory), manifest_name);
        if (!save.committed && save.directory == hint) {
            throw Error(Code::corrupt,
                        fmt::format("{} is missing, but {} names it as the newest save; to continue without it, move "
                                    "its directory away{}",
                                    manifest, join(root, latest_name), advice));
        }
        // The place of a damaged manifest in the order is unknown. It is safe to skip only if `latest` names the newest
        // of the others.
        if (save.committed && !save.readable) {
            if (newest.empty() || newest != hint) {
                if (save.unread) throw Error(*save.unread);
                throw Error(Code::corrupt,
                            fmt::format("{} is damaged and may be the newest save; to continue without it, move its "
                                        "directory away{}",
                                        manifest, advice));
            }
            log::warning("{} is damaged; skipping this save", manifest);
        }
        // A flipped digit can also move the newest save in the order. `latest` may rightly name an older save, but then
        // that save's manifest is intact.
        if (save.readable && save.directory == hint && hint != newest) {
            (void)Manifest::parse(read_text(files, manifest, max_manifest_bytes), manifest);
        }
    }
    return newest;
}

}  // namespace

std::optional<std::string> newest_save(FileSystem& files, const std::string& root) {
    const std::string hint = latest_of(files, root);
    std::string newest;
    try {
        newest = newest_of(files, root, hint);
    } catch (const Error&) {
        // A job that saves here meanwhile updates `latest` before it removes an older save.
        if (latest_of(files, root) != hint) return newest_save(files, root);
        throw;
    }
    if (newest.empty()) return std::nullopt;
    return newest;
}

int64_t next_sequence(FileSystem& files, const std::string& root) {
    int64_t next = 0;
    for (const SavedStep& save : scan_root(files, root)) {
        // Its number could be used twice, and the older of the two saves might pass for the newest.
        if (save.unread) throw Error(*save.unread);
        if (save.sequence == max_sequence) {
            throw Error(Code::corrupt, fmt::format("{} has the highest possible sequence number {}; move its directory "
                                                   "away, or save into another root",
                                                   join(root, save.directory), save.sequence));
        }
        next = std::max(next, save.sequence + 1);
    }
    return next;
}

std::string utc_now() {
    const auto since = std::chrono::system_clock::now().time_since_epoch();
    return utc_text(std::chrono::duration_cast<std::chrono::nanoseconds>(since).count());
}

std::string utc_text(int64_t ns) {
    const auto since = std::chrono::floor<std::chrono::milliseconds>(std::chrono::nanoseconds(ns));
    const auto whole = std::chrono::floor<std::chrono::seconds>(since);
    const std::time_t seconds = whole.count();
    std::tm utc{};
    ::gmtime_r(&seconds, &utc);
    return fmt::format("{:04}-{:02}-{:02}T{:02}:{:02}:{:02}.{:03}Z", utc.tm_year + 1900, utc.tm_mon + 1, utc.tm_mday,
                       utc.tm_hour, utc.tm_min, utc.tm_sec, (since - whole).count());
}

void empty_save(FileSystem& files, const std::string& path) {
    const auto remove = [&](std::string_view name) {
        const int64_t result = files.remove_file(join(path, name));
        if (result < 0 && result != -ENOENT) {
            throw os_error(fmt::format("cannot remove {}", join(path, name)), static_cast<int>(-result));
        }
    };
    if (exists(files, join(path, manifest_name))) {
        remove(manifest_name);
        sync_directory(files, path);
    }
    std::vector<std::string> names;
    const int64_t listed = files.list(path, names);
    if (listed == -ENOENT) return;
    if (listed < 0) throw os_error(fmt::format("cannot list {}", path), static_cast<int>(-listed));
    // The lease is removed last, on disk too: without it nobody could tell that the rest may be removed.
    for (const std::string& name : names) {
        if (name != writing_name && is_save_file_name(name)) remove(name);
    }
    sync_directory(files, path);
    remove(writing_name);
}

void remove_emptied(FileSystem& files, const std::string& path) {
    const int64_t result = files.remove_directory(path);
    if (result == -ENOTEMPTY || result == -EEXIST) {
        log::warning("{} holds files that Tessera did not write; they were not removed", path);
    } else if (result < 0 && result != -ENOENT) {
        throw os_error(fmt::format("cannot remove {}", path), static_cast<int>(-result));
    }
}

}  // namespace tsr
