#include "checkpoint/io/storage.hpp"

#include <algorithm>
#include <utility>

#include "base/error.hpp"
#include "checkpoint/io/part_writer.hpp"

namespace tsr {

namespace {

// What `body` throws is kept for os_error().
template <class Body>
int64_t attempt_number(Body&& body) {
    try {
        return body();
    } catch (...) {
        return -int64_t{keep_error(current_error())};
    }
}

// "runs/a", also for "/runs//a/": keys have no empty parts.
std::string key_of(const std::string& path) {
    std::string key;
    for (size_t begin = 0; begin < path.size();) {
        const size_t end = std::min(path.find('/', begin), path.size());
        const std::string part = path.substr(begin, end - begin);
        if (!part.empty() && part != ".") key += (key.empty() ? "" : "/") + part;
        begin = end + 1;
    }
    return key;
}

class StoredFile final : public File {
   public:
    explicit StoredFile(std::unique_ptr<Storage::Object> object) : object_(std::move(object)) {}

    int64_t read(std::span<std::byte> into, int64_t offset) override {
        return attempt_number([&] { return object_->read(into, offset); });
    }
    int64_t write(std::span<const std::byte>, int64_t) override { return -EBADF; }
    int64_t size() override { return object_->size(); }
    int64_t allocate(int64_t) override { return -EBADF; }
    int64_t truncate(int64_t) override { return -EBADF; }
    int64_t sync() override { return 0; }
    void start_writeback(int64_t, int64_t) override {}
    bool is_direct() const override { return false; }
    int64_t leave_direct() override { return 0; }
    bool is_cached(int64_t) override { return true; }  // there is no other way to read it

   private:
    std::unique_ptr<Storage::Object> object_;
};

// A file being written: it appears, complete, when it is synced, and not otherwise.
class FileToStore final : public File {
   public:
    FileToStore(Storage& storage, std::string key) : parts_(storage, std::move(key)) {}

    int64_t read(std::span<std::byte>, int64_t) override { return -EBADF; }
    int64_t write(std::span<const std::byte> from, int64_t offset) override {
        return attempt_number([&] {
            parts_.write(from, offset);
            return static_cast<int64_t>(from.size());
        });
    }
    int64_t size() override { return parts_.end(); }
    int64_t allocate(int64_t size) override {
        parts_.expect(size);
        return 0;
    }
    int64_t truncate(int64_t size) override { return size == parts_.end() ? 0 : -EINVAL; }
    int64_t sync() override {
        return attempt_number([&] { return parts_.finish(parts_.end()) ? int64_t{0} : -int64_t{EINVAL}; });
    }
    void start_writeback(int64_t, int64_t) override {}
    bool is_direct() const override { return false; }
    int64_t leave_direct() override { return 0; }
    bool is_cached(int64_t) override { return false; }

   private:
    PartWriter parts_;
};

class StorageFiles final : public FileSystem {
   public:
    explicit StorageFiles(std::shared_ptr<Storage> storage) : storage_(std::move(storage)) {}

    int64_t open(const std::string& path, OpenMode mode, std::unique_ptr<File>& out) override {
        if (mode == OpenMode::create || mode == OpenMode::create_direct) {
            // The caller guarantees that it does not exist: only one process writes into a save's directory.
            out = std::make_unique<FileToStore>(*storage_, key_of(path));
            return 0;
        }
        return attempt_number([&] {
            auto object = storage_->open(key_of(path));
            if (object == nullptr) return -int64_t{ENOENT};
            out = std::make_unique<StoredFile>(std::move(object));
            return int64_t{0};
        });
    }
    // A directory exists once something is in it; before that it only can be checked to be empty.
    int64_t make_directory(const std::string& path) override {
        return attempt_number([&] { return names_below(path).empty() ? int64_t{0} : -int64_t{EEXIST}; });
    }
    int64_t rename(const std::string&, const std::string&) override { return -EOPNOTSUPP; }
    int64_t link(const std::string& from, const std::string& to) override {
        return attempt_number([&] {
            const auto object = storage_->open(key_of(from));
            if (object == nullptr) return -int64_t{ENOENT};
            const std::vector<std::byte> data = contents(*object);
            const std::string key = key_of(to);
            // Without a conditional put, two writers may both see that it does not exist. The last one wins, and the
            // other notices when it checks the object before it commits.
            if (!storage_->puts_if_absent() && storage_->status(key)) return -int64_t{EEXIST};
            const auto how = storage_->puts_if_absent() ? Storage::PutMode::if_absent : Storage::PutMode::replace;
            return storage_->put(key, data, how) ? int64_t{0} : -int64_t{EEXIST};
        });
    }
    int64_t remove_file(const std::string& path) override {
        return attempt_number([&] {
            storage_->remove(key_of(path));
            return int64_t{0};
        });
    }
    int64_t remove_directory(const std::string& path) override {
        return attempt_number([&] {
            if (!names_below(path).empty()) return -int64_t{ENOTEMPTY};
            storage_->remove_directory(key_of(path));
            return int64_t{0};
        });
    }
    int64_t sync_directory(const std::string&) override { return 0; }
    int64_t list(const std::string& path, std::vector<std::string>& names) override {
        names.clear();
        return attempt_number([&] {
            names = names_below(path);
            std::sort(names.begin(), names.end());
            return int64_t{0};
        });
    }
    int64_t status(const std::string& path, FileStatus& out) override {
        return attempt_number([&] {
            const std::string key = key_of(path);
            if (key.empty()) {
                out = {FileStatus::Kind::directory, false, 0, std::nullopt};
                return int64_t{0};
            }
            const auto found = storage_->status(key);
            if (!found) return -int64_t{ENOENT};
            out = *found;
            return int64_t{0};
        });
    }
    // The storage's clock stamps what is put.
    int64_t touch(const std::string& path) override {
        return attempt_number([&] {
            const std::string key = key_of(path);
            const auto object = storage_->open(key);
            if (object == nullptr) return -int64_t{ENOENT};
            (void)storage_->put(key, contents(*object), Storage::PutMode::replace);
            return int64_t{0};
        });
    }
    bool writes_in_order() const override { return !storage_->parts_in_any_order(); }
    bool is_in_callback() const override { return storage_->is_in_callback(); }
    int64_t put(const std::string& path, std::span<const std::byte> data) override {
        return attempt_number([&] {
            (void)storage_->put(key_of(path), data, Storage::PutMode::replace);
            return int64_t{0};
        });
    }

   private:
    std::vector<std::string> names_below(const std::string& path) {
        std::vector<std::string> names;
        storage_->list(key_of(path), names);
        return names;
    }
    // Of a lease: small.
    static std::vector<std::byte> contents(Storage::Object& object) {
        constexpr int64_t most = 65536;
        std::vector<std::byte> data(static_cast<size_t>(std::min(object.size(), most)));
        const int64_t got = object.read(data, 0);
        data.resize(static_cast<size_t>(got));
        return data;
    }

    std::shared_ptr<Storage> storage_;
};

}  // namespace

std::unique_ptr<FileSystem> storage_files(std::shared_ptr<Storage> storage) {
    return std::make_unique<StorageFiles>(std::move(storage));
}

}  // namespace tsr
