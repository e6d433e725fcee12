#include "parallel/tensor/cross_entropy.hpp"

#include <fmt/core.h>

#include <array>
#include <cmath>
#include <limits>
#include <span>
#include <string>
#include <vector>

#include "base/error.hpp"
#include "parallel/tensor/loss_rows.hpp"
#include "tensor/half.hpp"

namespace tsr {

namespace {

constexpr int64_t most_classes = int64_t{1} << 48;

// --- elements

float value_of(float x) { return x; }
double value_of(double x) { return x; }
float value_of(Half x) { return widen(x); }
float value_of(BFloat x) { return widen(x); }
void store(float& to, float x) { to = x; }
void store(double& to, double x) { to = x; }
void store(Half& to, float x) { to = narrow_half(x); }
void store(BFloat& to, float x) { to = narrow_bfloat(x); }

// Value is the type of all that is computed: double for f64 logits, float for all others.
template <class Element, class Value>
class Computation {
   public:
    explicit Computation(const LossRows& rows) : rows_(rows), logits_(rows.logits.as<Element>()) {}

    void operator()(TpMoves& moves, StreamHandle /*stream*/) {
        const size_t n = rows_.count();
        std::vector<Value> most(n);
        for (size_t i = 0; i < n; ++i) most[i] = largest(row(i));
        reduce(moves, most, ReduceOp::max);
        // For each row: the sum of exponentials, the target's logit and, for smoothing, the weighted sum of logits.
        std::vector<Value> sums(3 * n);
        for (size_t i = 0; i < n; ++i) sum_row(i, most[i], std::span(sums).subspan(3 * i, 3));
        reduce(moves, sums, ReduceOp::sum);
        double total = 0;
        for (size_t i = 0; i < n; ++i) {
            const double loss = loss_of(i, std::span(sums).subspan(3 * i, 3));
            total += loss;
            if (rows_.reduction == LossReduction::none) rows_.loss.as<Value>()[i] = static_cast<Value>(loss);
            if (rows_.grad) grad_of(i, most[i], sums[3 * i]);
        }
        if (rows_.reduction != LossReduction::none) {
            rows_.loss.as<Value>()[0] = static_cast<Value>(total / rows_.divisor);
        }
    }

   private:
    [[nodiscard]] std::span<const Element> row(size_t i) const {
        return logits_.subspan(i * rows_.width(), rows_.width());
    }
    [[nodiscard]] int64_t target(size_t i) const { return integer_at(rows_.targets, i); }

    static void reduce(TpMoves& moves, std::vector<Value>& numbers, ReduceOp op) {
        const DType dtype = sizeof(Value) == sizeof(double) ? DType::f64 : DType::f32;
        const Tensor tensor = tensor_of(std::span(numbers), dtype);
        moves.comm()->run({.collective = Collective::all_reduce,
                           .inputs = {},
                           .outputs = {&tensor, 1},
                           .op = op,
                           .label = op == ReduceOp::max ? "largest logits" : "sums of logits"});
    }

    static Value largest(std::span<const Element> row) {
        Value most = -std::numeric_limits<Value>::infinity();
        for (const Element& x : row) {
            const Value value = value_of(x);
            if (value > most || std::isnan(value)) most = value;
        }
        return most;
    }

    void sum_row(size_t i, Value most, std::span<Value> sums) const {
        const std::span<const Element> row = this->row(i);
        double exponentials = 0;
        for (const Element& x : row) exponentials += std::exp(value_of(x) - most);
        sums[0] = static_cast<Value>(exponentials);
        const int64_t y = target(i);
        if (rows_.is_own(y)) sums[1] = value_of(row[static_cast<size_t>(y - rows_.classes.begin)]) - most;
        if (rows_.smoothing == 0) return;
        double weighted = 0;
        for (size_t c = 0; c < row.size(); ++c) {
            const double weight = rows_.weight(rows_.classes.begin + static_cast<int64_t>(c));
            if (weight != 0) weighted += weight * static_cast<double>(value_of(row[c]) - most);
        }
        sums[2] = static_cast<Value>(weighted);
    }

