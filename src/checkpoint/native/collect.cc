#include "checkpoint/native/collect.hpp"

#include "base/error.hpp"
#include "checkpoint/native/manifest.hpp"
#include "checkpoint/native/root.hpp"

namespace tsr {

namespace {

struct Content {
    bool empty = false;
    int64_t size_bytes = 0;  // of the files that Tessera writes
};

Content content_of(FileSystem& files, const std::string& path) {
    Content content;
    std::vector<std::string> names;
    if (files.list(path, names) < 0) return content;  // gone, or told by who removes it
    content.empty = names.empty();
    for (const std::string& name : names) {
        FileStatus status;
        if (is_save_file_name(name) && files.status(join(path, name), status) >= 0) content.size_bytes += status.size;
    }
    return content;
}

}  // namespace

std::vector<Unneeded> find_unneeded(FileSystem& files, const std::string& root, const std::vector<SavedStep>& saves,
                                    const std::vector<RankedSave>& ranked, const CollectOptions& options) {
    std::vector<Unneeded> found;
    for (const SavedStep& save : saves) {
        if (save.committed) continue;
        const std::string path = join(root, save.directory);
        if (is_link(files, path)) continue;
        const Content content = content_of(files, path);
        const std::string lease = join(path, writing_name);
        if (!exists(files, lease)) {
            // A writer died before its first file, and an empty directory goes; or this is something that is not ours
            // to judge, a copy on its way say, and stays.
            if (content.empty) found.push_back({save.directory, Unneeded::Why::empty, 0});
            continue;
        }
        bool live = false;
        try {
            const Holder holder = Holder::parse(read_text(files, lease, max_lease_bytes));
            live = holder.id != options.own_id && is_live(files, lease, holder, options.lease);
        } catch (const Error&) {
            live = is_live(files, lease, Holder{}, options.lease);  // cut short: judged by its age
        }
        if (!live) found.push_back({save.directory, Unneeded::Why::cut_short, content.size_bytes});
    }
    for (const std::string& name : to_remove(options.retention, ranked)) {
        if (is_link(files, join(root, name))) continue;
        found.push_back({name, Unneeded::Why::beyond_keep, content_of(files, join(root, name)).size_bytes});
    }
    return found;
}

bool remove_unneeded(FileSystem& files, const std::string& root, const Unneeded& unneeded, const std::string& own_id) {
    if (unneeded.why == Unneeded::Why::empty) {
        (void)files.remove_directory(join(root, unneeded.directory));  // refused if it is no longer empty
        return true;
    }
    if (unneeded.why == Unneeded::Why::beyond_keep) {
        return retire_save(files, root, unneeded.directory, Holder::this_process(own_id).dump());
    }
    remove_save(files, root, unneeded.directory);
    return true;
}

}  // namespace tsr
