// tessera/storage.h: the program's callbacks as a tsr::Storage.
#include "tessera/storage.h"

#include "callback.hpp"
#include "checkpoint/io/storage.hpp"
#include "handles.hpp"
#include "tessera/error.h"

namespace tsr::capi {

namespace {

constexpr int32_t known_capabilities = TSR_STORAGE_PARTS_IN_ANY_ORDER | TSR_STORAGE_PUT_IF_ABSENT;

struct Callbacks;

void check(const Reply& reply, int32_t returned, const char* what, const std::string& key) {
    reply.check(returned, [&] { return fmt::format("the storage's {} of '{}' failed", what, key); });
}

// Marks the calling thread as inside a callback while it lives.
class InCallback {
   public:
    explicit InCallback(const Callbacks& callbacks) : callbacks_(&callbacks) { innermost_ = this; }
    ~InCallback() { innermost_ = outer_; }
    InCallback(const InCallback&) = delete;
    InCallback& operator=(const InCallback&) = delete;

    [[nodiscard]] static bool of(const Callbacks& callbacks) {
        const InCallback* call = innermost_;
        while (call != nullptr && call->callbacks_ != &callbacks) call = call->outer_;
        return call != nullptr;
    }

   private:
    static thread_local const InCallback* innermost_;
    const Callbacks* callbacks_;
    const InCallback* outer_ = innermost_;
};
thread_local const InCallback* InCallback::innermost_ = nullptr;

// The callbacks and the program's data, which is destroyed when nothing uses it any more.
struct Callbacks {
    tsr_storage_vtable table{};
    void* user_data = nullptr;
    tsr_destroy_fn destroy = nullptr;

    Callbacks() = default;
    Callbacks(const Callbacks&) = delete;
    Callbacks& operator=(const Callbacks&) = delete;
    ~Callbacks() {
        if (destroy != nullptr) destroy(user_data);
    }

    template <class Callback, class... Arguments>
    auto call(Callback callback, Arguments... arguments) const {
        const InCallback here(*this);
        return callback(arguments..., user_data);
    }
};
using CallbacksPtr = std::shared_ptr<const Callbacks>;

class VtableObject final : public Storage::Object {
   public:
    VtableObject(CallbacksPtr callbacks, std::string key, void* object, int64_t size)
        : callbacks_(std::move(callbacks)), key_(std::move(key)), object_(object), size_(size) {}
    ~VtableObject() override { callbacks_->call(callbacks_->table.close, object_); }
    VtableObject(const VtableObject&) = delete;
    VtableObject& operator=(const VtableObject&) = delete;

    int64_t size() const override { return size_; }
    int64_t read(std::span<std::byte> into, int64_t offset) override {
        Reply reply;
        int64_t got = 0;
        const auto size = static_cast<int64_t>(into.size());
        check(reply,
              callbacks_->call(callbacks_->table.read, object_, offset, into.data(), size, &got, reply.message()),
              "read", key_);
        if (got < 0 || got > size) {
            throw Error(Code::io, fmt::format("the storage read {} of {} bytes of '{}'", got, size, key_));
        }
        return got;
    }

   private:
    CallbacksPtr callbacks_;
    std::string key_;
    void* object_;
    int64_t size_;
};

class VtableUpload final : public Storage::Upload {
   public:
    VtableUpload(CallbacksPtr callbacks, std::string key, void* upload)
        : callbacks_(std::move(callbacks)), key_(std::move(key)), upload_(upload) {}
    ~VtableUpload() override { callbacks_->call(callbacks_->table.drop, upload_); }
    VtableUpload(const VtableUpload&) = delete;
    VtableUpload& operator=(const VtableUpload&) = delete;

    void part(int64_t index, int64_t offset, std::span<const std::byte> data) override {
        Reply reply;
        check(reply,
              callbacks_->call(callbacks_->table.part, upload_, index, offset, data.data(),
                               static_cast<int64_t>(data.size()), reply.message()),
              "part", key_);
    }
    void finish() override {
        Reply reply;
        check(reply, callbacks_->call(callbacks_->table.finish, upload_, reply.message()), "finish", key_);
    }

   private:
    CallbacksPtr callbacks_;
    std::string key_;
    void* upload_;
};

class VtableStorage final : public Storage {
   public:
    explicit VtableStorage(CallbacksPtr callbacks) : callbacks_(std::move(callbacks)) {}

    bool parts_in_any_order() const override { return can(TSR_STORAGE_PARTS_IN_ANY_ORDER); }
    bool puts_if_absent() const override { return can(TSR_STORAGE_PUT_IF_ABSENT); }
    bool is_in_callback() const override { return InCallback::of(*callbacks_); }
    int64_t part_bytes() const override { return table().part_bytes != 0 ? table().part_bytes : default_part_bytes; }

