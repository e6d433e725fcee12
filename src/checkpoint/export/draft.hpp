// A directory that one process fills under a temporary name and then renames: it appears complete or not at all.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "checkpoint/io/file_system.hpp"

namespace tsr {

class Draft {
   public:
    // INVALID_ARGUMENT if `place` already exists.
    Draft(FileSystem& files, const std::string& place);
    ~Draft();  // removes it and its files, unless it was moved
    Draft(const Draft&) = delete;
    Draft& operator=(const Draft&) = delete;

    [[nodiscard]] const std::string& path() const { return path_; }
    [[nodiscard]] const std::string& tag() const { return tag_; }  // 8 random characters
    // The path() of a draft with this tag.
    [[nodiscard]] static std::string path_of(std::string place, std::string_view tag);
    // Durable, including the names of its files.
    void move_to_its_place();

   private:
    std::string place_;
    std::string tag_;
    std::string path_;
    std::optional<HeldDirectory> parent_;
    std::optional<HeldDirectory> own_;
    bool moved_ = false;
};

}  // namespace tsr
