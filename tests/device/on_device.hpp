// What tests of CUDA devices share, with simulated devices or a real one.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "base/error.hpp"
#include "device/device.hpp"
#include "soon.hpp"

namespace tsr::testing {

inline std::byte* bytes_of(std::vector<uint8_t>& v) { return reinterpret_cast<std::byte*>(v.data()); }

class OnDevice : public ::testing::Test {
   protected:
    static DeviceApi& device(int index = 0) { return device_api({DeviceType::cuda, index}); }

    static void synchronize(DeviceApi& on, StreamHandle stream = nullptr) { on.record(stream)->wait(soon()); }

    // What is in the device's memory.
    static std::vector<uint8_t> content(DeviceApi& on, const std::byte* data, size_t size,
                                        StreamHandle stream = nullptr) {
        std::vector<uint8_t> result(size);
        on.copy(bytes_of(result), data, size, stream);
        on.record(stream)->wait(soon());
        return result;
    }

    static Error failure(const std::function<void()>& body) {
        try {
            body();
        } catch (const Error& error) {
            return error;
        }
        ADD_FAILURE() << "no error";
        return {Code::internal, ""};
    }
};

}  // namespace tsr::testing
