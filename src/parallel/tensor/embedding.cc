#include "parallel/tensor/embedding.hpp"

#include <fmt/core.h>

#include <cstring>

#include "base/error.hpp"
#include "tensor/arithmetic.hpp"

namespace tsr {

namespace {

// Rows of one vocabulary: those of this rank, and where they are in its slice.
struct Words {
    std::vector<Range> ranges;
    int64_t vocabulary = 0;

    // The row in the slice; -1: another rank's.
    [[nodiscard]] int64_t row_of(int64_t id) const {
        int64_t at = 0;
        for (const Range& range : ranges) {
            if (id >= range.begin && id < range.end) return at + id - range.begin;
            at += range.end - range.begin;
        }
        return -1;
    }
};

int64_t id_at(const Tensor& ids, int64_t i) {
    return ids.dtype == DType::i64 ? ids.as<int64_t>()[static_cast<size_t>(i)]
                                   : ids.as<int32_t>()[static_cast<size_t>(i)];
}

Words words_of(const TensorParallel& model, const TpParam& param) {
    if (param.shape.ndim() != 2 || param.cut > 0 || !is_floating(param.dtype)) {
        throw Error(
            Code::invalid_argument,
            fmt::format("parameter \"{}\" {} {} ({}) is not an embedding: it must be a floating-point matrix [words, "
                        "features] that is whole or cut along dimension 0",
                        param.name, name_of(param.dtype), param.shape.str(), name_of(param.style)));
    }
    const int64_t words = param.shape[0];
    if (param.cut == 0) return {param.ranges(model.comm()->rank()), words};
    // Every rank has all words; rank 0 adds them.
    return {model.comm()->rank() == 0 ? std::vector<Range>{{0, words}} : std::vector<Range>{}, words};
}

void check_ids(const Tensor& ids, const TpParam& param) {
    if (ids.dtype != DType::i64 && ids.dtype != DType::i32) {
        throw Error(Code::invalid_argument, fmt::format("ids are {}; they must be i32 or i64", name_of(ids.dtype)));
    }
    for (int64_t i = 0; i < ids.numel(); ++i) {
        const int64_t id = id_at(ids, i);
        if (id >= 0 && id < param.shape[0]) continue;
        throw Error(
            Code::invalid_argument,
            fmt::format("id {} at position {} is outside of the vocabulary of \"{}\", which has the ids 0 to {}", id, i,
                        param.name, param.shape[0] - 1));
    }
}

// The whole activation's shape: that of the ids, and the features.
Dims activation_of(const Tensor& ids, const TpParam& param) {
    if (ids.shape.ndim() == max_ndim) {
        throw Error(Code::invalid_argument,
                    fmt::format("ids have {} dimensions; at most {} are supported", max_ndim, max_ndim - 1));
    }
    std::vector<int64_t> sizes(ids.shape.begin(), ids.shape.end());
    sizes.push_back(param.shape[1]);
    return Dims(std::span<const int64_t>(sizes));
}

void check_activation(const TensorParallel& model, const Tensor& activation, const Dims& whole, const TpParam& param,
                      int dim) {
    const Tensor complete{nullptr, whole, param.dtype, activation.device};
    if (dim >= 0) return model.moves().check_part(activation, complete, TpMoves::Part::in, dim);
    model.moves().check_same(activation, complete);
}

}  // namespace

void embed(TensorParallel& model, size_t index, const Tensor& ids, const Tensor& out, int dim, StreamHandle stream,
           WorkPtr* work) {
    const TpParam& param = model.param(index);
    const Words words = words_of(model, param);
    check_ids(ids, param);
    const Dims whole = activation_of(ids, param);
    check_activation(model, out, whole, param, dim);
    const Tensor weight = model.slice(index);
    const auto body = [=](TpMoves& moves) {
        const Tensor rows = dim >= 0 ? moves.temporary(whole, weight.dtype, out.device) : out;
        const size_t row_size = static_cast<size_t>(whole[whole.ndim() - 1]) * size_of(weight.dtype);
        for (int64_t i = 0; row_size > 0 && i < ids.numel(); ++i) {
            const int64_t row = words.row_of(id_at(ids, i));
            std::byte* const to = rows.data + static_cast<size_t>(i) * row_size;
            if (row < 0) {
                std::memset(to, 0, row_size);
            } else {
                std::memcpy(to, weight.data + static_cast<size_t>(row) * row_size, row_size);
            }
        }
        if (dim >= 0) return moves.sum_scatter(rows, out, dim, stream);
        moves.sum(rows, out, stream);
    };
    model.queue().run(body, stream, out.device, work);
}

void embed_backward(TensorParallel& model, size_t index, const Tensor& ids, const Tensor& grad, int dim,
                    const Tensor& sum, StreamHandle stream, WorkPtr* work) {
    const TpParam& param = model.param(index);
    Words words = words_of(model, param);
    if (param.cut < 0) words.ranges = {{0, param.shape[0]}};
    check_ids(ids, param);
    const Dims whole = activation_of(ids, param);
    check_activation(model, grad, whole, param, dim);
    model.moves().check_same(sum, model.slice(index));
    const auto body = [=](TpMoves& moves) {
        Tensor rows = grad;
        if (dim >= 0) {
            rows = moves.temporary(whole, grad.dtype, grad.device);
            moves.gather(grad, rows, dim, stream);
        }
        const int64_t features = whole[whole.ndim() - 1];
        const size_t row_size = static_cast<size_t>(features) * size_of(grad.dtype);
        for (int64_t i = 0; row_size > 0 && i < ids.numel(); ++i) {
            const int64_t row = words.row_of(id_at(ids, i));
            if (row < 0) continue;
            add({sum.data + static_cast<size_t>(row) * row_size, Dims{features}, grad.dtype, {}},
                {rows.data + static_cast<size_t>(i) * row_size, Dims{features}, grad.dtype, {}});
        }
    };
    model.queue().run(body, stream, grad.device, work);
}

}  // namespace tsr
