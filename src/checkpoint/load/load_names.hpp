// Which names of a state a load fills, and what they are in the checkpoint. For one load: it refers to the manifest and to
// the options that it is made of.
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

// A name of the checkpoint, and what it is in the state; if `saved` ends with '.' or is empty, what names begin with there
// and here. Of a value of one rank, `rank/<r>/<name>`, it is about <name>.
struct NameRule {
    std::string saved;
    std::string here;
};

class LoadNames {
   public:
    // `only`: names and patterns (base/wildcard.hpp) of the state's names; none: all names. Of the rules the first that
    // fits counts. INVALID_ARGUMENT if they are no names, or if two names that are loaded would be one.
    LoadNames(const Manifest& manifest, const std::vector<std::string>& only, const std::vector<NameRule>& rules);

    // Whether the load is about this name of the state.
    [[nodiscard]] bool takes(const std::string& here) const;
    // What a name of the checkpoint is in the state.
    [[nodiscard]] std::string here(const std::string& saved) const;
    // What the manifest has for a name of the state; nullptr: nothing, or the load is not about it.
    template <class T>
    [[nodiscard]] const T* find(const std::map<std::string, T, std::less<>>& of_manifest,
                                const std::string& here) const {
        const std::string* name = saved(here);
        if (name == nullptr) return nullptr;
        const auto found = of_manifest.find(*name);
        return found != of_manifest.end() ? &found->second : nullptr;
    }
    // The tensors and aliases that the load is about, in the order of their names in the state; `saved` is a string of the
    // manifest, the name that the data has in the files.
    void for_each_tensor(
        FunctionRef<void(const std::string& here, const SavedTensor& tensor, const std::string& saved)> visit) const;

   private:
    void add(const std::string& saved);
    [[nodiscard]] const std::string* saved(const std::string& here) const;

    const Manifest& manifest_;
    const bool takes_all_;
    std::unordered_set<std::string_view> names_;                         // all of `only`
    std::vector<std::string_view> patterns_;                             // those of them that may fit other names
    std::unordered_map<std::string_view, const NameRule*> rules_;        // by `saved`: the first
    std::map<std::string, const std::string*, std::less<>> names_here_;  // with rules: the saved name of what is taken
};

}  // namespace tsr
