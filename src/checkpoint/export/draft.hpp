// A directory that one process fills under another name and then moves to its place: it is there whole or not at all.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "checkpoint/io/file_system.hpp"

namespace tsr {

class Draft {
   public:
    // INVALID_ARGUMENT if `place` is there already.
    Draft(FileSystem& files, const std::string& place);
    ~Draft();  // removes it with all files in it, unless it was moved
    Draft(const Draft&) = delete;
    Draft& operator=(const Draft&) = delete;

    [[nodiscard]] const std::string& path() const { return path_; }
    [[nodiscard]] const std::string& tag() const { return tag_; }  // 8 characters, drawn
    // The path() that a draft of this tag has.
    [[nodiscard]] static std::string path_of(std::string place, std::string_view tag);
    // Durably, with the names of what is in it.
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
