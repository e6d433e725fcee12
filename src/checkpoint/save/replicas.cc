#include "checkpoint/save/replicas.hpp"

#include <fmt/core.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <numeric>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/crc32c.hpp"
#include "base/function_ref.hpp"
#include "base/parallel.hpp"
#include "base/splitmix64.hpp"
#include "checkpoint/save/agreement.hpp"

namespace tsr {

namespace {

constexpr int threads = 4;
constexpr size_t task_bytes = size_t{4} << 20;
constexpr size_t gathered = 4096;  // checksums per rank and message
constexpr size_t most_told = 8;    // ranks or names in a message

// A value, a tensor whose layout is arithmetic, or one box of another tensor: all ranks have the same list of them.
struct Replicated {
    const std::string* name;
    const Layout* layout = nullptr;  // each rank holds a shard of it; nullptr: all ranks hold the whole tensor
    std::optional<Box> box;          // set for a single box; then
    std::vector<int> holders;        // the ranks that hold it, in order
    bool is_value = false;
    bool is_of_metric = false;
    uint32_t crc = 0;  // of this rank's bytes, if it holds any
};

// Ranks that hold the same.
struct Group {
    int number = 0;
    std::vector<int> ranks;
};

std::string ranks_text(const std::vector<int>& ranks) {
    const size_t told = std::min(ranks.size(), most_told);
    std::string text = fmt::format("{} {}", ranks.size() == 1 ? "rank" : "ranks",
                                   fmt::join(ranks.begin(), ranks.begin() + static_cast<std::ptrdiff_t>(told), ", "));
    if (told < ranks.size()) text += fmt::format(" and {} more", ranks.size() - told);
    return text;
}

class Replicas {
   public:
    Replicas(const State& state, const Values& values, const Aliases& aliases, CopyStreams& copies, int rank,
             int world_size)
        : rank_(rank), world_size_(world_size), copies_(copies) {
        for (const auto& [name, tensor] : state.tensors()) {
            if (tensor.kind->shape.product() > 0 && !aliases.contains(name)) add(name, tensor);
        }
        for (const auto& [name, value] : values) {
            if (private_rank(name)) continue;
            Replicated& one = list_.emplace_back(Replicated{&name});
            one.is_value = true;
            one.is_of_metric = state.has_own(name);
            one.crc = crc32c(value.dump());
        }
    }

    // Computes the checksums of this rank's tensors.
    void read() {
        read_on_devices();
        std::vector<size_t> tasks;  // the first part of each
        size_t bytes = task_bytes;
        for (size_t i = 0; i < parts_.size(); ++i) {
            if (bytes + parts_[i].bytes.size() > task_bytes) {
                tasks.push_back(i);
                bytes = 0;
            }
            bytes += parts_[i].bytes.size();
        }
        run_parallel(tasks.size(), threads, [&](size_t task, int) {
            const size_t end = task + 1 < tasks.size() ? tasks[task + 1] : parts_.size();
            for (size_t i = tasks[task]; i < end; ++i) {
                if (!parts_[i].is_read) parts_[i].crc = crc_of(parts_[i]);
            }
        });
        for (const Part& part : parts_) {
            uint32_t& crc = list_[part.of].crc;
            crc = crc32c(std::as_bytes(std::span(&part.crc, 1)), crc);
        }
    }

    // The sum over all ranks is 0 if all replicas are equal: the first of k holders counts -(k - 1) times, the others
    // once. Hashing keeps several differences from cancelling out.
    [[nodiscard]] uint64_t share() const {
        uint64_t sum = 0;
        for (size_t i = 0; i < list_.size(); ++i) {
            const Replicated& one = list_[i];
            size_t place = static_cast<size_t>(rank_);
            size_t holders = static_cast<size_t>(world_size_);
            int shard = 0;
            if (one.box) {
                place =
                    static_cast<size_t>(std::find(one.holders.begin(), one.holders.end(), rank_) - one.holders.begin());
                holders = one.holders.size();
                if (place == holders) continue;
            } else if (one.layout != nullptr) {
                place = static_cast<size_t>(one.layout->replica_of(rank_));
                holders = static_cast<size_t>(one.layout->replica_count());
                shard = one.layout->shard_of(rank_);
            }
            const uint64_t which = SplitMix64::mix(uint64_t{i} << 32 | static_cast<uint32_t>(shard));
            const uint64_t hash = SplitMix64::mix(which + one.crc);
            sum += place == 0 ? hash * (1 - uint64_t{holders}) : hash;
        }
        return sum;
    }

