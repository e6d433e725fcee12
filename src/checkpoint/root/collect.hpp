// What of a root is of no more use: what saves left that were cut short, and saves beyond those to keep. Whoever
// removes holds the root's lease; what a live process writes is never found.
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
    std::string directory;  // its name in the root
    Why why = Why::empty;
    int64_t size_bytes = 0;  // of the files that would be removed
};

struct CollectOptions {
    Retention retention;  // which committed saves stay; by default all
    std::string own_id;   // a saver's: its own marks are no live writer's
    LeaseTimes lease;
};

// Calls visit(unneeded, remove) for each, its directory held from the look at it to its removal: what has its name by then is
// not touched. `files` are of the root, held, and `saves` is what scan_root() found there, in its order; `ranked` is what
// rank_saves() made of it. Damaged saves, what Tessera did not write and symbolic links are no one's to remove.
//
// remove() never leaves half: a committed save is marked first, so that a removal that is cut short is found again. False:
// the save is open for reading and stays.
using Remove = std::function<bool()>;
void for_each_unneeded(FileSystem& files, const std::string& root, const std::vector<SavedStep>& saves,
                       const std::vector<RankedSave>& ranked, const CollectOptions& options,
                       const std::function<void(const Unneeded& unneeded, const Remove& remove)>& visit);

}  // namespace tsr
