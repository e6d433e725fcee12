// A file system in memory that knows what a disk would have kept. Every file has what programs see now, and what was
// fsynced with the changes since; a directory likewise. lose_power() forgets any part of what was not fsynced:
//   - data: each 4 KiB page is on disk as any of its states since the fsync; the page that was being written may be torn
//     at sectors of 512 bytes; a page that never reached the disk reads as zeros or as old rubbish;
//   - size: any that the file had since the fsync;
//   - names: each creation, link, rename (whole, never half) and removal since the directory's fsync, in any
//     combination, or in the order of a journal. fsync of a file says nothing of its name.
// Without lose_power() it is what a process crash leaves: everything written so far.
// A Disk is a value: copying one takes a snapshot. MemoryFiles is the FileSystem over it, for any number of threads.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "checkpoint/io/file_system.hpp"

namespace tsr::testing {

class Disk {
   public:
    Disk() { nodes_[root].is_directory = true; }

    int64_t find(std::string_view path, int& out) const {
        int node = root;
        while (!path.empty()) {
            const size_t begin = path.find_first_not_of('/');
            if (begin == std::string_view::npos) break;
            path.remove_prefix(begin);
            const size_t end = std::min(path.find('/'), path.size());
            const Node& directory = nodes_.at(node);
            if (!directory.is_directory) return -ENOTDIR;
            const auto entry = directory.now.find(path.substr(0, end));
            if (entry == directory.now.end()) return -ENOENT;
            node = entry->second;
            path.remove_prefix(end);
        }
        out = node;
        return 0;
    }
    int64_t open(const std::string& path, bool creates, int& out) {
        const int64_t found = find(path, out);
        if (!creates) return found != 0 ? found : nodes_.at(out).is_directory ? -EISDIR : 0;
        if (found == 0) return -EEXIST;
        return add(path, false, out);
    }
    int64_t make_directory(const std::string& path) {
        int node = 0;
        return find(path, node) == 0 ? -EEXIST : add(path, true, node);
    }
    int64_t rename(const std::string& from, const std::string& to) {
        int node = 0;
        if (const int64_t error = find(from, node)) return error;
        int directory = 0;
        int other = 0;
        if (const int64_t error = find(parent_of(to), directory)) return error;
        if (const int64_t error = find(parent_of(from), other)) return error;
        if (directory != other) return -EXDEV;  // nobody here needs it
        change(directory, {{std::string(name_in_path(from)), none}, {std::string(name_in_path(to)), node}});
        return 0;
    }
    int64_t link(const std::string& from, const std::string& to) {
        int node = 0;
        int directory = 0;
        if (const int64_t error = find(from, node)) return error;
        if (find(to, directory) == 0) return -EEXIST;
        if (const int64_t error = find(parent_of(to), directory)) return error;
        change(directory, {{std::string(name_in_path(to)), node}});
        return 0;
    }
    int64_t remove(const std::string& path, bool directory) {
        int node = 0;
        int parent = 0;
        if (const int64_t error = find(path, node)) return error;
        const Node& found = nodes_.at(node);
        if (found.is_directory != directory) return directory ? -ENOTDIR : -EISDIR;
        if (directory && !found.now.empty()) return -ENOTEMPTY;
        if (const int64_t error = find(parent_of(path), parent)) return error;
        change(parent, {{std::string(name_in_path(path)), none}});
        return 0;
    }
    int64_t sync_directory(const std::string& path) {
        int node = 0;
        if (const int64_t error = find(path, node)) return error;
        Node& directory = nodes_.at(node);
        if (!directory.is_directory) return -ENOTDIR;
        directory.durable = directory.now;
        std::erase_if(unsynced_names_, [&](const NameChange& one) { return one.directory == node; });
        return 0;
    }
    int64_t list(const std::string& path, std::vector<std::string>& names) const {
        int node = 0;
        names.clear();
        if (const int64_t error = find(path, node)) return error;
        if (!nodes_.at(node).is_directory) return -ENOTDIR;
        for (const auto& [name, target] : nodes_.at(node).now) names.push_back(name);
        return 0;
    }
    int64_t status(const std::string& path, FileStatus& out) const {
        int node = 0;
        if (const int64_t error = find(path, node)) return error;
        const Node& found = nodes_.at(node);
        out.kind = found.is_directory ? FileStatus::Kind::directory : FileStatus::Kind::file;
        out.size = static_cast<int64_t>(found.data->size());
        out.modified_ns = found.modified_ns;
        return 0;
    }
    int64_t touch(const std::string& path) {
        int node = 0;
        if (const int64_t error = find(path, node)) return error;
        nodes_.at(node).modified_ns = now();
        return 0;
    }