    // Collective.
    [[nodiscard]] Error difference(Peers& peers) const {
        std::optional<Error> first;
        std::vector<std::string> others;
        size_t differ = 0;
        bool of_metric = false;  // some that differ
        bool of_model = false;
        const std::string* last = nullptr;
        for (size_t begin = 0; begin < list_.size(); begin += gathered) {
            const size_t end = std::min(begin + gathered, list_.size());
            std::string own;
            for (size_t i = begin; i < end; ++i) {
                own.append(reinterpret_cast<const char*>(&list_[i].crc), sizeof list_[i].crc);
            }
            const std::vector<std::string> all = peers.gather(own);
            for (size_t i = begin; i < end; ++i) {
                if (list_[i].name == last) continue;  // another box of a tensor that is reported already
                auto error = difference_in(list_[i], [&](int rank) {
                    uint32_t crc = 0;
                    std::memcpy(&crc, all[static_cast<size_t>(rank)].data() + (i - begin) * sizeof crc, sizeof crc);
                    return crc;
                });
                if (!error) continue;
                last = list_[i].name;
                (list_[i].is_of_metric ? of_metric : of_model) = true;
                if (differ++ == 0) {
                    first = std::move(error);
                } else if (others.size() < most_told) {
                    others.push_back(fmt::format("'{}'", *last));
                }
            }
        }
        if (!first) return Error(Code::internal, "replicas differ, but their checksums are the same");
        std::string advice;
        if (differ > 1) {
            advice =
                fmt::format("{} more {}: {}", differ - 1, differ == 2 ? "differs" : "differ", fmt::join(others, ", "));
            if (others.size() < differ - 1) advice += ", ...";
            advice += "; ";
        }
        if (of_metric) {
            advice += "rank 0 alone has the samples of a metric: save it in a separate state, without check_replicas";
        }
        if (of_model) {
            if (of_metric) advice += "; ";
            advice += "broadcast rank 0's state before training, or save without check_replicas";
        }
        return first->with_advice(advice);
    }

   private:
    struct Part {
        size_t of;  // number in list_
        std::span<const std::byte> bytes;
        CopyStream* on = nullptr;  // the device that has them
        uint32_t crc = 0;
        bool is_read = false;
    };

    // Where a device has kernels, the bytes stay there.
    void read_on_devices() {
        std::map<CopyStream*, std::vector<Part*>> by_device;
        for (Part& part : parts_) {
            if (part.on != nullptr) by_device[part.on].push_back(&part);
        }
        for (const auto& [device, parts] : by_device) {
            if (attempt([&, on = device] { on->device().require_kernels(); })) continue;
            std::vector<std::span<const std::byte>> ranges;
            for (const Part* part : parts) ranges.push_back(part->bytes);
            const std::vector<uint32_t> checksums = device->checksums(ranges);
            for (size_t i = 0; i < parts.size(); ++i) {
                parts[i]->crc = checksums[i];
                parts[i]->is_read = true;
            }
        }
    }

    void add(const std::string& name, const StateTensor& tensor) {
        const TensorKind& kind = *tensor.kind;
        if (kind.layout && kind.layout->is_explicit()) return add_boxes(name, tensor);
        const Layout* layout = kind.layout ? &*kind.layout : nullptr;
        if (layout != nullptr && layout->replica_count() == 1) return;
        list_.push_back({&name, layout, {}, {}});
        if (!kind.boxes.empty()) add_parts(tensor, 0);
    }

    void add_boxes(const std::string& name, const StateTensor& tensor) {
        const TensorKind& kind = *tensor.kind;
        const auto before = [](const Dims& a, const Dims& b) {
            return std::lexicographical_compare(a.begin(), a.end(), b.begin(), b.end());
        };
        // Boxes are equal or disjoint, so the offsets identify a box.
        std::map<Dims, std::pair<Box, std::vector<int>>, decltype(before)> holders(before);
        for (int rank = 0; rank < world_size_; ++rank) {
            for (const Box& box : kind.layout->boxes_of(rank)) {
                std::vector<int>& ranks =
                    holders.try_emplace(box.offsets, box, std::vector<int>()).first->second.second;
                if (ranks.empty() || ranks.back() != rank) ranks.push_back(rank);
            }
        }
        for (auto& [offsets, held] : holders) {
            auto& [box, ranks] = held;
            if (ranks.size() == 1) continue;
            list_.push_back({&name, nullptr, box, std::move(ranks)});
            const auto own = std::find(kind.boxes.begin(), kind.boxes.end(), box);
            if (own != kind.boxes.end()) add_parts(tensor, static_cast<size_t>(own - kind.boxes.begin()));
        }
    }

