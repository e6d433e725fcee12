// One rank of a chain's training (chain.hpp), cut by width, depth and data in any combination.
#pragma once

#include <memory>
#include <numeric>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "comm/inner_options.hpp"
#include "parallel/ddp/ddp.hpp"
#include "parallel/fsdp/fsdp.hpp"
#include "parallel/model.hpp"
#include "parallel/pipeline/pipeline.hpp"
#include "parallel/together/chain.hpp"
#include "train/optimizer_of.hpp"

namespace tsr::testing {

enum class Data { alone, ddp, fsdp, hsdp };  // hsdp: replicas of shards over two ranks

struct Cut {
    Data data = Data::alone;
    int dp = 1;
    int tp = 1;
    bool sequence = false;  // activations between regions are cut along the rows
    int pp = 1;
    const char* schedule = "";
    int per_rank = 1;  // stages
    int microbatches = 1;
    int batches = 1;  // whose gradients add up to those of one step

    [[nodiscard]] int ranks() const { return dp * tp * pp; }
    [[nodiscard]] int blocks() const { return pp > 1 ? pp * per_rank : 2; }
    [[nodiscard]] pipeline::Schedule order() const {
        return pipeline::make_schedule(schedule, pp, per_rank, microbatches);
    }
    [[nodiscard]] std::string name() const {
        const std::array<const char*, 4> kinds{"", "ddp", "fsdp", "hsdp"};
        std::string text = kinds.at(static_cast<size_t>(data));
        if (data != Data::alone) text += std::to_string(dp) + "_";
        if (tp > 1) text += (sequence ? "sequence" : "tp") + std::to_string(tp) + "_";
        if (pp > 1) text += std::string(schedule) + "_" + std::to_string(pp) + "x" + std::to_string(per_rank) + "_";
        if (batches > 1) text += "batches" + std::to_string(batches) + "_";
        text.pop_back();
        return text;
    }
};

template <class T>
class Job {
   public:
    Job(Communicator& comm, const Cut& cut)
        : cut_(cut),
          chain_(cut.blocks()),
          depth_(comm.rank() / (cut.dp * cut.tp)),
          group_(comm.split(depth_, comm.rank(), inner_options(comm, "/group"))),
          line_(comm.split(comm.rank() % (cut.dp * cut.tp), comm.rank(), inner_options(comm, "/line"))),
          mesh_(*group_, MeshShape({"dp", "tp"}, {cut.dp, cut.tp})) {
        std::vector<int> stages(static_cast<size_t>(cut.blocks()));
        std::iota(stages.begin(), stages.end(), 0);
        if (cut.pp > 1) {
            const auto order = cut.order();
            std::erase_if(stages, [&](int one) { return order.rank_of_stage[static_cast<size_t>(one)] != depth_; });
        }
        std::vector<NamedTensor> params;
        for (const int stage : stages) {
            first_[stage] = params.size();
            for (size_t p = 0; p < Mlp::params; ++p) {
                whole_.push_back(static_cast<size_t>(stage) * Mlp::params + p);
                params.push_back(chain_.named(whole_.back()));
            }
        }
        std::vector<TpRule> rules{{"block*.fc1", TpStyle::column, 0, {}}, {"block*.fc2", TpStyle::row, 0, {}}};
        if (cut.sequence) rules.push_back({"block*.norm", TpStyle::sequence, 0, {}});
        tp_ = std::make_shared<TensorParallel>(mesh_.slice(std::vector<std::string>{"tp"}), params, rules,
                                               TpOptions{.sequence_parallel = cut.sequence});
        for (size_t p = 0; p < params.size(); ++p) params[p].tensor = tp_->slice(p);
        create_model(params);
        if (cut.pp > 1) {
            join_optimizers(*adam_, line_);
            pipeline::PipelineOptions options;
            options.schedule = cut.schedule;
            options.microbatches = cut.microbatches;
            pipe_ = std::make_unique<pipeline::Pipeline>(line_, stages, options, callbacks());
        }
    }