    [[nodiscard]] std::string read(const std::string& path) const {
        int node = 0;
        if (find(path, node) != 0) throw std::runtime_error("there is no " + path);
        return data(node);
    }
    // Makes or replaces a file, as if it had always been so.
    void put(const std::string& path, std::string text) {
        int node = 0;
        if (find(path, node) != 0 && add(path, false, node) != 0) throw std::runtime_error("cannot make " + path);
        settle(nodes_.at(node), std::move(text));
    }

    const std::string& data(int node) const { return *nodes_.at(node).data; }
    void write(int node, int64_t offset, std::string_view bytes) {
        Node& file = nodes_.at(node);
        std::string data = *file.data;
        data.resize(std::max(data.size(), static_cast<size_t>(offset) + bytes.size()), '\0');
        data.replace(static_cast<size_t>(offset), bytes.size(), bytes);
        changed(file, std::move(data), offset, std::string(bytes));
    }
    void resize(int node, int64_t size) {
        Node& file = nodes_.at(node);
        std::string data = *file.data;
        data.resize(static_cast<size_t>(size), '\0');
        changed(file, std::move(data), 0, "");
    }
    void sync(int node) {
        Node& file = nodes_.at(node);
        file.durable_data = file.data;
        file.unsynced.clear();
    }

    // Calls visit(path, text) for each file; what it returns differently is there from now on, as if always.
    void for_each_file(const std::function<std::string(const std::string& path, const std::string& text)>& visit) {
        visit_below(root, "", visit);
    }
    // The clock of this file system goes on by itself a little at each look; this is a jump.
    void pass(std::chrono::nanoseconds span) { clock_ns_ += span.count(); }

    void lose_power(std::mt19937_64& random) {
        // Most of it lost, some of it, nearly none: each of these finds other mistakes.
        constexpr std::array<unsigned, 6> percents{0, 10, 50, 50, 90, 100};
        const unsigned percent = percents[random() % percents.size()];
        const auto survives = [&] { return random() % 100 < percent; };
        const bool journal = random() % 4 == 0;
        const size_t in_journal = random() % (unsynced_names_.size() + 1);
        for (size_t i = 0; i < unsynced_names_.size(); ++i) {
            if (journal ? i >= in_journal : !survives()) continue;
            apply(nodes_.at(unsynced_names_[i].directory).durable, unsynced_names_[i]);
        }
        unsynced_names_.clear();
        for (auto& [number, node] : nodes_) {
            if (node.is_directory) {
                node.now = node.durable;
            } else if (!node.unsynced.empty()) {
                settle(node, what_survives(node, percent, random));
            }
        }
    }

   private:
    static constexpr int root = 0;
    static constexpr int none = -1;
    static constexpr size_t page_bytes = 4096;
    static constexpr size_t sector_bytes = 512;
    using Names = std::map<std::string, int, std::less<>>;
    using Text = std::shared_ptr<const std::string>;

    struct DataChange {
        size_t offset;
        Text bytes;
        size_t size_after;
    };
    struct Node {
        bool is_directory = false;
        int64_t modified_ns = 0;
        Names now;  // of a directory
        Names durable;
        Text data = std::make_shared<const std::string>();  // of a file
        Text durable_data = data;
        std::vector<DataChange> unsynced;
    };
    struct NameChange {
        int directory;
        std::vector<std::pair<std::string, int>> entries;
    };

    int64_t now() { return clock_ns_ += 1000; }

