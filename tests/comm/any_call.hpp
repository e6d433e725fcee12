// One rank's part in any collective or message: its tensors over given memory, what it puts in, and what must come out.
#pragma once

#include <cstring>
#include <vector>

#include "comm/request.hpp"
#include "comm/values.hpp"

namespace tsr::testing {

inline constexpr Collective every_collective[] = {
    Collective::all_reduce, Collective::reduce_scatter, Collective::all_gather, Collective::all_gather_v,
    Collective::broadcast,  Collective::reduce,         Collective::gather,     Collective::scatter,
    Collective::all_to_all, Collective::barrier};

inline bool is_reduction(Collective c) {
    return c == Collective::all_reduce || c == Collective::reduce_scatter || c == Collective::reduce;
}
inline bool is_rooted(Collective c) {
    return c == Collective::broadcast || c == Collective::reduce || c == Collective::gather || c == Collective::scatter;
}
// Takes several tensors, which are exchanged together.
inline bool takes_lists(Collective c) {
    return c == Collective::all_reduce || c == Collective::broadcast || c == Collective::all_gather ||
           c == Collective::reduce_scatter;
}

// What all ranks of a call must agree on. A message is a send: `root` sends it to `to`, the others take no part.
struct Asked {
    Collective collective = Collective::barrier;
    DType dtype = DType::f32;
    ReduceOp op = ReduceOp::sum;
    int root = 0;
    size_t count = 1000;  // elements of a rank's part
    size_t tensors = 1;   // in so many of them, where lists are taken
    int to = -1;
    int tag = 0;

    [[nodiscard]] bool concerns(int rank) const { return collective != Collective::send || rank == root || rank == to; }
    // Of a rank's input, and as many of its output.
    [[nodiscard]] size_t bytes(int world) const { return count * static_cast<size_t>(world) * size_of(dtype); }
};

class AnyCall {
   public:
    AnyCall(const Asked& asked, int rank, int world, std::byte* input, std::byte* output)
        : asked_(asked), rank_(rank), world_(world) {
        const auto n = static_cast<size_t>(world);
        const auto over = [&](std::byte* data, size_t count) {
            return Tensor{data, Dims{static_cast<int64_t>(count)}, asked.dtype, {}};
        };
        const bool is_root = rank == asked.root;
        if (is_list()) {
            make_lists(input, output);
            return;
        }
        switch (asked.collective) {
            case Collective::all_reduce:  // in two tensors that are no neighbours
                outputs_ = {over(output, asked.count / 3), over(input, asked.count - asked.count / 3)};
                break;
            case Collective::broadcast: outputs_ = {over(output, asked.count)}; break;
            case Collective::reduce_scatter:
            case Collective::scatter:
                if (is_root || asked.collective != Collective::scatter) inputs_ = {over(input, asked.count * n)};
                outputs_ = {over(output, asked.count)};
                break;
            case Collective::all_gather:
            case Collective::gather:
                inputs_ = {over(input, asked.count)};
                if (is_root || asked.collective != Collective::gather) outputs_ = {over(output, asked.count * n)};
                break;
            case Collective::all_gather_v:
                for (size_t r = 0; r < n; ++r) {
                    outputs_.push_back(over(output + r * asked.count * size_of(asked.dtype), length_of(r)));
                }
                inputs_ = {over(input, length_of(static_cast<size_t>(rank)))};
                break;
            case Collective::reduce:
                inputs_ = {over(input, asked.count)};
                if (is_root) outputs_ = {over(output, asked.count)};
                break;
            case Collective::all_to_all:
                inputs_ = {over(input, asked.count * n)};
                outputs_ = {over(output, asked.count * n)};
                break;
            case Collective::send:
                if (is_root) inputs_ = {over(input, asked.count)};
                if (rank == asked.to) outputs_ = {over(output, asked.count)};
                break;
            default: break;
        }
    }

    [[nodiscard]] Request request() const {
        Request request{asked_.collective, inputs_, outputs_};
        if (asked_.collective == Collective::send) {
            const bool sends = rank_ == asked_.root;
            if (!sends) request.collective = Collective::recv;
            request.peer = sends ? asked_.to : asked_.root;
            request.tag = asked_.tag;
        }
        if (is_reduction(asked_.collective)) request.op = asked_.op;
        if (is_rooted(asked_.collective)) request.peer = asked_.root;
        return request;
    }

