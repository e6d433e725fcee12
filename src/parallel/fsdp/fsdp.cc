#include "parallel/fsdp/fsdp.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "comm/fingerprint.hpp"
#include "parallel/fsdp/unwritten.hpp"
#include "parallel/tensor/tensor_parallel.hpp"

namespace tsr {

namespace {

constexpr size_t names_in_message = 8;

}  // namespace

template <class Body>
auto Fsdp::attempt(Body&& body) {
    try {
        return body();
    } catch (const Error& error) {  // of these codes, nothing has happened
        if (error.code() != Code::invalid_state && error.code() != Code::interrupted) failed_ = error;
        throw;
    }
}

Fsdp::Fsdp(const std::shared_ptr<Communicator>& comm, std::vector<FsdpUnit> units, const FsdpOptions& options,
           std::shared_ptr<TensorParallel> slices)
    : comm_(comm),
      options_(options),
      slices_(std::move(slices)),
      plan_(std::make_shared<FsdpPlan>()),
      grad_slots_(
          options.grads_in_flight,
          [this](const std::shared_ptr<GradMemory>& memory, size_t size) {
              return attempt([&] { return place_->allocate(memory, size); });
          },
          [this](const WorkPtr& work) { await(work); }) {
    for (FsdpUnit& unit : units) {
        for (NamedTensor& param : unit.params) param.name = without_wrappers(std::move(param.name));
    }
    const std::vector<std::string> lines = or_refuse_on_all_ranks(*comm_, Compared::models, [&] {
        check_model(units, options_, comm_->world_size());
        device_ = device_of(units, comm_->device());
        if (device_.type != DeviceType::cpu) check_for_device(units, options_, slices_ != nullptr, device_);
        if (slices_) slices_->check_data_ranks(*comm_);
        for (const FsdpUnit& unit : units) {
            for (const NamedTensor& param : unit.params) {
                if (slices_) slice_of_.push_back(slices_->find_slice(param));
            }
        }
        return description(units, options_);
    });
    check_same_on_all_ranks(*comm_, Compared::models, lines, "the ranks' models differ");
    for (const FsdpUnit& unit : units) {
        UnitPlan& plan = plan_->units.emplace_back();
        plan.name = unit.name;
        plan.row_block = std::max(unit.row_block, 1);
        plan.flat = unit.flat;
        UnitState& state = states_.emplace_back();
        for (size_t i = 0; i < unit.params.size(); ++i) {
            const auto& [name, tensor] = unit.params[i];
            FsdpParam& param = plan_->params.emplace_back();
            param.name = name;
            param.shape = tensor.shape;
            param.dtype = tensor.dtype;
            param.whole_dtype = is_floating(tensor.dtype)
                                    ? unit.param_dtype.value_or(options_.param_dtype.value_or(tensor.dtype))
                                    : tensor.dtype;
            param.grad_dtype = unit.reduce_dtype.value_or(options_.reduce_dtype.value_or(param.whole_dtype));
            param.trained = unit.trained.empty() || unit.trained[i];
            param.unit = plan_->units.size() - 1;
            plan.params.push_back(plan_->params.size() - 1);
            if (param.trained) state.trained.push_back(plan_->params.size() - 1);
        }
    }
    const int ranks = options_.shard_ranks > 0 ? options_.shard_ranks : comm_->world_size();
    const int group = comm_->rank() / ranks;
    const int shard = comm_->rank() % ranks;
    plan_->ranks = ranks;
    lay_out(*plan_, shard);
    take_memory();
    place_->connect(*comm_, group, shard, ScatterOptions{options_.op, options_.pre_divide},
                    slices_ ? slices_->grad_parts(slice_of_) : nullptr);
    for (size_t u = 0; u < units.size(); ++u) {
        const int among = units[u].reshard_after_forward;
        if (among == 1) continue;
        states_[u].keepers = among == 0 ? 1 : place_->prepare_to_keep(u, among);
    }
    for (size_t u = 0; u < units.size(); ++u) order_.push_back(u);
    for (auto* flags : {&unused_, &written_, &used_, &has_grad_}) flags->assign(plan_->params.size(), 0);
    take_values(units);
}

Fsdp::~Fsdp() {
    bool is_idle = !failed_;
    for (size_t u = 0; u < states_.size(); ++u) is_idle = is_idle && phase(u) == UnitPhase::sharded;
    place_->end(is_idle);
}

// --- what there is

const UnitPlan& Fsdp::unit(size_t index) const {
    if (index < plan_->units.size()) return plan_->units[index];
    throw no_such("unit", index, plan_->units.size());
}

const FsdpParam& Fsdp::param(size_t index) const {
    if (index < plan_->params.size()) return plan_->params[index];
    throw no_such("parameter", index, plan_->params.size());
}

Fsdp::UnitState& Fsdp::state(size_t unit) {
    (void)this->unit(unit);
    return states_[unit];
}

Tensor Fsdp::whole(size_t param) const {
    const FsdpParam& what = this->param(param);
    const UnitState& state = states_[what.unit];
    if (state.memory != Memory::whole) {
        throw refusal(Code::invalid_state,
                      fmt::format("parameter \"{}\" of unit \"{}\" is {}", what.name, plan_->units[what.unit].name,
                                  state.memory == Memory::on_its_way
                                      ? "still being unsharded; wait for the unit first"
                                      : fmt::format("sharded; access it between forward() and forward_done(), or "
                                                    "between backward() and {}",
                                                    options_.calls.ready)));
    }
    return tensor_at(place_->data(what.unit) + what.whole_at, what.shape, what.whole_dtype);
}

Tensor Fsdp::grad(size_t param) const {
    const FsdpParam& what = this->param(param);
    const UnitState& state = states_[what.unit];
    if (!what.trained) {
        throw refusal(Code::invalid_state,
                      fmt::format("parameter \"{}\" is not trained; it has no gradient", what.name));
    }
    if (!state.in_backward()) {
        throw refusal(
            Code::invalid_state,
            fmt::format("the unsharded gradient of \"{}\" exists only between backward() and {} of its unit \"{}\"; "
                        "use the gradient's shard afterwards",
                        what.name, options_.calls.ready, plan_->units[what.unit].name));
    }
    return tensor_at(grad_slots_.data(*state.grad_slot) + what.grad_at, what.shape, what.grad_dtype);
}

void Fsdp::unused(size_t param) {
    const Tensor grad = this->grad(param);
    const UnitState& state = states_[this->param(param).unit];
    if (grad.size_bytes() > 0 && sync_ && !state.sums) {
        attempt([&] { place_->zero(grad.data, grad.size_bytes()); });
    }
    unused_[param] = 1;
}

bool Fsdp::has_grad(size_t param) const {
    (void)this->param(param);
    return has_grad_[param] != 0;
}

void Fsdp::forget_gradients() { std::fill(has_grad_.begin(), has_grad_.end(), uint8_t{0}); }

bool Fsdp::used(size_t param) const {
    (void)this->param(param);
    return used_[param] != 0;
}

Tensor Fsdp::shard(size_t param) const {
    const FsdpParam& what = this->param(param);
    return tensor_at(shards_.params.get() + what.shard_at, what.shard_shape, what.dtype);
}

Tensor Fsdp::shard_grad(size_t param) const {
    const FsdpParam& what = this->param(param);
    if (!what.trained) {
        throw refusal(Code::invalid_state,
                      fmt::format("parameter \"{}\" is not trained; it has no gradient", what.name));
    }
    return tensor_at(shards_.grads.get() + what.shard_grad_at, what.shard_shape, what.dtype);
}

// Ranks with other slices shard these in the same way, by the shapes that they have there.
Held Fsdp::held_of_slice(size_t param) const {
    const TensorParallel& slices = *slices_;
    if (plan_at_.empty()) {
        for (int place = 0; place < slices.comm()->world_size(); ++place) {
            FsdpPlan& plan = plan_at_.emplace_back(*plan_);
            for (size_t i = 0; i < slice_of_.size(); ++i) {
                plan.params[i].shape = slices.param(slice_of_[i]).slice_shape(place);
            }
            lay_out(plan, 0);
        }
    }
    const auto parts_of = [&](int place, int data_rank) {
        const FsdpPlan& plan = plan_at_[static_cast<size_t>(place)];
        return boxes_of_range(plan.params[param].shape,
                              elements_of(plan, plan.params[param], data_rank % shard_ranks()));
    };
    return slices.held_within(slice_of_[param], comm_->rank() / shard_ranks(), parts_of);
}

Held Fsdp::held(size_t param) const {
    const FsdpParam& what = this->param(param);
    if (slices_) return held_of_slice(param);
    const int replicas = comm_->world_size() / shard_ranks();
    return {layout_of(*plan_, what, replicas), comm_->rank(), comm_->rank() / shard_ranks()};
}

UnitPhase Fsdp::phase(size_t unit) const {
    (void)this->unit(unit);
    const UnitState& one = states_[unit];
    if (one.in_backward()) return UnitPhase::backward;
    if (one.memory == Memory::whole) return UnitPhase::whole;
    if (one.memory == Memory::on_its_way || one.is_kept) return UnitPhase::on_its_way;
    return one.is_reduced() ? UnitPhase::reducing : UnitPhase::sharded;
}

// --- whole parameters

void Fsdp::begin_whole(size_t unit) {
    UnitState& one = state(unit);
    fail_if_failed();
    if (one.is_gathered()) return;
    const bool is_left = one.memory == Memory::left;
    const size_t slot = is_left ? one.slot : whole_slots_.take(plan_->units[unit].whole_size, one.last_slot);
    try {
        const auto from = is_left                          ? UnitPlace::From::left
                          : one.is_kept && one.keepers > 1 ? UnitPlace::From::kept
                                                           : UnitPlace::From::shards;
        one.gathering = attempt([&] { return place_->unshard(unit, whole_slots_.id(slot), from); });
    } catch (...) {
        if (!is_left) whole_slots_.give_back(slot);
        throw;
    }
    one.slot = slot;
    one.memory = Memory::on_its_way;
}

void Fsdp::await_whole(size_t unit) {
    UnitState& one = state(unit);
    fail_if_failed();
    if (!one.is_gathered()) {
        throw refusal(Code::invalid_state,
                      fmt::format("unit \"{}\" is sharded and is not being unsharded; call unshard() first",
                                  plan_->units[unit].name));
    }
    if (one.memory == Memory::whole) return;
    await(one.gathering);
    attempt([&] { place_->show(unit, whole_slots_.id(one.slot)); });
    one.gathering = nullptr;
    one.last_slot = one.slot;
    one.memory = Memory::whole;
}

void Fsdp::give_back(size_t unit) {
    UnitState& one = state(unit);
    fail_if_failed();
    one.is_kept = false;
    if (one.memory == Memory::none) return;
    if (one.in_backward()) {
        throw refusal(Code::invalid_state, fmt::format("unit \"{}\" is in its backward; call {} first",
                                                       plan_->units[unit].name, options_.calls.ready));
    }
    if (one.memory == Memory::on_its_way) await_whole(unit);
    attempt([&] { place_->hide(unit); });
    whole_slots_.give_back(one.slot);
    one.memory = Memory::none;
}

void Fsdp::end_backward(size_t unit) {
    UnitState& one = states_[unit];
    const bool leaves = one.memory == Memory::whole || one.memory == Memory::left;
    if (one.reshards || one.in_backward() || !leaves) return give_back(unit);
    attempt([&] { place_->hide(unit); });
    one.is_kept = false;
    one.memory = Memory::left;
}

void Fsdp::unshard(size_t unit) {
    const Reentry once = enter(Among::shards);
    begin_whole(unit);
}

void Fsdp::await_unit(size_t unit) {
    const Reentry once = enter(Among::shards);
    await_whole(unit);
}

void Fsdp::reshard(size_t unit) {
    const Reentry once = enter(Among::shards);
    give_back(unit);
}

// Prefetches the next units, as in the previous pass, within the limits of the options.
void Fsdp::prefetch(Pass pass, size_t current) {
    const int ahead = pass == Pass::forward ? options_.forward_prefetch : options_.backward_prefetch;
    int left = ahead;
    if (pass == Pass::forward) {
        for (size_t i = recorded_.size(); i < order_.size() && left > 0; ++i, --left) begin_whole(order_[i]);
        return;
    }
    // The units of this forward whose backward is still to come, last first.
    for (auto unit = recorded_.rbegin(); unit != recorded_.rend() && left > 0; ++unit) {
        const UnitState& one = states_[*unit];
        if (*unit == current || one.backward != Backward::none || one.trained.empty()) continue;
        begin_whole(*unit);
        --left;
    }
}

// --- a step

void Fsdp::forward(size_t unit) {
    const Reentry once = enter(Among::shards);
    fail_if_failed();
    (void)state(unit);
    if (pass_ != Pass::forward) {
        for (size_t u = 0; u < states_.size(); ++u) {
            if (states_[u].backward == Backward::none) continue;
            throw refusal(Code::invalid_state,
                          fmt::format("the forward of unit \"{}\" cannot begin during a backward pass (unit \"{}\" has "
                                      "begun its backward); end the step first",
                                      plan_->units[unit].name, plan_->units[u].name));
        }
        pass_ = Pass::forward;
        if (!recorded_.empty()) order_ = std::exchange(recorded_, {});
    }
    const bool again =
        !recorded_.empty() && recorded_.back() == unit && states_[unit].memory == Memory::on_its_way;  // interrupted
    if (!again) recorded_.push_back(unit);
    begin_whole(unit);
    prefetch(Pass::forward, unit);
    await_whole(unit);
}

void Fsdp::forward_done(size_t unit) {
    const Reentry once = enter(Among::shards);
    UnitState& one = state(unit);
    if (one.keepers == 1) return;
    bool kept = one.is_kept;
    if (one.keepers > 1 && !kept && one.memory != Memory::none && !one.in_backward()) {
        await_whole(unit);
        attempt([&] { place_->keep(unit, whole_slots_.id(one.slot)); });
        kept = true;
    }
    give_back(unit);
    one.is_kept = kept;
}

void Fsdp::backward(size_t unit) {
    const Reentry once = enter(Among::shards);
    UnitState& one = state(unit);
    fail_if_failed();
    if (one.in_backward()) return;
    if (one.is_reduced()) place_->require_kernels_for("a second backward of a unit in a step");
    pass_ = Pass::backward;
    begin_whole(unit);
    prefetch(Pass::backward, unit);
    if (!one.trained.empty()) take_grad_slot(unit);
    await_whole(unit);
    for (const size_t param : one.trained) unused_[param] = 0;
    // Set last, so that an interrupted call resumes where it stopped.
    one.backward = one.is_reduced() ? Backward::begun_again : Backward::begun;
    if (!sync_ || one.sums || !place_->sees_memory()) return;
    for (const size_t param : one.trained) mark_unwritten(grad(param));
}

void Fsdp::take_grad_slot(size_t unit) {
    UnitState& one = states_[unit];
    if (!one.grad_slot) {  // otherwise gradients accumulate there, or the call was interrupted
        one.grad_slot = grad_slots_.take(std::max(plan_->units[unit].grad_size, fsdp_alignment));
        one.clears_grads = !sync_;
    }
    std::byte* grads = grad_slots_.ready(*one.grad_slot);
    if (!one.clears_grads) return;
    attempt([&] { place_->zero(grads, plan_->units[unit].grad_size); });
    one.clears_grads = false;
}

// Unwritten memory may hold another unit's gradient.
void Fsdp::refuse_unwritten(size_t unit) const {
    const UnitState& one = states_[unit];
    if (!sync_ || one.sums || !place_->sees_memory()) return;
    std::vector<std::string_view> names;
    for (const size_t param : one.trained) {
        if (is_unwritten(grad(param))) names.push_back(this->param(param).name);
    }
    if (names.empty()) return;
    const size_t told = std::min(names.size(), names_in_message);
    throw refusal(
        Code::invalid_state,
        fmt::format("{} of {} gradients of unit \"{}\" were not written: \"{}\"{}; write them{} and call {} again",
                    names.size(), one.trained.size(), plan_->units[unit].name,
                    fmt::join(names.begin(), names.begin() + static_cast<std::ptrdiff_t>(told), "\", \""),
                    names.size() > told ? fmt::format(" and {} more", names.size() - told) : "",
                    options_.calls.or_unused, options_.calls.ready));
}

void Fsdp::grads_ready(size_t unit) {
    const Reentry once = enter(Among::reduction);
    UnitState& one = state(unit);
    fail_if_failed();
    if (!one.in_backward()) {
        throw refusal(Code::invalid_state,
                      fmt::format("{} of unit \"{}\" without a backward in this step; call backward() first",
                                  options_.calls.ready, plan_->units[unit].name));
    }
    refuse_unwritten(unit);
    const bool add = one.is_reduced() || accumulate_;
    if (sync_ && one.grad_slot) {
        const auto& memory = grad_slots_.memory(*one.grad_slot);
        grad_slots_.reduce(*one.grad_slot, attempt([&] {
            if (!all_reduce_) return place_->reduce_partly(unit, memory);
            return place_->reduce(unit, memory, add ? UnitPlace::Into::old_grads : UnitPlace::Into::new_grads);
        }));
        one.grad_slot.reset();
    }
    for (const size_t param : one.trained) written_[param] |= unused_[param] == 0 ? 1 : 0;
    one.backward = Backward::done;
    one.sums = one.grad_slot.has_value();
    end_backward(unit);
}

void Fsdp::wait() {
    const Reentry once = enter(Among::reduction);
    fail_if_failed();
    std::string unsaid;
    size_t count = 0;
    for (size_t u = 0; u < states_.size(); ++u) {
        const UnitState& one = states_[u];
        if (one.trained.empty() || one.backward == Backward::done) continue;
        if (!sync_ && !one.in_backward()) continue;
        if (++count <= names_in_message) {
            unsaid += fmt::format("{}\"{}\"", count > 1 ? ", " : "", plan_->units[u].name);
        }
    }
    if (count > 0) {
        throw refusal(
            Code::invalid_state,
            fmt::format("the gradients of {} of {} units were never marked ready: {}{}; call {} for them (with zeros "
                        "if this step did not use them), then end the step again",
                        count, states_.size(), unsaid,
                        count > names_in_message ? fmt::format(" and {} more", count - names_in_message) : "",
                        options_.calls.ready));
    }
    grad_slots_.await_reductions();
    if (sync_ && all_reduce_) share_used();
    for (size_t u = 0; u < states_.size(); ++u) {
        end_backward(u);
        states_[u].backward = Backward::none;
    }
    if (sync_ && all_reduce_) counter_.count(++synced_steps_);
    pass_ = Pass::none;
}

// Tells optimizers which parameters no rank has a gradient of; they leave those unchanged.
void Fsdp::share_used() {
    if (!sharing_) {
        shared_used_ = std::make_shared<std::vector<uint8_t>>(written_);
        for (const uint64_t word : {compared_, ~compared_}) {
            for (size_t bit = 0; bit < 64; bit += 8) shared_used_->push_back(static_cast<uint8_t>(word >> bit));
        }
        sharing_ = attempt([&] { return place_->share(shared_used_); });
    }
    await(sharing_);
    sharing_ = nullptr;
    used_.assign(shared_used_->begin(), shared_used_->begin() + static_cast<std::ptrdiff_t>(written_.size()));
    // The maxima of a byte and of its complement are complements of each other only if all ranks have the same.
    const uint8_t* const most = shared_used_->data() + written_.size();
    ranks_agreed_ = true;
    for (size_t i = 0; i < 8; ++i) ranks_agreed_ = ranks_agreed_ && (most[i] ^ most[i + 8]) == 0xff;
    for (size_t i = 0; i < used_.size(); ++i)
        has_grad_[i] = used_[i] != 0 || (accumulate_ && has_grad_[i] != 0) ? 1 : 0;
    std::fill(written_.begin(), written_.end(), uint8_t{0});
}

void Fsdp::abandon() {
    const Reentry once = enter(Among::shards);
    fail_if_failed();
    grad_slots_.await_reductions();
    for (size_t u = 0; u < states_.size(); ++u) {
        states_[u].backward = Backward::none;
        give_back(u);
    }
    give_up_gradients();
    recorded_.clear();
    pass_ = Pass::none;
}

// --- between steps

void Fsdp::check_not_in_backward(const char* what) const {
    if (pass_ != Pass::backward) return;
    throw refusal(Code::invalid_state,
                  fmt::format("{} cannot be changed during a backward pass; end the step first", what));
}

void Fsdp::set_sync(bool sync) {
    check_not_in_backward("synchronisation");
    sync_ = sync;
}

void Fsdp::set_accumulate(bool accumulate) {
    check_not_in_backward("accumulation");
    if (accumulate) place_->require_kernels_for("accumulation in the shards' gradients");
    accumulate_ = accumulate;
}

void Fsdp::set_reshard_after_backward(size_t unit, bool reshard) {
    UnitState& one = state(unit);
    check_not_in_backward("resharding after backward");
    if (!reshard && !place_->sees_memory()) {
        throw refusal(Code::unsupported,
                      "a unit on a CUDA device cannot keep its memory after its backward: the host does not see "
                      "whether a shard has changed since; let it reshard");
    }
    one.reshards = reshard;
}

void Fsdp::set_all_reduce(bool all_reduce) {
    check_not_in_backward("the reduction over replicas");
    if (!all_reduce) place_->require_kernels_for("a reduction that leaves out replicas");
    all_reduce_ = all_reduce;
}

void Fsdp::zero_grad() {
    check_idle("gradients cannot be zeroed");
    give_up_gradients();
}

// Clears the shards' gradients and what accumulates unsharded or within replicas.
void Fsdp::give_up_gradients() {
    place_->forget_partial();
    attempt([&] { place_->zero(shards_.grads.get(), plan_->shard_grad_size); });
    std::fill(written_.begin(), written_.end(), uint8_t{0});
    forget_gradients();
    for (UnitState& one : states_) {
        if (!one.grad_slot) continue;
        grad_slots_.give_back(*one.grad_slot);
        one.grad_slot.reset();
        one.sums = false;
    }
}

// --- waits and errors

// Null: done already.
void Fsdp::await(const WorkPtr& work) {
    if (!work) return;
    // Each collective has its own deadline; this one only guards against work that never finishes. Jobs queued before
    // it count too: three collectives per unit.
    constexpr milliseconds most = std::chrono::hours{24 * 365};  // a longer time may overflow the clock
    const auto deadline = Deadline::in(
        std::min(most, comm_->options().timeout * static_cast<int64_t>(4 * states_.size() + 4) + milliseconds{10000}));
    try {
        place_->await(*work, deadline);
    } catch (const Error& error) {
        // An interrupted wait does not stop the work; the caller may wait again.
        if (error.code() != Code::interrupted) failed_ = error;
        throw;
    }
}

void Fsdp::set_stream(StreamHandle stream) {
    const Reentry once = enter();
    check_idle("the stream cannot be changed");
    place_->set_stream(stream);
}

void Fsdp::check_idle(const char* what) const {
    fail_if_failed();
    place_->check();
    for (size_t u = 0; u < states_.size(); ++u) {
        const std::string& name = plan_->units[u].name;
        switch (phase(u)) {
            case UnitPhase::sharded: continue;
            case UnitPhase::reducing:
                throw refusal(Code::invalid_state,
                              fmt::format("{} while the gradients of unit \"{}\" are being reduced; "
                                          "end the step first",
                                          what, name));
            case UnitPhase::on_its_way:
            case UnitPhase::whole:
            case UnitPhase::backward:
                throw refusal(Code::invalid_state,
                              fmt::format("{} while unit \"{}\" is {}; call {} or end the step first", what, name,
                                          states_[u].memory == Memory::whole ? "unsharded" : "being unsharded",
                                          options_.calls.reshard));
        }
    }
}

void Fsdp::check_reduced_after(int64_t steps) const {
    check_idle("the optimizer cannot change the shards");
    if (synced_steps_ > steps) return;
    throw refusal(Code::invalid_state,
                  fmt::format("the optimizer steps {}; call {} and end the step first, with synchronisation and the "
                              "reduction over replicas on",
                              steps == 0 ? "before any gradients were reduced"
                                         : "but no gradients were reduced since its last step",
                              options_.calls.ready));
}

Reentry Fsdp::enter(Among among) const {
    const int needed = among == Among::reduction && sync_ ? comm_->world_size() : shard_ranks();
    if (!failed_) {
        comm_->check_usable();
        if (needed > 1) comm_->refuse_in_turn("a call for the units of an FSDP model");
    }
    return enter();
}

void Fsdp::fail_if_failed() const {
    if (!failed_) return;
    throw refusal(Code::aborted, fmt::format("the model cannot be used after an earlier error: {}", failed_->what()))
        .caused_by(*failed_);
}

Error Fsdp::refusal(Code code, const std::string& why) const {
    return Error(code, fmt::format("rank {}: {}", comm_->rank(), why)).with_rank(comm_->rank());
}

}  // namespace tsr
