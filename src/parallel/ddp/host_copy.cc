#include "parallel/ddp/host_copy.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <functional>

#include "base/round_up.hpp"
#include "parallel/ddp/bucket_plan.hpp"

namespace tsr {

namespace {

constexpr int64_t loading = -1;  // instead of a step

}  // namespace

HostCopy::HostCopy(const std::shared_ptr<Communicator>& comm) : comm_(comm), host_(comm) {
    static_assert(std::atomic<int64_t>::is_always_lock_free, "stamps are shared by processes");
    stamps_ = host_.comm()->allocate(sizeof(Stamp));  // zeroed: begun and done are 0
}

void HostCopy::meet(std::string_view label) { host_.run({.label = label}); }

void HostCopy::together(const std::function<void()>& body) {
    try {
        body();
    } catch (const std::exception& error) {
        // A failed job is reported over comm_; ranks of this host may be waiting on the host's own communicator.
        if (!is_alone()) host_.comm()->abort(error.what());
        throw;
    }
}

// --- stamps

HostCopy::Stamp& HostCopy::stamp_of(int place) const {
    std::byte* const at = stamps_->of_rank(place);
    return *reinterpret_cast<Stamp*>(at != nullptr ? at : stamps_->data());
}

void HostCopy::begin_step(int64_t steps) { mark_begun(steps + 1); }

// A rank that reads another's stamp has met that rank since, or knows that its process has ended. All executed stores
// of an ended process are visible, and a processor executes them in program order; the compiler keeps that order
// because nothing after an acquire moves before it. So a rank that sees a change also sees the stamp that precedes it.
//
// A rank that was suspended before a meeting may find on resuming that all others have arrived, although they have
// since given it up and may be saving the copy. Either it sees that here and changes nothing, or a rank that read its
// stamp afterwards saw this stamp: both sides store first and then load, in the single order of sequentially consistent
// operations.
void HostCopy::mark_begun(int64_t step) {
    (void)stamp_of(place()).begun.exchange(step, std::memory_order_seq_cst);
    if (const auto error = host_.comm()->error()) throw host_.told(*error);
}

void HostCopy::end_step(int64_t steps) {
    // Release: a rank that sees the stamp sees all changes before it.
    stamp_of(place()).done.store(steps + 1, std::memory_order_release);
}

int64_t HostCopy::step() const {
    std::string differences;
    const int64_t known = known_.load(std::memory_order_relaxed);
    for (int r = 0; r < places(); ++r) {
        // First done, then begun: in the other order, a slice changed between the two loads would look consistent.
        const int64_t done = stamp_of(r).done.load(std::memory_order_acquire);
        const int64_t begun = stamp_of(r).begun.load(std::memory_order_seq_cst);
        if (done == known && begun == done) continue;
        if (!differences.empty()) differences += ", ";
        differences += begun == loading ? fmt::format("the slice of local rank {} was being loaded", r)
                       : begun != done
                           ? fmt::format("the slice of local rank {} is between step {} and step {}", r, done, begun)
                           : fmt::format("the slice of local rank {} is at step {}", r, done);
    }
    if (differences.empty()) return known;
    throw Error(
        Code::corrupt,
        fmt::format("rank {}: the host's shared parameters are inconsistent: this rank finished step {}, but {}; "
                    "discard the model, create a new one and load the last checkpoint",
                    comm_->rank(), known, differences))
        .with_rank(comm_->rank());
}

void HostCopy::check_whole() const { (void)step(); }

// --- loads

std::vector<int64_t> HostCopy::gather(int64_t own, std::string_view label) {
    std::vector<int64_t> all(static_cast<size_t>(places()));
    std::array<int64_t, 1> one{own};
    const Tensor input = tensor_of(std::span<int64_t>(one), DType::i64);
    const Tensor output = tensor_of(std::span<int64_t>(all), DType::i64);
    host_.run({.collective = Collective::all_gather, .inputs = {&input, 1}, .outputs = {&output, 1}, .label = label});
    return all;
}

void HostCopy::agree_to_load(uint32_t what) {
    const std::vector<int64_t> all = gather(what, "load of a shared copy");
    const auto other = std::find_if(all.begin(), all.end(), [&](int64_t one) { return one != all.front(); });
    if (other == all.end()) return;
    throw Error(
        Code::mismatch,
        fmt::format("rank {}: local rank {} of this host loads different tensors into the shared parameters than local "
                    "rank 0; load the same checkpoint with the same names and rules on all ranks of a host",
                    comm_->rank(), other - all.begin()))
        .with_rank(comm_->rank());
}

void HostCopy::begin_load() {
    meet("load begins");
    mark_begun(loading);
}

void HostCopy::end_load(const std::optional<Error>& error) {
    Stamp& own = stamp_of(place());
    if (!error) own.begun.store(own.done.load(std::memory_order_relaxed), std::memory_order_release);
    std::vector<int64_t> all;
    try {
        all = gather(error ? 1 : 0, "load ends");
    } catch (const Error&) {
        if (!error) throw;  // otherwise the first error counts
    }
    if (error) throw Error(*error);
    const auto failed = std::find(all.begin(), all.end(), int64_t{1});
    if (failed == all.end()) return;
    throw Error(
        Code::aborted,
        fmt::format("rank {}: local rank {} of this host could not load its rows of the shared parameters; see its "
                    "error, then load again on all ranks",
                    comm_->rank(), failed - all.begin()))
        .with_rank(comm_->rank());
}

// --- slices

// Splits the parameters of a bucket, each padded to full cache lines, into one part per rank, so that no two ranks
// write to the same line.
std::vector<ParamSlice> HostCopy::slice_of(const BucketView& bucket) const {
    const auto lines_of = [](const Tensor& grad) {
        return round_up(grad.size_bytes(), slot_alignment) / slot_alignment;
    };
    size_t lines = 0;
    for (const Tensor& grad : bucket.grads) lines += lines_of(grad);
    const auto places = static_cast<size_t>(this->places());
    const auto place = static_cast<size_t>(this->place());
    const size_t begin = lines / places * place + std::min(place, lines % places);
    const size_t end = begin + lines / places + (place < lines % places ? 1 : 0);
    std::vector<ParamSlice> slices;
    size_t at = 0;  // cache line of the parameter's first element
    for (size_t i = 0; i < bucket.grads.size() && at < end; ++i) {
        const Tensor& grad = bucket.grads[i];
        const size_t first = std::max(begin, at);
        const size_t last = std::min(end, at + lines_of(grad));
        if (first < last) {
            const size_t from = (first - at) * slot_alignment;
            const size_t to = std::min((last - at) * slot_alignment, grad.size_bytes());
            const size_t element = size_of(grad.dtype);
            // NOLINTNEXTLINE(clang-analyzer-core.DivideZero): parameters are f32 or f64, never of an unknown dtype
            slices.push_back({bucket.params[i], from / element, (to - from) / element, grad.data + from});
        }
        at += lines_of(grad);
    }
    return slices;
}

}  // namespace tsr
