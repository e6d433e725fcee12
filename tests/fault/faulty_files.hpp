// A file system that fails on purpose: before each call it asks what shall become of it. Wraps a sound one (the real one,
// or one in memory), so that what is there afterwards is what a real failure would leave.
#pragma once

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint/io/file_system.hpp"

namespace tsr::testing {

enum class Fault {
    none,
    error,    // the chosen call fails with `error_number`, once
    crash,    // the chosen call and all after it do nothing and fail: the process is as good as dead
    shorten,  // every transfer moves at most a part, and every other call is interrupted once
};

// What becomes of a call: a negative errno, or 0 to let it happen. A write that fails, and any transfer that does not,
// moves at most `bytes` first. An fsync that is left out says that it went well.
struct Verdict {
    int64_t error = 0;
    size_t bytes = SIZE_MAX;
    bool left_out = false;
};

class FaultyFiles final : public FileSystem {
   public:
    struct Call {
        int64_t number;           // from 0
        std::string name;         // "fsync /root/.owner"
        size_t bytes;             // that it would transfer; 0: it is no transfer
        bool direct;              // past the page cache
        const std::byte* memory;  // of a transfer
    };
    using Judge = std::function<Verdict(const Call& call)>;

    FaultyFiles(FileSystem& files, Judge judge) : files_(files), judge_(std::move(judge)) {}
    explicit FaultyFiles(Fault fault = Fault::none, int64_t at = -1, int error_number = EIO)
        : FaultyFiles(posix_file_system(), [this, fault, at, error_number](const Call& call) -> Verdict {
              if (fault == Fault::shorten && call.bytes > 0) {
                  if (call.number % 2 == 0) return {-EINTR, 0};
                  return {0, call.bytes / 3 + 1};  // off every alignment
              }
              if (fault == Fault::crash && call.number >= at) return {-EIO, 0};
              if (fault != Fault::error || call.number != at) return {};
              failed_call_ = call.name;
              return {-error_number,
                      call.bytes > 4096 ? size_t{4096} : 0};  // a full disk takes a part before it refuses
          }) {}

    [[nodiscard]] int64_t calls() const { return calls_; }
    [[nodiscard]] const std::string& failed_call() const { return failed_call_; }
    // Bytes of which the writing back was begun.
    [[nodiscard]] int64_t written_back() const { return written_back_; }
    // How many files were open at once.
    [[nodiscard]] int64_t most_open() const { return most_open_; }
    // Called in place of nothing at all: lets a test do something in the middle of a save.
    std::function<void(int64_t call, const std::string& name)> on_call;

    int64_t open(const std::string& path, OpenMode mode, std::unique_ptr<File>& out) override {
        const bool reads = mode != OpenMode::create && mode != OpenMode::create_direct;
        if (const int64_t error = next((reads ? "open " : "create ") + path).error) return error;
        std::unique_ptr<File> file;
        const int64_t result = files_.open(path, mode, file);
        if (result == 0) out = std::make_unique<FaultyFile>(owner_ != nullptr ? *owner_ : *this, std::move(file), path);
        return result;
    }
    int64_t make_directory(const std::string& path) override {
        const int64_t error = next("mkdir " + path).error;
        return error != 0 ? error : files_.make_directory(path);
    }
    int64_t rename(const std::string& from, const std::string& to) override {
        const int64_t error = next("rename " + to).error;
        return error != 0 ? error : files_.rename(from, to);
    }
    int64_t link(const std::string& from, const std::string& to) override {
        const int64_t error = next("link " + to).error;
        return error != 0 ? error : files_.link(from, to);
    }
    int64_t remove_file(const std::string& path) override {
        const int64_t error = next("unlink " + path).error;
        return error != 0 ? error : files_.remove_file(path);
    }
    int64_t remove_directory(const std::string& path) override {
        const int64_t error = next("rmdir " + path).error;
        return error != 0 ? error : files_.remove_directory(path);
    }
    int64_t sync_directory(const std::string& path) override {
        const Verdict verdict = next("fsync directory " + path);
        return verdict.error != 0 || verdict.left_out ? verdict.error : files_.sync_directory(path);
    }
    int64_t list(const std::string& path, std::vector<std::string>& names) override {
        const int64_t error = next("list " + path).error;
        return error != 0 ? error : files_.list(path, names);
    }
    int64_t status(const std::string& path, FileStatus& out) override {
        const int64_t error = next("stat " + path).error;
        return error != 0 ? error : files_.status(path, out);
    }
    int64_t hold(const std::string& path, std::unique_ptr<FileSystem>& out) override {
        if (const int64_t error = next("hold " + path).error) return error;
        std::unique_ptr<FileSystem> files;
        const int64_t result = files_.hold(path, files);
        if (files) out.reset(new FaultyFiles(*this, std::move(files)));
        return result;
    }
    // Not asked about: it comes from a thread that renews a lease by the clock.
    int64_t touch(const std::string& path) override { return files_.touch(path); }

