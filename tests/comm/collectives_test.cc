// Every collective against a plain reference, over worlds, dtypes, operations, sizes and kinds of memory. Inputs are
// small integers, so that every order of every dtype gives the same exact result; the order itself is tested apart.
#include <fmt/format.h>
#include <gmock/gmock.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <functional>

#include "comm/any_call.hpp"
#include "comm/communicator.hpp"
#include "patience.hpp"
#include "ranks.hpp"
#include "sanitized.hpp"
#include "values.hpp"

namespace tsr::testing {
namespace {

// --- where a test's tensors live

enum class Memory { foreign, buffers, mixed };

// Bytes for one tensor of one rank.
class Place {
   public:
    Place(Communicator& comm, Memory memory, size_t size) {
        const bool shared = memory == Memory::buffers || (memory == Memory::mixed && comm.rank() % 2 == 0);
        // Every rank must take part in the allocation, also one that then uses its own memory.
        if (memory != Memory::foreign) buffer_ = comm.allocate(size);
        if (shared) {
            data_ = buffer_->data();
        } else {
            own_.resize(size + 1);
            data_ = own_.data();
        }
    }
    [[nodiscard]] std::byte* data() const { return data_; }

   private:
    std::shared_ptr<Buffer> buffer_;
    std::vector<std::byte> own_;
    std::byte* data_ = nullptr;
};

Tensor view(const Place& place, DType dtype, size_t count, size_t offset = 0) {
    return {place.data() + offset * size_of(dtype), Dims{static_cast<int64_t>(count)}, dtype, {}};
}

void fill(const Tensor& tensor, int rank) {
    put_all(tensor, [&](int64_t i) { return input_value(rank, i); });
}

void clear(const Tensor& tensor) {
    if (tensor.size_bytes() > 0) std::memset(tensor.data, 0x5a, tensor.size_bytes());
}

struct Case {
    int world;
    Memory memory;
    const char* backend = "auto";
    const char* placement = "";
};

class Collectives : public ::testing::TestWithParam<Case> {
   protected:
    void on_ranks(const std::function<void(Communicator&)>& body) {
        const Case& given = GetParam();
        const auto store = make_memory_store(patience(milliseconds{30000}));
        expect_all_well(run_threads(given.world, [&](int rank) {
            CommOptions options = test_options(given.backend);
            options.host_id = pretended_host(given.placement, rank, given.world);
            const auto comm = Communicator::create(store, rank, given.world, options);
            if (*given.placement != '\0') {
                ASSERT_EQ(comm->transport(), "hierarchical");
            }
            body(*comm);
        }));
    }
    // Sizes (elements a rank) that meet each way: empty, tiny, one-shot, staged or direct, several segments, odd.
    [[nodiscard]] static std::vector<size_t> sizes() {
        if (GetParam().world > 4) return {0, 1, 1023, 70001};
        if (*GetParam().placement != '\0') return {0, 1, 7, 1023, 70001, (size_t{1} << 20) + 3};  // chunks in turn
        return {0, 1, 7, 1023, 70001, (size_t{1} << 18) + 3};
    }
};

auto sum_of(const Communicator& comm) {
    return [n = comm.world_size()](int64_t i) { return expected_value(n, i, DType::f32, ReduceOp::sum); };
}

// The first element that is not what a concatenation of all ranks' `count` elements holds; -1 if there is none.
int64_t first_not_gathered(const Tensor& tensor, size_t count) {
    const auto each = static_cast<int64_t>(count);
    return first_other(tensor, [&](int64_t i) { return input_value(static_cast<int>(i / each), i % each); }, each);
}

constexpr DType all_dtypes[] = {DType::f16, DType::bf16, DType::f32, DType::f64,
                                DType::i8,  DType::u8,   DType::i32, DType::i64};
constexpr ReduceOp all_ops[] = {ReduceOp::sum, ReduceOp::avg, ReduceOp::min, ReduceOp::max, ReduceOp::prod};

Request reduction(Collective collective, std::span<const Tensor> in, std::span<const Tensor> out, ReduceOp op,
                  int root = -1) {
    return {collective, in, out, op, root, 0, {}};
}

// Also where the ranks' tensors begin at different distances from what is aligned to a vector.
TEST_P(Collectives, AllReduceGivesEveryDtypeAndOp) {
    on_ranks([&](Communicator& comm) {
        const size_t most = sanitized || comm.world_size() > 5 ? 20011 : 70001;
        const Place place(comm, GetParam().memory, most * 8 + 64);
        for (const DType dtype : all_dtypes) {
            for (const ReduceOp op : all_ops) {
                for (const auto& [count, offset] :
                     {std::pair{size_t{3}, 0}, {3, 1}, {1023, 0}, {most, 0}, {20011, 3}}) {
                    const auto first = static_cast<size_t>(offset == 0 ? 0 : offset + comm.rank() % 3);
                    const Tensor tensor = view(place, dtype, count, first);
                    fill(tensor, comm.rank());
                    comm.run(reduction(Collective::all_reduce, {}, {&tensor, 1}, op));
                    ASSERT_EQ(
                        first_other(tensor, [&](int64_t i) { return expected_value(comm.world_size(), i, dtype, op); }),
                        -1)
                        << name_of(dtype) << " " << name_of(op) << " of " << count << " from " << first;
                }
            }
        }
    });
}

// With tensors that begin some elements after what is aligned to a page, on each rank another number of them.
void expect_right(Communicator& comm, const Asked& asked, const Place& input, const Place& output) {
    const size_t element = size_of(asked.dtype);
    const auto after = static_cast<size_t>(comm.rank() % 3);
    const AnyCall call(asked, comm.rank(), comm.world_size(), input.data() + (1 + after) * element,
                       output.data() + (3 + after) * element);
    call.fill(7);
    comm.run(call.request());
    ASSERT_EQ(call.first_wrong(7), -1) << name_of(asked.collective) << " of " << asked.count << " "
                                       << name_of(asked.dtype) << " " << name_of(asked.op);
}

TEST_P(Collectives, ReductionsGiveEveryDtypeAndOpAtAnyOffset) {
    on_ranks([&](Communicator& comm) {
        constexpr size_t count = 5003;  // one shot of small types, staged or direct of large ones
        const size_t most = Asked{.dtype = DType::i64, .count = count}.bytes(comm.world_size()) + 64;
        const Place input(comm, GetParam().memory, most);
        const Place output(comm, GetParam().memory, most);
        for (const Collective collective : every_collective) {
            if (!is_reduction(collective)) continue;
            for (const DType dtype : all_dtypes) {
                for (const ReduceOp op : all_ops) {
                    expect_right(comm, {collective, dtype, op, comm.world_size() / 2, count}, input, output);
                    if (HasFatalFailure()) return;
                }
            }
        }
    });
}

TEST_P(Collectives, WhatMovesDataDoesSoAtAnyOffset) {
    on_ranks([&](Communicator& comm) {
        const size_t most_count = comm.world_size() > 4 ? 20011 : 70001;
        const size_t most = Asked{.dtype = DType::f32, .count = most_count}.bytes(comm.world_size()) + 64;
        const Place input(comm, GetParam().memory, most);
        const Place output(comm, GetParam().memory, most);
        for (const Collective collective : every_collective) {
            if (is_reduction(collective)) continue;
            for (const DType dtype : {DType::u8, DType::f32}) {
                for (const size_t count : {size_t{1023}, most_count}) {
                    const int root = comm.world_size() - 1;
                    expect_right(comm, {collective, dtype, ReduceOp::sum, root, count}, input, output);
                    if (HasFatalFailure()) return;
                }
            }
        }
    });
}

TEST_P(Collectives, AllReduceOfEverySize) {
    on_ranks([&](Communicator& comm) {
        for (const size_t count : sizes()) {
            const Place place(comm, GetParam().memory, count * 4 + 64);
            for (const size_t offset : {size_t{0}, size_t{3}}) {
                const Tensor tensor = view(place, DType::f32, count, offset);
                for (int repeat = 0; repeat < 3; ++repeat) {
                    fill(tensor, comm.rank());
                    comm.run(reduction(Collective::all_reduce, {}, {&tensor, 1}, ReduceOp::sum));
                    ASSERT_EQ(first_other(tensor, sum_of(comm)), -1) << count;
                }
            }
        }
    });
}

TEST_P(Collectives, ListsOfTensorsAreReducedAndBroadcastTogether) {
    on_ranks([&](Communicator& comm) {
        const Place place(comm, GetParam().memory, size_t{8} << 20);
        // Gaps, neighbours and empty ones; together more than a segment, and than some chunks of several hosts.
        std::vector<Tensor> list;
        size_t at = 0;
        for (const size_t count : {5, 0, 1000, 70001, 1, 64, 130000, sanitized ? 1100000 : 1500000}) {
            list.push_back(view(place, DType::f32, count, at));
            at += count + (list.size() % 2);
        }
        for (const Tensor& tensor : list) fill(tensor, comm.rank());
        comm.run(reduction(Collective::all_reduce, {}, list, ReduceOp::max));
        for (const Tensor& tensor : list) {
            ASSERT_EQ(
                first_other(tensor,
                            [&](int64_t i) { return expected_value(comm.world_size(), i, DType::f32, ReduceOp::max); }),
                -1);
        }
        const int root = comm.world_size() - 1;
        for (const Tensor& tensor : list) fill(tensor, comm.rank());
        comm.run(reduction(Collective::broadcast, {}, list, ReduceOp::none, root));
        for (const Tensor& tensor : list) {
            ASSERT_EQ(first_other(tensor, [&](int64_t i) { return input_value(root, i); }), -1);
        }
        comm.run(reduction(Collective::all_reduce, {}, {}, ReduceOp::sum));
    });
}

// Gaps that are not the same on all ranks, and tensors that come in another order than they lie in. What is between them stays.
TEST_P(Collectives, WhereTheTensorsOfAListLieIsEachRanksOwn) {
    on_ranks([&](Communicator& comm) {
        constexpr size_t room = 120000;  // for a tensor and what is behind it
        const Place place(comm, GetParam().memory, 4 * room * sizeof(float));
        const std::array<size_t, 4> counts{70001, 1, 100000, 300};
        enum class Differs { nobody, one_rank, order };
        for (const Differs differs : {Differs::nobody, Differs::one_rank, Differs::order}) {
            const Tensor all = view(place, DType::f32, 4 * room);
            clear(all);
            const std::vector<std::byte> untouched(all.data, all.data + all.size_bytes());
            std::vector<Tensor> list;
            for (size_t i = 0; i < counts.size(); ++i) {
                const size_t slot = differs == Differs::order ? counts.size() - 1 - i : i;
                const size_t shift = differs == Differs::one_rank && comm.rank() == 1 && i == 2 ? 16 : 0;
                list.push_back(view(place, DType::f32, counts.at(i), slot * room + shift));
            }
            for (const Tensor& tensor : list) fill(tensor, comm.rank());
            comm.run(reduction(Collective::all_reduce, {}, list, ReduceOp::sum));
            for (const Tensor& tensor : list) {
                ASSERT_EQ(first_other(tensor, sum_of(comm)), -1) << static_cast<int>(differs);
                clear(tensor);
            }
            ASSERT_EQ(std::memcmp(all.data, untouched.data(), untouched.size()), 0) << static_cast<int>(differs);
        }
    });
}

// Lists of tensors of a rank: gaps, neighbours and empty ones; more than a segment, than some chunks of several hosts and
// than what is packed, which needs few ranks to be quick.
std::vector<size_t> list_of_counts(int world) {
    if (world > 4) return {5, 0, 1000, 1, 64, 30001};
    return {5, 0, 1000, 70001, 1, 64, 30001, 1100000};
}

struct Pairs {
    std::vector<Tensor> wholes;
    std::vector<Tensor> parts;
};

// `apart`: a gap after every second pair, so that the list is not one piece.
Pairs pairs_of(Communicator& comm, const Place& wholes, const Place& parts, std::span<const size_t> counts,
               size_t apart) {
    Pairs pairs;
    size_t whole_at = 0;
    size_t part_at = 0;
    for (const size_t count : counts) {
        const size_t all = count * static_cast<size_t>(comm.world_size());
        pairs.wholes.push_back(view(wholes, DType::f32, all, whole_at));
        pairs.parts.push_back(view(parts, DType::f32, count, part_at));
        const size_t gap = apart * (pairs.parts.size() % 2);
        whole_at += all + gap;
        part_at += count + gap;
    }
    return pairs;
}

size_t bytes_for(std::span<const size_t> counts, size_t times) {
    size_t elements = 0;
    for (const size_t count : counts) elements += count * times + 3;
    return elements * 4;
}

// Gives `body` the lists of this rank: long and short, in one piece or with gaps, with the parts beside the wholes or in
// them.
void for_lists(Communicator& comm, Memory memory, const std::function<void(const Pairs&)>& body) {
    const auto n = static_cast<size_t>(comm.world_size());
    const std::vector<size_t> many = list_of_counts(comm.world_size());
    const std::vector<size_t> few = {3, 1, 7};
    for (const std::vector<size_t>& counts : {many, few}) {
        const Place wholes(comm, memory, bytes_for(counts, n));
        const Place parts(comm, memory, bytes_for(counts, 1));
        for (const size_t apart : {size_t{0}, size_t{3}}) {
            for (const bool in_place : {false, true}) {
                SCOPED_TRACE(fmt::format("{} tensors, gaps of {}, in place {}", counts.size(), apart, in_place));
                Pairs pairs = pairs_of(comm, wholes, parts, counts, apart);
                for (size_t i = 0; in_place && i < counts.size(); ++i) {
                    pairs.parts[i].data =
                        pairs.wholes[i].data + static_cast<size_t>(comm.rank()) * pairs.parts[i].size_bytes();
                }
                body(pairs);
            }
        }
    }
}

TEST_P(Collectives, ListsOfTensorsAreGatheredTogether) {
    on_ranks([&](Communicator& comm) {
        for_lists(comm, GetParam().memory, [&](const Pairs& pairs) {
            for (const Tensor& whole : pairs.wholes) clear(whole);
            for (const Tensor& part : pairs.parts) fill(part, comm.rank());
            comm.run({.collective = Collective::all_gather, .inputs = pairs.parts, .outputs = pairs.wholes});
            for (size_t i = 0; i < pairs.parts.size(); ++i) {
                const auto count = static_cast<size_t>(pairs.parts[i].numel());
                ASSERT_EQ(first_not_gathered(pairs.wholes[i], count), -1) << "tensor " << i;
            }
        });
    });
}

TEST_P(Collectives, ListsOfTensorsAreReducedAndScatteredTogether) {
    on_ranks([&](Communicator& comm) {
        for_lists(comm, GetParam().memory, [&](const Pairs& pairs) {
            for (const Tensor& whole : pairs.wholes) fill(whole, comm.rank());
            comm.run(reduction(Collective::reduce_scatter, pairs.wholes, pairs.parts, ReduceOp::sum));
            const auto all = sum_of(comm);
            for (size_t i = 0; i < pairs.parts.size(); ++i) {
                const int64_t first = pairs.parts[i].numel() * comm.rank();
                ASSERT_EQ(first_other(pairs.parts[i], [&](int64_t at) { return all(first + at); }), -1)
                    << "tensor " << i;
            }
        });
    });
}

// What overflows in the sum of a host takes another way there.
TEST_P(Collectives, ListsOfIntegersAreAveragedAndScattered) {
    on_ranks([&](Communicator& comm) {
        const auto n = static_cast<size_t>(comm.world_size());
        std::vector<std::vector<int32_t>> memory;
        std::vector<Tensor> wholes;
        std::vector<Tensor> parts;
        for (const size_t count : {2, 40000}) {
            wholes.push_back(tensor_of(std::span<int32_t>(memory.emplace_back(n * count)), DType::i32));
            parts.push_back(tensor_of(std::span<int32_t>(memory.emplace_back(count)), DType::i32));
        }
        for (const Tensor& whole : wholes) fill(whole, comm.rank());
        comm.run(reduction(Collective::reduce_scatter, wholes, parts, ReduceOp::avg));
        for (const Tensor& part : parts) {
            ASSERT_EQ(first_other(part,
                                  [&](int64_t i) {
                                      return expected_value(comm.world_size(), part.numel() * comm.rank() + i,
                                                            DType::i32, ReduceOp::avg);
                                  }),
                      -1);
        }
    });
}

TEST_P(Collectives, ReduceScatter) {
    on_ranks([&](Communicator& comm) {
        const auto n = static_cast<size_t>(comm.world_size());
        const auto rank = static_cast<size_t>(comm.rank());
        for (const size_t count : sizes()) {
            const Place in_place(comm, GetParam().memory, n * count * 4);
            const Place out_place(comm, GetParam().memory, count * 4);
            const Tensor input = view(in_place, DType::i32, n * count);
            for (const bool in_part : {false, true}) {
                const Tensor output =
                    in_part ? view(in_place, DType::i32, count, rank * count) : view(out_place, DType::i32, count);
                fill(input, comm.rank());
                comm.run(reduction(Collective::reduce_scatter, {&input, 1}, {&output, 1}, ReduceOp::sum));
                const auto first = static_cast<int64_t>(rank * count);
                ASSERT_EQ(first_other(output, [&](int64_t i) { return sum_of(comm)(first + i); }), -1) << count;
            }
        }
    });
}

TEST_P(Collectives, AllGather) {
    on_ranks([&](Communicator& comm) {
        const auto n = static_cast<size_t>(comm.world_size());
        const auto rank = static_cast<size_t>(comm.rank());
        for (const size_t count : sizes()) {
            const Place in_place(comm, GetParam().memory, count * 4);
            const Place out_place(comm, GetParam().memory, n * count * 4);
            const Tensor output = view(out_place, DType::f32, n * count);
            for (const bool in_part : {false, true}) {
                const Tensor input =
                    in_part ? view(out_place, DType::f32, count, rank * count) : view(in_place, DType::f32, count);
                clear(output);
                fill(input, comm.rank());
                comm.run(reduction(Collective::all_gather, {&input, 1}, {&output, 1}, ReduceOp::none));
                ASSERT_EQ(first_not_gathered(output, count), -1) << count;
            }
        }
    });
}

TEST_P(Collectives, AllGatherOfDifferentLengths) {
    on_ranks([&](Communicator& comm) {
        const auto n = static_cast<size_t>(comm.world_size());
        for (const size_t base : {size_t{0}, size_t{5}, size_t{80000}}) {
            std::vector<size_t> lengths;
            size_t total = 0;
            for (size_t r = 0; r < n; ++r) lengths.push_back((r % 3) * base + r), total += lengths.back();
            const Place in_place(comm, GetParam().memory, *std::max_element(lengths.begin(), lengths.end()) * 4);
            const Place out_place(comm, GetParam().memory, total * 4);
            std::vector<Tensor> outputs;
            size_t at = 0;
            for (const size_t length : lengths)
                outputs.push_back(view(out_place, DType::f32, length, at)), at += length;
            const Tensor input = view(in_place, DType::f32, lengths[static_cast<size_t>(comm.rank())]);
            fill(input, comm.rank());
            comm.run(reduction(Collective::all_gather_v, {&input, 1}, outputs, ReduceOp::none));
            for (size_t r = 0; r < n; ++r) {
                ASSERT_EQ(first_other(outputs[r], [&](int64_t i) { return input_value(static_cast<int>(r), i); }), -1);
            }
        }
    });
}

TEST_P(Collectives, BroadcastReduceGatherScatterFromFirstAndLastRoot) {
    on_ranks([&](Communicator& comm) {
        const auto n = static_cast<size_t>(comm.world_size());
        for (const size_t count : sizes()) {
            const Place small(comm, GetParam().memory, count * 4);
            const Place other(comm, GetParam().memory, count * 4);
            const Place large(comm, GetParam().memory, n * count * 4);
            const Tensor part = view(small, DType::f32, count);
            const Tensor result = view(other, DType::f32, count);
            const Tensor whole = view(large, DType::f32, n * count);
            for (const int root : {0, comm.world_size() - 1}) {
                const bool is_root = comm.rank() == root;
                const auto only_on_root = [&](const Tensor& tensor) {
                    return std::span<const Tensor>(&tensor, is_root ? 1 : 0);
                };
                fill(part, comm.rank());
                comm.run(reduction(Collective::broadcast, {}, {&part, 1}, ReduceOp::none, root));
                ASSERT_EQ(first_other(part, [&](int64_t i) { return input_value(root, i); }), -1) << count;
                fill(part, comm.rank());
                comm.run(reduction(Collective::reduce, {&part, 1}, only_on_root(result), ReduceOp::sum, root));
                if (is_root) {
                    ASSERT_EQ(first_other(result, sum_of(comm)), -1) << count;
                }
                comm.run(reduction(Collective::gather, {&part, 1}, only_on_root(whole), ReduceOp::none, root));
                if (is_root) {
                    ASSERT_EQ(first_not_gathered(whole, count), -1) << count;
                }
                fill(whole, comm.rank());
                comm.run(reduction(Collective::scatter, only_on_root(whole), {&result, 1}, ReduceOp::none, root));
                const auto first = static_cast<int64_t>(count) * comm.rank();
                ASSERT_EQ(first_other(result, [&](int64_t i) { return input_value(root, first + i); }), -1) << count;
            }
        }
    });
}

TEST_P(Collectives, AllToAll) {
    on_ranks([&](Communicator& comm) {
        const auto n = static_cast<size_t>(comm.world_size());
        for (const size_t count : sizes()) {
            const Place in_place(comm, GetParam().memory, n * count * 4);
            const Place out_place(comm, GetParam().memory, n * count * 4);
            const Tensor input = view(in_place, DType::f32, n * count);
            const Tensor output = view(out_place, DType::f32, n * count);
            fill(input, comm.rank());
            clear(output);
            comm.run(reduction(Collective::all_to_all, {&input, 1}, {&output, 1}, ReduceOp::none));
            const auto each = static_cast<int64_t>(count);
            const auto part_of_rank = [&](int64_t i) {
                return input_value(static_cast<int>(i / each), comm.rank() * each + i % each);
            };
            ASSERT_EQ(first_other(output, part_of_rank, each), -1) << count;
        }
    });
}

// So many segments that both ways to store them are tried (comm/shm/stores.hpp).
TEST(StagedSegments, ArriveWhicheverWayTheyAreStored) {
    for (const int world : sanitized ? std::vector{2} : std::vector{2, 3, 5}) {
        for (const Collective collective : every_collective) {
            expect_all_well(run_ranks(world, test_options("shm"), [&](Communicator& comm) {
                const Asked asked{collective, DType::f32, ReduceOp::sum, world - 1, 120001};
                const Place input(comm, Memory::foreign, asked.bytes(world) + 64);
                const Place output(comm, Memory::foreign, asked.bytes(world) + 64);
                for (int repeat = 0; repeat < 15 && !::testing::Test::HasFatalFailure(); ++repeat) {
                    expect_right(comm, asked, input, output);
                }
            }));
        }
    }
}

std::string case_name(const ::testing::TestParamInfo<Case>& info) {
    const char* memory[] = {"Foreign", "Buffers", "Mixed"};
    return std::to_string(info.param.world) + memory[static_cast<int>(info.param.memory)];
}

std::string placed_case_name(const ::testing::TestParamInfo<Case>& info) {
    std::string placement = info.param.placement;
    std::erase(placement, '-');
    return case_name(info) + "_" + placement;
}

// Under a sanitizer 2, 4, 5 and 8 ranks stand for the others, and of hosts 3: what could race is the same.
std::vector<Case> kept(std::vector<Case> cases) {
    const auto is_like_another = [](const Case& one) {
        if (one.world == 3) return *one.placement == '\0';
        return one.world > 5 && one.world != 8;
    };
    if (sanitized) std::erase_if(cases, is_like_another);
    return cases;
}

INSTANTIATE_TEST_SUITE_P(
    Hosts, Collectives,
    ::testing::ValuesIn(kept({Case{3, Memory::foreign, "auto", "even"}, Case{3, Memory::buffers, "auto", "round-robin"},
                              Case{3, Memory::foreign, "auto", "uneven"}, Case{4, Memory::mixed, "auto", "even"},
                              Case{4, Memory::foreign, "auto", "round-robin"},
                              Case{4, Memory::buffers, "auto", "uneven"}, Case{5, Memory::foreign, "auto", "uneven"},
                              Case{6, Memory::buffers, "auto", "even"}, Case{7, Memory::foreign, "auto", "round-robin"},
                              Case{8, Memory::buffers, "auto", "round-robin"},
                              Case{9, Memory::mixed, "auto", "uneven"}})),
    placed_case_name);
// Gloo knows no kinds of memory.
INSTANTIATE_TEST_SUITE_P(Gloo, Collectives,
                         ::testing::ValuesIn(kept({Case{1, Memory::foreign, "gloo"}, Case{2, Memory::foreign, "gloo"},
                                                   Case{3, Memory::foreign, "gloo"}, Case{4, Memory::buffers, "gloo"},
                                                   Case{5, Memory::foreign, "gloo"}, Case{6, Memory::foreign, "gloo"},
                                                   Case{7, Memory::foreign, "gloo"},
                                                   Case{9, Memory::foreign, "gloo"}})),
                         case_name);
INSTANTIATE_TEST_SUITE_P(
    Worlds, Collectives,
    ::testing::ValuesIn(kept({Case{1, Memory::foreign}, Case{1, Memory::buffers}, Case{2, Memory::foreign},
                              Case{2, Memory::buffers}, Case{2, Memory::mixed}, Case{3, Memory::foreign},
                              Case{3, Memory::buffers}, Case{4, Memory::foreign}, Case{4, Memory::buffers},
                              Case{4, Memory::mixed}, Case{5, Memory::foreign}, Case{5, Memory::buffers},
                              Case{6, Memory::foreign}, Case{7, Memory::buffers}, Case{8, Memory::foreign},
                              Case{8, Memory::buffers}, Case{8, Memory::mixed}, Case{9, Memory::mixed}})),
    case_name);

}  // namespace
}  // namespace tsr::testing
