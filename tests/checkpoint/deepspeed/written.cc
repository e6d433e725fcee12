#include "written.hpp"

#include <fmt/format.h>

#include <cstdlib>
#include <filesystem>
#include <stdexcept>

#include "places.hpp"

namespace tsr::testing {

namespace {

class Unpacked {
   public:
    Unpacked() {
        const std::string archive = source_dir() + "/tests/interop/deepspeed/files.tar.gz";
        const std::string command = fmt::format("tar -xzf '{}' -C '{}'", archive, directory_.path());
        if (std::system(command.c_str()) != 0) throw std::runtime_error("failed: " + command);
    }
    [[nodiscard]] const std::string& path() const { return directory_.path(); }

   private:
    TempDir directory_;
};

const Unpacked& unpacked() {
    static const Unpacked once;
    return once;
}

}  // namespace

const std::string& written() { return unpacked().path(); }

std::string tag_of(const std::string& name) { return written() + "/" + name + "/after-2"; }

std::string copy_of(const std::string& name, const TempDir& dir) {
    const std::string copy = dir / name;
    std::filesystem::copy(tag_of(name), copy, std::filesystem::copy_options::recursive);
    return copy;
}

std::shared_ptr<const Checkpoint> expected_of(const std::string& name) {
    return Checkpoint::open(written() + "/" + name + "/expected/tensors.safetensors");
}

std::string bytes_of(const Checkpoint& checkpoint, const std::string& name, const Box& box, Verify verify) {
    const SavedTensor* saved = checkpoint.manifest().find(name);
    if (saved == nullptr) return "no tensor " + name;
    std::string bytes(static_cast<size_t>(box.numel()) * size_of(saved->dtype), '\xee');
    const ReadPart part{name, box, reinterpret_cast<std::byte*>(bytes.data())};
    LoadOptions options;
    options.verify = verify;
    checkpoint.read(std::span(&part, 1), options);
    return bytes;
}

std::string bytes_of(const Checkpoint& checkpoint, const std::string& name) {
    const SavedTensor* saved = checkpoint.manifest().find(name);
    return saved == nullptr ? "no tensor " + name : bytes_of(checkpoint, name, Box::whole(saved->shape));
}

}  // namespace tsr::testing
