// One libFuzzer program a target: -DTESSERA_FUZZ_TARGET=<name>. See tools/dev/fuzz.sh.
#include <cstddef>
#include <cstdint>

#include "fuzz/targets.hpp"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    (void)tsr::fuzz::TESSERA_FUZZ_TARGET({reinterpret_cast<const char*>(data), size});
    return 0;
}
