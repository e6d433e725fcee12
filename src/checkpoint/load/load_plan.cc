// What a load moves where, and how the checkpoint and the state differ.
#include <fmt/format.h>

#include <algorithm>
#include <functional>
#include <map>
#include <string_view>

#include "base/crc32c.hpp"
#include "base/error.hpp"
#include "base/wildcard.hpp"
#include "checkpoint/load/checkpoint.hpp"

namespace tsr {

namespace {

// Differences as one readable list; long lists are cut, with the number of those left out.
std::string listed(const std::vector<std::string>& items) {
    constexpr size_t shown = 50;
    std::string text;
    for (size_t i = 0; i < std::min(items.size(), shown); ++i) text.append("\n  ").append(items[i]);
    if (items.size() > shown) text += fmt::format("\n  and {} more", items.size() - shown);
    return text;
}

// Names that share memory are loaded once, from the first of them, as they are saved. In a checkpoint of untied names
// the others may differ, and threads would write there at the same time.
void keep_first_of_tied(std::vector<Wanted>& wanted) {
    std::vector<const std::byte*> memory;
    memory.reserve(wanted.size());
    for (const Wanted& one : wanted) {
        if (!one.box->empty()) memory.push_back(one.memory);
    }
    std::sort(memory.begin(), memory.end(), std::less<>());
    if (std::adjacent_find(memory.begin(), memory.end()) == memory.end()) return;  // mostly none is tied
    std::map<const std::byte*, std::vector<Wanted>> kept;
    std::vector<Wanted> first;
    for (const Wanted& one : wanted) {
        std::vector<Wanted>& here = kept[one.memory];
        const auto is_same = [&](const Wanted& other) { return other.dtype == one.dtype && *other.box == *one.box; };
        if (!one.box->empty() && std::any_of(here.begin(), here.end(), is_same)) continue;
        here.push_back(one);
        first.push_back(one);
    }
    wanted = std::move(first);
}

class LoadPlanner {
   public:
    LoadPlanner(const Manifest& manifest, const State& state, const LoadOptions& options)
        : manifest_(manifest),
          state_(state),
          options_(options),
          names_(manifest, options.only, options.rules),
          own_(state.collect()) {}

    // `path`: of the checkpoint, for messages.
    [[nodiscard]] Checkpoint::LoadPlan plan(const std::string& path) {
        match_tensors();
        match_values();
        find_unexpected_values();
        leave_sources_alone();
        refuse_differences(path);
        return std::move(plan_);
    }

   private:
    void not_saved(const std::string& name) {
        if (!names_.takes(name)) {
            report_.left_alone.push_back(name);
        } else if (const std::string* why = names_.find(manifest_.unreadable, name)) {
            differences_.push_back(fmt::format("'{}' cannot be read: {}", name, *why));
        } else {
            report_.missing.push_back(name);
        }
    }

    void match_tensors() {
        // Both are in order of names.
        plan_.wanted.reserve(state_.tensors().size());
        auto of_state = state_.tensors().begin();
        names_.for_each_tensor([&](const std::string& name, const SavedTensor& saved, const std::string& saved_name) {
            int order = 1;  // of the state's next tensor against this one
            for (; of_state != state_.tensors().end(); ++of_state) {
                order = of_state->first.compare(name);
                if (order >= 0) break;
                not_saved(of_state->first);
            }
            if (of_state == state_.tensors().end() || order > 0) {
                report_.unexpected.push_back(name);
                return;
            }
            compare(name, *of_state->second.kind, saved);
            want(name, of_state->second, saved_name, saved);
            ++of_state;
        });
        for (; of_state != state_.tensors().end(); ++of_state) not_saved(of_state->first);
        keep_first_of_tied(plan_.wanted);
    }

    void compare(const std::string& name, const TensorKind& kind, const SavedTensor& saved) {
        if (saved.shape != kind.shape) {
            differences_.push_back(fmt::format("tensor '{}': saved with shape {}, the state has {}", name,
                                               saved.shape.str(), kind.shape.str()));
        }
        if (saved.dtype == kind.dtype) return;
        const bool can_be_cast = is_floating(saved.dtype) && is_floating(kind.dtype);
        if (can_be_cast) report_.cast.push_back({name, saved.dtype, kind.dtype});
        if (!can_be_cast || options_.cast == Allow::no) {
            differences_.push_back(fmt::format("tensor '{}': saved as {}, the state has {}", name, name_of(saved.dtype),
                                               name_of(kind.dtype)));
        }
    }

