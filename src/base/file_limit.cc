#include "base/file_limit.hpp"

#include <fmt/core.h>
#include <sys/resource.h>

namespace tsr {

namespace {

rlim_t file_limit() {
    rlimit limit{};
    return ::getrlimit(RLIMIT_FSIZE, &limit) == 0 ? limit.rlim_cur : RLIM_INFINITY;
}

}  // namespace

bool within_file_limit(uint64_t size_bytes) {
    const rlim_t limit = file_limit();
    return limit == RLIM_INFINITY || size_bytes <= limit;
}

std::string file_limit_text() {
    const rlim_t limit = file_limit();
    if (limit == RLIM_INFINITY) return "";
    return fmt::format(" (the file size limit, RLIMIT_FSIZE, is {} bytes; see `ulimit -f`)", limit);
}

}  // namespace tsr
