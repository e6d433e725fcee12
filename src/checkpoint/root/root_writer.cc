#include "checkpoint/root/root_writer.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <functional>
#include <optional>
#include <utility>
#include <vector>

#include "base/attempt.hpp"
#include "base/error.hpp"
#include "base/log.hpp"
#include "checkpoint/root/collect.hpp"
#include "checkpoint/root/root.hpp"

namespace tsr {

namespace {

// What tessera.torch.checkpoint calls itself. Its directories hold one save, which the next one replaces, and in
// PyTorch's format a `.metadata` beside it; a saver's hold as many as retention keeps.
constexpr std::string_view one_save_language = "pytorch";

[[noreturn]] void refuse(std::string why) { throw Error(Code::invalid_argument, std::move(why)); }

// The beginning of a manifest as this library writes it, if there is one.
std::optional<std::string> manifest_head(FileSystem& files, const std::string& directory) {
    try {
        std::string head = first_bytes(files, join(directory, manifest_name), 4096);
        if (parse_manifest_head(head)) return head;
    } catch (const Error&) {  // NOLINT(bugprone-empty-catch): whoever needs it reports the fault
    }
    return std::nullopt;
}

void refuse_what_is_no_root(FileSystem& files, const std::string& root) {
    // Saves in it would never be found: the path of a checkpoint means that checkpoint.
    if (exists(files, join(root, manifest_name))) {
        refuse(fmt::format("{} is a checkpoint, not a root; pass a new directory or a root such as {}", root,
                           parent_of(root)));
    }
    const std::string_view name = name_in_path(root);
    FileStatus status;
    if ((name == latest_name || name == best_name) && files.status(root, status) == 0 &&
        status.kind == FileStatus::Kind::file) {
        refuse(fmt::format("{} names a checkpoint of the root {}; to save into that root, pass {}", root,
                           parent_of(root), parent_of(root)));
    }
    for (std::string at = parent_of(root); at != "." && at != "/"; at = parent_of(at)) {
        if (!manifest_head(files, at)) continue;
        refuse(fmt::format("{} is inside the checkpoint {}; pass a directory outside of it, or the root {}", root, at,
                           parent_of(at)));
    }
}

// One save of a root is enough to tell the layout.
void refuse_other_layout(FileSystem& files, const std::string& root, std::string_view language) {
    if (language.empty()) return;
    const bool one_save = language == one_save_language;
    if (!one_save && exists(files, join(root, dcp_metadata_name))) {
        refuse(
            fmt::format("{} is a checkpoint in PyTorch's format (it has a {}), so saves in it would not be found; give "
                        "the saver its own root, and load this checkpoint to continue from it",
                        root, dcp_metadata_name));
    }
    std::vector<std::string> names;
    if (files.list(root, names) < 0) return;  // not created yet; other faults are reported when it is created
    std::ranges::sort(names, std::greater());
    for (const std::string& name : names) {
        if (!is_step_directory_name(name)) continue;
        const auto head = manifest_head(files, join(root, name));
        if (!head) continue;
        const auto found = parse_manifest_language(*head);
        if (!found || (*found == one_save_language) == one_save) return;
        if (one_save) {
            refuse(
                fmt::format("{} is the root of a saver ({} was written by {}), which keeps several checkpoints; "
                            "tessera.torch.checkpoint replaces the single checkpoint in its directory, so give it its "
                            "own directory as checkpoint_id",
                            root, name, *found));
        }
        refuse(
            fmt::format("{} is a directory of tessera.torch.checkpoint ({} was written by PyTorch), which keeps and "
                        "replaces a single checkpoint; give the saver its own root, and load {} to continue from it",
                        root, name, root));
    }
}

const std::string& made(FileSystem& files, const std::string& root, std::string_view language) {
    refuse_what_is_no_root(files, root);
    refuse_other_layout(files, root, language);
    make_directories(files, root);
    return root;
}

}  // namespace

RootWriter::RootWriter(FileSystem& files, const std::string& root, const LeaseTimes& lease, Retention retention,
                       std::string_view language)
    : files_(files),
      root_(made(files, root, language)),
      id_(random_id()),
      times_(lease),
      retention_(std::move(retention)),
      lease_(files, root_, id_, lease) {}

void RootWriter::begin(const std::string& directory) {
    std::optional<HeldDirectory> held;
    if (const auto gone = attempt([&] { held.emplace(files_, root_); })) {
        lease_.check();  // reports that the lease is gone too
        throw Error(*gone);
    }
    FileSystem& root = held->files();
    lease_.check(root);
    const int64_t made = root.make_directory(directory);
    if (made < 0) {
        throw os_error(fmt::format("cannot create the directory {}", directory), static_cast<int>(-made));
    }
    save_.reset();  // of a save whose outcome is unknown
    held_root_.emplace(std::move(*held));
    try {
        save_.emplace(root, directory);
        std::vector<std::string> names;
        if (save_->holds() && (files().list(directory, names) < 0 || !names.empty())) {
            save_.reset();  // nothing in it is ours to remove
            throw Error(Code::io, fmt::format("{} was replaced right after it was created", directory));
        }
        write_new_text(files(), join(directory, writing_name), Holder::this_process(id_).dump());
        sync_directory(files(), directory);  // otherwise a power loss may leave rank files that nobody may collect
        sync_directory(root, root_);
    } catch (...) {
        abandon(directory);
        throw;
    }
}

void RootWriter::commit(const std::string& directory, Manifest manifest) {
    FileSystem& root = held_root_->files();
    manifest.sequence = next_sequence(root, root_);
    manifest.committed = utc_now();
    const std::string text = manifest.dump();
    const std::string tag = manifest.save_id.substr(0, 8);

    sync_directory(files(), directory);
    lease_.check(root);
    replace_text(files(), join(directory, manifest_name), text, tag);

    // The checkpoint exists. The rest is convenience; its failure does not fail the save.
    const std::string name(name_in_path(directory));
    const auto try_to = [&](auto&& body) {
        const auto error = attempt(body);
        if (error) log::warning("{} is committed, but cleaning up {} failed: {}", name, root_, error->what());
    };
    try_to([&] {
        (void)files().remove_file(join(directory, writing_name));
        replace_text(root, join(root_, latest_name), name + "\n", tag);
    });
    try_to([&] { tidy(root, name); });
    save_.reset();
    held_root_.reset();
}

void RootWriter::abandon(const std::string& directory) noexcept {
    const auto error = attempt([&] {
        if (!held_root_) return;  // committed
        if (save_) empty_save(files(), directory);
        remove_emptied(held_root_->files(), directory);
    });
    if (error) log::warning("could not remove {} after its save failed: {}", directory, error->what());
    save_.reset();
    held_root_.reset();
}

// Records which save is the best, and removes unneeded saves and the leftovers of dead writers.
void RootWriter::tidy(FileSystem& files, const std::string& newest) {
    std::vector<std::string> names;
    if (files.list(root_, names) >= 0) {
        for (const std::string& name : names) {
            if (name.starts_with(fmt::format("{}.tmp-", latest_name)) ||
                name.starts_with(fmt::format("{}.tmp-", best_name))) {
                (void)files.remove_file(join(root_, name));
            }
        }
    }
    const std::vector<SavedStep> saves = scan_root(files, root_);
    const std::vector<RankedSave> ranked = rank_saves(files, root_, saves, retention_.rule);
    if (retention_.rule) {
        const std::string best = best_of(ranked, retention_.rule->better).value_or("-");
        replace_text(files, join(root_, best_name), best_text(best, *retention_.rule), id_.substr(0, 8));
    }
    const CollectOptions options{retention_, id_, times_};
    for_each_unneeded(files, root_, saves, ranked, options, [&](const Unneeded& unneeded, const Remove& remove) {
        if (unneeded.directory == newest) return;
        if (unneeded.why == Unneeded::Why::cut_short) {
            log::info("removing {}, left by an interrupted save", unneeded.directory);
        }
        // A save that cannot be removed, such as another user's, must not keep the others alive.
        const auto error = attempt([&] {
            if (remove()) return;
            log::info("{} is being read; a later save removes it", join(root_, unneeded.directory));
        });
        if (error) log::warning("could not remove {}: {}", join(root_, unneeded.directory), error->what());
    });
}

}  // namespace tsr
