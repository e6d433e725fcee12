#include "checkpoint/native/plan.hpp"

#include <fmt/format.h>
#include <openssl/evp.h>

#include <algorithm>
#include <queue>
#include <tuple>

#include "base/error.hpp"

namespace tsr {

namespace {

// Hands out the least loaded of `count` replicas; equal loads go to the lowest.
class Loads {
   public:
    explicit Loads(int count) : bytes_(static_cast<size_t>(count), 0) {
        for (int i = 0; i < count; ++i) order_.push({0, i});
    }
    int least() {
        while (order_.top().first != bytes_[static_cast<size_t>(order_.top().second)]) order_.pop();  // outdated
        return order_.top().second;
    }
    void add(int replica, int64_t bytes) {
        int64_t& load = bytes_[static_cast<size_t>(replica)];
        load += bytes;
        order_.push({load, replica});
    }

   private:
    using Entry = std::pair<int64_t, int>;
    std::vector<int64_t> bytes_;
    std::priority_queue<Entry, std::vector<Entry>, std::greater<>> order_;
};

// All tensors with the same mesh and placements share their replica groups, so they are balanced together.
struct Group {
    struct Member {
        const std::string* name;
        const StateTensor* tensor;
        Layout layout;
        int64_t shard_bytes;  // of the largest shard
        int split = 1;
        int first_replica = 0;  // block b is written by replica (first_replica + b) % replicas
    };
    std::vector<Member> members;
};

void choose_owners(Group& group, const PlanOptions& options) {
    const int replicas = group.members.front().layout.replica_count();
    if (replicas == 1) return;
    Loads loads(replicas);
    std::vector<Group::Member*> large;
    std::vector<Group::Member*> small;
    int64_t small_bytes = 0;
    for (Group::Member& member : group.members) {
        const int64_t rows = row_count(member.layout.shard(0));
        if (member.shard_bytes >= options.split_bytes && rows > 1) {
            member.split = static_cast<int>(std::min<int64_t>(replicas, rows));
            large.push_back(&member);
        } else {
            small.push_back(&member);
            small_bytes += member.shard_bytes;
        }
    }
    std::stable_sort(large.begin(), large.end(),
                     [](const auto* a, const auto* b) { return a->shard_bytes > b->shard_bytes; });
    for (Group::Member* member : large) {
        member->first_replica = loads.least();
        const Box shard = member->layout.shard(0);
        for (int block = 0; block < member->split; ++block) {
            loads.add(
                (member->first_replica + block) % replicas,
                row_block(shard, member->split, block).numel() * static_cast<int64_t>(size_of(member->tensor->dtype)));
        }
    }
    // A pack is a run of names, so that a layer's tensors stay in one file; at least four packs a replica where the
    // bytes allow, for balance.
    const int64_t pack_bytes = std::clamp(small_bytes / (int64_t{4} * replicas),
                                          std::min<int64_t>(65536, options.pack_bytes), options.pack_bytes);
    struct Pack {
        size_t first;
        size_t count;
        int64_t bytes;
    };
    std::vector<Pack> packs;
    for (size_t i = 0; i < small.size(); ++i) {
        if (packs.empty() || packs.back().bytes >= pack_bytes) packs.push_back({i, 0, 0});
        ++packs.back().count;
        packs.back().bytes += small[i]->shard_bytes;
    }
    std::stable_sort(packs.begin(), packs.end(), [](const Pack& a, const Pack& b) { return a.bytes > b.bytes; });
    for (const Pack& pack : packs) {
        const int replica = loads.least();
        for (size_t i = pack.first; i < pack.first + pack.count; ++i) small[i]->first_replica = replica;
        loads.add(replica, pack.bytes);
    }
}

// Runs of equal step; a single run of step 1 from 0 that is the numbers themselves is left out by the caller.
std::vector<FileRun> runs_of(const std::vector<int>& ranks) {
    std::vector<FileRun> runs;
    for (size_t i = 0; i < ranks.size();) {
        FileRun run{ranks[i], 1, 1};
        if (i + 1 < ranks.size()) {
            run.step = ranks[i + 1] - ranks[i];
            while (i + static_cast<size_t>(run.count) < ranks.size() &&
                   ranks[i + static_cast<size_t>(run.count)] == run.first + run.count * run.step) {
                ++run.count;
            }
            // Two unequal neighbours are two single runs, unless they follow each other.
            if (run.count == 2 && run.step != 1) run.count = 1;
        }
        i += static_cast<size_t>(run.count);
        runs.push_back(run);
    }
    return runs;
}

// Few in number, and neighbours mostly share one: a search beats hashing. Found in order of names, so that every rank
// has the same groups in the same order.
Group& group_of(const Layout& layout, std::vector<Group>& groups) {
    const auto found = std::find_if(groups.rbegin(), groups.rend(), [&](const Group& group) {
        const Layout& other = group.members.front().layout;
        return std::ranges::equal(layout.mesh_sizes(), other.mesh_sizes()) &&
               std::ranges::equal(layout.placements(), other.placements());
    });
    return found != groups.rend() ? *found : groups.emplace_back();
}

class Planner {
   public:
    Planner(const State& state, const Aliases& aliases, int rank, int world_size, const PlanOptions& options)
        : rank_(rank), world_size_(world_size), options_(options) {
        std::vector<Group> groups;
        for (const auto& [name, tensor] : state.tensors()) {
            if (aliases.contains(name)) continue;
            Layout layout = tensor.layout ? *tensor.layout : Layout::replicated(tensor.shape, world_size);
            check(name, tensor, layout);
            if (layout.is_explicit()) {
                explicit_.push_back({&name, &tensor, layout, 0});
                continue;
            }
            const int64_t bytes = layout.shard(0).numel() * static_cast<int64_t>(size_of(tensor.dtype));
            group_of(layout, groups).members.push_back({&name, &tensor, std::move(layout), bytes});
        }
        for (Group& group : groups) {
            choose_owners(group, options_);
            for (const Group::Member& member : group.members) add_regular(member);
        }
        add_explicit();
        for (std::vector<Piece>& file : plan_.files) order_pieces(file);
    }