    // The gradients of a batch. Returns its loss.
    double backward(const Examples<T>& examples) {
        sum_ = 0;
        begun_.clear();
        if (ddp_ != nullptr) ddp_->zero_grad();
        if (ddp_ == nullptr && fsdp_ == nullptr) tp_->zero_grad();
        for (batch_ = 0; batch_ < cut_.batches; ++batch_) {
            const Range own = chunk(batch_rows, cut_.dp * cut_.batches, mesh_.coordinate(0) * cut_.batches + batch_);
            rows_ = {own.begin, own.end - own.begin};
            if (ddp_ != nullptr) ddp_->set_sync(is_last_batch());
            cut_.pp > 1 ? through_pipeline(examples) : straight(examples);
            if (ddp_ != nullptr) ddp_->wait();
            if (fsdp_ != nullptr) fsdp_->wait();
        }
        if (ddp_ == nullptr && fsdp_ == nullptr) tp_->sum_grads(nullptr);
        add_up(mesh_.comm(0));
        if (cut_.sequence) add_up(mesh_.comm(1));
        return sum_ * row_weight;
    }
    [[nodiscard]] Optimizer& adam() { return *adam_; }

    // This rank's parameters: which one of the chain, where this rank's part lies, and what is in it.
    [[nodiscard]] size_t params() const { return whole_.size(); }
    [[nodiscard]] size_t whole(size_t param) const { return whole_[param]; }
    [[nodiscard]] Held held(size_t param) const {
        if (fsdp_ != nullptr) return fsdp_->held(param);
        return ddp_ != nullptr ? ddp_->held(param).value() : tp_->held(param);
    }
    [[nodiscard]] std::span<T> value(size_t param) const {
        return (fsdp_ != nullptr ? fsdp_->shard(param) : tp_->slice(param)).template as<T>();
    }
    [[nodiscard]] std::span<T> grad(size_t param) const {
        if (fsdp_ != nullptr) return fsdp_->shard_grad(param).template as<T>();
        return (ddp_ != nullptr ? ddp_->grad(param) : tp_->grad(param)).template as<T>();
    }

    // Goes on from the beginning of another training's step, which has the number of this one's next.
    void take(const Trace<T>& trace, size_t step) {
        for (size_t p = 0; p < params(); ++p) {
            std::ranges::copy(held_part(trace.values[step][whole(p)], held(p)), value(p).begin());
        }
        for (const Moment& moment : adam_->moments()) {
            if (moment.name == step_moment) continue;
            const std::vector<T>& from = trace.moments[step].at(moment.param + "." + moment.name);
            std::ranges::copy(moment.held ? held_part(from, *moment.held) : from,
                              moment.tensor.template as<T>().begin());
        }
    }

   private:
    void create_model(const std::vector<NamedTensor>& slices) {
        const auto make = [](std::vector<OptimizerParam> own, const std::shared_ptr<SharedCopy>& copy) {
            return std::make_shared<Adam>(std::move(own), adam_options, copy);
        };
        if (cut_.data == Data::alone) {
            adam_ = optimizer_of(tp_, make);
        } else if (cut_.data == Data::ddp) {
            DdpOptions options;
            options.op = ReduceOp::sum;
            options.bucket_bytes = 300;  // several, so that some are reduced while others are computed
            options.first_bucket_bytes = 300;
            ddp_ = std::make_shared<Ddp>(mesh_.comm(0), slices, options, tp_);
            adam_ = optimizer_of(ddp_, make);
        } else {
            FsdpOptions options;
            options.op = ReduceOp::sum;
            if (cut_.data == Data::hsdp) options.shard_ranks = 2;
            std::vector<FsdpUnit> units;
            for (const auto& [stage, first] : first_) {
                FsdpUnit& unit = units.emplace_back();
                unit.name = "block" + std::to_string(stage);
                const auto begin = slices.begin() + static_cast<std::ptrdiff_t>(first);
                unit.params.assign(begin, begin + Mlp::params);
                unit.reshard_after_forward = cut_.pp > 1 ? 0 : 1;
            }
            fsdp_ = std::make_shared<Fsdp>(mesh_.comm(0), units, options, tp_);
            adam_ = optimizer_of(fsdp_, make);
        }
    }

