#include <fmt/core.h>

#include <functional>
#include <utility>

#include "base/error.hpp"
#include "device/launch.hpp"
#include "parallel/placement.hpp"
#include "parallel/tensor/loss_rows.hpp"

namespace tsr {

namespace {

// Memory that the kernels share: the divisor and the weight of all classes, each row's loss, its largest logit, its sums.
struct LossMemory {
    std::byte* divisor;
    std::byte* weight_of_all;
    std::byte* losses;
    std::byte* largest;
    std::byte* sums;

    static constexpr size_t numbers = 2;  // of all rows
    [[nodiscard]] static size_t size(size_t rows, size_t loss_size) {
        return (numbers + rows) * sizeof(double) + 4 * rows * loss_size;
    }
    LossMemory(std::byte* begin, size_t rows, size_t loss_size)
        : divisor(begin),
          weight_of_all(begin + sizeof(double)),
          losses(begin + numbers * sizeof(double)),
          largest(losses + rows * sizeof(double)),
          sums(largest + rows * loss_size) {}
};

template <class T>
class LossKernels {
   public:
    LossKernels(const LossRows& rows, const unsigned* outside, std::shared_ptr<Communicator> data_ranks)
        : rows_(rows),
          targets_{.classes = {rows.targets.data, rows.count(), rows.targets.dtype == DType::i64},
                   .outside = {outside},
                   .vocabulary = rows.vocabulary,
                   .ignored = rows.ignore_index,
                   .weights = rows.weights ? rows.weights->data : nullptr,
                   .wide_weights = rows.weights && rows.weights->dtype == DType::f64},
          data_ranks_(std::move(data_ranks)) {}

    void operator()(TpMoves& moves, StreamHandle stream) const {
        DeviceApi& device = device_api(rows_.logits.device);
        const size_t n = rows_.count();
        const Dims bytes{static_cast<int64_t>(LossMemory::size(n, sizeof(Loss)))};
        const LossMemory memory(moves.temporary(bytes, DType::u8, rows_.logits.device, stream).data, n, sizeof(Loss));
        const bool is_mean = rows_.reduction == LossReduction::mean;
        const bool smooths = rows_.smoothing > 0;
        const bool weighs_all = smooths && rows_.weights;
        const std::byte* const divisor = is_mean ? memory.divisor : nullptr;
        if (is_mean || weighs_all) {
            launch(device, kernels::SumsOfWeights{targets_, weighs_all, memory.divisor}, stream);
        }
        if (is_mean && data_ranks_) {
            reduce(*data_ranks_, memory.divisor, 1, DType::f64, ReduceOp::sum, "rows of the loss", stream);
        }
        const kernels::Logits<T> logits{targets_, rows_.logits.data, rows_.classes.begin, rows_.width()};
        if (n > 0) {
            launch(device, kernels::LargestLogits<T>{logits, memory.largest}, stream);
            reduce(*moves.comm(), memory.largest, n, loss_dtype, ReduceOp::max, "largest logits", stream);
            launch(device, kernels::SumsOfLogits<T>{logits, smooths, memory.largest, memory.sums}, stream);
            reduce(*moves.comm(), memory.sums, 3 * n, loss_dtype, ReduceOp::sum, "sums of logits", stream);
        }
        const bool joins = rows_.reduction != LossReduction::none;
        launch(device,
               kernels::LossOfRows<T>{.logits = logits,
                                      .smoothing = rows_.smoothing,
                                      .grad_scale = rows_.grad_scale,
                                      .divisor = divisor,
                                      .weight_of_all = weighs_all ? memory.weight_of_all : nullptr,
                                      .largest = memory.largest,
                                      .sums = memory.sums,
                                      .losses = memory.losses,
                                      .losses_of_caller = joins ? nullptr : rows_.loss.data,
                                      .grad = rows_.grad ? rows_.grad->data : nullptr},
               stream);
        if (joins) launch(device, kernels::SumOfLosses<Loss>{memory.losses, n, divisor, rows_.loss.data}, stream);
    }

   private:
    using Loss = kernels::LossOf<T>;
    static constexpr DType loss_dtype = sizeof(Loss) == sizeof(double) ? DType::f64 : DType::f32;

    void reduce(Communicator& comm, std::byte* numbers, size_t count, DType dtype, ReduceOp op, const char* label,
                StreamHandle stream) const {
        const Tensor tensor{numbers, Dims{static_cast<int64_t>(count)}, dtype, rows_.logits.device};
        comm.run({.collective = Collective::all_reduce,
                  .outputs = {&tensor, 1},
                  .op = op,
                  .label = label,
                  .stream = stream});
    }

    LossRows rows_;
    kernels::Targets targets_;
    std::shared_ptr<Communicator> data_ranks_;
};

TpQueue::Body kernels_of(const LossRows& rows, const unsigned* outside,
                         const std::shared_ptr<Communicator>& data_ranks) {
    switch (rows.logits.dtype) {
        case DType::f16: return LossKernels<Half>(rows, outside, data_ranks);
        case DType::bf16: return LossKernels<BFloat>(rows, outside, data_ranks);
        case DType::f32: return LossKernels<float>(rows, outside, data_ranks);
        default: return LossKernels<double>(rows, outside, data_ranks);
    }
}

}  // namespace

void loss_on_device(TensorParallel& model, const LossRows& rows, const std::shared_ptr<Communicator>& data_ranks,
                    StreamHandle stream, WorkPtr* work) {
    require_kernels_for("cross-entropy", rows.logits.device);
    check_rows("cross-entropy", rows.count(), rows.width());
    if (data_ranks) check_on_device(rows.logits, "cross-entropy over data_ranks: a tensor", data_ranks->device());
    const std::shared_ptr<unsigned> outside = model.queue().flag(rows.logits.device);
    auto verify = [outside, last = rows.vocabulary - 1, ignored = rows.ignore_index] {
        if (*outside == 0) return;
        throw Error(
            Code::invalid_argument,
            fmt::format("cross-entropy: a target is neither a class, 0 to {}, nor ignore_index {}", last, ignored));
    };
    model.queue().run(kernels_of(rows, outside.get(), data_ranks), stream, rows.logits.device, work, std::move(verify));
}

}  // namespace tsr
