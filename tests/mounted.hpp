// A file system of a test's own.
#pragma once

#include <sys/mount.h>

#include <filesystem>
#include <string>
#include <utility>

namespace tsr::testing {

// Mounted on a new directory, where the test may mount one.
class Mounted {
   public:
    Mounted(const char* type, std::string path, const std::string& options = "") : path_(std::move(path)) {
        std::filesystem::create_directory(path_);
        is_there_ = ::mount(type, path_.c_str(), type, 0, options.c_str()) == 0;
    }
    ~Mounted() {
        if (is_there_) ::umount2(path_.c_str(), MNT_DETACH);
    }
    Mounted(const Mounted&) = delete;
    Mounted& operator=(const Mounted&) = delete;
    [[nodiscard]] bool is_there() const { return is_there_; }
    [[nodiscard]] const std::string& path() const { return path_; }

   private:
    std::string path_;
    bool is_there_;
};

}  // namespace tsr::testing