    static void settle(Node& file, std::string text) {
        file.data = std::make_shared<const std::string>(std::move(text));
        file.durable_data = file.data;
        file.unsynced.clear();
    }
    static void apply(Names& names, const NameChange& change) {
        for (const auto& [name, node] : change.entries) {
            if (node == none) {
                names.erase(name);
            } else {
                names[name] = node;
            }
        }
    }
    void change(int directory, std::vector<std::pair<std::string, int>> entries) {
        unsynced_names_.push_back({directory, std::move(entries)});
        apply(nodes_.at(directory).now, unsynced_names_.back());
    }
    int64_t add(const std::string& path, bool is_directory, int& out) {
        int parent = 0;
        if (const int64_t error = find(parent_of(path), parent)) return error;
        if (!nodes_.at(parent).is_directory) return -ENOTDIR;
        out = next_node_++;
        nodes_[out].is_directory = is_directory;
        nodes_[out].modified_ns = now();
        change(parent, {{std::string(name_in_path(path)), out}});
        return 0;
    }
    void changed(Node& file, std::string data, int64_t offset, std::string bytes) {
        file.unsynced.push_back(
            {static_cast<size_t>(offset), std::make_shared<const std::string>(std::move(bytes)), data.size()});
        file.data = std::make_shared<const std::string>(std::move(data));
        file.modified_ns = now();
    }

    static std::string what_survives(const Node& file, unsigned percent, std::mt19937_64& random) {
        std::vector<size_t> sizes{file.durable_data->size()};
        for (const DataChange& change : file.unsynced) sizes.push_back(change.size_after);
        const size_t size = percent == 0     ? sizes.front()
                            : percent == 100 ? sizes.back()
                                             : sizes[random() % sizes.size()];
        std::string data = *file.durable_data;
        data.resize(*std::max_element(sizes.begin(), sizes.end()), '\0');
        const bool rubbish = random() % 2 == 0;
        for (size_t page = 0; page < data.size(); page += page_bytes) {
            const size_t page_end = std::min(page + page_bytes, data.size());
            if (rubbish && page >= file.durable_data->size()) {
                for (size_t i = page; i < page_end; ++i) data[i] = static_cast<char>(random());
            }
            std::vector<const DataChange*> versions;
            for (const DataChange& change : file.unsynced) {
                if (change.offset < page_end && change.offset + change.bytes->size() > page)
                    versions.push_back(&change);
            }
            const size_t kept = percent == 0 ? 0 : percent == 100 ? versions.size() : random() % (versions.size() + 1);
            for (size_t i = 0; i < versions.size() && i <= kept; ++i) {
                const bool torn = i == kept;
                if (torn && (percent == 0 || random() % 2 == 0)) break;
                const DataChange& change = *versions[i];
                const size_t begin = std::max(page, change.offset);
                const size_t end = std::min(page_end, change.offset + change.bytes->size());
                for (size_t at = begin; at < end;) {
                    const size_t stop = std::min(end, at / sector_bytes * sector_bytes + sector_bytes);
                    if (!torn || random() % 2 == 0) {
                        data.replace(at, stop - at, *change.bytes, at - change.offset, stop - at);
                    }
                    at = stop;
                }
            }
        }
        data.resize(size, '\0');
        return data;
    }

    void visit_below(int directory, const std::string& path,
                     const std::function<std::string(const std::string&, const std::string&)>& visit) {
        for (const auto& [name, number] : nodes_.at(directory).now) {
            Node& node = nodes_.at(number);
            const std::string full = path + "/" + name;
            if (node.is_directory) {
                visit_below(number, full, visit);
            } else if (std::string text = visit(full, *node.data); text != *node.data) {
                settle(node, std::move(text));
            }
        }
    }

    std::map<int, Node> nodes_;
    std::vector<NameChange> unsynced_names_;  // in the order in which they were made
    int next_node_ = 1;
    int64_t clock_ns_ = int64_t{1'700'000'000} * 1'000'000'000;
};

class MemoryFiles final : public FileSystem {
   public:
    explicit MemoryFiles(Disk disk = {}) : disk_(std::move(disk)) {}

    [[nodiscard]] Disk disk() const {
        const std::lock_guard lock(mutex_);
        return disk_;
    }
    [[nodiscard]] int open_files() const { return open_files_; }
    // Called after each call that changed something, with what is there then; under the lock.
    std::function<void(const Disk&)> on_change;

