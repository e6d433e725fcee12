// A storage in memory behind the public vtable, as strict as a storage may be: parts come as the header promises or the
// part fails; nothing is seen before it is whole. Any single call can be made to fail. Every object that was opened and
// every upload that was begun must have ended when it is destroyed.
#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "api.hpp"

namespace api {

class MemoryStorage {
   public:
    struct Traits {
        int32_t capabilities = TSR_STORAGE_PARTS_IN_ANY_ORDER | TSR_STORAGE_PUT_IF_ABSENT;
        int64_t part_bytes = 65536;
    };

    explicit MemoryStorage(Traits traits) : traits_(traits) {}
    MemoryStorage() : MemoryStorage(Traits{}) {}
    ~MemoryStorage() {
        EXPECT_EQ(open_, 0) << "objects were opened and not closed";
        EXPECT_EQ(uploads_, 0) << "uploads were begun and not dropped";
    }
    MemoryStorage(const MemoryStorage&) = delete;
    MemoryStorage& operator=(const MemoryStorage&) = delete;

    [[nodiscard]] tsr_storage_vtable vtable() const {
        tsr_storage_vtable table{};
        table.struct_size = sizeof table;
        table.capabilities = traits_.capabilities;
        table.part_bytes = traits_.part_bytes;
        table.status = on_status;
        table.open = on_open;
        table.read = on_read;
        table.close = on_close;
        table.put = on_put;
        table.begin = on_begin;
        table.part = on_part;
        table.finish = on_finish;
        table.drop = on_drop;
        table.list = on_list;
        table.remove = on_remove;
        return table;
    }
    [[nodiscard]] Owned<tsr_storage> handle() {
        Owned<tsr_storage> storage;
        const tsr_storage_vtable table = vtable();
        EXPECT_OK(tsr_storage_create(&table, this, nullptr, storage.out()));
        return storage;
    }

    // From now on the call number `call`, counted from 0, returns `status` and does nothing. Negative: none fails.
    void fail_at(int64_t call, int32_t status) { fail(call, call, status); }
    // So do all calls from that one on.
    void fail_from(int64_t call, int32_t status) { fail(call, INT64_MAX, status); }
    void fail(int64_t call, int64_t last, int32_t status) {
        const std::lock_guard lock(mutex_);
        calls_ = 0;
        fail_call_ = call;
        last_fail_ = last;
        fail_status_ = status;
    }
    [[nodiscard]] int64_t calls() const {
        const std::lock_guard lock(mutex_);
        return calls_;
    }
    [[nodiscard]] std::string failed_call() const {
        const std::lock_guard lock(mutex_);
        return failed_;
    }
    [[nodiscard]] int64_t bytes_read() const { return bytes_read_; }
    [[nodiscard]] int64_t largest_part_count() const {
        const std::lock_guard lock(mutex_);
        return most_parts_;
    }
    [[nodiscard]] std::vector<std::string> keys() const {
        const std::lock_guard lock(mutex_);
        std::vector<std::string> keys;
        for (const auto& [key, object] : objects_) keys.push_back(key);
        return keys;
    }
    // Changes or removes what is there behind the library's back.
    void edit(const std::function<void(std::map<std::string, std::string>& contents)>& change) {
        const std::lock_guard lock(mutex_);
        std::map<std::string, std::string> contents;
        for (const auto& [key, object] : objects_) contents[key] = *object.data;
        change(contents);
        std::map<std::string, Stored> after;
        for (auto& [key, data] : contents) {
            after[key] = {std::make_shared<const std::string>(std::move(data)), objects_[key].modified_ms};
        }
        objects_ = std::move(after);
    }

   private:
    struct Stored {
        std::shared_ptr<const std::string> data;
        int64_t modified_ms = 0;
    };
    struct Opened {
        std::shared_ptr<const std::string> data;
    };
    struct Uploading {
        std::string key;
        std::map<int64_t, std::string> parts;
        int64_t size = 0;
        std::atomic<bool> busy{false};
    };