    SavePlan take() { return std::move(plan_); }

   private:
    void check(const std::string& name, const StateTensor& tensor, const Layout& layout) const {
        if (layout.world_size() != world_size_) {
            throw Error(Code::invalid_argument, fmt::format("tensor '{}' has a layout of {} ranks, the saver has {}",
                                                            name, layout.world_size(), world_size_));
        }
        if (tensor.layout && tensor.rank != rank_) {
            throw Error(Code::invalid_argument, fmt::format("tensor '{}' was added with the pieces of rank {}, this is "
                                                            "rank {}",
                                                            name, tensor.rank, rank_));
        }
    }

    void write_piece(size_t file, const std::string& name, const StateTensor& tensor, const Box& box,
                     const std::byte* data) {
        if (plan_.files.size() <= file) plan_.files.resize(file + 1);
        plan_.files[file].push_back({name, tensor.dtype, box, data});
    }

    void add_regular(const Group::Member& member) {
        const Layout& layout = member.layout;
        const StateTensor& tensor = *member.tensor;
        const int replicas = layout.replica_count();
        const int my_shard = layout.shard_of(rank_);
        const int my_block = (layout.replica_of(rank_) - member.first_replica + replicas) % replicas;
        const bool no_elements = tensor.shape.product() == 0;
        if (no_elements) {
            // Someone writes an empty tensor whole, so that readers of plain safetensors see it.
            if (my_shard == 0 && my_block == 0) write_piece(0, *member.name, tensor, Box::whole(tensor.shape), nullptr);
        } else if (my_block < member.split) {
            const Box shard = layout.shard(my_shard);
            const Box block = row_block(shard, member.split, my_block);
            if (!block.empty()) {
                // A row block is contiguous in the shard: only dimensions of size 1 come before the one that is cut.
                int64_t begin = 0;
                for (int d = 0; d < shard.sizes.ndim(); ++d) {
                    begin = begin * shard.sizes[d] + (block.offsets[d] - shard.offsets[d]);
                }
                const std::byte* data =
                    tensor.pieces.front().data + begin * static_cast<int64_t>(size_of(tensor.dtype));
                write_piece(0, *member.name, tensor, block, data);
            }
        }
        if (rank_ != 0) return;
        SavedTensor saved{tensor.dtype, layout, tensor.shape, member.split, {}, {}};
        std::vector<int> ranks;
        for (int shard = 0; shard < layout.shard_count(); ++shard) {
            for (int block = 0; block < member.split; ++block) {
                ranks.push_back(layout.rank_of(shard, (member.first_replica + block) % replicas));
            }
        }
        saved.files = runs_of(ranks);
        plan_.tensors.emplace(*member.name, std::move(saved));
    }

