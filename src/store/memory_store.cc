// A store inside one process: a table under a mutex, with a condition variable that each change of a key wakes.
#include <fmt/core.h>

#include <condition_variable>
#include <mutex>

#include "base/error.hpp"
#include "store/store.hpp"
#include "store/table.hpp"

namespace tsr {

namespace {

class MemoryStore final : public Store {
   public:
    explicit MemoryStore(milliseconds timeout) : Store(timeout) {}

    void set(std::string_view key, std::string_view value, Deadline) override {
        const std::lock_guard lock(mutex_);
        table_.set(key, value);
        changed_.notify_all();
    }

    std::optional<std::string> get(std::string_view key, Deadline) override {
        check_key(key);
        const std::lock_guard lock(mutex_);
        const Value value = table_.find(key);
        return value == nullptr ? std::nullopt : std::optional(*value);
    }

    std::string wait(std::string_view key, Deadline deadline) override {
        check_key(key);
        std::unique_lock lock(mutex_);
        for (;;) {
            if (const Value value = table_.find(key)) return *value;
            if (deadline.expired()) {
                throw Error(Code::timeout, fmt::format("timed out waiting for key '{}' of the store", key));
            }
            changed_.wait_for(lock, deadline.slice());
            lock.unlock();
            poll_interrupt();
            lock.lock();
        }
    }

    int64_t add(std::string_view key, int64_t delta, Deadline) override {
        const std::lock_guard lock(mutex_);
        const int64_t sum = table_.add(key, delta);
        changed_.notify_all();
        return sum;
    }

    bool compare_set(std::string_view key, std::optional<std::string_view> expected, std::string_view desired,
                     Deadline) override {
        const std::lock_guard lock(mutex_);
        const bool swapped = table_.compare_set(key, expected, desired);
        if (swapped) changed_.notify_all();
        return swapped;
    }

    bool erase(std::string_view key, Deadline) override {
        check_key(key);
        const std::lock_guard lock(mutex_);
        return table_.erase(key);
    }

   private:
    std::mutex mutex_;  // guards table_
    std::condition_variable changed_;
    Table table_;
};

}  // namespace

std::shared_ptr<Store> make_memory_store(milliseconds timeout) { return std::make_shared<MemoryStore>(timeout); }

}  // namespace tsr