    [[nodiscard]] bool is_last_batch() const { return batch_ + 1 == cut_.batches; }
    [[nodiscard]] size_t unit(int stage) const { return first_.at(stage) / Mlp::params; }
    [[nodiscard]] MlpParams<T> params_of(int stage) const {
        const size_t first = first_.at(stage);
        return {[this, first](size_t p) {
                    return (fsdp_ != nullptr ? fsdp_->whole(first + p) : tp_->slice(first + p)).template as<T>();
                },
                [this, first](size_t p) {
                    return fsdp_ != nullptr ? fsdp_->grad(first + p).template as<T>() : grad(first + p);
                }};
    }
    // Of rows of the batch, those that this rank has between regions.
    [[nodiscard]] pipeline::Rows own_rows(pipeline::Rows rows) const {
        if (!cut_.sequence) return rows;
        const Range own = chunk(rows.count, cut_.tp, mesh_.coordinate(1));
        return {rows.begin + own.begin, own.end - own.begin};
    }
    [[nodiscard]] pipeline::Rows microbatch(int index) const {
        const auto part = pipeline::rows_of_part(rows_.count, cut_.microbatches, index);
        return {rows_.begin + part.begin, part.count};
    }

    std::vector<T> forward(int stage, int index, std::vector<T> x) {
        MlpPass<T>& pass = kept_[{stage, index}];
        pass = {.inputs = chain_.inputs(stage),
                .width = static_cast<size_t>(tp_->slice_shape(first_.at(stage) + Mlp::b1)[0]),
                .outputs = chain_.outputs(stage)};
        return pass.forward(params_of(stage), moves(index), std::move(x));
    }
    std::vector<T> backward_input(int stage, int index, std::vector<T> dy) {
        if (fsdp_ != nullptr && begun_.insert(stage).second) {
            fsdp_->backward(unit(stage));
            for (size_t p = 0; p < Mlp::params; ++p) std::ranges::fill(params_of(stage).grad(p), T{0});
        }
        return kept_.at({stage, index}).backward_input(params_of(stage), moves(index), std::move(dy));
    }
    void backward_weight(int stage, int index, bool is_last) {
        kept_.at({stage, index}).backward_weight(params_of(stage));
        if (!is_last) return;
        if (fsdp_ != nullptr) fsdp_->grads_ready(unit(stage));
        if (ddp_ == nullptr) return;
        for (size_t p = 0; p < Mlp::params; ++p) ddp_->ready(first_.at(stage) + p);
    }
    [[nodiscard]] Moves<T> moves(int index) const {
        return moves_of<T>(*tp_, cut_.sequence, static_cast<size_t>(microbatch(index).count));
    }

    void straight(const Examples<T>& examples) {
        const auto own = own_rows(rows_);
        std::vector<T> x = rows_of(examples.inputs, own);
        for (int stage = 0; stage < cut_.blocks(); ++stage) {
            if (fsdp_ != nullptr) fsdp_->forward(unit(stage));
            x = forward(stage, 0, std::move(x));
            if (fsdp_ != nullptr) fsdp_->forward_done(unit(stage));
        }
        std::vector<T> dy = distance(std::move(x), rows_of(examples.targets, own), static_cast<T>(row_weight), sum_);
        for (int stage = cut_.blocks() - 1; stage >= 0; --stage) {
            dy = backward_input(stage, 0, std::move(dy));
            backward_weight(stage, 0, true);
        }
    }

