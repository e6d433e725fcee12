#include "parallel/ddp/shared_step.hpp"

#include <vector>

#include "parallel/ddp/bucket_plan.hpp"

namespace tsr {

void SharedStep::reduce_and_update(size_t bucket, int64_t step) {
    copy_->together([&] {
        const BucketView& view = reducer_->buckets()[bucket];
        // Copies what a save of this rank still needs, including slices of other ranks, which change after the meeting.
        stepping_->with([&](Optimizer& optimizer) {
            for (const size_t param : view.params) optimizer.before_write(param);
        });
        const bool fused = reducer_->can_reduce_parts();
        if (!fused) reducer_->reduce(bucket, step);
        copy_->meet(bucket_label(bucket));
        if (fused) reducer_->times()[bucket].start = Clock::now();
        copy_->begin_step(step);
        const std::vector<ParamSlice> slices = copy_->slice_of(view);
        stepping_->with([&](Optimizer& optimizer) {
            if (!fused) return optimizer.step_slices(slices);
            reducer_->reduce_slices(slices, view.ranges[0].dtype,
                                    [&](const ParamSlice& reduced) { optimizer.step_slices({&reduced, 1}); });
        });
        reducer_->times()[bucket].end = Clock::now();
    });
}

void SharedStep::end(int64_t step) {
    copy_->together([&] {
        copy_->begin_step(step);  // a rank may have no slice of any bucket
        if (copy_->place() == 0) {
            stepping_->with([](Optimizer& optimizer) { optimizer.write_step_moments(optimizer.steps() + 1); });
        }
        copy_->end_step(step);
        copy_->meet("shared parameters");
    });
}

}  // namespace tsr
