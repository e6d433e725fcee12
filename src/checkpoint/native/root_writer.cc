#include "checkpoint/native/root_writer.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <ctime>
#include <utility>

#include "base/clock.hpp"
#include "base/error.hpp"
#include "base/log.hpp"
#include "checkpoint/native/root.hpp"

namespace tsr {

namespace {

std::string utc_now() {
    const auto now = std::chrono::system_clock::now();
    const std::time_t seconds = std::chrono::system_clock::to_time_t(now);
    const auto ms = std::chrono::duration_cast<milliseconds>(now.time_since_epoch()).count() % 1000;
    std::tm utc{};
    ::gmtime_r(&seconds, &utc);
    return fmt::format("{:04}-{:02}-{:02}T{:02}:{:02}:{:02}.{:03}Z", utc.tm_year + 1900, utc.tm_mon + 1, utc.tm_mday,
                       utc.tm_hour, utc.tm_min, utc.tm_sec, ms);
}

const std::string& made(FileSystem& files, const std::string& root) {
    make_directories(files, root);
    return root;
}

}  // namespace

RootWriter::RootWriter(FileSystem& files, const std::string& root, const LeaseTimes& lease, Retention retention)
    : files_(files),
      root_(made(files, root)),
      id_(random_id()),
      times_(lease),
      retention_(std::move(retention)),
      lease_(files, root_, id_, lease) {}

void RootWriter::begin(const std::string& directory) {
    lease_.check();
    const int64_t made = files_.make_directory(directory);
    if (made < 0) {
        throw os_error(fmt::format("cannot create the directory {}", directory), static_cast<int>(-made));
    }
    try {
        write_new_text(files_, join(directory, writing_name), Holder::this_process(id_).dump());
        sync_directory(files_, directory);  // or a power loss may keep rank files that nobody may collect
        sync_directory(files_, root_);
    } catch (...) {
        abandon(directory);
        throw;
    }
}

void RootWriter::commit(const std::string& directory, Manifest manifest) {
    for (const SavedStep& save : scan_root(files_, root_)) {
        if (save.sequence == max_sequence) {
            throw Error(Code::corrupt, fmt::format("{} has the sequence {}, after which no save can come; move its "
                                                   "directory away, or save into another root",
                                                   join(root_, save.directory), save.sequence));
        }
        manifest.sequence = std::max(manifest.sequence, save.sequence + 1);
    }
    manifest.committed = utc_now();
    const std::string text = manifest.dump();
    const std::string tag = manifest.save_id.substr(0, 8);

    sync_directory(files_, directory);
    lease_.check();
    replace_text(files_, join(directory, manifest_name), text, tag);

    const std::string name(name_in_path(directory));
    try {
        (void)files_.remove_file(join(directory, writing_name));
        replace_text(files_, join(root_, latest_name), name + "\n", tag);
        collect_leftovers();
        retain();
    } catch (const Error& error) {
        log::warning("{} is committed; tidying {} up failed: {}", name, root_, error.what());
    }
}

void RootWriter::abandon(const std::string& directory) noexcept {
    try {
        remove_save(files_, root_, std::string(name_in_path(directory)));
    } catch (const Error& error) {
        log::warning("could not remove {} after its save failed: {}", directory, error.what());
    } catch (...) {
        log::warning("could not remove {} after its save failed", directory);
    }
}

// Removes what writers that are gone left behind.
void RootWriter::collect_leftovers() {
    std::vector<std::string> names;
    if (files_.list(root_, names) >= 0) {
        for (const std::string& name : names) {
            if (name.starts_with(fmt::format("{}.tmp-", latest_name)) ||
                name.starts_with(fmt::format("{}.tmp-", best_name))) {
                (void)files_.remove_file(join(root_, name));
            }
        }
    }
    for (const SavedStep& save : scan_root(files_, root_)) {
        if (save.committed) continue;
        const std::string lease = join(join(root_, save.directory), writing_name);
        if (!exists(files_, lease)) {
            // A writer died before its first file, and an empty directory goes; or this is something that is not ours
            // to judge, a copy on its way say, and stays.
            (void)files_.remove_directory(join(root_, save.directory));
            continue;
        }
        bool live = false;
        try {
            const Holder holder = Holder::parse(read_text(files_, lease, 4096));
            live = holder.id != id_ && is_live(files_, lease, holder, times_);
        } catch (const Error&) {
            live = is_live(files_, lease, Holder{}, times_);  // cut short: judged by its age
        }
        if (live) continue;
        log::info("removing {}, left by a save that was cut short", save.directory);
        remove_save(files_, root_, save.directory);
    }
}

// Says which save is the best, and removes those that nothing keeps.
void RootWriter::retain() {
    const Retention& keep = retention_;
    if (keep.latest == 0 && !keep.rule) return;
    const std::vector<RankedSave> saves = rank_saves(files_, root_, scan_root(files_, root_), keep.rule);
    if (keep.rule) {
        const std::vector<size_t> order = best_first(saves, keep.rule->better);
        const std::string text =
            best_text(order.empty() ? std::string("-") : saves[order.front()].save.directory, *keep.rule);
        replace_text(files_, join(root_, best_name), text, id_.substr(0, 8));
    }
    for (const std::string& directory : to_remove(keep, saves)) {
        if (!retire_save(files_, root_, directory, Holder::this_process(id_).dump())) {
            log::info("{} is being read; a later save removes it", join(root_, directory));
        }
    }
}

}  // namespace tsr
