// Finds what may be removed from a root: leftovers of interrupted saves, and saves beyond those to keep. The remover
// must hold the root's lease. Saves that a live process is writing are never found.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "checkpoint/io/file_system.hpp"
#include "checkpoint/root/lease.hpp"
#include "checkpoint/root/retention.hpp"

namespace tsr {

struct Unneeded {
    enum class Why { empty, cut_short, beyond_keep };
    std::string directory;  // name in the root
    Why why = Why::empty;
    int64_t size_bytes = 0;  // of the files that would be removed
};

struct CollectOptions {
    Retention retention;  // which committed saves are kept; default: all
    std::string own_id;   // of the calling saver: its own marks do not count as a live writer
    LeaseTimes lease;
};

// Calls visit(unneeded, remove) for each unneeded save. Its directory is held from its inspection to its removal, so
// that a directory that takes its name meanwhile is not touched. `files` are those of the held root, `saves` is the
// result of scan_root() in its order, and `ranked` is what rank_saves() made of it. Damaged saves, files that Tessera
// did not write and symbolic links are never removed.
//
// remove() never leaves half a save: a committed save is marked first, so that an interrupted removal is found again.
// It returns false if the save is open for reading and is kept.
using Remove = std::function<bool()>;
void for_each_unneeded(FileSystem& files, const std::string& root, const std::vector<SavedStep>& saves,
                       const std::vector<RankedSave>& ranked, const CollectOptions& options,
                       const std::function<void(const Unneeded& unneeded, const Remove& remove)>& visit);

}  // namespace tsr