    void want(const std::string& name, const StateTensor& tensor, const std::string& saved_name,
              const SavedTensor& saved) {
        const TensorKind& kind = *tensor.kind;
        if (tensor.shared) {
            uint32_t& loaded = plan_.of_copies[tensor.shared.get()];
            loaded = crc32c(fmt::format("{}\n{}\n{}\n", manifest_.save_id, name, saved_name), loaded);
            const Box& rows = kind.own_rows;
            const bool first = kind.shape.ndim() > 0 || tensor.shared->place() == 0;
            if (rows.empty() || !first) return;
            const int64_t before = kind.shape.ndim() > 0 ? rows.offsets[0] * (rows.numel() / rows.sizes[0]) : 0;
            plan_.wanted.push_back({&saved_name, &saved, &rows, kind.dtype,
                                    tensor.memory[0] + static_cast<size_t>(before) * size_of(kind.dtype)});
            return;
        }
        for (size_t i = 0; i < kind.boxes.size(); ++i) {
            plan_.wanted.push_back({&saved_name, &saved, &kind.boxes[i], kind.dtype, tensor.memory[i], tensor.device});
        }
    }

    // Private values belong to their rank. Values of ranks that only one of the two world sizes has are no difference.
    void match_values() {
        for (const auto& [name, value] : own_) {
            const Json* saved = names_.find(manifest_.values, name);
            plan_.values.emplace(name, saved != nullptr ? *saved : value);
            if (saved != nullptr) continue;
            const auto rank = private_rank(name);
            const bool was_there = !rank || *rank < manifest_.world_size;
            if (was_there || !names_.takes(name) || names_.find(manifest_.unreadable, name) != nullptr) not_saved(name);
        }
    }

    void find_unexpected_values() {
        for (const auto& [saved, value] : manifest_.values) {
            const std::string name = names_.here(saved);
            if (!private_rank(name) && names_.takes(name) && !own_.contains(name)) report_.unexpected.push_back(name);
        }
        for (const auto& [saved, why] : manifest_.unreadable) {
            const std::string name = names_.here(saved);
            if (names_.takes(name) && !state_.tensors().contains(name) && !own_.contains(name)) {
                report_.unexpected.push_back(name);
            }
        }
    }

    // Each pattern of `only` matches a name of the state.
    void check_patterns() {
        for (const std::string& pattern : options_.only) {
            const auto fit = [&](const auto& named) { return fits(pattern, named.first); };
            if (state_.tensors().contains(pattern) || own_.contains(pattern)) continue;
            if (is_pattern(pattern) && (std::ranges::any_of(state_.tensors(), fit) || std::ranges::any_of(own_, fit)))
                continue;
            differences_.push_back(fmt::format("no name of the state matches '{}' in `only`", pattern));
        }
    }

    // A source none of whose values is loaded is not called.
    void leave_sources_alone() {
        if (options_.only.empty()) return;
        for (const std::string& prefix : state_.prefixes()) {
            const std::string begin = prefix + ".";
            auto value = own_.lower_bound(begin);
            while (value != own_.end() && value->first.starts_with(begin) && !names_.takes(value->first)) ++value;
            if (value == own_.end() || !value->first.starts_with(begin)) plan_.sources_left_alone.insert(prefix);
        }
    }

    // What makes a load of what fits possible.
    [[nodiscard]] std::string advice() const {
        std::vector<std::string_view> options;
        if (options_.missing == Allow::no && !report_.missing.empty()) options.emplace_back("allow_missing");
        if (options_.unexpected == Allow::no && !report_.unexpected.empty()) options.emplace_back("allow_unexpected");
        if (options_.cast == Allow::no && !report_.cast.empty()) options.emplace_back("allow_cast");
        return fmt::format(" (to load what fits, choose names with `only`{}{}; a resume is always strict)",
                           options.empty() ? "" : ", or set ", fmt::join(options, " and "));
    }

    void refuse_differences(const std::string& path) {
        if (options_.missing == Allow::no) {
            for (const std::string& name : report_.missing) {
                differences_.push_back(fmt::format("'{}' is missing: the state has it, the checkpoint does not", name));
            }
        }
        if (options_.unexpected == Allow::no) {
            for (const std::string& name : report_.unexpected) {
                differences_.push_back(
                    fmt::format("'{}' is unexpected: the checkpoint has it, the state does not", name));
            }
        }
        const std::string advised = differences_.empty() ? "" : advice();
        check_patterns();
        if (differences_.empty()) return;
        throw Error(Code::mismatch,
                    fmt::format("{} does not fit the state; {} difference{}{}:{}", path, differences_.size(),
                                differences_.size() == 1 ? "" : "s", advised, listed(differences_)));
    }

    const Manifest& manifest_;
    const State& state_;
    const LoadOptions& options_;
    const LoadNames names_;
    const Values own_;
    Checkpoint::LoadPlan plan_;
    LoadReport& report_ = plan_.report;
    std::vector<std::string> differences_;
};

}  // namespace

Checkpoint::LoadPlan Checkpoint::plan_load(const State& state, const LoadOptions& options) const {
    return LoadPlanner(manifest_, state, options).plan(path_);
}

}  // namespace tsr
