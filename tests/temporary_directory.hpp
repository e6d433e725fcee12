// A directory of a test's own, removed with what is in it at the end of the scope.
#pragma once

#include <stdlib.h>

#include <filesystem>
#include <stdexcept>
#include <string>
#include <system_error>

namespace tsr::testing {

class TemporaryDirectory {
   public:
    TemporaryDirectory() {
        std::string path = (std::filesystem::temp_directory_path() / "tessera-test.XXXXXX").string();
        if (::mkdtemp(path.data()) == nullptr) throw std::runtime_error("no directory like " + path);
        path_ = path;
    }
    ~TemporaryDirectory() {
        std::error_code ignored;
        std::filesystem::remove_all(path_, ignored);
    }
    TemporaryDirectory(const TemporaryDirectory&) = delete;
    TemporaryDirectory& operator=(const TemporaryDirectory&) = delete;
    [[nodiscard]] const std::filesystem::path& path() const { return path_; }

   private:
    std::filesystem::path path_;
};

}  // namespace tsr::testing