    void add_explicit() {
        std::vector<int64_t> loads(static_cast<size_t>(world_size_), 0);
        for (const Group::Member& member : explicit_) {
            const StateTensor& tensor = *member.tensor;
            const auto itemsize = static_cast<int64_t>(size_of(tensor.dtype));
            struct Holder {
                int rank;
                size_t piece;
            };
            const auto less = [](const Box& a, const Box& b) {
                const auto key = [](const Box& box) {
                    return std::pair(std::vector<int64_t>(box.offsets.begin(), box.offsets.end()),
                                     std::vector<int64_t>(box.sizes.begin(), box.sizes.end()));
                };
                return key(a) < key(b);
            };
            std::map<Box, std::vector<Holder>, decltype(less)> holders(less);
            for (int rank = 0; rank < world_size_; ++rank) {
                const std::vector<Box> boxes = member.layout.boxes_of(rank);
                for (size_t i = 0; i < boxes.size(); ++i) holders[boxes[i]].push_back({rank, i});
            }
            int64_t covered = 0;
            SavedTensor saved{tensor.dtype, std::nullopt, tensor.shape, 1, {}, {}};
            std::vector<int> nth;
            std::map<int, int> pieces_of_rank;
            if (tensor.shape.product() == 0) {
                holders.clear();
                saved.pieces.push_back({Box::whole(tensor.shape), 0});
                nth.push_back(0);
                if (rank_ == 0) write_piece(0, *member.name, tensor, Box::whole(tensor.shape), nullptr);
            }
            for (const auto& [box, list] : holders) {
                covered += box.numel();
                const Holder owner = *std::min_element(list.begin(), list.end(), [&](const Holder& a, const Holder& b) {
                    return loads[static_cast<size_t>(a.rank)] < loads[static_cast<size_t>(b.rank)];
                });
                loads[static_cast<size_t>(owner.rank)] += box.numel() * itemsize;
                const int index = pieces_of_rank[owner.rank]++;
                if (owner.rank == rank_) {
                    write_piece(static_cast<size_t>(index), *member.name, tensor, box, tensor.pieces[owner.piece].data);
                }
                saved.pieces.push_back({box, owner.rank});
                nth.push_back(index);
            }
            if (covered != tensor.shape.product()) {
                throw Error(Code::invalid_argument,
                            fmt::format("tensor '{}': its layout gives {} of {} elements to no rank", *member.name,
                                        tensor.shape.product() - covered, tensor.shape.product()));
            }
            if (rank_ != 0) continue;
            plan_.tensors.emplace(*member.name, std::move(saved));
            plan_.nth_file.emplace(*member.name, std::move(nth));
        }
    }

