// Gradients in the memory of a device, and the two streams that meet there: the trainer's, on which it writes gradients and
// uses the reduced ones, and the model's own, on which buckets are reduced beside it:
//
//     trainer's   write a bucket's gradients . write the next ones . . . . . . . wait . optimizer
//                                            \ event                             / event
//     own                                     wait . all-reduce . wait . all-reduce
//
// Nothing waits for the device but await() and times(): what fails there shows in the work of an operation, which check() looks
// at. The trainer's thread owns all of it, but for what jobs do: begin_bucket(), set_aside(), convert(), divide(), run() and
// end_bucket().
#pragma once

#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "base/function_ref.hpp"
#include "comm/communicator.hpp"
#include "device/convert.hpp"
#include "device/device.hpp"
#include "device/growing_memory.hpp"

namespace tsr {

class DeviceGrads {
   public:
    using EventPtr = std::shared_ptr<const DeviceEvent>;

    // Throws NO_MEMORY.
    DeviceGrads(Device device, size_t size);
    DeviceGrads(const DeviceGrads&) = delete;
    DeviceGrads& operator=(const DeviceGrads&) = delete;

    [[nodiscard]] std::byte* memory() const { return memory_.get(); }
    [[nodiscard]] StreamHandle own() const { return own_.get(); }

    // The new stream goes on after what the model did on the former one, which may be gone. Throws INVALID_ARGUMENT.
    void set_trainer(StreamHandle stream);
    // Both on the trainer's stream.
    void zero();
    void broadcast(Communicator& comm, Request request);
    // All that the trainer's stream has now.
    [[nodiscard]] EventPtr point() const;

    // Around what a job does with a bucket, whose gradients are written at that point of the trainer's stream.
    void begin_bucket(size_t bucket, EventPtr written);
    void end_bucket(size_t bucket);
    // Zeroes a gradient; end_step() can bring values back that are kept.
    enum class Values { dropped, kept };
    void set_aside(size_t param, const Tensor& grad, Values values);
    // Between steps: room for a bucket that is reduced in another dtype. Throws NO_MEMORY.
    void reserve(size_t size) { room_.reserve(size, api_); }
    [[nodiscard]] std::byte* room() const { return room_.data(); }
    // On the own stream, with kernels: convert_on(), divide_on().
    void convert(std::span<const ConvertedRange> ranges, DType from, DType to, double before, double after) const;
    void divide(std::span<const Tensor> tensors, double divisor) const;
    // On the own stream, which the request's is set to.
    void run(Communicator& comm, Request request);

    // Around a step. Its jobs are over at the end, which brings the values of those gradients back that `is_wanted` names, and
    // lets the trainer's stream go on after all of it.
    void begin_step(size_t buckets);
    void end_step(FunctionRef<bool(size_t param)> is_wanted);
    // Lets times() be those of the step that has just ended.
    void keep_times() { timed_ = step_; }
    // Since the begin of that step; waits for its end. INTERRUPTED or TIMEOUT.
    struct Times {
        std::chrono::nanoseconds written{};
        std::chrono::nanoseconds start{};
        std::chrono::nanoseconds end{};
    };
    struct StepTimes {
        std::vector<Times> buckets;              // zero: the bucket is empty
        std::chrono::nanoseconds trainer_end{};  // the trainer's stream had nothing left but to wait
    };
    [[nodiscard]] StepTimes times(Deadline deadline) const;

    // Returns when all of that is done. Throws why it has failed, or INTERRUPTED.
    void await(const Communicator& comm);
    // Throws why an operation has failed on the device, if one has.
    void check(const Communicator& comm);
    // Whether an operation is not done, or has failed.
    [[nodiscard]] bool has_unfinished();

   private:
    struct BucketMarks {
        EventPtr written;
        EventPtr start;
        EventPtr end;
    };
    struct StepMarks {
        EventPtr begin;
        std::vector<BucketMarks> buckets;  // null until they are launched
        EventPtr trainer_end;
        EventPtr end;
    };
    struct Aside {
        size_t param;
        Tensor grad;
        std::byte* values;
    };

    void run_on(StreamHandle stream, Communicator& comm, Request& request);
    [[nodiscard]] std::byte* room_aside(size_t size);

    DeviceApi& api_;
    const std::shared_ptr<std::byte> memory_;  // freed when nothing on the device uses it any more
    const size_t size_;
    StreamHandle trainer_ = nullptr;
    EventPtr settled_;  // the last that the model did on the trainer's stream

    GrowingMemory room_;

    // Pieces that grow as far as a step needs, used in the order of the own stream.
    std::vector<std::pair<std::shared_ptr<std::byte>, size_t>> pieces_;
    size_t piece_ = 0;  // in use,
    size_t used_ = 0;   // up to here
    std::vector<Aside> aside_;

    StepMarks step_;
    StepMarks timed_;

    std::mutex mutex_;            // guards works_
    std::vector<WorkPtr> works_;  // in order, without those that are known to have ended well

    const std::shared_ptr<void> own_;  // ends before the memory that its operations use
};

}  // namespace tsr