    [[nodiscard]] double loss_of(size_t i, std::span<const Value> sums) const {
        const int64_t y = target(i);
        if (y == rows_.ignore_index) return 0;
        const double log_sum = std::log(static_cast<double>(sums[0]));
        const double plain = rows_.weight(y) * (log_sum - static_cast<double>(sums[1]));
        if (rows_.smoothing == 0) return plain;
        const double smooth = rows_.weights_sum * log_sum - static_cast<double>(sums[2]);
        return (1 - rows_.smoothing) * plain + rows_.smoothing / static_cast<double>(rows_.vocabulary) * smooth;
    }

    void grad_of(size_t i, Value most, Value exponentials) const {
        const std::span<const Element> row = this->row(i);
        const std::span<Element> grad = rows_.grad->as<Element>().subspan(i * rows_.width(), rows_.width());
        const int64_t y = target(i);
        if (y == rows_.ignore_index) {
            for (Element& g : grad) store(g, 0);
            return;
        }
        const double scale =
            rows_.reduction == LossReduction::none ? rows_.grad_scale : rows_.grad_scale / rows_.divisor;
        const double plain = (1 - rows_.smoothing) * rows_.weight(y) * scale;
        const double smooth = rows_.smoothing / static_cast<double>(rows_.vocabulary) * scale;
        const auto of_softmax =
            static_cast<Value>((plain + smooth * rows_.weights_sum) / static_cast<double>(exponentials));
        for (size_t c = 0; c < row.size(); ++c) {
            const int64_t id = rows_.classes.begin + static_cast<int64_t>(c);
            Value value = std::exp(value_of(row[c]) - most) * of_softmax;
            if (smooth != 0) value -= static_cast<Value>(smooth * rows_.weight(id));
            if (id == y) value -= static_cast<Value>(plain);
            store(grad[c], value);
        }
    }

