// A file system that fails on purpose: it counts calls, and at the chosen one does what the test asks. Wraps the real
// one, so that what is on disk afterwards is what a real failure would leave.
#pragma once

#include <atomic>
#include <cerrno>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "checkpoint/io/file_system.hpp"

namespace tsr::testing {

enum class Fault {
    none,
    error,    // the chosen call fails with `error_number`, once
    crash,    // the chosen call and all after it do nothing and fail: the process is as good as dead
    shorten,  // every transfer moves at most a part, and every other call is interrupted once
};

class FaultyFiles final : public FileSystem {
   public:
    explicit FaultyFiles(Fault fault = Fault::none, int64_t at = -1, int error_number = EIO)
        : fault_(fault), at_(at), error_number_(error_number) {}

    [[nodiscard]] int64_t calls() const { return calls_; }
    [[nodiscard]] const std::string& failed_call() const { return failed_call_; }
    // Called in place of nothing at all: lets a test do something in the middle of a save.
    std::function<void(int64_t call, const std::string& name)> on_call;

    int64_t open(const std::string& path, OpenMode mode, std::unique_ptr<File>& out) override {
        const bool reads = mode == OpenMode::read || mode == OpenMode::read_direct;
        if (const int64_t error = next(reads ? "open " + path : "create " + path)) return error;
        std::unique_ptr<File> file;
        const int64_t result = posix_file_system().open(path, mode, file);
        if (result == 0) out = std::make_unique<FaultyFile>(*this, std::move(file), path);
        return result;
    }
    int64_t make_directory(const std::string& path) override {
        const int64_t error = next("mkdir " + path);
        return error != 0 ? error : posix_file_system().make_directory(path);
    }
    int64_t rename(const std::string& from, const std::string& to) override {
        const int64_t error = next("rename " + to);
        return error != 0 ? error : posix_file_system().rename(from, to);
    }
    int64_t link(const std::string& from, const std::string& to) override {
        const int64_t error = next("link " + to);
        return error != 0 ? error : posix_file_system().link(from, to);
    }
    int64_t remove_file(const std::string& path) override {
        const int64_t error = next("unlink " + path);
        return error != 0 ? error : posix_file_system().remove_file(path);
    }
    int64_t remove_directory(const std::string& path) override {
        const int64_t error = next("rmdir " + path);
        return error != 0 ? error : posix_file_system().remove_directory(path);
    }
    int64_t sync_directory(const std::string& path) override {
        const int64_t error = next("fsync directory " + path);
        return error != 0 ? error : posix_file_system().sync_directory(path);
    }
    int64_t list(const std::string& path, std::vector<std::string>& names) override {
        const int64_t error = next("list " + path);
        return error != 0 ? error : posix_file_system().list(path, names);
    }
    int64_t status(const std::string& path, FileStatus& out) override {
        const int64_t error = next("stat " + path);
        return error != 0 ? error : posix_file_system().status(path, out);
    }
    int64_t touch(const std::string& path) override { return posix_file_system().touch(path); }

   private:
    class FaultyFile final : public File {
       public:
        FaultyFile(FaultyFiles& owner, std::unique_ptr<File> file, std::string path)
            : owner_(owner), file_(std::move(file)), path_(std::move(path)) {}
        int64_t read(std::span<std::byte> into, int64_t offset) override {
            if (const int64_t error = owner_.next("read " + path_)) return error;
            return file_->read(into.first(owner_.part(into.size())), offset);
        }
        int64_t write(std::span<const std::byte> from, int64_t offset) override {
            if (const int64_t error = owner_.next("write " + path_)) {
                // A full disk takes a part before it refuses.
                if (owner_.fault_ == Fault::error && from.size() > 4096) (void)file_->write(from.first(4096), offset);
                return error;
            }
            return file_->write(from.first(owner_.part(from.size())), offset);
        }
        int64_t size() override {
            const int64_t error = owner_.next("fstat " + path_);
            return error != 0 ? error : file_->size();
        }
        int64_t allocate(int64_t size) override {
            const int64_t error = owner_.next("fallocate " + path_);
            return error != 0 ? error : file_->allocate(size);
        }
        int64_t truncate(int64_t size) override {
            const int64_t error = owner_.next("ftruncate " + path_);
            return error != 0 ? error : file_->truncate(size);
        }
        int64_t sync() override {
            const int64_t error = owner_.next("fsync " + path_);
            return error != 0 ? error : file_->sync();
        }
        void start_writeback(int64_t offset, int64_t size) override { file_->start_writeback(offset, size); }
        bool is_direct() const override { return file_->is_direct(); }
        int64_t leave_direct() override { return file_->leave_direct(); }
        bool is_cached(int64_t offset) override { return file_->is_cached(offset); }

       private:
        FaultyFiles& owner_;
        std::unique_ptr<File> file_;
        std::string path_;
    };

    int64_t next(const std::string& name) {
        const int64_t call = calls_.fetch_add(1);
        if (on_call) on_call(call, name);
        if (fault_ == Fault::shorten)
            return call % 2 == 0 && (name.starts_with("write") || name.starts_with("read")) ? -EINTR : 0;
        if (fault_ == Fault::crash && call >= at_) return -EIO;
        if (fault_ == Fault::error && call == at_) {
            failed_call_ = name;
            return -error_number_;
        }
        return 0;
    }
    // A third, off every alignment.
    size_t part(size_t size) const { return fault_ == Fault::shorten && size > 3 ? size / 3 + 1 : size; }

    Fault fault_;
    int64_t at_;
    int error_number_;
    std::atomic<int64_t> calls_{0};
    std::string failed_call_;
};

}  // namespace tsr::testing
