// Plans of a Group.
#include "comm/plan.hpp"

#include <fmt/core.h>

#include "comm/group.hpp"

namespace tsr {

class Group::Prepared final : public Plan {
   public:
    Prepared(std::shared_ptr<Group> group, const Request& request) : group_(std::move(group)) {
        task_.request = std::make_shared<const OwnedRequest>(request);
        task_.work = std::make_shared<Work>();
        task_.work->finish(std::nullopt);
        task_.operation = operation_of(task_.request->view());
        bytes_ = task_.operation.size_bytes();
    }

    void run() override {
        const Call once = group_->enter();
        if (group_->runs_inline()) return now();
        queue();
        group_->await(task_);
    }

    void start() override {
        const Call once = group_->enter();
        group_->refuse_own_job();
        group_->throw_if_unusable();
        queue();
    }

    void wait(Deadline deadline) const override { task_.work->wait(deadline); }

   private:
    void now() {
        const uint64_t sequence = ++group_->collectives_;
        const uint64_t took =
            group_->run_collective(task_.request->view(), task_.operation, sequence,
                                   group_->flight_.started(task_.operation, sequence), group_->timeout());
        group_->count_inline(bytes_, took);
    }

    void queue() {
        if (!task_.work->done()) {
            throw Error(
                Code::invalid_state,
                fmt::format("rank {}: a planned {} was launched before its previous launch finished; wait for it first",
                            group_->rank_, name_of(task_.operation.collective)))
                .with_rank(group_->rank_);
        }
        task_.work->begin_again();
        task_.ticket = group_->flight_.queued(task_.operation);
        try {
            group_->enqueue(task_);
        } catch (...) {  // no thread, no memory: nothing was started that could be waited for
            task_.work->finish(current_error());
            throw;
        }
    }

    const std::shared_ptr<Group> group_;
    Task task_;
    uint64_t bytes_ = 0;
};

std::shared_ptr<Plan> Group::prepare(const Request& request) {
    refuse_in_child();
    const bool on_device = validate(request, rank_, world_size_, own_device_);
    if (is_point_to_point(request.collective) || request.collective == Collective::allocate ||
        request.collective == Collective::finalize) {
        throw Error(Code::invalid_argument, fmt::format("cannot plan {}; only collectives over tensors can be planned",
                                                        name_of(request.collective)));
    }
    throw_if_unusable();
    if (on_device) return prepare_on_device(request);
    return std::make_shared<Prepared>(shared_from_this(), request);
}

}  // namespace tsr