    LossRows rows_;
    std::span<const Element> logits_;
};

TpQueue::Body computation_of(const LossRows& rows) {
    switch (rows.logits.dtype) {
        case DType::f32: return Computation<float, float>(rows);
        case DType::f64: return Computation<double, double>(rows);
        case DType::f16: return Computation<Half, float>(rows);
        case DType::bf16: return Computation<BFloat, float>(rows);
        default: break;
    }
    throw Error(Code::invalid_argument,
                fmt::format("logits are {}; they must be f16, bf16, f32 or f64", name_of(rows.logits.dtype)));
}

// --- checks

[[noreturn]] void refuse(const std::string& why) { throw Error(Code::invalid_argument, "cross-entropy: " + why); }

void check_shapes(const LossRows& rows, int rank, int ranks) {
    std::vector<int64_t> sizes(rows.targets.shape.begin(), rows.targets.shape.end());
    if (sizes.size() == max_ndim)
        refuse(fmt::format("targets have {} dimensions; at most {} are supported", max_ndim, max_ndim - 1));
    sizes.push_back(rows.classes.end - rows.classes.begin);
    const Dims expected{std::span<const int64_t>(sizes)};
    if (rows.logits.shape != expected) {
        refuse(fmt::format("logits are {}; for targets {} and {} classes, those of rank {} of {} must be {}",
                           rows.logits.shape.str(), rows.targets.shape.str(), rows.vocabulary, rank, ranks,
                           expected.str()));
    }
    if (rows.grad && (rows.grad->shape != expected || rows.grad->dtype != rows.logits.dtype)) {
        refuse(fmt::format("the gradient is {} {}; it must be {} {} like the logits", name_of(rows.grad->dtype),
                           rows.grad->shape.str(), name_of(rows.logits.dtype), expected.str()));
    }
    const DType dtype = rows.logits.dtype == DType::f64 ? DType::f64 : DType::f32;
    const Dims of_loss = rows.reduction == LossReduction::none ? rows.targets.shape : Dims{};
    if (rows.loss.shape != of_loss || rows.loss.dtype != dtype) {
        refuse(fmt::format("the loss is {} {}; it must be {} {}", name_of(rows.loss.dtype), rows.loss.shape.str(),
                           name_of(dtype), of_loss.str()));
    }
}

void check_places(const TensorParallel& model, const LossRows& rows, StreamHandle stream) {
    const std::array tensors{rows.logits, rows.targets, rows.loss, rows.grad.value_or(rows.logits),
                             rows.weights.value_or(rows.logits)};
    model.moves().check_places(tensors, stream);
    for (const Tensor& tensor : tensors) {
        if (tensor.device.type == rows.logits.device.type) continue;
        refuse("some of its tensors are on the CPU and some on a CUDA device; all must be in one place");
    }
}

void check_targets(const LossRows& rows) {
    if (rows.targets.dtype != DType::i64 && rows.targets.dtype != DType::i32) {
        refuse(fmt::format("targets are {}; they must be i32 or i64", name_of(rows.targets.dtype)));
    }
    if (rows.targets.device.type != DeviceType::cpu) return;  // kernels check them
    for (size_t i = 0; i < rows.count(); ++i) {
        const int64_t y = integer_at(rows.targets, i);
        if (y == rows.ignore_index || (y >= 0 && y < rows.vocabulary)) continue;
        refuse(fmt::format("target {} of row {} is neither a class, 0 to {}, nor ignore_index {}", y, i,
                           rows.vocabulary - 1, rows.ignore_index));
    }
}

void check_weights(const LossRows& rows) {
    if (!rows.weights) return;
    const Tensor& weights = *rows.weights;
    if ((weights.dtype == DType::f32 || weights.dtype == DType::f64) && weights.shape == Dims{rows.vocabulary}) return;
    refuse(
        fmt::format("class weights are {} {}; they must be f32 or f64 [{}], one for each class of the whole vocabulary",
                    name_of(weights.dtype), weights.shape.str(), rows.vocabulary));
}

}  // namespace

void cross_entropy(TensorParallel& model, const Tensor& logits, const Tensor& targets,
                   const CrossEntropyOptions& options, const Tensor& loss, const Tensor* grad, StreamHandle stream,
                   WorkPtr* work) {
    const Communicator& comm = *model.comm();
    if (options.vocabulary < 1 || options.vocabulary > most_classes)
        refuse(fmt::format("the vocabulary has {} classes; it needs 1 to {}", options.vocabulary, most_classes));
    if (!(options.label_smoothing >= 0 && options.label_smoothing <= 1)) {
        refuse(fmt::format("label_smoothing is {}; it must be between 0 and 1", options.label_smoothing));
    }
    if (options.reduction < LossReduction::none || options.reduction > LossReduction::sum) {
        refuse(fmt::format("unknown reduction {}; it is 0 (none), 1 (mean) or 2 (sum)",
                           static_cast<int>(options.reduction)));
    }
    LossRows rows;
    rows.logits = logits;
    rows.targets = targets;
    rows.loss = loss;
    if (grad != nullptr) rows.grad = *grad;
    rows.vocabulary = options.vocabulary;
    rows.classes = chunk(options.vocabulary, comm.world_size(), comm.rank());
    rows.ignore_index = options.ignore_index;
    rows.smoothing = options.label_smoothing;
    rows.reduction = options.reduction;
    rows.grad_scale = options.grad_scale;
    rows.weights = options.class_weights;
    (void)computation_of(rows);  // checks the dtype
    check_shapes(rows, comm.rank(), comm.world_size());
    check_places(model, rows, stream);
    check_targets(rows);
    check_weights(rows);
    if (logits.device.type != DeviceType::cpu) [[unlikely]]
        return loss_on_device(model, rows, options.data_ranks, stream, work);
    for (int64_t c = 0; options.label_smoothing > 0 && c < options.vocabulary; ++c) rows.weights_sum += rows.weight(c);
    if (options.reduction == LossReduction::mean) {
        double sum = 0;
        for (size_t i = 0; i < rows.count(); ++i) {
            const int64_t y = integer_at(targets, i);
            if (y != options.ignore_index) sum += rows.weight(y);
        }
        if (options.data_ranks) {
            const Tensor number = tensor_of(std::span(&sum, 1), DType::f64);
            options.data_ranks->run({.collective = Collective::all_reduce,
                                     .inputs = {},
                                     .outputs = {&number, 1},
                                     .op = ReduceOp::sum,
                                     .label = "rows of the loss"});
        }
        rows.divisor = sum;
    }
    model.queue().run(computation_of(rows), stream, logits.device, work);
}

}  // namespace tsr
