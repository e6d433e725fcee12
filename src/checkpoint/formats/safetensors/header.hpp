// The header of any safetensors file, whoever wrote it: checked as strictly as the format asks (no hole, no overlap, no
// byte beyond the tensors), and what PyTorch's HuggingFaceStorageWriter and this library put into `__metadata__` besides.
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

inline constexpr int64_t max_header_bytes = 100'000'000;  // what safetensors readers take

inline constexpr std::string_view safetensors_metadata_key = "__metadata__";

// INVALID_ARGUMENT: a tensor cannot have this name in a safetensors file, which has it for itself.
void check_safetensors_key(std::string_view name);

struct SafetensorsEntry {
    std::string name;
    DType dtype = DType::f32;
    Dims shape;
    std::optional<Dims> offsets;  // in the whole tensor, if the file says that it holds a part
    std::string unreadable;       // why; then dtype and shape say nothing. Empty: it can be read
    int64_t begin = 0;            // bytes from the start of the data
    int64_t end = 0;

    [[nodiscard]] Box box() const;
};

class SafetensorsHeader {
   public:
    SafetensorsHeader(SafetensorsHeader&&) = default;  // not copied: by_name_ points into entries_
    SafetensorsHeader& operator=(SafetensorsHeader&&) = default;
    // CORRUPT names the file and what is wrong; UNSUPPORTED if a tensor's name is none here.
    [[nodiscard]] static SafetensorsHeader read(FileSystem& files, const std::string& path);
    [[nodiscard]] static SafetensorsHeader read(File& file, const std::string& path);
    // The same over the bytes before the data, of a file of `size` bytes.
    [[nodiscard]] static SafetensorsHeader parse(std::string_view header, const std::string& path, int64_t size);

    [[nodiscard]] int64_t file_bytes() const { return size_; }
    [[nodiscard]] int64_t data_begin() const { return data_begin_; }
    [[nodiscard]] const std::vector<SafetensorsEntry>& entries() const { return entries_; }  // in order of offsets
    [[nodiscard]] const SafetensorsEntry* find(std::string_view name) const;
    // Tied names, as safetensors' save_model() leaves them in `__metadata__`: the name -> the tensor of this file.
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