    static MemoryStorage& self(void* user_data) { return *static_cast<MemoryStorage*>(user_data); }
    static int32_t says(char* message, const std::string& text, int32_t status) {
        std::strncpy(message, text.c_str(), TSR_MESSAGE_BYTES - 1);
        return status;
    }
    // Counts a call; what it returns instead of doing anything, or 0.
    int32_t enter(const char* what, const std::string& key, char* message) {
        const int64_t call = calls_++;
        if (fail_call_ < 0 || call < fail_call_ || call > last_fail_) return TSR_OK;
        failed_ = std::string(what) + " of " + key;
        return says(message, "injected into " + failed_, fail_status_);
    }
    static int64_t now_ms() {
        const auto now = std::chrono::system_clock::now().time_since_epoch();
        return std::chrono::duration_cast<std::chrono::milliseconds>(now).count();
    }
    void store(const std::string& key, std::string data) {
        objects_[key] = {std::make_shared<const std::string>(std::move(data)), now_ms()};
    }

    static int32_t on_status(const char* key, int32_t* kind, int64_t* size, int64_t* modified_ms, char* message,
                             void* user_data) {
        MemoryStorage& s = self(user_data);
        const std::lock_guard lock(s.mutex_);
        if (const int32_t fault = s.enter("status", key, message)) return fault;
        if (const auto found = s.objects_.find(key); found != s.objects_.end()) {
            *kind = TSR_STORAGE_OBJECT;
            *size = static_cast<int64_t>(found->second.data->size());
            *modified_ms = found->second.modified_ms;
            return TSR_OK;
        }
        const auto below = s.objects_.lower_bound(std::string(key) + "/");
        if (below == s.objects_.end() || !below->first.starts_with(std::string(key) + "/")) return TSR_E_NOT_FOUND;
        *kind = TSR_STORAGE_DIRECTORY;
        return TSR_OK;
    }
    static int32_t on_open(const char* key, void** object, int64_t* size, char* message, void* user_data) {
        MemoryStorage& s = self(user_data);
        const std::lock_guard lock(s.mutex_);
        if (const int32_t fault = s.enter("open", key, message)) return fault;
        const auto found = s.objects_.find(key);
        if (found == s.objects_.end()) return TSR_E_NOT_FOUND;
        *size = static_cast<int64_t>(found->second.data->size());
        *object = new Opened{found->second.data};
        ++s.open_;
        return TSR_OK;
    }
    static int32_t on_read(void* object, int64_t offset, void* data, int64_t size, int64_t* got, char* message,
                           void* user_data) {
        MemoryStorage& s = self(user_data);
        {
            const std::lock_guard lock(s.mutex_);
            if (const int32_t fault = s.enter("read", "an object", message)) return fault;
        }
        const std::string& bytes = *static_cast<Opened*>(object)->data;
        *got = std::max<int64_t>(0, std::min(size, static_cast<int64_t>(bytes.size()) - offset));
        std::memcpy(data, bytes.data() + offset, static_cast<size_t>(*got));
        s.bytes_read_ += *got;
        return TSR_OK;
    }
    static void on_close(void* object, void* user_data) {
        delete static_cast<Opened*>(object);
        --self(user_data).open_;
    }
    static int32_t on_put(const char* key, const void* data, int64_t size, int32_t if_absent, char* message,
                          void* user_data) {
        MemoryStorage& s = self(user_data);
        const std::lock_guard lock(s.mutex_);
        if (const int32_t fault = s.enter("put", key, message)) return fault;
        if (if_absent != 0 && (s.traits_.capabilities & TSR_STORAGE_PUT_IF_ABSENT) == 0) {
            return says(message, "if_absent was asked for, which this storage does not have", -1);
        }
        if (if_absent != 0 && s.objects_.contains(key)) return TSR_E_INVALID_STATE;
        s.store(key, {static_cast<const char*>(data), static_cast<size_t>(size)});
        return TSR_OK;
    }
    static int32_t on_begin(const char* key, int64_t size, void** upload, char* message, void* user_data) {
        MemoryStorage& s = self(user_data);
        const std::lock_guard lock(s.mutex_);
        if (const int32_t fault = s.enter("begin", key, message)) return fault;
        auto* begun = new Uploading;
        begun->key = key;
        begun->size = size;
        *upload = begun;
        ++s.uploads_;
        return TSR_OK;
    }
    static int32_t on_part(void* upload, int64_t index, int64_t offset, const void* data, int64_t size, char* message,
                           void* user_data) {
        MemoryStorage& s = self(user_data);
        auto& to = *static_cast<Uploading*>(upload);
        const bool any_order = (s.traits_.capabilities & TSR_STORAGE_PARTS_IN_ANY_ORDER) != 0;
        if (to.busy.exchange(true) && !any_order) return says(message, "two parts at once", -2);
        const std::lock_guard lock(s.mutex_);
        to.busy = false;
        if (const int32_t fault = s.enter("part", to.key, message)) return fault;
        if (!any_order && index != static_cast<int64_t>(to.parts.size())) {
            return says(message, "part " + std::to_string(index) + " is not the next one", -3);
        }
        if (index > 0 && offset % index != 0) return says(message, "parts differ in size", -4);
        if (!to.parts.emplace(index, std::string(static_cast<const char*>(data), static_cast<size_t>(size))).second) {
            return says(message, "the same part twice", -5);
        }
        return TSR_OK;
    }
    static int32_t on_finish(void* upload, char* message, void* user_data) {
        MemoryStorage& s = self(user_data);
        auto& to = *static_cast<Uploading*>(upload);
        const std::lock_guard lock(s.mutex_);
        if (const int32_t fault = s.enter("finish", to.key, message)) return fault;
        std::string whole;
        int64_t next = 0;
        for (const auto& [index, data] : to.parts) {
            const bool last = index + 1 == static_cast<int64_t>(to.parts.size());
            if (index != next++) return says(message, "a part is missing", -6);
            if (!last && static_cast<int64_t>(data.size()) < s.traits_.part_bytes) {
                return says(message, "a part is too small", -7);
            }
            if (!last && data.size() != to.parts.begin()->second.size()) return says(message, "parts differ", -8);
            whole += data;
        }
        const auto size = static_cast<int64_t>(whole.size());
        if (size > to.size || size + 4096 <= to.size) return says(message, "the size told at first is wrong", -9);
        s.most_parts_ = std::max(s.most_parts_, next);
        s.store(to.key, std::move(whole));
        return TSR_OK;
    }
    static void on_drop(void* upload, void* user_data) {
        delete static_cast<Uploading*>(upload);
        --self(user_data).uploads_;
    }
    static int32_t on_list(const char* key, tsr_storage_found_fn found, void* found_data, char* message,
                           void* user_data) {
        MemoryStorage& s = self(user_data);
        std::set<std::string> names;
        {
            const std::lock_guard lock(s.mutex_);
            if (const int32_t fault = s.enter("list", key, message)) return fault;
            const std::string begin = *key == '\0' ? "" : std::string(key) + "/";
            for (const auto& [name, object] : s.objects_) {
                if (!name.starts_with(begin)) continue;
                names.insert(name.substr(begin.size(), name.find('/', begin.size()) - begin.size()));
            }
        }
        for (const std::string& name : names) found(name.c_str(), found_data);
        return TSR_OK;
    }
    static int32_t on_remove(const char* key, char* message, void* user_data) {
        MemoryStorage& s = self(user_data);
        const std::lock_guard lock(s.mutex_);
        if (const int32_t fault = s.enter("remove", key, message)) return fault;
        return s.objects_.erase(key) == 0 ? TSR_E_NOT_FOUND : TSR_OK;
    }

    const Traits traits_;
    mutable std::mutex mutex_;
    std::map<std::string, Stored> objects_;  // guarded by mutex_
    int64_t calls_ = 0;                      // guarded by mutex_
    int64_t fail_call_ = -1;                 // guarded by mutex_
    int64_t last_fail_ = -1;                 // guarded by mutex_
    int32_t fail_status_ = TSR_OK;           // guarded by mutex_
    std::string failed_;                     // guarded by mutex_
    int64_t most_parts_ = 0;                 // guarded by mutex_
    std::atomic<int64_t> bytes_read_{0};
    std::atomic<int> open_{0};
    std::atomic<int> uploads_{0};
};

}  // namespace api
