#include "store/file_store.hpp"

#include <fcntl.h>
#include <fmt/core.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <utility>

#include "base/error.hpp"
#include "base/fd.hpp"
#include "store/table.hpp"

namespace tsr {

namespace {

constexpr size_t max_name_bytes = 240;  // of a file's 255, so that there is room for what file systems add

// Text as a file name: letters, digits, '-' and '_' stay, others become %xx. Injective, and never "." or "..".
std::string escaped(std::string_view text) {
    std::string name;
    for (const char c : text) {
        const bool plain =
            (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '-' || c == '_';
        if (plain) {
            name += c;
        } else {
            name += fmt::format("%{:02x}", static_cast<unsigned char>(c));
        }
    }
    return name;
}

Fd open_directory(int at, const std::string& path, int flags = 0) {
    return Fd(::openat(at, path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC | flags));
}

class FileStore final : public Store {
   public:
    FileStore(const std::string& directory, const StoreOptions& options) : Store(options.timeout), path_(directory) {
        if (::mkdir(directory.c_str(), 0700) != 0 && errno != EEXIST) fail("cannot create", errno);
        const Fd top = open_directory(AT_FDCWD, directory);
        struct stat info{};
        if (!top.valid() || ::fstat(top.get(), &info) != 0) fail("cannot open", errno);
        if ((info.st_mode & 002) != 0 && !options.insecure) {
            throw Error(
                Code::permission,
                fmt::format("the file store directory {} is writable by every user; run chmod o-w on it, or set "
                            "TESSERA_INSECURE=1 if all users of this machine are trusted",
                            directory));
        }
        const std::string scope = fmt::format("job-{}-epoch-{}", escaped(options.job_id), options.epoch);
        if (scope.size() > max_name_bytes) {
            throw Error(Code::invalid_argument,
                        fmt::format("the job id '{}' is too long for a file store", options.job_id));
        }
        if (::mkdirat(top.get(), scope.c_str(), 0700) != 0 && errno != EEXIST)
            fail("cannot create a directory in", errno);
        directory_ = open_directory(top.get(), scope, O_NOFOLLOW);
        if (!directory_.valid()) fail("cannot open", errno);
        path_ += "/" + scope;
    }

    void set(std::string_view key, std::string_view value, Deadline deadline) override {
        check_key(key);
        check_value(key, value);
        const Fd lock = locked(deadline);
        write(key, value);
    }

    std::optional<std::string> get(std::string_view key, Deadline) override {
        check_key(key);
        return read(key);
    }

    std::string wait(std::string_view key, Deadline deadline) override {
        check_key(key);
        std::optional<std::string> value;
        const std::string what = fmt::format("the key '{}' of the file store {}", key, path_);
        wait_until([&] { return (value = read(key)).has_value(); }, deadline, what.c_str());
        return *std::move(value);
    }

    int64_t add(std::string_view key, int64_t delta, Deadline deadline) override {
        check_key(key);
        const Fd lock = locked(deadline);
        const std::optional<std::string> current = read(key);
        const int64_t sum = sum_of(key, current ? &*current : nullptr, delta);
        write(key, std::to_string(sum));
        return sum;
    }

    bool compare_set(std::string_view key, std::optional<std::string_view> expected, std::string_view desired,
                     Deadline deadline) override {
        check_key(key);
        check_value(key, desired);
        const Fd lock = locked(deadline);
        const std::optional<std::string> current = read(key);
        const bool as_expected = expected ? current == *expected : !current;
        if (as_expected) write(key, desired);
        return as_expected;
    }

    bool erase(std::string_view key, Deadline deadline) override {
        check_key(key);
        const Fd lock = locked(deadline);
        const Place place = place_of(key);
        if (::unlinkat(directory_.get(), place.path().c_str(), 0) == 0) return true;
        if (errno != ENOENT) fail("cannot delete a key in", errno);
        return false;
    }

   private:
    // Keys whose name is too long for one file are split: a directory for each full length, a file for the rest.
    struct Place {
        std::string directories;  // "" or "x.d/y.d/"
        std::string file;
        [[nodiscard]] std::string path() const { return directories + file; }
    };

    static Place place_of(std::string_view key) {
        std::string name = escaped(key);
        Place place;
        while (name.size() > max_name_bytes) {
            place.directories += name.substr(0, max_name_bytes) + ".d/";
            name.erase(0, max_name_bytes);
        }
        place.file = name + ".v";
        return place;
    }

    [[noreturn]] void fail(const char* doing, int failure) const {
        throw os_error(fmt::format("{} the file store {}", doing, path_), failure);
    }

    // A lock on the open file description: it works between threads and between processes, and ends with its holder.
    Fd locked(Deadline deadline) {
        Fd file(::openat(directory_.get(), ".lock", O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600));
        if (!file.valid()) fail("cannot open the lock of", errno);
        const std::string what = fmt::format("the lock of the file store {}", path_);
        wait_until(
            [&] {
                if (::flock(file.get(), LOCK_EX | LOCK_NB) == 0) return true;
                if (errno != EWOULDBLOCK && errno != EINTR) fail("cannot lock", errno);
                return false;
            },
            deadline, what.c_str());
        return file;
    }

    std::optional<std::string> read(std::string_view key) {
        const Place place = place_of(key);
        const Fd file(::openat(directory_.get(), place.path().c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW));
        if (!file.valid()) {
            if (errno == ENOENT) return std::nullopt;
            fail("cannot read a key of", errno);
        }
        struct stat info{};
        if (::fstat(file.get(), &info) != 0) fail("cannot read a key of", errno);
        if (!S_ISREG(info.st_mode) || static_cast<uint64_t>(info.st_size) > max_value_bytes) {
            throw Error(Code::corrupt, fmt::format("the file store {} holds an invalid file for key '{}'", path_, key));
        }
        std::string value(static_cast<size_t>(info.st_size), '\0');
        size_t done = 0;
        while (done < value.size()) {
            const ssize_t got = ::read(file.get(), value.data() + done, value.size() - done);
            if (got < 0 && errno == EINTR) continue;
            if (got < 0) fail("cannot read a key of", errno);
            if (got == 0) throw Error(Code::corrupt, fmt::format("a file of the file store {} is truncated", path_));
            done += static_cast<size_t>(got);
        }
        return value;
    }

    // Call under the lock: there is only one draft name, and a draft left by a killed writer is simply overwritten.
    void write(std::string_view key, std::string_view value) {
        const Place place = place_of(key);
        make_directories(place.directories);
        const Fd draft(
            ::openat(directory_.get(), ".draft", O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW, 0600));
        if (!draft.valid()) fail("cannot write a key of", errno);
        while (!value.empty()) {
            const ssize_t written = ::write(draft.get(), value.data(), value.size());
            if (written < 0 && errno == EINTR) continue;
            if (written < 0) fail("cannot write a key of", errno);
            value.remove_prefix(static_cast<size_t>(written));
        }
        if (::renameat(directory_.get(), ".draft", directory_.get(), place.path().c_str()) != 0) {
            fail("cannot write a key of", errno);
        }
    }

    void make_directories(const std::string& path) {
        for (size_t slash = path.find('/'); slash != std::string::npos; slash = path.find('/', slash + 1)) {
            if (::mkdirat(directory_.get(), path.substr(0, slash).c_str(), 0700) != 0 && errno != EEXIST) {
                fail("cannot create a directory in", errno);
            }
        }
    }

    std::string path_;
    Fd directory_;
};

}  // namespace

std::shared_ptr<Store> open_file_store(const std::string& directory, const StoreOptions& options) {
    return std::make_shared<FileStore>(directory, options);
}

}  // namespace tsr
