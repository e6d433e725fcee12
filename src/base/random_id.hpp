// Random bytes from the kernel, and names that nobody else has chosen.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace tsr {

void random_bytes(uint8_t* bytes, size_t size);

// 32 hexadecimal digits.
[[nodiscard]] std::string random_id();

}  // namespace tsr
