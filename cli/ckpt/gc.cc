// `tessera ckpt gc`: removes what saves left that were cut short, and with --keep all but the newest checkpoints and
// the best one. It holds the root's lease while it does, so no job saves there meanwhile, and it refuses where one
// does.
#include <fmt/core.h>

#include <memory>
#include <optional>

#include "base/attempt.hpp"
#include "base/error.hpp"
#include "base/log.hpp"
#include "checkpoint/root/collect.hpp"
#include "checkpoint/root/root.hpp"
#include "ckpt/command.hpp"
#include "ckpt/print.hpp"

namespace tsr::cli {

namespace {

struct Arguments {
    int keep = 0;
    bool dry_run = false;
};

int collect(const std::string& root, const Arguments& arguments, Output output) {
    FileStatus status;
    if (posix_file_system().status(root, status) < 0 || status.kind != FileStatus::Kind::directory) {
        throw Error(Code::not_found, fmt::format("directory {} does not exist", root));
    }
    const HeldDirectory held(posix_file_system(), root);
    FileSystem& files = held.files();
    if (exists(files, join(root, manifest_name))) {
        throw Error(Code::invalid_argument,
                    fmt::format("{} is a checkpoint, not a root; pass its root {}", root, parent_of(root)));
    }
    const std::string id = random_id();
    std::optional<Lease> lease;
    if (arguments.dry_run) {
        check_not_held(files, root);
    } else {
        lease.emplace(files, root, id);
    }
    CollectOptions options{{}, id, {}};
    if (arguments.keep > 0) {
        (void)newest_save(files, root);  // CORRUPT where it is not certain which is the newest
        options.retention.latest = arguments.keep;
        options.retention.rule = best_rule(files, root);  // the best stays too
    }
    Json::Array list;
    int64_t bytes = 0;
    size_t removed = 0;
    const std::vector<SavedStep> saves = scan_root(files, root);
    const std::vector<RankedSave> ranked = rank_saves(files, root, saves, options.retention.rule);
    std::optional<Error> failure;  // the first
    for_each_unneeded(files, root, saves, ranked, options, [&](const Unneeded& unneeded, const Remove& remove) {
        bool gone = true;
        // A save that cannot be removed, such as another user's, must not keep the others alive.
        if (const auto error = attempt([&] { gone = arguments.dry_run || remove(); })) {
            if (failure) return log::warning("{}", error->what());
            failure = error;
            return;
        }
        if (!gone) {
            return log::warning("{} is open for reading; not removed", join(root, unneeded.directory));
        }
        ++removed;
        bytes += unneeded.size_bytes;
        const bool is_old = unneeded.why == Unneeded::Why::beyond_keep;
        const std::string path = join(root, unneeded.directory);
        if (output == Output::json) {
            Json one;
            one.set("path", path);
            one.set("why", is_old ? "beyond keep" : "cut short");
            one.set("size_bytes", unneeded.size_bytes);
            list.push_back(std::move(one));
        } else {
            fmt::print("{} {}: {}, {}\n", arguments.dry_run ? "would remove" : "removed", path,
                       is_old ? "beyond --keep" : "left by an interrupted save", size_text(unneeded.size_bytes));
        }
    });
    if (failure) throw Error(*failure);
    if (output == Output::json) {
        Json json;
        json.set("root", root);
        json.set("dry_run", arguments.dry_run);
        json.set("removed", Json(std::move(list)));
        json.set("size_bytes", bytes);
        print_json(json);
    } else {
        fmt::print("{}: {}, {}\n", arguments.dry_run ? "would remove" : "removed", count_text(removed, "directory"),
                   size_text(bytes));
    }
    return exit_sound;
}

}  // namespace

void add_gc(Command& ckpt) {
    const auto arguments = std::make_shared<Arguments>();
    Command command =
        add_command(ckpt, "gc", "Remove leftovers of interrupted saves, and older checkpoints", "The root directory",
                    [arguments](const std::string& root, Output output) { return collect(root, *arguments, output); });
    command
        .add_option("--keep", arguments->keep, "Keep the newest N checkpoints and remove older ones; default: keep all")
        .in_range(1, 1'000'000'000);
    command.add_flag("--dry-run", arguments->dry_run, "Print what would be removed, and change nothing");
}

}  // namespace tsr::cli
