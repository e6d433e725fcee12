// Safetensors files as others write them: any header, data of any bytes.
#pragma once

#include <cstring>
#include <string>
#include <vector>

#include "checkpoint/fixture.hpp"

namespace tsr::testing {

inline std::string with_length(const std::string& json) {
    std::string text(8, '\0');
    const uint64_t size = json.size();
    std::memcpy(text.data(), &size, sizeof size);
    return text + json;
}

template <class T>
std::string bytes_of(const std::vector<T>& numbers) {
    return {reinterpret_cast<const char*>(numbers.data()), numbers.size() * sizeof(T)};
}

struct Part {
    std::string name;
    std::string dtype;
    std::string shape;  // "[2,3]"
    std::string data;
    std::string offsets;  // "[0,0]" of a part; empty: none is told
};

// `more` are members of __metadata__, such as `"a":"b"`.
inline std::string safetensors_file(const std::vector<Part>& parts, const std::string& more = "") {
    std::string entries;
    std::string sharding;
    std::string data;
    for (const Part& part : parts) {
        entries += ",\"" + part.name + "\":{\"dtype\":\"" + part.dtype + "\",\"shape\":" + part.shape +
                   ",\"data_offsets\":[" + std::to_string(data.size()) + "," +
                   std::to_string(data.size() + part.data.size()) + "]}";
        data += part.data;
        if (part.offsets.empty()) continue;
        sharding +=
            (sharding.empty() ? "" : ",") + ("\\\"" + part.name) + "\\\":{\\\"saved_offsets\\\":" + part.offsets + "}";
    }
    std::string metadata = "\"format\":\"pt\"";
    if (!sharding.empty()) metadata += ",\"DCP_VERSION\":\"1.0\",\"DCP_SHARDING_INFO\":\"{" + sharding + "}\"";
    if (!more.empty()) metadata += "," + more;
    return with_length("{\"__metadata__\":{" + metadata + "}" + entries + "}") + data;
}

}  // namespace tsr::testing