    std::optional<FileStatus> status(const std::string& key) override {
        Reply reply;
        int32_t kind = 0;
        int64_t size = 0;
        int64_t modified_ms = 0;
        const int32_t returned = call(table().status, key.c_str(), &kind, &size, &modified_ms, reply.message());
        if (returned == TSR_E_NOT_FOUND) return std::nullopt;
        check(reply, returned, "status", key);
        if (kind != TSR_STORAGE_OBJECT && kind != TSR_STORAGE_DIRECTORY) {
            throw Error(Code::io, fmt::format("the storage returned for '{}' the unknown kind {}", key, kind));
        }
        check_size(size, key);
        constexpr int64_t most_ms = INT64_MAX / 1'000'000 / 2;
        if (modified_ms < -most_ms || modified_ms > most_ms) {
            throw Error(Code::io,
                        fmt::format("the storage returned for '{}' the modification time {} ms, which is out of range",
                                    key, modified_ms));
        }
        FileStatus found;
        found.kind = kind == TSR_STORAGE_OBJECT ? FileStatus::Kind::file : FileStatus::Kind::directory;
        found.size = size;
        if (modified_ms != 0) found.modified_ns = modified_ms * 1'000'000;
        return found;
    }
    std::unique_ptr<Object> open(const std::string& key) override {
        Reply reply;
        void* object = nullptr;
        int64_t size = 0;
        const int32_t returned = call(table().open, key.c_str(), &object, &size, reply.message());
        if (returned == TSR_E_NOT_FOUND) return nullptr;
        check(reply, returned, "open", key);
        auto opened = std::make_unique<VtableObject>(callbacks_, key, object, size);  // closes it even after an error
        check_size(size, key);
        return opened;
    }
    bool put(const std::string& key, std::span<const std::byte> bytes, PutMode mode) override {
        Reply reply;
        const bool if_absent = mode == PutMode::if_absent;
        const int32_t returned = call(table().put, key.c_str(), bytes.data(), static_cast<int64_t>(bytes.size()),
                                      if_absent ? 1 : 0, reply.message());
        if (if_absent && returned == TSR_E_INVALID_STATE) return false;
        check(reply, returned, "put", key);
        return true;
    }
    std::unique_ptr<Upload> begin(const std::string& key, int64_t size) override {
        Reply reply;
        void* upload = nullptr;
        check(reply, call(table().begin, key.c_str(), size, &upload, reply.message()), "begin", key);
        return std::make_unique<VtableUpload>(callbacks_, key, upload);
    }
    void list(const std::string& key, std::vector<std::string>& names) override {
        Reply reply;
        check(reply, call(table().list, key.c_str(), add_name, &names, reply.message()), "list", key);
    }
    void remove(const std::string& key) override {
        Reply reply;
        const int32_t returned = call(table().remove, key.c_str(), reply.message());
        if (returned != TSR_E_NOT_FOUND) check(reply, returned, "remove", key);
    }
    void remove_directory(const std::string& key) override {
        if (table().remove_directory == nullptr) return;
        Reply reply;
        const int32_t returned = call(table().remove_directory, key.c_str(), reply.message());
        if (returned != TSR_E_NOT_FOUND) check(reply, returned, "remove_directory", key);
    }

   private:
    // Called by the program, so it must not throw.
    static void add_name(const char* name, void* names) noexcept {
        if (name != nullptr) static_cast<std::vector<std::string>*>(names)->emplace_back(name);
    }
    static void check_size(int64_t size, const std::string& key) {
        if (size >= 0) return;
        throw Error(Code::io, fmt::format("the storage returned for '{}' the negative size {}", key, size));
    }
    [[nodiscard]] const tsr_storage_vtable& table() const { return callbacks_->table; }
    template <class Callback, class... Arguments>
    int32_t call(Callback callback, Arguments... arguments) const {
        return callbacks_->call(callback, arguments...);
    }
    [[nodiscard]] bool can(int32_t capability) const { return (table().capabilities & capability) != 0; }

    CallbacksPtr callbacks_;
};

tsr_storage_vtable vtable_in(const tsr_storage_vtable* given) {
    (void)required(given, "vtable");
    const auto table = options_in(given, tsr_storage_vtable{}, "vtable");
    const auto need = [](bool there, const char* name) {
        if (!there) throw Error(Code::invalid_argument, fmt::format("vtable.{} is NULL", name));
    };
    need(table.status != nullptr, "status");
    need(table.open != nullptr, "open");
    need(table.read != nullptr, "read");
    need(table.close != nullptr, "close");
    need(table.put != nullptr, "put");
    need(table.begin != nullptr, "begin");
    need(table.part != nullptr, "part");
    need(table.finish != nullptr, "finish");
    need(table.drop != nullptr, "drop");
    need(table.list != nullptr, "list");
    need(table.remove != nullptr, "remove");
    if ((table.capabilities & ~known_capabilities) != 0 || table.reserved != 0) {
        throw Error(Code::unsupported,
                    fmt::format("vtable.capabilities is {}; this library knows {}, and reserved must be 0",
                                table.capabilities, known_capabilities));
    }
    if (table.part_bytes != 0 && table.part_bytes < min_part_bytes) {
        throw Error(Code::invalid_argument, fmt::format("vtable.part_bytes is {}; it must be 0 ({}) or at least {}",
                                                        table.part_bytes, default_part_bytes, min_part_bytes));
    }
    return table;
}

}  // namespace

extern "C" {

tsr_status tsr_storage_create(const tsr_storage_vtable* vtable, void* user_data, tsr_destroy_fn destroy_data,
                              tsr_storage** out) {
    return guard([&] {
        create(out, [&] {
            auto callbacks = std::make_shared<Callbacks>();
            callbacks->table = vtable_in(vtable);
            auto storage = std::make_shared<VtableStorage>(callbacks);
            callbacks->user_data = user_data;
            callbacks->destroy = destroy_data;  // nothing can fail from here on
            return storage;
        });
    });
}

void tsr_storage_destroy(tsr_storage* storage) { destroy(storage); }

}  // extern "C"

}  // namespace tsr::capi
