// A part of a store: every key is prefixed, so that users of one store cannot meet by accident.
#include <utility>

#include "base/error.hpp"
#include "store/store.hpp"
#include "store/table.hpp"

namespace tsr {

namespace {

class PrefixedStore final : public Store {
   public:
    PrefixedStore(std::shared_ptr<Store> store, std::string prefix)
        : Store(store->timeout()), store_(std::move(store)), prefix_(std::move(prefix)) {}

    void set(std::string_view key, std::string_view value, Deadline deadline) override {
        store_->set(full(key), value, deadline);
    }
    std::optional<std::string> get(std::string_view key, Deadline deadline) override {
        return store_->get(full(key), deadline);
    }
    std::string wait(std::string_view key, Deadline deadline) override { return store_->wait(full(key), deadline); }
    int64_t add(std::string_view key, int64_t delta, Deadline deadline) override {
        return store_->add(full(key), delta, deadline);
    }
    bool compare_set(std::string_view key, std::optional<std::string_view> expected, std::string_view desired,
                     Deadline deadline) override {
        return store_->compare_set(full(key), expected, desired, deadline);
    }
    bool erase(std::string_view key, Deadline deadline) override { return store_->erase(full(key), deadline); }

    std::string local_address() const override { return store_->local_address(); }

   private:
    [[nodiscard]] std::string full(std::string_view key) const {
        check_key(key);
        return prefix_ + std::string(key);
    }

    std::shared_ptr<Store> store_;
    std::string prefix_;
};

}  // namespace

std::shared_ptr<Store> prefixed(std::shared_ptr<Store> store, std::string prefix) {
    if (!store) throw Error(Code::invalid_argument, "prefixed: the store is null");
    return std::make_shared<PrefixedStore>(std::move(store), std::move(prefix));
}

}  // namespace tsr