    int64_t open(const std::string& path, OpenMode mode, std::unique_ptr<File>& out) override {
        const bool creates = mode == OpenMode::create || mode == OpenMode::create_direct;
        const bool direct = mode == OpenMode::read_direct || mode == OpenMode::create_direct;
        const std::lock_guard lock(mutex_);
        int node = 0;
        if (const int64_t error = disk_.open(path, creates, node)) return error;
        out = std::make_unique<MemoryFile>(*this, node, direct);
        return creates ? told(0) : 0;
    }
    int64_t make_directory(const std::string& path) override {
        return changing([&] { return disk_.make_directory(path); });
    }
    int64_t rename(const std::string& from, const std::string& to) override {
        return changing([&] { return disk_.rename(from, to); });
    }
    int64_t link(const std::string& from, const std::string& to) override {
        return changing([&] { return disk_.link(from, to); });
    }
    int64_t remove_file(const std::string& path) override {
        return changing([&] { return disk_.remove(path, false); });
    }
    int64_t remove_directory(const std::string& path) override {
        return changing([&] { return disk_.remove(path, true); });
    }
    int64_t sync_directory(const std::string& path) override {
        return changing([&] { return disk_.sync_directory(path); });
    }
    int64_t list(const std::string& path, std::vector<std::string>& names) override {
        const std::lock_guard lock(mutex_);
        return disk_.list(path, names);
    }
    int64_t status(const std::string& path, FileStatus& out) override {
        const std::lock_guard lock(mutex_);
        return disk_.status(path, out);
    }
    int64_t touch(const std::string& path) override {
        const std::lock_guard lock(mutex_);
        return disk_.touch(path);
    }

   private:
    class MemoryFile final : public File {
       public:
        MemoryFile(MemoryFiles& owner, int node, bool direct) : owner_(owner), node_(node), direct_(direct) {
            ++owner_.open_files_;
        }
        ~MemoryFile() override { --owner_.open_files_; }
        MemoryFile(const MemoryFile&) = delete;
        MemoryFile& operator=(const MemoryFile&) = delete;

        int64_t read(std::span<std::byte> into, int64_t offset) override {
            if (!aligned(into.data(), into.size(), offset)) return -EINVAL;
            const std::lock_guard lock(owner_.mutex_);
            const std::string& data = owner_.disk_.data(node_);
            if (static_cast<size_t>(offset) >= data.size()) return 0;
            const size_t bytes = std::min(into.size(), data.size() - static_cast<size_t>(offset));
            std::copy_n(reinterpret_cast<const std::byte*>(data.data()) + offset, bytes, into.data());
            return static_cast<int64_t>(bytes);
        }
        int64_t write(std::span<const std::byte> from, int64_t offset) override {
            if (!aligned(from.data(), from.size(), offset)) return -EINVAL;
            const std::string_view bytes(reinterpret_cast<const char*>(from.data()), from.size());
            return owner_.changing([&] {
                owner_.disk_.write(node_, offset, bytes);
                return static_cast<int64_t>(from.size());
            });
        }
        int64_t size() override {
            const std::lock_guard lock(owner_.mutex_);
            return static_cast<int64_t>(owner_.disk_.data(node_).size());
        }
        int64_t allocate(int64_t size) override { return size > this->size() ? truncate(size) : 0; }
        int64_t truncate(int64_t size) override {
            return owner_.changing([&] {
                owner_.disk_.resize(node_, size);
                return 0;
            });
        }
        int64_t sync() override {
            return owner_.changing([&] {
                owner_.disk_.sync(node_);
                return 0;
            });
        }
        void start_writeback(int64_t, int64_t) override {}
        bool is_direct() const override { return direct_; }
        int64_t leave_direct() override {
            direct_ = false;
            return 0;
        }
        bool is_cached(int64_t) override { return false; }

       private:
        // As strict as Linux may be: a direct transfer that is not aligned is refused.
        bool aligned(const void* memory, size_t size, int64_t offset) const {
            const auto off = [](uint64_t value) { return value % direct_alignment != 0; };
            return !direct_ ||
                   !(off(reinterpret_cast<uintptr_t>(memory)) || off(size) || off(static_cast<uint64_t>(offset)));
        }
        MemoryFiles& owner_;
        int node_;
        std::atomic<bool> direct_;
    };

    template <class Body>
    int64_t changing(Body body) {
        const std::lock_guard lock(mutex_);
        return told(body());
    }
    int64_t told(int64_t result) {
        if (result >= 0 && on_change) on_change(disk_);
        return result;
    }

    mutable std::mutex mutex_;
    Disk disk_;  // guarded by mutex_
    std::atomic<int> open_files_{0};
};

}  // namespace tsr::testing
