#include "parallel/pipeline/pipeline.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <limits>
#include <tuple>
#include <utility>

#include "base/crc32c.hpp"
#include "comm/fingerprint.hpp"
#include "comm/inner_options.hpp"
#include "comm/reduce.hpp"
#include "parallel/pipeline/microbatches.hpp"

namespace tsr::pipeline {

namespace {

std::string_view name_of(Work work) {
    switch (work) {
        case Work::forward: return "forward";
        case Work::backward: return "backward";
        case Work::backward_input: return "backward of the inputs";
        case Work::backward_weight: return "backward of the weights";
    }
    return "";
}

// So short that the flight record has room for the micro-batch and the stage.
std::string_view short_name_of(Work work) {
    switch (work) {
        case Work::forward: return "forward";
        case Work::backward: return "backward";
        case Work::backward_input: return "backward_input";
        case Work::backward_weight: return "backward_weight";
    }
    return "";
}

std::string title_of(const PipelineOptions& options) {
    return options.schedule_csv.empty() ? fmt::format("schedule {}", options.schedule) : "the schedule of the CSV";
}

Schedule schedule_of(const PipelineOptions& options, int ranks, size_t own_stages) {
    if (options.schedule_csv.empty()) {
        if (options.microbatches < 1) {
            throw Error(Code::invalid_argument,
                        fmt::format("microbatches is {}; it must be at least 1", options.microbatches));
        }
        if (own_stages == 0) throw Error(Code::invalid_argument, "this rank has no stage; each rank needs one");
        const int per_rank = static_cast<int>(std::min(own_stages, size_t{max_stages}));
        return make_schedule(options.schedule, ranks, per_rank, options.microbatches);
    }
    Schedule schedule = from_csv(options.schedule_csv);
    if (schedule.ranks() != ranks) {
        throw Error(Code::invalid_argument, fmt::format("the CSV has a schedule of {} ranks; the communicator has {}",
                                                        schedule.ranks(), ranks));
    }
    if (options.microbatches != 0 && options.microbatches != schedule.microbatches) {
        throw Error(Code::invalid_argument, fmt::format("microbatches is {}; the CSV has a schedule of {}",
                                                        options.microbatches, schedule.microbatches));
    }
    return schedule;
}

void check_callbacks(const Schedule& schedule, const std::string& title, const Callbacks& callbacks) {
    const auto uses = [&](Work work) {
        return std::ranges::any_of(schedule.orders, [&](const auto& order) {
            return std::ranges::any_of(order, [&](const Action& action) { return action.work == work; });
        });
    };
    for (const auto& [work, callback, name] :
         {std::tuple(Work::forward, &callbacks.forward, "forward"),
          std::tuple(Work::backward, &callbacks.backward, "backward"),
          std::tuple(Work::backward_input, &callbacks.backward_input, "backward_input"),
          std::tuple(Work::backward_weight, &callbacks.backward_weight, "backward_weight")}) {
        if (*callback || !uses(work)) continue;
        throw Error(Code::invalid_argument, fmt::format("{} needs the callback {}", title, name));
    }
}

// The largest number of stages that a rank has.
size_t most_stages_of_a_rank(const Schedule& schedule) {
    std::vector<size_t> counts(static_cast<size_t>(schedule.ranks()));
    for (const int rank : schedule.rank_of_stage) ++counts[static_cast<size_t>(rank)];
    return std::ranges::max(counts);
}

std::vector<std::vector<int>> gather_stages(Communicator& comm, const std::vector<int>& own, size_t width) {
    constexpr int32_t none = -1;
    std::vector<int32_t> mine(own.begin(), own.end());
    mine.resize(width, none);
    std::vector<int32_t> all(width * static_cast<size_t>(comm.world_size()));
    const Tensor input = tensor_of(std::span(mine), DType::i32);
    const Tensor output = tensor_of(std::span(all), DType::i32);
    comm.run({.collective = Collective::all_gather,
              .inputs = {&input, 1},
              .outputs = {&output, 1},
              .label = "the stages of a pipeline"});
    std::vector<std::vector<int>> stages_of(static_cast<size_t>(comm.world_size()));
    for (size_t i = 0; i < all.size(); ++i) {
        if (all[i] != none) stages_of[i / width].push_back(all[i]);
    }
    return stages_of;
}

Error with_message(const Error& error, std::string message) {
    ErrorRecord record = *error.record();
    record.message = std::move(message);
    return Error(std::make_shared<const ErrorRecord>(std::move(record)));
}

void check_device(const Communicator& comm, const PipelineOptions& options) {
    if (!options.on_device || comm.device()) return;
    throw Error(Code::unsupported,
                "a pipeline on CUDA devices needs a communicator that has a transport for them; create it with the "
                "backend 'cpu:auto,cuda:nccl'");
}

// The CPU if there is none: agree() refuses that.
Device device_of(const Communicator& comm, const PipelineOptions& options) {
    return options.on_device ? comm.device().value_or(Device{}) : Device{};
}

Tensor without_data(const Tensor& tensor) { return {nullptr, tensor.shape, tensor.dtype, tensor.device}; }

std::string join(std::span<const int> numbers) {
    std::string text;
    for (const int number : numbers) text += fmt::format("{}{}", text.empty() ? "" : ", ", number);
    return text;
}

}  // namespace

// --- making it

Pipeline::Pipeline(const std::shared_ptr<Communicator>& comm, const std::vector<int>& stages,
                   const PipelineOptions& options, Callbacks callbacks)
    : comm_(comm),
      callbacks_(std::move(callbacks)),
      edges_(options.edges),
      max_message_bytes_(options.max_message_bytes),
      rank_(comm->rank()),
      device_(device_of(*comm, options)),
      api_(device_api(device_)),
      pool_(std::make_shared<Pool>(api_)),
      on_host_(is_on_device() ? std::make_shared<Pool>(cpu_device()) : pool_) {
    agree(*comm, stages, options);
    join_stages();
    losses_.resize(static_cast<size_t>(schedule_.microbatches));
    CommOptions inner = inner_options(*comm, "/pipeline");
    inner.bound = true;
    const auto own = comm->split(0, rank_, inner);
    const std::vector<Route> routes = routes_of(schedule_, edges_);
    std::unique_ptr<DeviceLanes> lanes;
    if (is_on_device()) {
        std::vector<Direction> directions;
        for (const Route& route : routes) {
            directions.push_back({route.from_rank, route.to_rank});
            directions.push_back({route.to_rank, route.from_rank});
        }
        lanes = std::make_unique<DeviceLanes>(*own, directions, comm->options().backend, device_);
    }
    messages_ =
        std::make_unique<Messages>(own, routes, schedule_.microbatches, max_message_bytes_, pool_, std::move(lanes));
}

Pipeline::~Pipeline() = default;

void Pipeline::agree(Communicator& comm, const std::vector<int>& stages, const PipelineOptions& options) {
    const std::string title = title_of(options);
    const size_t width = or_refuse_on_all_ranks(comm, Compared::pipelines, [&] {
        check_device(comm, options);
        schedule_ = schedule_of(options, comm.world_size(), stages.size());
        check_callbacks(schedule_, title, callbacks_);
        check_edges(edges_, schedule_.stages());
        const size_t most = most_stages_of_a_rank(schedule_);
        if (stages.size() > most) {
            throw Error(Code::invalid_argument, fmt::format("{} has at most {} stages on a rank, got {} ({})", title,
                                                            most, stages.size(), join(stages)));
        }
        for (const int stage : stages) {
            if (stage < 0) throw Error(Code::invalid_argument, fmt::format("stage {} is negative", stage));
        }
        if (max_message_bytes_ == 0) throw Error(Code::invalid_argument, "max_message_bytes is 0; no tensor fits");
        return most;
    });
    const std::string& csv = options.schedule_csv;
    std::vector<std::string> lines{
        csv.empty() ? title
                    : fmt::format("a schedule of {} bytes of CSV with checksum {:08x}", csv.size(), crc32c(csv)),
        fmt::format("{} micro-batches", schedule_.microbatches), fmt::format("{} stages", schedule_.stages()),
        fmt::format("max_message_bytes {}", max_message_bytes_),
        is_on_device() ? "tensors on CUDA devices" : "tensors on the CPU"};
    for (const Edge& edge : edges_) {
        lines.push_back(fmt::format("an edge for output {} of stage {} to stage {}", edge.output, edge.from, edge.to));
    }
    check_same_on_all_ranks(comm, Compared::pipelines, lines, "the pipeline");
    check_placement(schedule_, title, gather_stages(comm, stages, width));
}

void Pipeline::join_stages() {
    const auto& order = schedule_.orders[static_cast<size_t>(rank_)];
    for (size_t i = 0; i < order.size(); ++i) {
        if (order[i].work == Work::backward || order[i].work == Work::backward_weight)
            stages_[order[i].stage].last_backward = i;
    }
    const size_t first_edge = static_cast<size_t>(schedule_.stages()) - 1;
    for (auto& [stage, joined] : stages_) {
        if (stage > 0) joined.from.push_back(static_cast<size_t>(stage) - 1);
        for (size_t i = 0; i < edges_.size(); ++i) {
            if (edges_[i].to == stage) joined.from.push_back(first_edge + i);
            if (edges_[i].from == stage) joined.to.push_back(first_edge + i);
        }
    }
}

// --- a pass

std::span<const double> Pipeline::step(const Batch& batch) { return run(Pass::training, batch); }
std::span<const double> Pipeline::eval(const Batch& batch) { return run(Pass::evaluation, batch); }

std::span<const double> Pipeline::run(Pass pass, const Batch& batch) {
    in_step([&] {
        const auto began = Clock::now();
        begin(pass, batch);
        const auto& order = schedule_.orders[static_cast<size_t>(rank_)];
        for (size_t i = 0; i < order.size(); ++i) {
            if (pass == Pass::training || order[i].work == Work::forward) compute(i);
        }
        const auto done = Clock::now();
        messages_->finish();
        share_losses(pass);
        stats_.waited += Clock::now() - done;
        for (const auto& [stage, waited] : waits_) {
            stats_.waited += waited;
            if (waited <= stats_.longest) continue;
            stats_.longest = waited;
            stats_.longest_stage = stage;
            stats_.longest_rank = schedule_.rank_of_stage[static_cast<size_t>(stage)];
        }
        stats_.peak_bytes = pool_->peak_bytes();
        stats_.wall = Clock::now() - began;
    });
    return losses_;
}

void Pipeline::in_step(FunctionRef<void()> body) {
    const Reentry once = enter();
    if (failed_) {
        throw Error(Code::aborted,
                    fmt::format("rank {}: the pipeline is unusable after an earlier error: {}", rank_, failed_->what()))
            .with_rank(rank_)
            .with_peer(failed_->record()->peer)
            .caused_by(*failed_);
    }
    comm_->refuse_in_turn("a pass of a pipeline");
    try {
        body();
    } catch (...) {
        const Error error = current_error();
        messages_->fail(error);
        live_.clear();
        made_.clear();
        const std::string begin = fmt::format("rank {}: ", rank_);
        const std::string_view message = error.what();
        failed_ = with_message(error, fmt::format("{}{}", message.starts_with(begin) ? "" : begin, message));
        if (failed_->record()->rank < 0) failed_ = failed_->with_rank(rank_);
        failed_ = failed_->with_launcher_rank(comm_->launcher_rank(failed_->record()->rank))
                      .with_launcher_peer(comm_->launcher_rank(failed_->record()->peer));
        throw Error(*failed_);
    }
}

void Pipeline::refuse(const Error& why) {
    in_step([&] { throw Error(why); });
    throw Error(why);  // not reached: in_step has thrown
}

PipelineStats Pipeline::stats() const {
    const Reentry once = enter();
    return stats_;
}

void Pipeline::begin(Pass pass, const Batch& batch) {
    const int m = schedule_.microbatches;
    training_ = pass == Pass::training;
    batch_ = batch;
    stats_ = {};
    waits_.clear();
    pool_->begin_step();
    if (is_on_device()) {
        on_host_->begin_step();
        mark_stream();  // refuses one that is being captured into a graph
    }
    if (stages_.contains(0)) {
        check_places(batch.inputs, "batch");
        static_cast<void>(rows_of(batch.inputs, m, "batch"));
    }
    if (stages_.contains(schedule_.stages() - 1)) {
        check_places(batch.targets, "targets");
        if (!batch.weights.empty() && batch.weights.size() != static_cast<size_t>(m)) {
            throw Error(Code::invalid_argument,
                        fmt::format("there are {} weights for {} micro-batches", batch.weights.size(), m));
        }
        weights_ = weights_of(batch.weights, rows_of(batch.targets, m, "targets"), m);
    }
    std::ranges::fill(losses_, std::numeric_limits<double>::quiet_NaN());
    messages_->begin(pass, comm_->options().timeout);
}

void Pipeline::compute(size_t index) {
    const Action& action = schedule_.orders[static_cast<size_t>(rank_)][index];
    const bool is_last = stages_.at(action.stage).last_backward == index;
    switch (action.work) {
        case Work::forward: return forward(action);
        case Work::backward:
        case Work::backward_input: return backward(action, is_last);
        case Work::backward_weight: return backward_weight(action, is_last);
    }
}

void Pipeline::forward(const Action& action) {
    const int stage = action.stage;
    const int microbatch = static_cast<int>(action.microbatch);
    Cell& cell = live_[{stage, microbatch}];
    stats_.peak_activations = std::max(stats_.peak_activations, live_.size());
    if (stage == 0) cell.inputs = part_of(batch_.inputs, schedule_.microbatches, microbatch);
    for (const size_t edge : stages_.at(stage).from) {
        Bundle bundle = take({Kind::activation, edge, microbatch});
        cell.inputs_of_edge.push_back(bundle.size());
        for (Held& held : bundle) {
            cell.inputs.push_back(held.tensor);
            cell.memory.push_back(std::move(held.memory));
        }
    }
    if (is_last_stage(stage)) cell.targets = part_of(batch_.targets, schedule_.microbatches, microbatch);
    made_.clear();
    call({.work = Work::forward, .stage = stage, .microbatch = microbatch}, cell, callbacks_.forward);
    for (Held& held : made_) {
        cell.outputs.push_back(held.tensor);
        cell.memory.push_back(held.memory);
    }
    send_outputs(action);
    made_.clear();
    if (!training_) release(live_.find({stage, microbatch}));
}

void Pipeline::send_outputs(const Action& action) {
    const int microbatch = static_cast<int>(action.microbatch);
    const Stage& stage = stages_.at(action.stage);
    if (is_last_stage(action.stage)) return;
    Bundle next;
    for (size_t i = 0; i < made_.size(); ++i) {
        if (goes_to_next(stage, i)) next.push_back(made_[i]);
    }
    messages_->send({Kind::activation, static_cast<size_t>(action.stage), microbatch}, std::move(next), point_);
    for (const size_t edge : stage.to) {
        const size_t output = output_of(edge);
        if (output >= made_.size()) {
            throw Error(Code::invalid_argument,
                        fmt::format("stage {}, micro-batch {}: the forward made {} outputs; an edge takes output {} to "
                                    "stage {}",
                                    action.stage, microbatch, made_.size(), output, messages_->route(edge).to_stage));
        }
        messages_->send({Kind::activation, edge, microbatch}, {made_[output]}, point_);
    }
}

void Pipeline::backward(const Action& action, bool is_last) {
    const int number = action.stage;
    const int microbatch = static_cast<int>(action.microbatch);
    const Stage& stage = stages_.at(number);
    Cell& cell = live_.at({number, microbatch});
    if (!is_last_stage(number)) {
        std::vector<Tensor> to_next;
        for (size_t i = 0; i < cell.outputs.size(); ++i) {
            if (goes_to_next(stage, i)) to_next.push_back(cell.outputs[i]);
        }
        take_gradients({Kind::gradient, static_cast<size_t>(number), microbatch}, to_next, cell);
        for (const size_t edge : stage.to) {
            take_gradients({Kind::gradient, edge, microbatch}, {&cell.outputs[output_of(edge)], 1}, cell);
        }
    }
    std::vector<Tensor> input_grads;
    std::vector<Bundle> bundles(stage.from.size());
    for (size_t e = 0; e < bundles.size(); ++e) {
        for (size_t i = 0; i < cell.inputs_of_edge[e]; ++i) {
            const Tensor& input = cell.inputs[input_grads.size()];
            if (!is_floating(input.dtype)) {
                input_grads.push_back(without_data(input));
                continue;
            }
            Held grad = make(input.dtype, input.shape);
            api_.zero(grad.tensor.data, grad.tensor.size_bytes(), stream_);
            input_grads.push_back(grad.tensor);
            bundles[e].push_back(std::move(grad));
        }
    }
    const bool split = action.work == Work::backward_input;
    call({.work = action.work,
          .stage = number,
          .microbatch = microbatch,
          .is_last_backward = is_last,
          .input_grads = input_grads},
         cell, split ? callbacks_.backward_input : callbacks_.backward);
    if (!split) release(live_.find({number, microbatch}));
    for (size_t e = 0; e < bundles.size(); ++e) {
        messages_->send({Kind::gradient, stage.from[e], microbatch}, std::move(bundles[e]), point_);
    }
}

void Pipeline::backward_weight(const Action& action, bool is_last) {
    const int microbatch = static_cast<int>(action.microbatch);
    const auto cell = live_.find({action.stage, microbatch});
    call({.work = Work::backward_weight, .stage = action.stage, .microbatch = microbatch, .is_last_backward = is_last},
         cell->second, callbacks_.backward_weight);
    release(cell);
}

void Pipeline::release(std::map<std::pair<int, int>, Cell>::iterator cell) {
    if (is_on_device()) [[unlikely]] {
        for (const auto& memory : cell->second.memory) pool_->add_use(memory.get(), point_);
    }
    live_.erase(cell);
}

void Pipeline::call(StageCall what, const Cell& cell, const Callback& callback) {
    what.microbatches = schedule_.microbatches;
    what.training = training_;
    if (is_last_stage(what.stage)) what.weight = weights_[static_cast<size_t>(what.microbatch)];
    what.inputs = cell.inputs;
    what.targets = cell.targets;
    what.outputs = cell.outputs;
    what.output_grads = cell.output_grads;
    const auto began = Clock::now();
    current_ = &what;
    try {
        messages_->record(fmt::format("{} {}, stage {}", short_name_of(what.work), what.microbatch, what.stage),
                          [&] { callback(what); });
        current_ = nullptr;
    } catch (...) {
        current_ = nullptr;
        const Error error = current_error();
        throw with_message(error, fmt::format("stage {}, micro-batch {}, {}: {}", what.stage, what.microbatch,
                                              name_of(what.work), error.what()));
    }
    if (is_on_device()) [[unlikely]]
        mark_stream();
    stats_.busy += Clock::now() - began;
}

// --- tensors

const Tensor& Pipeline::output(DType dtype, const Dims& shape) {
    if (current_ == nullptr || current_->work != Work::forward) {
        throw Error(Code::invalid_state, "an output is made outside of a forward callback of this pipeline");
    }
    const std::string what = fmt::format("output {} of stage {}", made_.size(), current_->stage);
    if (!is_known(dtype)) {
        throw Error(Code::invalid_argument, fmt::format("{} has the unknown dtype {}", what, static_cast<int>(dtype)));
    }
    check_shape(shape, dtype, what);
    const Tensor tensor{nullptr, shape, dtype, {}};
    if (tensor.size_bytes() > max_message_bytes_) {
        throw Error(Code::invalid_argument,
                    fmt::format("{}, {} {}, has {} bytes; max_message_bytes is {}", what, tsr::name_of(dtype),
                                shape.str(), tensor.size_bytes(), max_message_bytes_));
    }
    if (made_.size() == max_bundle_tensors) {
        throw Error(Code::invalid_argument,
                    fmt::format("{}: a stage has at most {} outputs", what, max_bundle_tensors));
    }
    return made_.emplace_back(make(dtype, shape)).tensor;
}

void Pipeline::loss(double value) {
    if (current_ == nullptr || !is_last_stage(current_->stage)) {
        throw Error(Code::invalid_state, "a loss was reported outside of a callback of the last stage");
    }
    losses_[static_cast<size_t>(current_->microbatch)] = value;
}

Held Pipeline::make(DType dtype, const Dims& shape) {
    Held held{{nullptr, shape, dtype, {}}, nullptr};
    held.memory = pool_->take(held.tensor.size_bytes());
    held.tensor.data = held.memory.get();
    if (is_on_device()) [[unlikely]] {
        held.tensor.device = device_;
        for (const EventPtr& use : pool_->former_uses(held.tensor.data)) api_.wait(stream_, *use);
    }
    return held;
}

Bundle Pipeline::take(const Parcel& parcel) {
    if (messages_->sender_of(parcel) == rank_) return messages_->take(parcel, stream_);
    const auto began = Clock::now();
    Bundle bundle = messages_->take(parcel, stream_);
    const Route& route = messages_->route(parcel.edge);
    waits_[parcel.kind == Kind::activation ? route.from_stage : route.to_stage] += Clock::now() - began;
    return bundle;
}

void Pipeline::take_gradients(const Parcel& parcel, std::span<const Tensor> outputs, Cell& cell) {
    Bundle bundle = take(parcel);
    size_t next = 0;
    const auto refuse = [&](const std::string& why) {
        const int peer = messages_->sender_of(parcel);
        throw Error(Code::mismatch,
                    fmt::format("stage {} received {}, which {}", messages_->route(parcel.edge).from_stage,
                                messages_->describe(parcel), why))
            .with_peer(peer);
    };
    for (const Tensor& output : outputs) {
        if (!is_floating(output.dtype)) {
            cell.output_grads.push_back(without_data(output));
            continue;
        }
        if (next == bundle.size()) refuse(fmt::format("has only {} tensors", next));
        Held& held = bundle[next++];
        if (held.tensor.dtype != output.dtype || held.tensor.shape != output.shape) {
            refuse(fmt::format("is {} {}; the output is {} {}", tsr::name_of(held.tensor.dtype),
                               held.tensor.shape.str(), tsr::name_of(output.dtype), output.shape.str()));
        }
        cell.output_grads.push_back(held.tensor);
        cell.memory.push_back(std::move(held.memory));
    }
    if (next != bundle.size()) refuse(fmt::format("has {} tensors; {} were expected", bundle.size(), next));
}

// --- together

// A rank that is late here, or has died, has not told how far it is.
void Pipeline::share_losses(Pass pass) {
    const Tensor losses = tensor_of(std::span(losses_), DType::f64);
    try {
        messages_->between(comm_->options().timeout, [&](Communicator& comm) {
            comm.run({.collective = Collective::broadcast,
                      .outputs = {&losses, 1},
                      .peer = schedule_.rank_of_stage.back(),
                      .label = pass == Pass::training ? "the losses of a step" : "the losses of an eval"});
        });
    } catch (const Error& error) {
        const int peer = error.record()->peer;
        if (peer < 0 || peer >= schedule_.ranks()) throw;
        const auto& order = schedule_.orders[static_cast<size_t>(peer)];
        const auto last = std::ranges::find_if(order.rbegin(), order.rend(), [&](const Action& action) {
            return pass == Pass::training || action.work == Work::forward;
        });
        throw with_message(error, fmt::format("{}. The last that rank {} computes is stage {}, micro-batch {}, {}",
                                              error.what(), peer, last->stage, last->microbatch, name_of(last->work)));
    }
}

void Pipeline::check_tied(const Tensor& gradient, std::span<const int> stages) const {
    const std::string what = fmt::format("the tied gradient of stages {}", join(stages));
    for (size_t i = 0; i < stages.size(); ++i) {
        if (stages[i] < 0 || stages[i] >= schedule_.stages()) {
            throw Error(Code::invalid_argument,
                        fmt::format("{}: there are stages 0 to {}", what, schedule_.stages() - 1));
        }
        if (i > 0 && stages[i] <= stages[i - 1]) {
            throw Error(Code::invalid_argument, fmt::format("{}: name each stage once, in ascending order", what));
        }
    }
    if (std::ranges::none_of(stages, [&](int stage) { return stages_.contains(stage); })) {
        throw Error(Code::invalid_argument, fmt::format("{}: none of them is on this rank", what));
    }
    if (!is_floating(gradient.dtype)) {
        throw Error(Code::invalid_argument,
                    fmt::format("{} is {}; it must be of floating point", what, tsr::name_of(gradient.dtype)));
    }
    check_place(gradient, what);
}

void Pipeline::sum_tied(const Tensor& gradient, std::span<const int> stages) {
    in_step([&] {
        check_tied(gradient, stages);
        std::vector<int> ranks;
        for (const int stage : stages) {
            const int rank = schedule_.rank_of_stage[static_cast<size_t>(stage)];
            if (std::ranges::find(ranks, rank) == ranks.end()) ranks.push_back(rank);
        }
        if (ranks.size() == 1 || gradient.numel() == 0) return;
        if (gradient.device.type == DeviceType::cpu) return sum_on_host(gradient, ranks);
        sum_of_device(gradient, ranks);
    });
}

void Pipeline::sum_on_host(const Tensor& gradient, const std::vector<int>& ranks) {
    messages_->between(comm_->options().timeout, [&](Communicator& comm) {
        const auto send = [&](int peer) {
            comm.run({.collective = Collective::send,
                      .inputs = {&gradient, 1},
                      .peer = peer,
                      .tag = tied_tag,
                      .label = "a tied gradient"});
        };
        const auto receive = [&](const Tensor& tensor, int peer) {
            comm.run({.collective = Collective::recv,
                      .outputs = {&tensor, 1},
                      .peer = peer,
                      .tag = tied_tag,
                      .label = "a tied gradient"});
        };
        if (rank_ != ranks[0]) {
            send(ranks[0]);
            return receive(gradient, ranks[0]);
        }
        std::vector<std::shared_ptr<std::byte>> others;
        std::vector<const std::byte*> addends{gradient.data};
        for (size_t i = 1; i < ranks.size(); ++i) {
            others.push_back(on_host_->take(gradient.size_bytes()));
            receive({others.back().get(), gradient.shape, gradient.dtype, {}}, ranks[i]);
            addends.push_back(others.back().get());
        }
        reduce(gradient.data, addends, static_cast<size_t>(gradient.numel()), gradient.dtype, ReduceOp::sum);
        for (size_t i = 1; i < ranks.size(); ++i) send(ranks[i]);
    });
}

}  // namespace tsr::pipeline
