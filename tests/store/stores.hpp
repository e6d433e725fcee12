// Every kind of store under one face, for tests that all must pass: a house holds what the store needs (a server, a
// directory) and opens as many clients as the test wants.
#pragma once

#include <memory>
#include <optional>
#include <string_view>

#include "base/error.hpp"
#include "store/store.hpp"

namespace tsr::testing {

enum class StoreKind { memory };
inline constexpr StoreKind store_kinds[] = {StoreKind::memory};

inline std::string_view name_of(StoreKind kind) {
    switch (kind) {
        case StoreKind::memory: return "memory";
    }
    return "";
}

class StoreHouse {
   public:
    virtual ~StoreHouse() = default;
    virtual std::shared_ptr<Store> open() = 0;
};

class MemoryHouse final : public StoreHouse {
   public:
    std::shared_ptr<Store> open() override { return store_; }

   private:
    std::shared_ptr<Store> store_ = make_memory_store(milliseconds{20000});
};

inline std::unique_ptr<StoreHouse> make_house(StoreKind kind) {
    switch (kind) {
        case StoreKind::memory: return std::make_unique<MemoryHouse>();
    }
    return nullptr;
}

// The code of the error that `body` throws; nullopt if it throws none.
template <class Body>
std::optional<Code> code_of(Body&& body) {
    try {
        body();
    } catch (const Error& error) {
        return error.code();
    }
    return std::nullopt;
}

}  // namespace tsr::testing
