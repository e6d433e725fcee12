#include "checkpoint/model/plan.hpp"

#include <fmt/core.h>
#include <openssl/evp.h>

#include <algorithm>
#include <queue>
#include <tuple>
#include <unordered_map>

#include "base/error.hpp"

namespace tsr {

namespace {

constexpr size_t no_layout = SIZE_MAX;  // of explicit ones

// What tensors have in common that differ only in name and memory. A model has few kinds, however many tensors.
struct Kind {
    DType dtype;
    Dims shape;
    size_t layout;  // index into Entries::layouts, which compares only mesh and placements
    friend bool operator==(const Kind&, const Kind&) = default;
};

struct KindHash {
    size_t operator()(const Kind& kind) const {
        uint64_t hash = static_cast<uint64_t>(kind.dtype) << 32 | (kind.layout & 0xffffffff);
        for (const int64_t size : kind.shape) hash = (hash ^ static_cast<uint64_t>(size)) * 0x9e3779b97f4a7c15;
        return hash ^ hash >> 32;
    }
};

// The tensors in name order. Walking the map costs one cache miss after the other; through a list they overlap.
struct Entries {
    struct Entry {
        const std::string* name;
        const StateTensor* tensor;
        const std::byte* data;  // of the first piece
        size_t kind;            // number in kinds
    };
    std::vector<Entry> list;
    std::vector<Kind> kinds;
    std::vector<Layout> layouts;
    size_t name_bytes = 0;  // of all together

    Entries(const State& state, int world_size) : layouts{Layout::replicated({}, world_size)} {
        list.reserve(state.tensors().size());
        for (const auto& [name, tensor] : state.tensors()) {
            list.push_back(
                {&name, &tensor, tensor.memory.empty() ? nullptr : tensor.memory.front(), number_of(*tensor.kind)});
            name_bytes += name.size();
        }
    }

   private:
    size_t number_of(const TensorKind& of_state) {
        const auto [known, is_unknown] = known_.try_emplace(&of_state, 0);
        if (!is_unknown) return known->second;
        const Kind kind{of_state.dtype, of_state.shape, of_state.layout ? number_of(*of_state.layout) : 0};
        const auto [at, is_new] = numbers_.try_emplace(kind, kinds.size());
        if (is_new) kinds.push_back(kind);
        return known->second = at->second;
    }

    // They are few, and neighbours mostly share one: a search beats hashing.
    size_t number_of(const Layout& layout) {
        if (layout.is_explicit()) return no_layout;
        const auto found = std::find_if(layouts.rbegin(), layouts.rend(),
                                        [&](const Layout& other) { return other.same_placements(layout); });
        if (found != layouts.rend()) return static_cast<size_t>(layouts.rend() - found) - 1;
        layouts.push_back(layout);
        return layouts.size() - 1;
    }

