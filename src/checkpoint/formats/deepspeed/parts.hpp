// What the layouts of DeepSpeed's checkpoints have in common: the files, what was found in them so far, and how parameters that
// are ranges of flat tensors are put together.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "base/function_ref.hpp"
#include "checkpoint/formats/deepspeed/archives.hpp"
#include "checkpoint/formats/torch_dcp/contents.hpp"
#include "checkpoint/formats/torch_dcp/flattener.hpp"
#include "checkpoint/model/manifest.hpp"

namespace tsr {

struct DeepSpeedParts {
    using Members = DeepSpeedArchives::Members;

    // A flat tensor in a file: a rank's partition of a group of parameters, and what the optimizer keeps for it.
    struct Partition {
        int file = 0;
        pickle::Ref master = pickle::no_ref;
        int64_t count = 0;  // elements of parameters, not of padding at its end
        Members state;
    };
    // A range of a partition that belongs to a parameter.
    struct Fragment {
        const Partition* partition = nullptr;
        int64_t begin = 0;  // in the partition
        int64_t count = 0;
        int64_t first = 0;  // in the parameter, row-major
    };
    struct Parameter {
        std::string name;
        Dims shape;
    };
    // Gives the flat tensor of a fragment.
    using NodeOf = FunctionRef<pickle::Ref(const Fragment& fragment)>;

    DeepSpeedParts(FileSystem& files, const std::string& directory);
    DeepSpeedParts(const DeepSpeedParts&) = delete;
    DeepSpeedParts& operator=(const DeepSpeedParts&) = delete;

    [[nodiscard]] Flattener::Source source(int file) const {
        return {&archives.archive(file), file, archives.size_bytes(file)};
    }
    // Fills `model` and `aliases`. A tensor that is another one under a second name becomes its alias.
    void read_module();
    [[nodiscard]] std::set<std::string_view> buffer_names() const;
    // Parameters in the order of their elements, a list for each group.
    [[nodiscard]] std::vector<std::vector<Parameter>> parameters() const;
    [[nodiscard]] Dims shape_of(std::string_view name, pickle::Ref node) const;
    // Of partitions that follow each other.
    void append_end(std::vector<int64_t>& ends, const Partition& partition) const;

    // A tensor of ranges of flat tensors.
    void put_fragments(const std::string& name, const Dims& shape, const std::vector<Fragment>& fragments,
                       NodeOf node_of);
    // A parameter and what the optimizer keeps for it.
    void put_parameter(const Parameter& parameter, const std::vector<Fragment>& fragments);
    // A tensor without dimensions, or a number, which becomes one. False for others.
    bool put_scalar(const std::string& name, int file, pickle::Ref node);
    // What the optimizer does not have: buffers, frozen parameters, and without ZeRO all that is not 16-bit.
    void add_module();

    DeepSpeedArchives archives;
    Manifest manifest;
    TorchContents::Tensors tensors;
    Flattener objects;
    Members model;                                            // in its order
    std::map<std::string, std::string, std::less<>> aliases;  // in the model, name -> the name that has the data

   private:
    void put(const std::string& name, SavedTensor saved, TorchContents::Tensor tensor);
    [[nodiscard]] std::optional<std::string> why_not_flat(const std::vector<Fragment>& fragments, NodeOf node_of) const;
};

}  // namespace tsr
