// manifest.json: the commit record of a native checkpoint, and all that is known of its tensors without opening a rank
// file. docs/FORMAT.md describes the text; this is its form in memory. A regular tensor costs one short line whatever
// the number of ranks: its shards follow from mesh and placements, only their files are told, as runs.
#pragma once

#include <compare>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/function_ref.hpp"
#include "checkpoint/model/file_names.hpp"
#include "checkpoint/model/value.hpp"
#include "tensor/layout.hpp"

namespace tsr {

inline constexpr int64_t manifest_version = 1;
inline constexpr std::string_view torch_dcp_format = "torch_dcp";
inline constexpr int64_t max_manifest_bytes = int64_t{1} << 31;
inline constexpr int64_t max_sequence =
    (int64_t{1} << 53) - 1;  // exact in every language's JSON; one more never overflows

struct SavedFile {
    std::string name;
    int64_t size = 0;
    uint32_t header_crc = 0;
};

// `count` files from `first` on, each `step` after the one before.
struct FileRun {
    int first = 0;
    int count = 1;
    int step = 1;
    friend auto operator<=>(const FileRun&, const FileRun&) = default;
};

struct SavedPiece {
    Box box;
    int file = 0;
};

// Each shard of `layout` is cut into `split` row blocks, and piece (shard * split + block) lies in the file that
// `files` gives it; no `files` means file number = piece number. Empty pieces lie nowhere. An explicit tensor lists its
// pieces instead.
struct SavedTensor {
    DType dtype = DType::f32;
    std::optional<Layout> layout;
    Dims shape;
    int split = 1;
    std::vector<FileRun> files;
    std::vector<SavedPiece> pieces;  // of explicit tensors

    [[nodiscard]] int file_of(int64_t piece) const;
    // Calls visit(box, file) for each saved piece that overlaps `wanted`.
    void for_each_piece(const Box& wanted, FunctionRef<void(const Box& box, int file)> visit) const;
    [[nodiscard]] int64_t size_bytes() const { return shape.product() * static_cast<int64_t>(size_of(dtype)); }
};

// By name. Tensors that differ in name alone may share one.
using SavedTensors = std::map<std::string, std::shared_ptr<const SavedTensor>, std::less<>>;

struct WrittenBy {
    std::string library;
    std::string language;
    std::string version;
};

struct Manifest {
    // "tessera"; torch_dcp_format beside a `.metadata`, which tells the tensors. Other formats, which have no such file,
    // fill the same record from what they have.
    std::string format = "tessera";
    int64_t sequence = 0;   // one more than any save in the root before it
    int64_t step = 0;       // -1: the format does not tell
    std::string save_id;    // a UUID
    std::string committed;  // UTC, ISO 8601
    WrittenBy writer;
    int world_size = 1;
    std::vector<SavedFile> files;
    SavedTensors tensors;
    std::map<std::string, std::string, std::less<>> aliases;  // tied weights: name -> the name that is saved
    Values values;
    Values metrics;
    std::map<std::string, std::string, std::less<>> unreadable;  // of other formats: name -> why it cannot be read

    [[nodiscard]] std::string dump() const;  // ends with its own checksum
    // Throws CORRUPT, or VERSION if it is of a newer format.
    [[nodiscard]] static Manifest parse(std::string_view text, const std::string& path);

    // The tensor or alias `name`; nullptr if there is none.
    [[nodiscard]] const SavedTensor* find(std::string_view name) const;
    // The name under which the tensor or alias `name`, which is there, is saved; lives as long as the manifest.
    [[nodiscard]] const std::string& saved_name(std::string_view name) const;
    // All tensors and aliases in the order of their names; `target` is the saved name of an alias, nullptr of a tensor.
    void for_each(
        FunctionRef<void(const std::string& name, const SavedTensor& tensor, const std::string* target)> visit) const;
    [[nodiscard]] int64_t size_bytes() const;  // of all rank files
};

// Dims as a list of numbers; the way back throws CORRUPT.
[[nodiscard]] Json dims_json(const Dims& dims);
[[nodiscard]] Dims dims_of(const Json& json);

// The beginning of a manifest, which has a fixed form: enough to order the saves of a root without reading them.
struct ManifestHead {
    int64_t sequence = 0;
    int64_t step = 0;
};
[[nodiscard]] std::optional<ManifestHead> parse_manifest_head(std::string_view text);
// The language of its writer, from the beginning of a manifest as this library writes it; none if `head` does not hold it.
[[nodiscard]] std::optional<std::string> parse_manifest_language(std::string_view head);
// The metrics, from the end of a manifest as this library writes it; none if `tail` does not hold them whole.
[[nodiscard]] std::optional<Values> parse_manifest_metrics(std::string_view tail);

// Row block `block` of `split` of a box: cut as torch.chunk along the first dimension that has more than one element.
[[nodiscard]] Box row_block(const Box& box, int split, int block);
// Into how many row blocks a box can be cut at most.
[[nodiscard]] int64_t row_count(const Box& box);

}  // namespace tsr
