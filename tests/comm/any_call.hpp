// One rank's part in any collective: its tensors over given memory, what it puts in, and what must come out.
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

// What all ranks of a call must agree on.
struct Asked {
    Collective collective = Collective::barrier;
    DType dtype = DType::f32;
    ReduceOp op = ReduceOp::sum;
    int root = 0;
    size_t count = 1000;  // elements of a rank's part

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
            default: break;
        }
    }

    [[nodiscard]] Request request() const {
        Request request{asked_.collective, inputs_, outputs_};
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
        for (const Tensor& tensor : in_place ? outputs_ : inputs_) {
            for (int64_t i = 0; i < tensor.numel(); ++i) put(tensor, i, input_value(rank_, i + salt));
        }
    }

    // The first element of an output that is not what must come out; -1: none.
    [[nodiscard]] int64_t first_wrong(int64_t salt) const {
        const auto part = static_cast<int64_t>(asked_.count);
        for (size_t k = 0; k < outputs_.size(); ++k) {
            for (int64_t i = 0; i < outputs_[k].numel(); ++i) {
                const auto sum = [&](int64_t at) { return expected_value(world_, at + salt, asked_.dtype, asked_.op); };
                const auto of = [&](int64_t r, int64_t at) { return input_value(static_cast<int>(r), at + salt); };
                double expected = 0;
                switch (asked_.collective) {
                    case Collective::all_reduce:
                    case Collective::reduce: expected = sum(i); break;
                    case Collective::reduce_scatter: expected = sum(rank_ * part + i); break;
                    case Collective::all_gather:
                    case Collective::gather: expected = of(i / part, i % part); break;
                    case Collective::all_gather_v: expected = of(static_cast<int64_t>(k), i); break;
                    case Collective::broadcast: expected = of(asked_.root, i); break;
                    case Collective::scatter: expected = of(asked_.root, rank_ * part + i); break;
                    case Collective::all_to_all: expected = of(i / part, rank_ * part + i % part); break;
                    default: break;
                }
                if (get(outputs_[k], i) != expected) return i;
            }
        }
        return -1;
    }

   private:
    // Of an all_gather_v, of rank r.
    [[nodiscard]] size_t length_of(size_t r) const { return r % 3 == 1 ? asked_.count / 2 : asked_.count; }

    const Asked asked_;
    const int rank_;
    const int world_;
    std::vector<Tensor> inputs_;
    std::vector<Tensor> outputs_;
};

}  // namespace tsr::testing
