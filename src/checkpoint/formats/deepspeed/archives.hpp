// The open archives of a DeepSpeed checkpoint, those of the model first, and their objects. Everything that DeepSpeed
// wrote otherwise is CORRUPT, with the file's name.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/error.hpp"
#include "checkpoint/formats/deepspeed/files.hpp"
#include "checkpoint/formats/torch_dcp/torch_archive.hpp"
#include "checkpoint/io/file_system.hpp"

namespace tsr {

class DeepSpeedArchives {
   public:
    // Keys and values of a dict whose keys are texts, in the file's order.
    using Members = std::vector<std::pair<std::string_view, pickle::Ref>>;

    DeepSpeedArchives(FileSystem& files, const std::string& directory);

    [[nodiscard]] const DeepSpeedFiles& names() const { return names_; }
    [[nodiscard]] int count() const { return static_cast<int>(archives_.size()); }
    [[nodiscard]] int first_optimizer() const { return static_cast<int>(names_.model.size()); }
    [[nodiscard]] const std::string& path(int file) const { return paths_[static_cast<size_t>(file)]; }
    [[nodiscard]] int64_t size_bytes(int file) const { return sizes_[static_cast<size_t>(file)]; }
    [[nodiscard]] int64_t modified_ns() const { return modified_ns_; }  // of the newest file
    [[nodiscard]] const TorchArchive& archive(int file) const { return archives_[static_cast<size_t>(file)]; }
    [[nodiscard]] const pickle::Tree& tree(int file) const { return archive(file).tree(); }
    [[noreturn]] void refuse(int file, std::string_view why, Code code = Code::corrupt) const;

    // The value of a key; no_ref if it is missing or None.
    [[nodiscard]] pickle::Ref find(int file, pickle::Ref dict, std::string_view key) const;
    [[nodiscard]] pickle::Ref need(int file, pickle::Ref dict, std::string_view key) const;
    // The same in a file's own dict.
    [[nodiscard]] pickle::Ref find(int file, std::string_view key) const { return find(file, tree(file).root(), key); }
    [[nodiscard]] pickle::Ref need(int file, std::string_view key) const { return need(file, tree(file).root(), key); }
    [[nodiscard]] std::optional<int64_t> find_int(int file, std::string_view key) const;
    [[nodiscard]] std::span<const pickle::Ref> list(int file, pickle::Ref node) const;
    [[nodiscard]] Members members(int file, pickle::Ref dict) const;
    // The same of what an optimizer keeps for a tensor.
    [[nodiscard]] Members state_members(int file, pickle::Ref dict) const;
    // A contiguous tensor of one dimension.
    [[nodiscard]] StoredTensor flat_tensor(int file, pickle::Ref node) const;
    // nullopt for what is not a tensor, or of a kind that Tessera lacks.
    [[nodiscard]] std::optional<StoredTensor> find_tensor(int file, pickle::Ref node) const;
    // Moves the contents out.
    [[nodiscard]] std::vector<std::string> take_paths() { return std::move(paths_); }
    [[nodiscard]] std::vector<TorchArchive> take_archives() { return std::move(archives_); }

   private:
    void open(FileSystem& files, const std::string& directory, const DeepSpeedName& name);

    DeepSpeedFiles names_;
    std::vector<std::string> paths_;
    std::vector<int64_t> sizes_;
    std::vector<TorchArchive> archives_;
    int64_t modified_ns_ = 0;
};

// What an optimizer (the dict of a torch.optim.Optimizer's state_dict) keeps for its tensors, which are numbered in its
// groups.
class OptimizerStates {
   public:
    OptimizerStates(const DeepSpeedArchives& archives, int file, pickle::Ref optimizer);
    [[nodiscard]] size_t groups() const { return groups_.size(); }
    [[nodiscard]] size_t tensors_in(size_t group) const { return groups_[group].numbers.size(); }
    // Of tensor number `of_group` of a group; empty before its first step. Some optimizers count steps for a group:
    // each of its tensors then has them. CORRUPT if there is no such tensor.
    [[nodiscard]] DeepSpeedArchives::Members state(size_t group, size_t of_group) const;

   private:
    struct Group {
        std::span<const pickle::Ref> numbers;
        pickle::Ref step = pickle::no_ref;
    };
    const DeepSpeedArchives& archives_;
    int file_;
    std::vector<Group> groups_;
    std::unordered_map<int64_t, pickle::Ref> states_;
};

inline constexpr std::string_view step_state = "step";
// Adds the group's step count to a state that lacks one.
void add_group_step(DeepSpeedArchives::Members& state, pickle::Ref step);

}  // namespace tsr