    // Inputs that differ with `salt`, and outputs that are nothing that could come out.
    void fill(int64_t salt) const {
        const bool in_place = asked_.collective == Collective::all_reduce || asked_.collective == Collective::broadcast;
        for (const Tensor& tensor : outputs_) {
            if (tensor.size_bytes() > 0) std::memset(tensor.data, 0x5a, tensor.size_bytes());
        }
        const std::vector<Tensor>& given = in_place ? outputs_ : inputs_;
        for (size_t k = 0; k < given.size(); ++k) {
            put_all(given[k], [&](int64_t i) { return input_value(rank_, i + salt_of(k, salt)); });
        }
    }

    // The first element of an output that is not what must come out; -1: none.
    [[nodiscard]] int64_t first_wrong(int64_t salt) const {
        for (size_t k = 0; k < outputs_.size(); ++k) {
            const int64_t shift = salt_of(k, salt);
            const auto part = static_cast<int64_t>(is_list() ? length_in_list(k) : asked_.count);
            const auto sum = [&](int64_t at) { return expected_value(world_, at + shift, asked_.dtype, asked_.op); };
            const auto of = [&](int64_t r, int64_t at) { return input_value(static_cast<int>(r), at + shift); };
            const auto expected = [&](int64_t i) -> double {
                switch (asked_.collective) {
                    case Collective::all_reduce:
                    case Collective::reduce: return sum(i);
                    case Collective::reduce_scatter: return sum(rank_ * part + i);
                    case Collective::all_gather:
                    case Collective::gather: return of(i / part, i % part);
                    case Collective::all_gather_v: return of(static_cast<int64_t>(k), i);
                    case Collective::send:
                    case Collective::broadcast: return of(asked_.root, i);
                    case Collective::scatter: return of(asked_.root, rank_ * part + i);
                    case Collective::all_to_all: return of(i / part, rank_ * part + i % part);
                    default: return 0;
                }
            };
            const int64_t wrong = first_other(outputs_[k], expected, part);
            if (wrong >= 0) return wrong;
        }
        return -1;
    }

   private:
    [[nodiscard]] bool is_list() const { return asked_.tensors > 1 && takes_lists(asked_.collective); }
    // The last of a list has what is left, which may be nothing for the others.
    [[nodiscard]] size_t length_in_list(size_t k) const {
        const size_t each = asked_.count / asked_.tensors;
        return k + 1 < asked_.tensors ? each : asked_.count - each * (asked_.tensors - 1);
    }
    // Tensors of a list differ, so that none passes for its neighbour.
    [[nodiscard]] int64_t salt_of(size_t k, int64_t salt) const {
        return is_list() ? salt + 3 * static_cast<int64_t>(k) : salt;
    }
    // One after the other; in place, in both memories in turn, so that some are no neighbours.
    void make_lists(std::byte* input, std::byte* output) {
        const auto n = static_cast<size_t>(world_);
        const auto over = [&](std::byte* memory, size_t first, size_t count) {
            return Tensor{memory + first * size_of(asked_.dtype), Dims{static_cast<int64_t>(count)}, asked_.dtype, {}};
        };
        for (size_t k = 0, at = 0; k < asked_.tensors; at += length_in_list(k++)) {
            const size_t count = length_in_list(k);
            const bool gathers = asked_.collective == Collective::all_gather;
            if (gathers || asked_.collective == Collective::reduce_scatter) {
                inputs_.push_back(gathers ? over(input, at, count) : over(input, n * at, n * count));
                outputs_.push_back(gathers ? over(output, n * at, n * count) : over(output, at, count));
            } else {
                outputs_.push_back(over(k % 2 == 0 ? output : input, at, count));
            }
        }
    }

    // Of an all_gather_v, of rank r.
    [[nodiscard]] size_t length_of(size_t r) const { return r % 3 == 1 ? asked_.count / 2 : asked_.count; }

    const Asked asked_;
    const int rank_;
    const int world_;
    std::vector<Tensor> inputs_;
    std::vector<Tensor> outputs_;
};

}  // namespace tsr::testing
