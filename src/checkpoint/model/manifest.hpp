// manifest.json: the commit record of a native checkpoint, and all that is known of its tensors without opening a rank
// file. docs/FORMAT.md describes the text; this is its form in memory. A regular tensor costs one short line whatever
// the number of ranks: its shards follow from mesh and placements, and only their files are listed, as runs.
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

// Each shard of `layout` is cut into `split` row blocks. Piece (shard * split + block) is in the file that `files`
// gives it; without `files`, the file number is the piece number. Empty pieces are in no file. An explicit tensor lists
// its pieces instead.
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

// By name. Tensors that differ only in name may share a record.
using SavedTensors = std::map<std::string, std::shared_ptr<const SavedTensor>, std::less<>>;

struct WrittenBy {
    std::string library;
    std::string language;
    std::string version;
};

struct Manifest {
    // "tessera", or torch_dcp_format beside a `.metadata`, which lists the tensors. Formats without a manifest fill
    // this record from their own files.
    std::string format = "tessera";
    int64_t sequence = 0;   // one more than that of any earlier save in the root
    int64_t step = 0;       // -1: not recorded by the format
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
    // Throws CORRUPT, or VERSION for a newer format.
    [[nodiscard]] static Manifest parse(std::string_view text, const std::string& path);

    // The tensor or alias `name`; nullptr if there is none.
    [[nodiscard]] const SavedTensor* find(std::string_view name) const;
    // The name under which the tensor or alias `name`, which must exist, is saved; valid as long as the manifest.
    [[nodiscard]] const std::string& saved_name(std::string_view name) const;
    // Visits all tensors and aliases in name order; `target` is the saved name of an alias, nullptr for a tensor.
    void for_each(
        FunctionRef<void(const std::string& name, const SavedTensor& tensor, const std::string* target)> visit) const;
    [[nodiscard]] int64_t size_bytes() const;  // of all rank files
};

// Dims as a list of numbers, and back (CORRUPT).
[[nodiscard]] Json dims_json(const Dims& dims);
[[nodiscard]] Dims dims_of(const Json& json);

// The head of a manifest, which has a fixed form: enough to order the saves of a root without parsing them.
struct ManifestHead {
    int64_t sequence = 0;
    int64_t step = 0;
};
[[nodiscard]] std::optional<ManifestHead> parse_manifest_head(std::string_view text);
// The writer's language, from the head of a manifest written by this library; nullopt if `head` does not contain it.
[[nodiscard]] std::optional<std::string> parse_manifest_language(std::string_view head);
// The metrics, from the end of a manifest written by this library; nullopt if `tail` does not contain all of them.
[[nodiscard]] std::optional<Values> parse_manifest_metrics(std::string_view tail);

// Row block `block` of `split` of a box, cut like torch.chunk along the first dimension with more than one element.
[[nodiscard]] Box row_block(const Box& box, int split, int block);
// The maximum number of row blocks that a box can be cut into.
[[nodiscard]] int64_t row_count(const Box& box);

}  // namespace tsr
