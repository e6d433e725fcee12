// The file size limit (RLIMIT_FSIZE, `ulimit -f`). It also applies to shared memory, and the kernel sends SIGXFSZ to a
// process that exceeds it. The library installs no signal handlers, so it checks the limit before it extends a file.
#pragma once

#include <cstdint>
#include <string>

namespace tsr {

[[nodiscard]] bool within_file_limit(uint64_t size_bytes);

// " (the file size limit, RLIMIT_FSIZE, is 4096 bytes; see `ulimit -f`)"; empty without a limit.
[[nodiscard]] std::string file_limit_text();

}  // namespace tsr
