// A torch.save archive: its object as a tree, and the location of its tensors' bytes. Tensors are recognised by the few
// functions of torch._utils that torch.save writes; anything else that is not plain data is reported by name and
// skipped.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "base/json.hpp"
#include "checkpoint/formats/torch_dcp/pickle.hpp"
#include "checkpoint/formats/torch_dcp/zip.hpp"
#include "tensor/tensor.hpp"

namespace tsr {

// A tensor as a view of an entry of the archive.
struct StoredTensor {
    DType dtype = DType::f32;
    Dims shape;
    Dims strides;                     // in elements
    int64_t first = 0;                // index of its first element in the storage
    const ZipEntry* entry = nullptr;  // nullptr: it has no elements, and its storage may be missing
};

// "torch.float32" -> f32; nullopt for dtypes that Tessera does not have.
[[nodiscard]] std::optional<DType> dtype_from_torch(std::string_view name);
[[nodiscard]] std::string_view torch_name(DType dtype);          // "float32"
[[nodiscard]] std::string_view torch_storage_name(DType dtype);  // "FloatStorage"; empty: its storage is untyped
// A global such as torch.float32. UNSUPPORTED names a dtype that Tessera does not have.
[[nodiscard]] DType dtype_of(const pickle::Tree& tree, pickle::Ref node);

class TorchArchive {
   public:
    // Throws CORRUPT or UNSUPPORTED naming the file and the place.
    explicit TorchArchive(PartReader& part);

    [[nodiscard]] const ZipArchive& zip() const { return zip_; }
    [[nodiscard]] const pickle::Tree& tree() const { return tree_; }
    [[nodiscard]] static bool is_tensor(const pickle::Tree& tree, pickle::Ref node);
    // CORRUPT if it is malformed, UNSUPPORTED if it is a kind of tensor that cannot be read.
    [[nodiscard]] StoredTensor tensor(pickle::Ref node) const;

   private:
    ZipArchive zip_;
    pickle::Tree tree_;
};

// Plain data as a typed value. UNSUPPORTED names what is not plain data. `budget` is reduced by the memory taken, as a
// small pickle may expand to a huge value. A list of None has the largest ratio.
inline constexpr int64_t value_bytes_per_byte = 64;
[[nodiscard]] Json value_of(const pickle::Tree& tree, pickle::Ref node, int64_t& budget, int depth = 0);

// Sizes, strides or offsets: a tuple, list or torch.Size of at most max_ndim integers, none negative.
[[nodiscard]] Dims dims_of(const pickle::Tree& tree, pickle::Ref node);

}  // namespace tsr
