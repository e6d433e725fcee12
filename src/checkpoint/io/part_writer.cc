#include "checkpoint/io/part_writer.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

namespace tsr {

int64_t part_size_for(int64_t object_bytes, int64_t least) {
    constexpr int64_t unit = int64_t{1} << 20;
    const int64_t needed = (object_bytes + max_parts - 1) / max_parts;
    return needed <= least ? least : (needed + unit - 1) / unit * unit;
}

PartWriter::PartWriter(Storage& storage, std::string key)
    : storage_(storage), key_(std::move(key)), part_bytes_(storage.part_bytes()) {}

void PartWriter::expect(int64_t size) {
    expected_ = size;
    part_bytes_ = part_size_for(size, storage_.part_bytes());
}

int64_t PartWriter::end() const {
    const std::lock_guard lock(mutex_);
    return end_;
}

PartWriter::Part& PartWriter::part_at(int64_t index) {
    const std::lock_guard lock(mutex_);
    Part& part = parts_[index];
    if (part.memory == nullptr) part.memory.reset(new std::byte[static_cast<size_t>(part_bytes_)]);
    return part;  // a map's elements stay where they are
}

Storage::Upload& PartWriter::upload() {
    const std::lock_guard lock(mutex_);
    if (upload_ == nullptr) upload_ = storage_.begin(key_, std::max(expected_, end_));
    return *upload_;
}

void PartWriter::send(int64_t index, const Part& part) {
    upload().part(index, index * part_bytes_, {part.memory.get(), static_cast<size_t>(part.filled)});
}

void PartWriter::write(std::span<const std::byte> from, int64_t offset) {
    while (!from.empty()) {
        const int64_t index = offset / part_bytes_;
        const int64_t within = offset % part_bytes_;
        const auto n = std::min(static_cast<int64_t>(from.size()), part_bytes_ - within);
        Part& part = part_at(index);
        std::memcpy(part.memory.get() + within, from.data(), static_cast<size_t>(n));
        std::map<int64_t, Part> complete;
        {
            const std::lock_guard lock(mutex_);
            part.filled += n;
            end_ = std::max(end_, offset + n);
            // An object of one part is put at once; only `expected_` or a later write shows whether another part
            // follows.
            const bool many = std::max(expected_, end_) > part_bytes_;
            for (auto next = parts_.begin(); many && next != parts_.end();) {
                const auto here = next++;
                if (here->second.filled == part_bytes_) complete.insert(parts_.extract(here));
            }
            sent_ += static_cast<int64_t>(complete.size());
        }
        for (const auto& [number, whole] : complete) send(number, whole);
        from = from.subspan(static_cast<size_t>(n));
        offset += n;
    }
}

bool PartWriter::finish(int64_t size) {
    const int64_t count = (size + part_bytes_ - 1) / part_bytes_;
    std::map<int64_t, Part> rest;
    {
        const std::lock_guard lock(mutex_);
        if (end_ != size || sent_ + static_cast<int64_t>(parts_.size()) != count) return false;
        for (const auto& [index, part] : parts_) {
            if (part.filled != std::min(part_bytes_, size - index * part_bytes_)) return false;
        }
        rest.swap(parts_);
    }
    if (count <= 1 && upload_ == nullptr) {
        std::span<const std::byte> data;
        if (!rest.empty()) data = {rest.begin()->second.memory.get(), static_cast<size_t>(size)};
        (void)storage_.put(key_, data, Storage::PutMode::replace);
        return true;
    }
    for (const auto& [index, part] : rest) send(index, part);
    upload().finish();
    upload_.reset();
    return true;
}

}  // namespace tsr
