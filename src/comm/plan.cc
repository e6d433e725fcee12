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
        if (!is_on_device(task_.request->view())) return queue();
        begin_work();
        group_->launch_beside(task_.request->view(), task_.operation, task_.work);
    }

    void wait(Deadline deadline) const override { task_.work->wait(deadline); }

   private:
    void now() {
        if (is_on_device(task_.request->view())) return group_->launch_now(task_.request->view(), task_.operation);
        const uint64_t sequence = ++group_->collectives_;
        group_->run_collective(task_.request->view(), task_.operation, sequence,
                               group_->flight_.started(task_.operation, sequence), group_->timeout());
    }

    void begin_work() {
        if (!task_.work->done()) {
            throw Error(
                Code::invalid_state,
                fmt::format("rank {}: a planned {} was launched before its previous launch finished; wait for it first",
                            group_->rank_, name_of(task_.operation.collective)))
                .with_rank(group_->rank_);
        }
        task_.work->begin_again();
    }

    void queue() {
        begin_work();
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
};

std::shared_ptr<Plan> Group::prepare(const Request& request) {
    refuse_in_child();
    check(request);
    if (is_point_to_point(request.collective) || request.collective == Collective::allocate ||
        request.collective == Collective::finalize) {
        throw Error(Code::invalid_argument, fmt::format("cannot plan {}; only collectives over tensors can be planned",
                                                        name_of(request.collective)));
    }
    throw_if_unusable();
    return std::make_shared<Prepared>(shared_from_this(), request);
}

}  // namespace tsr
