#include "checkpoint/root/collect.hpp"

#include <algorithm>
#include <optional>

#include "base/error.hpp"
#include "base/log.hpp"
#include "checkpoint/model/manifest.hpp"
#include "checkpoint/root/root.hpp"

namespace tsr {

namespace {

struct Content {
    bool empty = false;
    int64_t size_bytes = 0;  // of the files that Tessera writes
};

Content content_of(FileSystem& files, const std::string& path) {
    Content content;
    std::vector<std::string> names;
    if (files.list(path, names) < 0) return content;  // gone, or reported by the removal
    content.empty = names.empty();
    for (const std::string& name : names) {
        FileStatus status;
        if (is_save_file_name(name) && files.status(join(path, name), status) >= 0) content.size_bytes += status.size;
    }
    return content;
}

// nullopt if it is gone or a link.
std::optional<HeldDirectory> hold_save(FileSystem& files, const std::string& path) {
    if (is_link(files, path)) return std::nullopt;
    try {
        return HeldDirectory(files, path);
    } catch (const Error& error) {
        if (error.code() != Code::not_found) log::warning("{}; not removed", error.what());
        return std::nullopt;
    }
}

// Why a save without a manifest is to be removed; nullopt if it is to be kept.
std::optional<Unneeded> judge(FileSystem& files, const std::string& path, const CollectOptions& options) {
    if (exists(files, join(path, manifest_name))) return std::nullopt;
    const std::string directory(name_in_path(path));
    const Content content = content_of(files, path);
    const std::string lease = join(path, writing_name);
    if (!exists(files, lease)) {
        // Empty: a writer died before its first file. Otherwise it may be something else, such as a copy in progress,
        // and is kept.
        if (!content.empty) return std::nullopt;
        return Unneeded{directory, Unneeded::Why::empty, 0};
    }
    bool live = false;
    try {
        const Holder holder = Holder::parse(read_text(files, lease, max_lease_bytes));
        live = holder.id != options.own_id && is_live(files, lease, holder, options.lease);
    } catch (const Error&) {
        live = is_live(files, lease, Holder{}, options.lease);  // cut short: judged by its age
    }
    if (live) return std::nullopt;
    return Unneeded{directory, Unneeded::Why::cut_short, content.size_bytes};
}

// The manifest, if it belongs to the save that was ranked: another save may have its directory name by now.
std::unique_ptr<File> manifest_of(FileSystem& files, const std::string& path, const SavedStep& save) {
    const std::string name = join(path, manifest_name);
    try {
        auto manifest = open_file(files, name, OpenMode::read);
        const auto head = parse_manifest_head(first_bytes(*manifest, name));
        if (head && head->sequence == save.sequence && head->step == save.step) return manifest;
    } catch (const Error& error) {
        if (error.code() == Code::not_found) return nullptr;
        log::warning("{}; its save is not removed", error.what());
        return nullptr;
    }
    log::warning("{} was replaced by another save; not removed", path);
    return nullptr;
}

}  // namespace

void for_each_unneeded(FileSystem& files, const std::string& root, const std::vector<SavedStep>& saves,
                       const std::vector<RankedSave>& ranked, const CollectOptions& options,
                       const std::function<void(const Unneeded& unneeded, const Remove& remove)>& visit) {
    for (const SavedStep& save : saves) {
        if (save.committed) continue;
        const std::string path = join(root, save.directory);
        const auto held = hold_save(files, path);
        if (!held) continue;
        const auto unneeded = judge(held->files(), path, options);
        if (!unneeded) continue;
        visit(*unneeded, [&] {
            if (unneeded->why == Unneeded::Why::empty) {
                (void)files.remove_directory(path);  // refused if it is no longer empty
                return true;
            }
            empty_save(held->files(), path);
            remove_emptied(files, path);
            return true;
        });
    }
    for (const std::string& name : to_remove(options.retention, ranked)) {
        const std::string path = join(root, name);
        const auto held = hold_save(files, path);
        if (!held) continue;
        const auto of = std::find_if(ranked.begin(), ranked.end(),
                                     [&](const RankedSave& one) { return one.save.directory == name; });
        const auto manifest = manifest_of(held->files(), path, of->save);
        if (manifest == nullptr) continue;
        visit({name, Unneeded::Why::beyond_keep, content_of(held->files(), path).size_bytes}, [&] {
            // Locked to the end, so that nobody begins to read it.
            if (manifest->lock(FileLock::exclusive) == -EWOULDBLOCK) return false;
            const std::string writing = join(path, writing_name);
            (void)held->files().remove_file(writing);
            write_new_text(held->files(), writing, Holder::this_process(options.own_id).dump());
            sync_directory(held->files(), path);
            empty_save(held->files(), path);
            remove_emptied(files, path);
            return true;
        });
    }
}

}  // namespace tsr
