#include "parallel/tensor/embedding.hpp"

#include <fmt/core.h>

#include <array>
#include <cstring>

#include "base/error.hpp"
#include "device/launch.hpp"
#include "parallel/placement.hpp"
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
    if (ids.device.type != DeviceType::cpu) return;  // kernels check them
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

// All of an operation are where the embedding is.
void check_places(const TensorParallel& model, const TpParam& param, const Tensor& slice, const Tensor& ids,
                  const Tensor& activation, StreamHandle stream) {
    const std::array tensors{slice, ids, activation};
    model.moves().check_places(tensors, stream);
    for (const Tensor& tensor : tensors) {
        if (tensor.device.type == slice.device.type) continue;
        throw Error(Code::invalid_argument,
                    fmt::format("the embedding \"{}\" is on {}, but the ids or the activation are on {}", param.name,
                                device_api(slice.device).name(), device_api(tensor.device).name()));
    }
    if (slice.device.type == DeviceType::cpu) return;
    require_kernels_for("an embedding", slice.device);
    check_rows("an embedding", static_cast<size_t>(ids.numel()), static_cast<size_t>(param.shape[1]));
}

void check_activation(const TensorParallel& model, const Tensor& activation, const Dims& whole, const TpParam& param,
                      int dim) {
    const Tensor complete{nullptr, whole, param.dtype, activation.device};
    if (dim >= 0) return model.moves().check_part(activation, complete, TpMoves::Part::in, dim);
    model.moves().check_same(activation, complete);
}

void look_up(const Tensor& ids, const Words& words, const Tensor& weight, const Tensor& rows, int64_t features) {
    const size_t row_size = static_cast<size_t>(features) * size_of(weight.dtype);
    for (int64_t i = 0; row_size > 0 && i < ids.numel(); ++i) {
        const int64_t row = words.row_of(id_at(ids, i));
        std::byte* const to = rows.data + static_cast<size_t>(i) * row_size;
        if (row < 0) {
            std::memset(to, 0, row_size);
        } else {
            std::memcpy(to, weight.data + static_cast<size_t>(row) * row_size, row_size);
        }
    }
}

void add_words(const Tensor& ids, const Words& words, const Tensor& rows, const Tensor& sum, int64_t features) {
    const size_t row_size = static_cast<size_t>(features) * size_of(sum.dtype);
    for (int64_t i = 0; row_size > 0 && i < ids.numel(); ++i) {
        const int64_t row = words.row_of(id_at(ids, i));
        if (row < 0) continue;
        add({sum.data + static_cast<size_t>(row) * row_size, Dims{features}, sum.dtype, {}},
            {rows.data + static_cast<size_t>(i) * row_size, Dims{features}, sum.dtype, {}});
    }
}

// --- on a device

// Where kernels report an id outside of the vocabulary, and what then fails.
struct Report {
    std::shared_ptr<unsigned> outside;  // null on the CPU
    std::function<void()> verify;
};

Report report_of(TensorParallel& model, const TpParam& param, const Tensor& ids) {
    if (ids.device.type == DeviceType::cpu) return {};
    Report report{model.queue().flag(ids.device), {}};
    report.verify = [outside = report.outside, name = param.name, words = param.shape[0]] {
        if (*outside == 0) return;
        throw Error(
            Code::invalid_argument,
            fmt::format("an id is outside of the vocabulary of \"{}\", which has the ids 0 to {}", name, words - 1));
    };
    return report;
}

// Kernels of one operation on the rows of ids.
class OnWords {
   public:
    OnWords(const Tensor& ids, const Words& words, int64_t features, const unsigned* outside, StreamHandle stream)
        : device_(device_api(ids.device)),
          ranges_(words.ranges),
          all_{.ids = {ids.data, static_cast<size_t>(ids.numel()), ids.dtype == DType::i64},
               .outside = {outside},
               .vocabulary = words.vocabulary,
               .begin = 0,
               .end = 0,
               .row = 0,
               .width = static_cast<size_t>(features)},
          stream_(stream) {}

    void look_up(const Tensor& weight, const Tensor& rows) const {
        switch (size_of(weight.dtype)) {
            case 2: return look_up_units<uint16_t>(weight, rows);
            case 4: return look_up_units<uint32_t>(weight, rows);
            default: return look_up_units<uint64_t>(weight, rows);
        }
    }
    void add(const Tensor& rows, const Tensor& sum) const {
        switch (sum.dtype) {
            case DType::f16: return add_elements<Half>(rows, sum);
            case DType::bf16: return add_elements<BFloat>(rows, sum);
            case DType::f32: return add_elements<float>(rows, sum);
            default: return add_elements<double>(rows, sum);
        }
    }

   private:
    // Calls use(words) with each range of words of this rank; without any, with an empty one.
    template <class Use>
    void for_ranges(Use&& use) const {
        if (all_.width == 0) return;
        kernels::Words some = all_;
        if (ranges_.empty()) return use(some);
        for (const Range& range : ranges_) {
            some.begin = range.begin;
            some.end = range.end;
            use(some);
            some.row += static_cast<size_t>(range.end - range.begin);
        }
    }
    template <class Unit>
    void look_up_units(const Tensor& weight, const Tensor& rows) const {
        bool clears = true;
        for_ranges([&](const kernels::Words& some) {
            launch(device_, kernels::LookUp<Unit>{some, weight.data, rows.data, clears}, stream_);
            clears = false;
        });
    }
    template <class T>
    void add_elements(const Tensor& rows, const Tensor& sum) const {
        for_ranges([&](const kernels::Words& some) {
            launch(device_, kernels::AddWords<T>{some, rows.data, sum.data}, stream_);
        });
    }

    DeviceApi& device_;
    const std::vector<Range>& ranges_;
    const kernels::Words all_;
    const StreamHandle stream_;
};

}  // namespace

void embed(TensorParallel& model, size_t index, const Tensor& ids, const Tensor& out, int dim, StreamHandle stream,
           WorkPtr* work) {
    const TpParam& param = model.param(index);
    const Words words = words_of(model, param);
    check_ids(ids, param);
    const Dims whole = activation_of(ids, param);
    check_activation(model, out, whole, param, dim);
    const Tensor weight = model.slice(index);
    check_places(model, param, weight, ids, out, stream);
    const Report report = report_of(model, param, ids);
    const auto body = [=](TpMoves& moves, StreamHandle on) {
        const Tensor rows = dim >= 0 ? moves.temporary(whole, weight.dtype, out.device, on) : out;
        const int64_t features = whole[whole.ndim() - 1];
        if (report.outside) {
            OnWords(ids, words, features, report.outside.get(), on).look_up(weight, rows);
        } else {
            look_up(ids, words, weight, rows, features);
        }
        if (dim >= 0) return moves.sum_scatter(rows, out, dim, on);
        moves.sum(rows, out, on);
    };
    model.queue().run(body, stream, out.device, work, report.verify);
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
    check_places(model, param, sum, ids, grad, stream);
    const Report report = report_of(model, param, ids);
    const auto body = [=](TpMoves& moves, StreamHandle on) {
        Tensor rows = grad;
        if (dim >= 0) {
            rows = moves.temporary(whole, grad.dtype, grad.device, on);
            moves.gather(grad, rows, dim, on);
        }
        const int64_t features = whole[whole.ndim() - 1];
        if (report.outside) return OnWords(ids, words, features, report.outside.get(), on).add(rows, sum);
        add_words(ids, words, rows, sum, features);
    };
    model.queue().run(body, stream, grad.device, work, report.verify);
}

}  // namespace tsr
