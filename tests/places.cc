#include "places.hpp"

#include "build_places.hpp"

namespace tsr::testing {

const std::string& source_dir() {
    static const std::string path = TESSERA_SOURCE_DIR;
    return path;
}

const std::string& binary_dir() {
    static const std::string path = TESSERA_BINARY_DIR;
    return path;
}

}  // namespace tsr::testing
