// Options of communicators that the library splits off for internal use: a mesh dimension, a saver's votes.
#pragma once

#include <string_view>

#include "comm/communicator.hpp"

namespace tsr {

// The options of `parent`, with `suffix` appended to its name, which is truncated if necessary, for tensors on the CPU alone.
[[nodiscard]] CommOptions inner_options(const Communicator& parent, std::string_view suffix);

}  // namespace tsr
