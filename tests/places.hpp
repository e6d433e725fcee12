// Where the sources and the build are. Defined in one file, so that no other object depends on the path of the checkout
// and ccache finds it again in another.
#pragma once

#include <string>

namespace tsr::testing {

// Made at the first call, so that constants of test files may use them.
const std::string& source_dir();
const std::string& binary_dir();

}  // namespace tsr::testing