   private:
    // What is held asks as `owner` does, and counts there.
    FaultyFiles(FaultyFiles& owner, std::unique_ptr<FileSystem> files)
        : own_files_(std::move(files)), files_(*own_files_), owner_(owner.owner_ != nullptr ? owner.owner_ : &owner) {}

    class FaultyFile final : public File {
       public:
        FaultyFile(FaultyFiles& owner, std::unique_ptr<File> file, std::string path)
            : owner_(owner), file_(std::move(file)), path_(std::move(path)) {
            const int64_t open = owner_.open_.fetch_add(1) + 1;
            int64_t most = owner_.most_open_;
            while (most < open && !owner_.most_open_.compare_exchange_weak(most, open)) {
            }
        }
        ~FaultyFile() override { owner_.open_.fetch_sub(1); }
        FaultyFile(const FaultyFile&) = delete;
        FaultyFile& operator=(const FaultyFile&) = delete;
        int64_t read(std::span<std::byte> into, int64_t offset) override {
            const Verdict verdict = owner_.next("read " + path_, into.size(), file_->is_direct(), into.data());
            if (verdict.error != 0) return verdict.error;
            return file_->read(into.first(std::min(into.size(), verdict.bytes)), offset);
        }
        int64_t write(std::span<const std::byte> from, int64_t offset) override {
            const Verdict verdict = owner_.next("write " + path_, from.size(), file_->is_direct(), from.data());
            const auto part = from.first(std::min(from.size(), verdict.bytes));
            if (verdict.error == 0) return file_->write(part, offset);
            if (verdict.bytes != SIZE_MAX && !part.empty()) (void)file_->write(part, offset);
            return verdict.error;
        }
        int64_t size() override {
            const int64_t error = owner_.next("fstat " + path_).error;
            return error != 0 ? error : file_->size();
        }
        int64_t allocate(int64_t size) override {
            const int64_t error = owner_.next("fallocate " + path_).error;
            return error != 0 ? error : file_->allocate(size);
        }
        int64_t truncate(int64_t size) override {
            const int64_t error = owner_.next("ftruncate " + path_).error;
            return error != 0 ? error : file_->truncate(size);
        }
        int64_t sync() override {
            const Verdict verdict = owner_.next("fsync " + path_);
            return verdict.error != 0 || verdict.left_out ? verdict.error : file_->sync();
        }
        void start_writeback(int64_t offset, int64_t size) override {
            owner_.written_back_ += size;
            file_->start_writeback(offset, size);
        }
        bool is_direct() const override { return file_->is_direct(); }
        int64_t leave_direct() override { return file_->leave_direct(); }
        bool is_cached(int64_t offset) override { return file_->is_cached(offset); }
        int64_t lock(FileLock kind) override { return file_->lock(kind); }

       private:
        FaultyFiles& owner_;
        std::unique_ptr<File> file_;
        std::string path_;
    };

    Verdict next(std::string name, size_t bytes = 0, bool direct = false, const std::byte* memory = nullptr) {
        if (owner_ != nullptr) return owner_->next(std::move(name), bytes, direct, memory);
        const Call call{calls_.fetch_add(1), std::move(name), bytes, direct, memory};
        if (on_call) on_call(call.number, call.name);
        return judge_(call);
    }

    std::unique_ptr<FileSystem> own_files_;
    FileSystem& files_;
    FaultyFiles* owner_ = nullptr;
    Judge judge_;
    std::atomic<int64_t> calls_{0};
    std::atomic<int64_t> written_back_{0};
    std::atomic<int64_t> open_{0};
    std::atomic<int64_t> most_open_{0};
    std::string failed_call_;
};

}  // namespace tsr::testing
