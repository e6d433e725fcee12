#include "checkpoint/load_names.hpp"

#include <fmt/format.h>
#include <fnmatch.h>

#include <algorithm>

#include "base/error.hpp"

namespace tsr {

bool LoadNames::takes(const std::string& here) const {
    return only_.empty() || std::any_of(only_.begin(), only_.end(), [&](const std::string& pattern) {
               return pattern == here || ::fnmatch(pattern.c_str(), here.c_str(), 0) == 0;
           });
}

std::string LoadNames::of_saved(const std::string& saved) const {
    for (const NameRule& rule : rules_) {
        if (rule.saved.empty() || rule.saved.back() == '.') {
            if (saved.starts_with(rule.saved)) return rule.here + saved.substr(rule.saved.size());
        } else if (saved == rule.saved) {
            return rule.here;
        }
    }
    return saved;
}

void LoadNames::for_each(const Manifest& manifest, FunctionRef<void(const std::string& here, const SavedTensor& tensor,
                                                                    const std::string& saved)>
                                                       visit) const {
    if (!renames()) {
        return manifest.for_each([&](const std::string& name, const SavedTensor& tensor, const std::string* target) {
            visit(name, tensor, target != nullptr ? *target : name);
        });
    }
    struct Named {
        std::string here;
        const std::string* name;
        const SavedTensor* tensor;
        const std::string* saved;
    };
    std::vector<Named> all;
    manifest.for_each([&](const std::string& name, const SavedTensor& tensor, const std::string* target) {
        all.push_back({of_saved(name), &name, &tensor, target != nullptr ? target : &name});
    });
    std::stable_sort(all.begin(), all.end(), [](const Named& a, const Named& b) { return a.here < b.here; });
    const auto twice =
        std::adjacent_find(all.begin(), all.end(), [](const Named& a, const Named& b) { return a.here == b.here; });
    if (twice != all.end()) {
        throw Error(Code::invalid_argument, fmt::format("'{}' and '{}' of the checkpoint would both be '{}'",
                                                        *twice->name, *(twice + 1)->name, twice->here));
    }
    for (const Named& one : all) visit(one.here, *one.tensor, *one.saved);
}

}  // namespace tsr