    void add_parts(const StateTensor& tensor, size_t box) {
        const Tensor piece = tensor.piece(box);
        std::span<const std::byte> rest(piece.data, piece.size_bytes());
        while (!rest.empty()) {
            const size_t size = std::min(rest.size(), task_bytes);
            parts_.push_back({list_.size() - 1, rest.first(size), copies_.of(tensor.device)});
            rest = rest.subspan(size);
        }
    }

    [[nodiscard]] static uint32_t crc_of(const Part& part) {
        static_assert(task_bytes <= CopyStreams::slice_bytes);
        if (part.on == nullptr) return crc32c(part.bytes);
        const auto slice = part.on->slice();
        part.on->copy(slice.get(), part.bytes.data(), part.bytes.size());
        part.on->wait();
        return crc32c({slice.get(), part.bytes.size()});
    }

    [[nodiscard]] std::vector<Group> groups_of(const Replicated& one) const {
        if (one.box) return {{0, one.holders}};
        std::vector<Group> groups;
        const int shards = one.layout != nullptr ? one.layout->shard_count() : 1;
        for (int shard = 0; shard < shards; ++shard) {
            Group& group =
                groups.emplace_back(Group{shard, std::vector<int>(static_cast<size_t>(world_size_ / shards))});
            std::iota(group.ranks.begin(), group.ranks.end(), 0);
            if (one.layout == nullptr) continue;
            for (int& replica : group.ranks) replica = one.layout->rank_of(shard, replica);
        }
        return groups;
    }

    // The difference in the first group that has one.
    [[nodiscard]] std::optional<Error> difference_in(const Replicated& one,
                                                     FunctionRef<uint32_t(int rank)> crc_of) const {
        for (const Group& group : groups_of(one)) {
            std::map<uint32_t, int> votes;
            for (const int rank : group.ranks) ++votes[crc_of(rank)];
            if (votes.size() == 1) continue;
            // On a tie, the lower rank is right.
            const int right = *std::max_element(group.ranks.begin(), group.ranks.end(),
                                                [&](int a, int b) { return votes[crc_of(a)] < votes[crc_of(b)]; });
            std::vector<int> wrong;
            for (const int rank : group.ranks) {
                if (crc_of(rank) != crc_of(right)) wrong.push_back(rank);
            }
            std::string part;
            if (one.box || (one.layout != nullptr && one.layout->shard_count() > 1)) {
                part = fmt::format(" (part {})", one.box ? one.box->str() : one.layout->shard(group.number).str());
            }
            const char* const differ = wrong.size() == 1 ? "differs" : "differ";
            return Error(
                       Code::mismatch,
                       fmt::format("{} '{}'{} differs between replicas: {} {} from rank {}{}",
                                   one.is_value ? "value" : "tensor", *one.name, part, ranks_text(wrong), differ, right,
                                   one.is_value ? "; name a per-rank value rank/<r>/... (PerRank in Python)" : ""))
                .with_peer(wrong.front());
        }
        return std::nullopt;
    }

    int rank_;
    int world_size_;
    CopyStreams& copies_;
    std::vector<Replicated> list_;
    std::vector<Part> parts_;
};

}  // namespace

std::optional<Error> compare_replicas(Peers& peers, const State& state, const Values& values, const Aliases& aliases,
                                      CopyStreams& copies) {
    if (peers.world_size() == 1) return std::nullopt;
    std::optional<Replicas> replicas;
    uint64_t share = 0;
    const auto failed = attempt([&] {
        state.follow(copies);
        replicas.emplace(state, values, aliases, copies, peers.rank(), peers.world_size());
        replicas->read();
        share = replicas->share();
    });
    std::vector<uint64_t> shares;
    if (auto agreed = peers.vote(failed, share, shares)) return agreed;
    if (std::accumulate(shares.begin(), shares.end(), uint64_t{0}) == 0) return std::nullopt;
    return replicas->difference(peers);
}

}  // namespace tsr