    int rank_;
    int world_size_;
    PlanOptions options_;
    std::vector<Group::Member> explicit_;
    SavePlan plan_;
};

}  // namespace

Aliases find_aliases(const State& state) {
    std::map<std::tuple<const std::byte*, DType, std::string>, const std::string*> seen;
    Aliases aliases;
    for (const auto& [name, tensor] : state.tensors()) {
        if (tensor.layout || tensor.shape.product() == 0) continue;
        const auto [first, is_new] =
            seen.emplace(std::tuple(tensor.pieces.front().data, tensor.dtype, tensor.shape.str()), &name);
        if (!is_new) aliases.emplace(name, *first->second);
    }
    return aliases;
}

std::string describe(const State& state, const Values& values, int world_size) {
    std::string text;
    for (const auto& [name, tensor] : state.tensors()) {
        text += fmt::format("tensor '{}' {} {} ", name, name_of(tensor.dtype), tensor.shape.str());
        text += tensor.layout ? tensor.layout->str() : fmt::format("mesh [{}], R", world_size);
        text += '\n';
    }
    for (const auto& [name, value] : values) {
        if (!private_rank(name)) text += fmt::format("value '{}'\n", name);
    }
    return text;
}

Digest digest_of(std::string_view text) {
    std::array<uint8_t, EVP_MAX_MD_SIZE> full{};
    unsigned int size = 0;
    if (EVP_Digest(text.data(), text.size(), full.data(), &size, EVP_sha256(), nullptr) != 1) {
        throw Error(Code::internal, "SHA-256 failed");
    }
    Digest digest;
    std::copy_n(full.begin(), digest.size(), digest.begin());
    return digest;
}

std::string first_difference(std::string_view rank0, std::string_view mine) {
    const auto next_line = [](std::string_view& text) {
        const size_t end = text.find('\n');
        const std::string_view line = text.substr(0, end);
        text.remove_prefix(std::min(text.size(), line.size() + 1));
        return line;
    };
    while (true) {
        const std::string_view theirs = next_line(rank0);
        const std::string_view ours = next_line(mine);
        if (theirs == ours && !theirs.empty()) continue;
        const auto shown = [](std::string_view line) { return line.empty() ? std::string_view("nothing more") : line; };
        return fmt::format("it has {} where rank 0 has {}", shown(ours), shown(theirs));
    }
}

SavePlan make_plan(const State& state, const Aliases& aliases, int rank, int world_size, const PlanOptions& options) {
    return Planner(state, aliases, rank, world_size, options).take();
}

void number_files(SavePlan& plan, const std::vector<std::vector<SavedFile>>& of_ranks, std::vector<SavedFile>& files) {
    std::vector<std::vector<int>> number(of_ranks.size());  // by rank, then by index
    bool any = true;
    for (size_t index = 0; any; ++index) {
        any = false;
        for (size_t rank = 0; rank < of_ranks.size(); ++rank) {
            if (index >= of_ranks[rank].size()) continue;
            any = true;
            number[rank].push_back(static_cast<int>(files.size()));
            files.push_back(of_ranks[rank][index]);
        }
    }
    const bool all_write = std::all_of(number.begin(), number.end(), [](const auto& list) { return !list.empty(); });
    for (auto& [name, tensor] : plan.tensors) {
        if (!tensor.layout) {
            const std::vector<int>& nth = plan.nth_file.at(name);
            for (size_t i = 0; i < tensor.pieces.size(); ++i) {
                const auto rank = static_cast<size_t>(tensor.pieces[i].file);
                tensor.pieces[i].file = number[rank].at(static_cast<size_t>(nth[i]));
            }
            continue;
        }
        if (!all_write) {
            // Ranks without a file moved the others up; a rank whose pieces are all empty points anywhere.
            std::vector<int> list;
            for (const FileRun& run : tensor.files) {
                for (int i = 0; i < run.count; ++i) {
                    const int rank = run.first + i * run.step;
                    const std::vector<int>& of_rank = number[static_cast<size_t>(rank)];
                    list.push_back(of_rank.empty() ? 0 : of_rank.front());
                }
            }
            tensor.files = runs_of(list);
        }
        const auto pieces = int64_t{tensor.layout->shard_count()} * tensor.split;
        if (tensor.files == std::vector<FileRun>{{0, static_cast<int>(pieces), 1}}) tensor.files.clear();
    }
}

}  // namespace tsr
