#include "checkpoint/native/collect.hpp"

#include <algorithm>

#include "base/error.hpp"
#include "checkpoint/native/manifest.hpp"
#include "checkpoint/native/rank_file.hpp"
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
        const bool ours = is_rank_file_name(name) || name.starts_with(manifest_name) || name == writing_name;
        if (ours && files.status(join(path, name), status) >= 0) content.size_bytes += status.size;
    }
    return content;
}

}  // namespace

std::vector<Unneeded> find_unneeded(FileSystem& files, const std::string& root, const CollectOptions& options) {
    std::vector<Unneeded> found;
    std::vector<std::string> committed;
    for (const SavedStep& save : scan_root(files, root)) {
        if (save.committed) {
            if (save.readable) committed.push_back(save.directory);
            continue;
        }
        const std::string path = join(root, save.directory);
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
    const auto keep = static_cast<size_t>(std::max(options.keep_latest, 0));
    for (size_t i = 0; keep > 0 && i + keep < committed.size(); ++i) {
        const int64_t size = content_of(files, join(root, committed[i])).size_bytes;
        found.push_back({committed[i], Unneeded::Why::beyond_keep, size});
    }
    return found;
}

void remove_unneeded(FileSystem& files, const std::string& root, const Unneeded& unneeded, const std::string& own_id) {
    if (unneeded.why == Unneeded::Why::empty) {
        (void)files.remove_directory(join(root, unneeded.directory));  // refused if it is no longer empty
        return;
    }
    if (unneeded.why == Unneeded::Why::beyond_keep) {
        const std::string lease = join(join(root, unneeded.directory), writing_name);
        (void)files.remove_file(lease);
        write_new_text(files, lease, Holder::this_process(own_id).dump());
        sync_directory(files, parent_of(lease));
    }
    remove_save(files, root, unneeded.directory);
}

}  // namespace tsr
