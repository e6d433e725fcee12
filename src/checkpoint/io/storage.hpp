// Checkpoints in a storage that is no file system of this machine: an object store, or whatever else can keep named
// objects. A storage need do little: put an object whole, write a large one in parts that appear together, read ranges,
// list, remove. It renames nothing, locks nothing, knows no directories but the parts of keys between slashes.
//
// storage_files() makes a FileSystem of it, so that savers and checkpoints need not know. What a file system does by a
// rename is one put there, and link() is a put of what must not exist; a written file appears when it is synced.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "checkpoint/io/file_system.hpp"

namespace tsr {

// Any method may be called from many threads at once. Each throws tsr::Error.
class Storage {
   public:
    // An object opened for reading; many threads read it at once.
    class Object {
       public:
        virtual ~Object() = default;
        [[nodiscard]] virtual int64_t size() const = 0;
        // Fewer bytes than asked for only at the object's end.
        [[nodiscard]] virtual int64_t read(std::span<std::byte> into, int64_t offset) = 0;
    };
    // A large object while it is written. All parts but the last have one size. What was not finished goes with this.
    class Upload {
       public:
        virtual ~Upload() = default;
        // From many threads and in any order if the storage has parts_in_any_order, else one by one from index 0.
        virtual void part(int64_t index, int64_t offset, std::span<const std::byte> data) = 0;
        virtual void finish() = 0;  // the object is there, whole and durable
    };
    enum class PutMode { replace, if_absent };

    virtual ~Storage() = default;
    [[nodiscard]] virtual bool parts_in_any_order() const = 0;
    [[nodiscard]] virtual bool puts_if_absent() const = 0;  // of two that put the same key at once, one is told so
    [[nodiscard]] virtual int64_t part_bytes() const = 0;   // the smallest part but the last
    // Whether the calling thread is in code of the program's that serves a call of this.
    [[nodiscard]] virtual bool is_in_callback() const { return false; }

    // A directory is any key that others continue after a slash. None: there is nothing.
    [[nodiscard]] virtual std::optional<FileStatus> status(const std::string& key) = 0;
    [[nodiscard]] virtual std::unique_ptr<Object> open(const std::string& key) = 0;  // nullptr: there is none
    // Durable, and either the old or the new. False: if_absent, and there is one.
    [[nodiscard]] virtual bool put(const std::string& key, std::span<const std::byte> data, PutMode mode) = 0;
    // `size` bytes are about to come, or a few less.
    [[nodiscard]] virtual std::unique_ptr<Upload> begin(const std::string& key, int64_t size) = 0;
    // The names directly below, each once, in any order.
    virtual void list(const std::string& key, std::vector<std::string>& names) = 0;
    virtual void remove(const std::string& key) = 0;            // one that is not there too
    virtual void remove_directory(const std::string& key) = 0;  // an empty one, where there are such
};

inline constexpr int64_t default_part_bytes = int64_t{8} << 20;
inline constexpr int64_t min_part_bytes = int64_t{64} << 10;
inline constexpr int64_t max_parts = 10000;  // S3's

// The size of all parts but the last: as small as it may be, so that few bytes wait in memory.
[[nodiscard]] int64_t part_size_for(int64_t object_bytes, int64_t least);

[[nodiscard]] std::unique_ptr<FileSystem> storage_files(std::shared_ptr<Storage> storage);

}  // namespace tsr
