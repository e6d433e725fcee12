// Which names of a state a load fills, and which names of the checkpoint they are.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "base/function_ref.hpp"
#include "checkpoint/native/manifest.hpp"

namespace tsr {

// A name of the checkpoint, or, if it ends with '.' or is empty, what names of it begin with; and what it is, or they
// begin with, in the state.
struct NameRule {
    std::string saved;
    std::string here;
};

class LoadNames {
   public:
    // `only`: patterns as a shell has them, of names of the state; none: all names. Of the rules the first that fits counts.
    LoadNames(std::vector<std::string> only, std::vector<NameRule> rules)
        : only_(std::move(only)), rules_(std::move(rules)) {}

    [[nodiscard]] const std::vector<std::string>& only() const { return only_; }
    [[nodiscard]] bool takes(const std::string& here) const;
    [[nodiscard]] bool renames() const { return !rules_.empty(); }
    [[nodiscard]] std::string of_saved(const std::string& saved) const;

    // All tensors and aliases in the order of their names in the state; `saved` is a string of the manifest, the one under
    // which the tensor's data is saved. INVALID_ARGUMENT if two would have one name.
    void for_each(const Manifest& manifest, FunctionRef<void(const std::string& here, const SavedTensor& tensor,
                                                             const std::string& saved)>
                                                visit) const;

   private:
    std::vector<std::string> only_;
    std::vector<NameRule> rules_;
};

}  // namespace tsr
