// Checkpoints in a storage that is not a file system of this machine: an object store or anything else that keeps named
// objects. A storage puts complete objects, writes large ones in parts that appear together, reads ranges, lists and
// removes. It needs neither renames nor locks; directories are only the parts of keys between slashes.
//
// storage_files() wraps it as a FileSystem, so that savers and checkpoints need not know about it. A put replaces the
// rename of a file system, link() is a put that fails if the object exists, and a written file appears when it is
// synced.
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
    // A large object being written. All parts but the last have the same size. Destroying it unfinished discards it.
    class Upload {
       public:
        virtual ~Upload() = default;
        // From many threads and in any order if parts_in_any_order(); otherwise one by one from index 0.
        virtual void part(int64_t index, int64_t offset, std::span<const std::byte> data) = 0;
        virtual void finish() = 0;  // the object appears, complete and durable
    };
    enum class PutMode { replace, if_absent };

    virtual ~Storage() = default;
    [[nodiscard]] virtual bool parts_in_any_order() const = 0;
    [[nodiscard]] virtual bool puts_if_absent() const = 0;  // of two concurrent puts of one key, one fails
    [[nodiscard]] virtual int64_t part_bytes() const = 0;   // the smallest part but the last
    // Whether the calling thread is in a callback of the program that serves a call of this storage.
    [[nodiscard]] virtual bool is_in_callback() const { return false; }

    // A directory is any key that other keys continue after a slash. nullopt: it does not exist.
    [[nodiscard]] virtual std::optional<FileStatus> status(const std::string& key) = 0;
    [[nodiscard]] virtual std::unique_ptr<Object> open(const std::string& key) = 0;  // nullptr: it does not exist
    // Durable and atomic. False: if_absent was given and the object exists.
    [[nodiscard]] virtual bool put(const std::string& key, std::span<const std::byte> data, PutMode mode) = 0;
    // `size` bytes will follow, or slightly fewer.
    [[nodiscard]] virtual std::unique_ptr<Upload> begin(const std::string& key, int64_t size) = 0;
    // The names directly below, each once, in any order.
    virtual void list(const std::string& key, std::vector<std::string>& names) = 0;
    virtual void remove(const std::string& key) = 0;            // no error if it does not exist
    virtual void remove_directory(const std::string& key) = 0;  // an empty one, if the storage has such
};

inline constexpr int64_t default_part_bytes = int64_t{8} << 20;
inline constexpr int64_t min_part_bytes = int64_t{64} << 10;
inline constexpr int64_t max_parts = 10000;  // S3's

// The size of all parts but the last: as small as possible, so that few bytes wait in memory.
[[nodiscard]] int64_t part_size_for(int64_t object_bytes, int64_t least);

[[nodiscard]] std::unique_ptr<FileSystem> storage_files(std::shared_ptr<Storage> storage);

}  // namespace tsr
