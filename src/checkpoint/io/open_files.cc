#include "checkpoint/io/open_files.hpp"

#include <algorithm>

namespace tsr {

std::shared_ptr<File> OpenFiles::get(int number) {
    const std::lock_guard lock(mutex_);
    const auto found = std::find_if(kept_.begin(), kept_.end(), [&](const auto& kept) { return kept.first == number; });
    if (found != kept_.end()) {
        kept_.splice(kept_.begin(), kept_, found);
        return found->second;
    }
    if (kept_.size() == max_kept) kept_.pop_back();
    kept_.emplace_front(number, open_(number));
    return kept_.front().second;
}

}  // namespace tsr