    void through_pipeline(const Examples<T>& examples) {
        std::vector<T> x = rows_of(examples.inputs, rows_);
        std::vector<T> t = rows_of(examples.targets, rows_);
        const auto tensor = [&](std::vector<T>& rows) {
            const auto width = static_cast<int64_t>(rows.size()) / rows_.count;
            return tensor_of_shape(rows, Dims{rows_.count, width});
        };
        const Tensor inputs = tensor(x);
        const Tensor targets = tensor(t);
        // A unit is whole from its first forward to its last backward: the schedule mixes the two.
        for (size_t i = 0; fsdp_ != nullptr && i < fsdp_->units(); ++i) {
            fsdp_->forward(i);
            fsdp_->forward_done(i);
        }
        const std::vector<double> weights(static_cast<size_t>(cut_.microbatches), row_weight);
        for (const double loss : pipe_->step({{&inputs, 1}, {&targets, 1}, weights})) sum_ += loss;
    }
    [[nodiscard]] pipeline::Callbacks callbacks() {
        using pipeline::StageCall;
        return {[this](const StageCall& call) { forward_call(call); },
                [this](const StageCall& call) {
                    input_call(call);
                    backward_weight(call.stage, call.microbatch, call.is_last_backward);
                },
                [this](const StageCall& call) { input_call(call); },
                [this](const StageCall& call) { backward_weight(call.stage, call.microbatch, call.is_last_backward); }};
    }
    // The rows of a batch that the pipeline gave to this micro-batch, or of them those of this rank.
    [[nodiscard]] std::vector<T> rows_in(const Tensor& tensor, bool whole, int index) const {
        const auto numbers = tensor.as<T>();
        std::vector<T> rows(numbers.begin(), numbers.end());
        if (!whole || !cut_.sequence) return rows;
        EXPECT_EQ(tensor.shape[0], microbatch(index).count);
        return part_of(rows, tensor.shape, 0, cut_.tp, mesh_.coordinate(1));
    }
    void forward_call(const pipeline::StageCall& call) {
        std::vector<T> y =
            forward(call.stage, call.microbatch, rows_in(call.inputs[0], call.stage == 0, call.microbatch));
        if (call.stage + 1 == cut_.blocks()) {
            double loss = 0;
            grads_[call.microbatch] = distance(std::move(y), rows_in(call.targets[0], true, call.microbatch),
                                               static_cast<T>(row_weight), loss);
            pipe_->loss(loss);
            return;
        }
        const auto width = static_cast<int64_t>(chain_.outputs(call.stage));
        const Tensor& out = pipe_->output(dtype_of<T>, Dims{own_rows(microbatch(call.microbatch)).count, width});
        std::ranges::copy(y, out.as<T>().begin());
    }
    void input_call(const pipeline::StageCall& call) {
        const bool is_last = call.stage + 1 == cut_.blocks();
        if (is_last) {
            EXPECT_EQ(call.weight, row_weight);
        }
        const std::vector<T> dx = backward_input(
            call.stage, call.microbatch,
            is_last ? grads_.at(call.microbatch) : rows_in(call.output_grads[0], false, call.microbatch));
        if (call.stage > 0) std::ranges::copy(dx, call.input_grads[0].as<T>().begin());
    }

    void add_up(const std::shared_ptr<Communicator>& comm) {
        const Tensor tensor = tensor_of(std::span(&sum_, 1), DType::f64);
        comm->run({.collective = Collective::all_reduce, .inputs = {}, .outputs = {&tensor, 1}, .op = ReduceOp::sum});
    }

    const Cut cut_;
    Chain<T> chain_;
    const int depth_;                            // this rank's place along the pipeline
    const std::shared_ptr<Communicator> group_;  // the ranks with the same stages
    const std::shared_ptr<Communicator> line_;   // a rank of each
    const DeviceMesh mesh_;
    std::map<int, size_t> first_;  // of each stage of this rank, its first parameter
    std::vector<size_t> whole_;
    std::shared_ptr<TensorParallel> tp_;
    std::shared_ptr<Ddp> ddp_;
    std::shared_ptr<Fsdp> fsdp_;
    std::shared_ptr<Optimizer> adam_;

    // Of the step that goes on.
    double sum_ = 0;
    int batch_ = 0;
    pipeline::Rows rows_;                             // of the batch
    std::map<std::pair<int, int>, MlpPass<T>> kept_;  // by stage and micro-batch
    std::map<int, std::vector<T>> grads_;             // of the last stage's outputs
    std::set<int> begun_;                             // stages whose backward has begun
    std::unique_ptr<pipeline::Pipeline> pipe_;
};

}  // namespace tsr::testing
