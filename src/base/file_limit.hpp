// The limit of file sizes (RLIMIT_FSIZE, `ulimit -f`). It counts for shared memory too, and the kernel kills by SIGXFSZ who
// goes beyond it; the library installs no signal handlers, so it asks before it makes something grow.
#pragma once

#include <cstdint>
#include <string>

namespace tsr {

[[nodiscard]] bool within_file_limit(uint64_t size_bytes);

// " (the limit of file sizes, RLIMIT_FSIZE, is 4096 bytes: see `ulimit -f`)"; empty without a limit.
[[nodiscard]] std::string file_limit_text();

}  // namespace tsr
