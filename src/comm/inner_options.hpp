// The options of communicators that the library splits off for a purpose of its own: a mesh's dimension, a saver's votes.
#pragma once

#include <string_view>

#include "comm/communicator.hpp"

namespace tsr {

// Those of `parent`, with its name, cut short where it has to be, and `suffix`.
[[nodiscard]] CommOptions inner_options(const Communicator& parent, std::string_view suffix);

}  // namespace tsr
