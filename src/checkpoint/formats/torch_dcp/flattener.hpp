// Takes the objects of torch.save archives apart into names. Dicts become dotted names, as in PyTorch's DCP: dicts are
// always descended into; lists and tuples only if they contain a tensor or a dict, and their elements are named by
// index; everything else is a value. A container with a part that cannot have its own name (it is invalid or taken)
// becomes one value. What is not plain data is listed in Manifest::unreadable.
#pragma once

#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "base/error.hpp"
#include "checkpoint/formats/torch_dcp/contents.hpp"
#include "checkpoint/formats/torch_dcp/torch_archive.hpp"
#include "checkpoint/model/manifest.hpp"

namespace tsr {

inline constexpr int64_t least_value_memory = int64_t{64} << 20;  // for values and names, whatever their pickles' size

// The memory that the values of a pickle may take.
[[nodiscard]] int64_t budget_of(const pickle::Tree& tree);
// The message without the file's name, which the caller adds.
[[nodiscard]] std::string without_place(const Error& error, const std::string& place);
// A typed value that is valid in a manifest; UNSUPPORTED if it is not plain data.
[[nodiscard]] Json checked_value_of(const pickle::Tree& tree, pickle::Ref node, int64_t& budget);

class Flattener {
   public:
    // An archive that TorchContents will have as number `file`.
    struct Source {
        const TorchArchive* archive = nullptr;
        int file = 0;
        int64_t file_bytes = 0;
    };

    Flattener(Manifest& manifest, TorchContents::Tensors& tensors) : manifest_(manifest), tensors_(tensors) {}

    // Lets what follows take memory in proportion to an archive. Once for each.
    void allow(const TorchArchive& archive) { budget_ += budget_of(archive.tree()); }
    // UNSUPPORTED if all that is allowed was taken.
    void spend(const TorchArchive& archive, int64_t bytes);

    // The object of an archive, without a name. UNSUPPORTED if it cannot be taken apart.
    void add_object(const Source& source);
    // An object of an archive under a name, which must be new and valid (CORRUPT).
    void add(const Source& source, const std::string& name, pickle::Ref object);
    // Takes a name, likewise, for a tensor that the caller adds.
    void take_name(const TorchArchive& archive, const std::string& name);

   private:
    class Walk;
    Manifest& manifest_;
    TorchContents::Tensors& tensors_;
    std::set<std::string> names_;  // taken so far
    int64_t budget_ = least_value_memory;
};

}  // namespace tsr