    std::unordered_map<Kind, size_t, KindHash> numbers_;
    std::unordered_map<const TensorKind*, size_t> known_;  // one kind may be several of a state's
};

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

struct Group;

// What the plan of a tensor needs of its kind.
struct KindPlan {
    Group* group = nullptr;  // none of explicit tensors
    Box largest;             // the first shard
    int64_t largest_bytes = 0;
    SharedBox mine;  // this rank's
    bool has_elements = true;
    std::map<std::pair<int, int>, size_t> alike;  // by split and first replica: those in the plan
};

struct Placed {
    const Entries::Entry* entry;
    KindPlan* kind;
    int split = 1;
    int first_replica = 0;  // block b is written by replica (first_replica + b) % replicas
};

// All tensors with the same mesh and placements share their replica groups, so they are balanced together.
struct Group {
    Layout layout;  // of one of them
    int replicas;
    int my_shard;
    int my_replica;
    std::vector<Placed*> members;                                 // where there is a choice
    std::map<std::pair<int, int>, std::vector<FileRun>> writers;  // by split and first replica: the pieces' ranks
};

void choose_owners(Group& group, const PlanOptions& options) {
    const int replicas = group.replicas;
    if (replicas == 1) return;
    Loads loads(replicas);
    std::vector<Placed*> large;
    std::vector<Placed*> small;
    int64_t small_bytes = 0;
    for (Placed* member : group.members) {
        const KindPlan& kind = *member->kind;
        const int64_t rows = kind.largest_bytes >= options.split_bytes ? row_count(kind.largest) : 1;
        if (rows > 1) {
            member->split = static_cast<int>(std::min<int64_t>(replicas, rows));
            large.push_back(member);
        } else {
            small.push_back(member);
            small_bytes += kind.largest_bytes;
        }
    }
    std::stable_sort(large.begin(), large.end(),
                     [](const auto* a, const auto* b) { return a->kind->largest_bytes > b->kind->largest_bytes; });
    for (Placed* member : large) {
        member->first_replica = loads.least();
        const auto itemsize = static_cast<int64_t>(size_of(member->entry->tensor->kind->dtype));
        for (int block = 0; block < member->split; ++block) {
            loads.add((member->first_replica + block) % replicas,
                      row_block(member->kind->largest, member->split, block).numel() * itemsize);
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
        packs.back().bytes += small[i]->kind->largest_bytes;
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

class Planner {
   public:
    Planner(const Entries& entries, const Aliases& aliases, int rank, int world_size, const PlanOptions& options)
        : rank_(rank), world_size_(world_size), options_(options), loads_(static_cast<size_t>(world_size), 0) {
        for (const Layout& layout : entries.layouts) {
            groups_.push_back(
                {layout, layout.replica_count(), layout.shard_of(rank_), layout.replica_of(rank_), {}, {}});
        }
        kinds_.reserve(entries.kinds.size());
        for (const Kind& kind : entries.kinds) kinds_.push_back(plan_of(kind));
        if (rank_ == 0) {
            plan_.regular.reserve(entries.list.size());
            plan_.names.reserve(entries.name_bytes);
        }
        members_.reserve(entries.list.size());
        auto alias = aliases.begin();
        for (const Entries::Entry& entry : entries.list) {
            check(entry);
            if (alias != aliases.end() && alias->first == *entry.name) {
                ++alias;
                continue;
            }
            Placed& member = members_.emplace_back(Placed{&entry, &kinds_[entry.kind]});
            Group* group = member.kind->group;
            if (group != nullptr && group->replicas > 1) group->members.push_back(&member);
        }
        for (Group& group : groups_) choose_owners(group, options_);
        // In order of names, which is how pieces are ordered that are equal otherwise.
        for (Placed& member : members_) {
            if (member.kind->group != nullptr) {
                add_regular(member);
            } else {
                add_explicit(member);
            }
        }
        for (std::vector<Piece>& file : plan_.files) order_pieces(file);
    }

    SavePlan take() { return std::move(plan_); }

   private:
    void check(const Entries::Entry& entry) const {
        const TensorKind& tensor = *entry.tensor->kind;
        if (!tensor.layout) return;
        if (tensor.layout->world_size() != world_size_) {
            throw Error(Code::invalid_argument,
                        fmt::format("tensor '{}' has a layout of {} ranks, but the saver has {}", *entry.name,
                                    tensor.layout->world_size(), world_size_));
        }
        if (tensor.rank != rank_) {
            throw Error(Code::invalid_argument,
                        fmt::format("tensor '{}' was added with the pieces of rank {}, but this is rank "
                                    "{}",
                                    *entry.name, tensor.rank, rank_));
        }
    }

    static SharedBox whole(const TensorKind& tensor) { return std::make_shared<const Box>(Box::whole(tensor.shape)); }

    KindPlan plan_of(const Kind& kind) {
        KindPlan plan;
        if (kind.layout == no_layout) return plan;
        plan.group = &groups_[kind.layout];
        plan.has_elements = kind.shape.product() > 0;
        const Layout layout = plan.group->layout.of_shape(kind.shape);
        plan.largest = layout.shard(0);
        plan.largest_bytes = plan.largest.numel() * static_cast<int64_t>(size_of(kind.dtype));
        plan.mine = std::make_shared<const Box>(layout.shard(plan.group->my_shard));
        return plan;
    }

    void write_piece(size_t file, const Placed& member, SharedBox box, const std::byte* data) {
        if (plan_.files.size() <= file) plan_.files.resize(file + 1);
        if (plan_.files[file].capacity() == 0 && file == 0) plan_.files[file].reserve(members_.size());
        const StateTensor& tensor = *member.entry->tensor;
        plan_.files[file].push_back({*member.entry->name, tensor.kind->dtype, std::move(box), data, tensor.device});
    }

    void add_regular(const Placed& member) {
        const KindPlan& kind = *member.kind;
        const Group& group = *kind.group;
        const TensorKind& tensor = *member.entry->tensor->kind;
        const int my_block = (group.my_replica - member.first_replica + group.replicas) % group.replicas;
        if (!kind.has_elements) {
            // One rank writes an empty tensor, so that readers of plain safetensors see it.
            if (group.my_shard == 0 && my_block == 0) write_piece(0, member, whole(tensor), nullptr);
        } else if (my_block < member.split) {
            const Box& shard = *kind.mine;
            const SharedBox mine =
                member.split > 1 ? std::make_shared<const Box>(row_block(shard, member.split, my_block)) : kind.mine;
            const Box& block = *mine;
            if (!block.empty()) {
                // A row block is contiguous in the shard: only dimensions of size 1 come before the one that is cut.
                int64_t begin = 0;
                for (int d = 0; d < shard.sizes.ndim(); ++d) {
                    begin = begin * shard.sizes[d] + (block.offsets[d] - shard.offsets[d]);
                }
                write_piece(0, member, mine, member.entry->data + begin * static_cast<int64_t>(size_of(tensor.dtype)));
            }
        }
        if (rank_ != 0) return;
        const auto [at, is_new] =
            member.kind->alike.try_emplace({member.split, member.first_replica}, plan_.alike.size());
        if (is_new) {
            plan_.alike.push_back(std::make_shared<const SavedTensor>(SavedTensor{tensor.dtype,
                                                                                  group.layout.of_shape(tensor.shape),
                                                                                  tensor.shape,
                                                                                  member.split,
                                                                                  writers_of(member),
                                                                                  {}}));
        }
        plan_.names += *member.entry->name;
        plan_.regular.push_back({plan_.names.size(), at->second});
    }

    // Independent of the shape, so that the cost per rank is paid once, not once per tensor.
    const std::vector<FileRun>& writers_of(const Placed& member) {
        Group& group = *member.kind->group;
        const auto [at, is_new] = group.writers.try_emplace({member.split, member.first_replica});
        if (!is_new) return at->second;
        std::vector<int> ranks;
        for (int shard = 0; shard < group.layout.shard_count(); ++shard) {
            for (int block = 0; block < member.split; ++block) {
                ranks.push_back(group.layout.rank_of(shard, (member.first_replica + block) % group.replicas));
            }
        }
        return at->second = runs_of(ranks);
    }

    void add_explicit(const Placed& member) {
        const TensorKind& tensor = *member.entry->tensor->kind;
        const Layout& layout = *tensor.layout;
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
            const std::vector<Box> boxes = layout.boxes_of(rank);
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
            if (rank_ == 0) write_piece(0, member, whole(tensor), nullptr);
        }
        for (const auto& [box, list] : holders) {
            covered += box.numel();
            const Holder owner = *std::min_element(list.begin(), list.end(), [&](const Holder& a, const Holder& b) {
                return loads_[static_cast<size_t>(a.rank)] < loads_[static_cast<size_t>(b.rank)];
            });
            loads_[static_cast<size_t>(owner.rank)] += box.numel() * itemsize;
            const int index = pieces_of_rank[owner.rank]++;
            if (owner.rank == rank_) {
                write_piece(static_cast<size_t>(index), member, std::make_shared<const Box>(box),
                            member.entry->tensor->memory[owner.piece]);
            }
            saved.pieces.push_back({box, owner.rank});
            nth.push_back(index);
        }
        if (covered != tensor.shape.product()) {
            throw Error(Code::invalid_argument,
                        fmt::format("tensor '{}': its layout assigns {} of {} elements to no rank", *member.entry->name,
                                    tensor.shape.product() - covered, tensor.shape.product()));
        }
        if (rank_ != 0) return;
        plan_.irregular.emplace_hint(plan_.irregular.end(), *member.entry->name,
                                     std::make_shared<const SavedTensor>(std::move(saved)));
        plan_.nth_file.emplace(*member.entry->name, std::move(nth));
    }

    int rank_;
    int world_size_;
    PlanOptions options_;
    std::vector<Group> groups_;    // one a layout; kinds point to them,
    std::vector<KindPlan> kinds_;  // and members to kinds
    std::vector<Placed> members_;
    std::vector<int64_t> loads_;  // of explicit tensors, by rank
    SavePlan plan_;
};

}  // namespace

namespace {

Aliases aliases_in(const Entries& entries) {
    struct Whole {
        const std::byte* data;
        const Entries::Entry* entry;
        size_t place;
    };
    std::vector<Whole> wholes;
    for (const Entries::Entry& entry : entries.list) {
        if (entry.tensor->kind->layout || entry.tensor->kind->shape.product() == 0) continue;
        wholes.push_back({entry.data, &entry, wholes.size()});
    }
    std::sort(wholes.begin(), wholes.end(),
              [](const Whole& a, const Whole& b) { return std::tie(a.data, a.place) < std::tie(b.data, b.place); });
    Aliases aliases;
    for (size_t begin = 0, end = 0; begin < wholes.size(); begin = end) {
        std::vector<const Entries::Entry*> firsts;  // of each dtype and shape at this address
        for (end = begin; end < wholes.size() && wholes[end].data == wholes[begin].data; ++end) {
            if (end + 1 == wholes.size() || wholes[end + 1].data != wholes[begin].data) {
                if (end == begin) continue;  // not shared, like nearly all
            }
            const Entries::Entry& entry = *wholes[end].entry;
            const auto first = std::find_if(firsts.begin(), firsts.end(),
                                            [&](const Entries::Entry* other) { return other->kind == entry.kind; });
            if (first == firsts.end()) {
                firsts.push_back(&entry);
            } else {
                aliases.emplace(*entry.name, *(*first)->name);
            }
        }
    }
    return aliases;
}

}  // namespace

Aliases find_aliases(const State& state) { return aliases_in(Entries(state, 1)); }

std::string describe(const State& state, const Values& values, int world_size) {
    std::string text;
    for (const auto& [name, tensor] : state.tensors()) {
        const TensorKind& kind = *tensor.kind;
        text += fmt::format("tensor '{}' {} {} ", name, name_of(kind.dtype), kind.shape.str());
        text += kind.layout ? kind.layout->str() : fmt::format("mesh [{}], R", world_size);
        text += '\n';
    }
    for (const auto& [name, value] : values) {
        if (!private_rank(name)) text += state.told(name, value);
    }
    return text;
}

namespace {

// SHA-256 of what is added, cut to a Digest.
class Hasher {
   public:
    Hasher() : context_(EVP_MD_CTX_new(), EVP_MD_CTX_free) {
        check(context_ && EVP_DigestInit_ex(context_.get(), EVP_sha256(), nullptr) == 1);
    }
    void add(std::string_view text) {
        add_number(text.size());
        buffer_ += text;
        if (buffer_.size() >= flush_bytes) flush();
    }
    void add_number(uint64_t number) { buffer_.append(reinterpret_cast<const char*>(&number), sizeof number); }
    [[nodiscard]] Digest finish() {
        flush();
        std::array<uint8_t, EVP_MAX_MD_SIZE> full{};
        check(EVP_DigestFinal_ex(context_.get(), full.data(), nullptr) == 1);
        Digest digest;
        std::copy_n(full.begin(), digest.size(), digest.begin());
        return digest;
    }

   private:
    static constexpr size_t flush_bytes = 16384;
    static void check(bool done) {
        if (!done) throw Error(Code::internal, "SHA-256 failed");
    }
    void flush() {
        check(EVP_DigestUpdate(context_.get(), buffer_.data(), buffer_.size()) == 1);
        buffer_.clear();
    }
    std::unique_ptr<EVP_MD_CTX, void (*)(EVP_MD_CTX*)> context_;
    std::string buffer_;
};

Digest structure_in(const Entries& entries) {
    Hasher hasher;
    // Layouts and kinds are hashed as numbers.
    hasher.add_number(entries.layouts.size());
    for (const Layout& layout : entries.layouts) hasher.add(layout.str());
    hasher.add_number(entries.kinds.size());
    for (const Kind& kind : entries.kinds) {
        hasher.add_number(static_cast<uint64_t>(kind.dtype) << 32 | static_cast<uint64_t>(kind.shape.ndim()));
        for (const int64_t size : kind.shape) hasher.add_number(static_cast<uint64_t>(size));
        hasher.add_number(kind.layout);
    }
    hasher.add_number(entries.list.size());
    for (const Entries::Entry& entry : entries.list) {
        hasher.add(*entry.name);
        hasher.add_number(entry.kind);
        if (entries.kinds[entry.kind].layout == no_layout) hasher.add(entry.tensor->kind->layout->str());
    }
    return hasher.finish();
}

}  // namespace

Digest structure_of(const State& state, int world_size) { return structure_in(Entries(state, world_size)); }

Digest digest_of(std::string_view text) {
    Hasher hasher;
    hasher.add(text);
    return hasher.finish();
}

std::shared_ptr<const StatePlan> PlanCache::of(const State& state, int rank, int world_size,
                                               const PlanOptions& options) {
    const std::shared_ptr<const void> version = state.tensors_version();
    if (last_ && last_->version == version) return last_;
    last_ = nullptr;  // its memory first
    auto next = std::make_shared<StatePlan>();
    next->version = version;
    const Entries entries(state, world_size);
    next->structure = structure_in(entries);
    next->aliases = aliases_in(entries);
    std::string text;
    for (const auto& [name, target] : next->aliases) text += fmt::format("{}\n{}\n", name, target);
    next->alias_digest = digest_of(text);
    next->plan = std::make_shared<const SavePlan>(Planner(entries, next->aliases, rank, world_size, options).take());
    return last_ = std::move(next);
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
        if (theirs.empty()) return fmt::format("it has {}, which rank 0's lacks", ours);
        if (ours.empty()) return fmt::format("it lacks {}, which rank 0's has", theirs);
        return fmt::format("it has {} where rank 0 has {}", ours, theirs);
    }
}

SavePlan make_plan(const State& state, const Aliases& aliases, int rank, int world_size, const PlanOptions& options) {
    return Planner(Entries(state, world_size), aliases, rank, world_size, options).take();
}

SavedTensors SavePlan::tensors(std::span<const std::shared_ptr<const SavedTensor>> alike_told,
                               SavedTensors told) const {
    size_t begin = 0;
    for (const Regular& one : regular) {
        told.emplace_hint(told.end(), names.substr(begin, one.name_end - begin), alike_told[one.tensor]);
        begin = one.name_end;
    }
    return told;
}

SavedTensors number_files(const SavePlan& plan, const std::vector<std::vector<SavedFile>>& of_ranks,
                          std::vector<SavedFile>& files) {
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
    // Ranks without a file shift the numbers of the others; a rank whose pieces are all empty may point anywhere. Many
    // tensors have the same runs.
    std::map<std::vector<FileRun>, std::vector<FileRun>> moved;
    const auto moved_up = [&](const std::vector<FileRun>& runs) {
        const auto [at, is_new] = moved.try_emplace(runs);
        if (!is_new) return at->second;
        std::vector<int> list;
        for (const FileRun& run : runs) {
            for (int i = 0; i < run.count; ++i) {
                const int file = run.first + i * run.step;
                const std::vector<int>& of_rank = number[static_cast<size_t>(file)];
                list.push_back(of_rank.empty() ? 0 : of_rank.front());
            }
        }
        return at->second = runs_of(list);
    };
    std::vector<std::shared_ptr<const SavedTensor>> alike;
    for (const auto& planned : plan.alike) {
        SavedTensor tensor = *planned;
        if (!all_write) tensor.files = moved_up(tensor.files);
        const auto pieces = int64_t{tensor.layout->shard_count()} * tensor.split;
        if (tensor.files == std::vector<FileRun>{{0, static_cast<int>(pieces), 1}}) tensor.files.clear();
        alike.push_back(std::make_shared<const SavedTensor>(std::move(tensor)));
    }
    SavedTensors irregular;
    for (const auto& [name, planned] : plan.irregular) {
        SavedTensor tensor = *planned;
        const std::vector<int>& nth = plan.nth_file.at(name);
        for (size_t i = 0; i < tensor.pieces.size(); ++i) {
            const auto rank = static_cast<size_t>(tensor.pieces[i].file);
            tensor.pieces[i].file = number[rank].at(static_cast<size_t>(nth[i]));
        }
        irregular.emplace_hint(irregular.end(), name, std::make_shared<const SavedTensor>(std::move(tensor)));
    }
    return plan.tensors(alike, std::move(irregular));
}

}  // namespace tsr
