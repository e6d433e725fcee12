// Which names of a state a load fills, and their names in the checkpoint. Used for one load: refers to the manifest and
// the options that it was made from.
#pragma once

#include <map>
#include <string>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "base/function_ref.hpp"
#include "checkpoint/model/manifest.hpp"

namespace tsr {

// A name in the checkpoint and its name in the state. If `saved` ends with '.' or is empty, both are prefixes of names.
// For a per-rank value `rank/<r>/<name>` the rule applies to <name>.
struct NameRule {
    std::string saved;
    std::string here;
};

class LoadNames {
   public:
    // `only`: names of the state and patterns of them (base/wildcard.hpp); empty: all names. The first rule that
    // matches applies. INVALID_ARGUMENT for invalid names, or if two loaded names would become one.
    LoadNames(const Manifest& manifest, const std::vector<std::string>& only, const std::vector<NameRule>& rules);

    // Whether the load includes this name of the state.
    [[nodiscard]] bool takes(const std::string& here) const;
    // The name in the state for a name in the checkpoint.
    [[nodiscard]] std::string here(const std::string& saved) const;
    // The manifest's entry for a name of the state; nullptr if there is none or the load does not include it.
    template <class T>
    [[nodiscard]] const T* find(const std::map<std::string, T, std::less<>>& of_manifest,
                                const std::string& here) const {
        const std::string* name = saved(here);
        if (name == nullptr) return nullptr;
        const auto found = of_manifest.find(*name);
        return found != of_manifest.end() ? &found->second : nullptr;
    }
    // Visits the tensors and aliases that the load includes, in the order of their names in the state. `saved` is a
    // string of the manifest: the name of the data in the files.
    void for_each_tensor(
        FunctionRef<void(const std::string& here, const SavedTensor& tensor, const std::string& saved)> visit) const;

   private:
    void add(const std::string& saved);
    [[nodiscard]] const std::string* saved(const std::string& here) const;

    const Manifest& manifest_;
    const bool takes_all_;
    std::unordered_set<std::string_view> names_;                         // all of `only`
    std::vector<std::string_view> patterns_;                             // those that may match other names
    std::unordered_map<std::string_view, const NameRule*> rules_;        // by `saved`: the first such rule
    std::map<std::string, const std::string*, std::less<>> names_here_;  // with rules: saved names of what is loaded
};

}  // namespace tsr
