// The header of any safetensors file, whoever wrote it, checked as strictly as the format requires (no gap, no overlap,
// no byte beyond the tensors). Also reads what PyTorch's HuggingFaceStorageWriter and this library add to
// `__metadata__`.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "checkpoint/io/file_system.hpp"
#include "tensor/layout.hpp"

namespace tsr {

inline constexpr int64_t max_header_bytes = 100'000'000;  // the limit of safetensors readers

inline constexpr std::string_view safetensors_metadata_key = "__metadata__";

// INVALID_ARGUMENT if safetensors files reserve this name, so that a tensor cannot have it.
void check_safetensors_key(std::string_view name);

struct SafetensorsEntry {
    std::string name;
    DType dtype = DType::f32;
    Dims shape;
    std::optional<Dims> offsets;  // in the whole tensor, if the file says that this is a part
    std::string unreadable;       // why it cannot be read; dtype and shape are then undefined. Empty: it can be read
    int64_t begin = 0;            // bytes from the start of the data
    int64_t end = 0;

    [[nodiscard]] Box box() const;
};

class SafetensorsHeader {
   public:
    SafetensorsHeader(SafetensorsHeader&&) = default;  // not copied: by_name_ points into entries_
    SafetensorsHeader& operator=(SafetensorsHeader&&) = default;
    // CORRUPT names the file and the fault; UNSUPPORTED if a tensor's name is not valid in Tessera.
    [[nodiscard]] static SafetensorsHeader read(FileSystem& files, const std::string& path);
    [[nodiscard]] static SafetensorsHeader read(File& file, const std::string& path);
    // The same for the bytes before the data, of a file of `size` bytes.
    [[nodiscard]] static SafetensorsHeader parse(std::string_view header, const std::string& path, int64_t size);

    [[nodiscard]] int64_t file_bytes() const { return size_; }
    [[nodiscard]] int64_t data_begin() const { return data_begin_; }
    [[nodiscard]] const std::vector<SafetensorsEntry>& entries() const { return entries_; }  // in order of offsets
    [[nodiscard]] const SafetensorsEntry* find(std::string_view name) const;
    // Tied names, as safetensors' save_model() records them in `__metadata__`: name -> tensor of this file.
    [[nodiscard]] std::map<std::string, std::string> tied() const;

   private:
    SafetensorsHeader() = default;

    int64_t size_ = 0;
    int64_t data_begin_ = 0;
    std::vector<SafetensorsEntry> entries_;
    std::unordered_map<std::string_view, size_t> by_name_;  // into entries_, which never changes after parse
    std::map<std::string, std::string> metadata_;
};

}  // namespace tsr
