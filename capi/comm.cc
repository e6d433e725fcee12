// tessera/comm.h: communicators, collectives and work.
#include "tessera/comm.h"

#include <cstring>
#include <optional>

#include "checkpoint/save/save_queue.hpp"
#include "comm/communicator.hpp"
#include "comm/fingerprint.hpp"
#include "comm/seats.hpp"
#include "comm/work.hpp"
#include "handles.hpp"
#include "launch/from_environment.hpp"
#include "store/store.hpp"

namespace tsr::capi {

namespace {

static_assert(static_cast<int>(ReduceOp::sum) == TSR_REDUCE_SUM);
static_assert(static_cast<int>(ReduceOp::avg) == TSR_REDUCE_AVG);
static_assert(static_cast<int>(ReduceOp::min) == TSR_REDUCE_MIN);
static_assert(static_cast<int>(ReduceOp::max) == TSR_REDUCE_MAX);
static_assert(static_cast<int>(ReduceOp::prod) == TSR_REDUCE_PROD);

tsr_comm_options in_c(const CommOptions& options) {
    tsr_comm_options result{};
    result.struct_size = sizeof result;
    result.timeout_ms = static_cast<int32_t>(options.timeout.count());
    result.spin_count = options.spin_count;
    result.heartbeat_timeout_ms = static_cast<int32_t>(options.heartbeat.count());
    result.cuda_device = options.device;
    return result;
}

// The caller's options over `base`; NULL fields keep what `base` has.
CommOptions options_over(CommOptions base, const tsr_comm_options* options) {
    const tsr_comm_options given = options_in(options, in_c(base), "options");
    base.timeout = milliseconds{given.timeout_ms};
    base.spin_count = given.spin_count;
    base.heartbeat = milliseconds{given.heartbeat_timeout_ms};
    base.device = given.cuda_device;
    if (given.backend != nullptr) base.backend = given.backend;
    if (given.name != nullptr) base.name = name_in(given.name, "the communicator's name");
    return base;
}

// Runs the request, or submits it if the caller wants work.
void issue(Communicator& comm, const Request& request, tsr_work** work) {
    if (work == nullptr) return comm.run(request);
    create(work, [&] { return comm.submit(request); });
}

// `n` tensors of the caller; a single one, the usual case, needs no allocation.
class TensorList {
   public:
    TensorList(const tsr_tensor* tensors, size_t n, const char* what) {
        if (n == 1) {
            list_ = {&one_.emplace(tensor_in(tensors, what)), 1};
        } else if (n > 1) {
            more_ = tensors_in(tensors, n, what);
            list_ = more_;
        }
    }
    TensorList(const TensorList&) = delete;
    TensorList& operator=(const TensorList&) = delete;
    [[nodiscard]] std::span<const Tensor> list() const { return list_; }

   private:
    std::optional<Tensor> one_;
    std::vector<Tensor> more_;
    std::span<const Tensor> list_;
};

// The common form: at most one input, at most one output.
void issue(tsr_comm* comm, Collective collective, const tsr_tensor* input, const tsr_tensor* output, tsr_reduce_op op,
           int32_t peer, int32_t tag, void* stream, tsr_work** work) {
    if (work != nullptr) *work = nullptr;
    Communicator& object = *object_of(comm, "comm");
    const TensorList in(input, input == nullptr ? 0 : 1, "input");
    const TensorList out(output, output == nullptr ? 0 : 1, "output");
    issue(object, {collective, in.list(), out.list(), static_cast<ReduceOp>(op), peer, tag, {}, stream}, work);
}

void issue_list(tsr_comm* comm, Collective collective, const tsr_tensor* input, const tsr_tensor* tensors, size_t n,
                const char* what, tsr_reduce_op op, int32_t peer, void* stream, tsr_work** work) {
    if (work != nullptr) *work = nullptr;
    Communicator& object = *object_of(comm, "comm");
    const TensorList in(input, input == nullptr ? 0 : 1, "input");
    const TensorList list(tensors, n, what);
    issue(object, {collective, in.list(), list.list(), static_cast<ReduceOp>(op), peer, 0, {}, stream}, work);
}

void issue_pairs(tsr_comm* comm, Collective collective, const tsr_tensor* inputs, const tsr_tensor* outputs, size_t n,
                 tsr_reduce_op op, void* stream, tsr_work** work) {
    if (work != nullptr) *work = nullptr;
    Communicator& object = *object_of(comm, "comm");
    const std::vector<Tensor> in = tensors_in(inputs, n, "inputs");
    const std::vector<Tensor> out = tensors_in(outputs, n, "outputs");
    issue(object, {collective, in, out, static_cast<ReduceOp>(op), -1, 0, {}, stream}, work);
}

}  // namespace

extern "C" {

tsr_status tsr_comm_options_init(tsr_comm_options* options, size_t struct_size) {
    return guard([&] {
        const tsr_comm_options defaults = in_c(CommOptions::from_environment());
        write_options(options, struct_size, &defaults, sizeof defaults, "options");
    });
}

tsr_status tsr_comm_from_env(const tsr_comm_options* options, tsr_comm** out) {
    return guard([&] {
        create(out,
               [&] { return communicator_from_environment(options_over(CommOptions::from_environment(), options)); });
    });
}

tsr_status tsr_comm_create(tsr_store* store, int32_t rank, int32_t world_size, const tsr_comm_options* options,
                           tsr_comm** out) {
    return guard([&] {
        create(out, [&] {
            const auto& meeting = object_of(store, "store");
            CommOptions chosen = options_over(CommOptions::from_environment(), options);
            attach_to_agent(chosen);
            return Communicator::create(meeting, rank, world_size, chosen);
        });
    });
}

tsr_status tsr_comm_split(tsr_comm* comm, int32_t color, int32_t key, const tsr_comm_options* options, tsr_comm** out) {
    return guard([&] {
        required(out, "out") = nullptr;
        auto& parent = object_of(comm, "comm");
        CommOptions asked = parent->options();
        try {
            asked = options_over(std::move(asked), options);
        } catch (...) {
            parent->refuse_split(current_error());
        }
        auto group = parent->split(color, key, asked);
        if (group) create(out, [&] { return std::move(group); });
    });
}

// A reason can hold anything; all other ranks make room for it.
constexpr size_t most_reason = 65536;

tsr_status tsr_comm_refuse(tsr_comm* comm, tsr_creation creation, tsr_status code, const char* reason) {
    return guard([&] {
        Communicator& ranks = *object_of(comm, "comm");
        const bool is_code = code > TSR_OK && code <= TSR_E_INTERNAL;
        const Error why(
            is_code ? static_cast<Code>(code) : Code::invalid_argument,
            reason == nullptr ? "it gives no reason" : readable_utf8({reason, ::strnlen(reason, most_reason)}));
        switch (creation) {
            case TSR_CREATES_MODEL: refuse_on_all_ranks(ranks, Compared::models, why);
            case TSR_CREATES_PIPELINE: refuse_on_all_ranks(ranks, Compared::pipelines, why);
            case TSR_CREATES_MESH: refuse_on_all_ranks(ranks, Compared::meshes, why);
            case TSR_CREATES_COMM: ranks.refuse_split(why);
            default: break;
        }
        throw Error(Code::invalid_argument,
                    fmt::format("creation is {}; it must be a TSR_CREATES_ value, 1 to 4", creation));
    });
}

tsr_status tsr_comm_shrink(tsr_comm* comm, const tsr_comm_options* options, tsr_comm** out) {
    return guard([&] {
        create(out, [&] {
            auto& failed = object_of(comm, "comm");
            return failed->shrink(options_over(failed->options(), options));
        });
    });
}

tsr_status tsr_comm_grow(tsr_comm* comm, const tsr_comm_options* options, tsr_comm** out) {
    return guard([&] {
        create(out, [&] {
            auto& failed = object_of(comm, "comm");
            return grow(*failed, options_over(failed->options(), options));
        });
    });
}

tsr_status tsr_comm_finalize(tsr_comm* comm) {
    return guard([&] { object_of(comm, "comm")->finalize(); });
}

tsr_status tsr_comm_abort(const tsr_comm* comm, const char* reason) {
    return guard([&] { object_of(comm, "comm")->abort(reason == nullptr ? "" : readable_utf8(reason)); });
}

void tsr_comm_destroy(tsr_comm* comm) {
    (void)!guard([&] {
        if (comm != nullptr && comm->magic == tsr_comm::type_magic) comm->object->leave();
    });
    destroy(comm);
}

tsr_status tsr_comm_rank(const tsr_comm* comm, int32_t* rank) {
    return guard([&] { required(rank, "rank") = object_of(comm, "comm")->rank(); });
}

tsr_status tsr_comm_world_size(const tsr_comm* comm, int32_t* world_size) {
    return guard([&] { required(world_size, "world_size") = object_of(comm, "comm")->world_size(); });
}

tsr_status tsr_comm_transport(const tsr_comm* comm, const char** name) {
    return guard([&] { required(name, "name") = object_of(comm, "comm")->transport().data(); });
}

tsr_status tsr_comm_set_timeout(const tsr_comm* comm, int32_t timeout_ms) {
    return guard([&] { object_of(comm, "comm")->set_timeout(milliseconds{timeout_ms}); });
}

tsr_status tsr_comm_timeout(const tsr_comm* comm, int32_t* timeout_ms) {
    return guard([&] {
        required(timeout_ms, "timeout_ms") = static_cast<int32_t>(object_of(comm, "comm")->options().timeout.count());
    });
}

tsr_status tsr_comm_error(const tsr_comm* comm, tsr_error** error) {
    return guard([&] {
        const auto found = object_of(comm, "comm")->error();
        tsr_error*& slot = required(error, "error");  // before there is something to lose
        slot = found ? detached(*found) : nullptr;
    });
}

tsr_status tsr_comm_write_trace(const tsr_comm* comm, const char* path) {
    return guard([&] {
        const auto& object = object_of(comm, "comm");
        object->write_trace(text(path, "path"));
    });
}

tsr_status tsr_comm_all_reduce(tsr_comm* comm, const tsr_tensor* tensors, size_t n, tsr_reduce_op op, void* stream,
                               tsr_work** work) {
    return guard(
        [&] { issue_list(comm, Collective::all_reduce, nullptr, tensors, n, "tensors", op, -1, stream, work); });
}

tsr_status tsr_comm_reduce_scatter(tsr_comm* comm, const tsr_tensor* input, const tsr_tensor* output, tsr_reduce_op op,
                                   void* stream, tsr_work** work) {
    return guard([&] { issue(comm, Collective::reduce_scatter, input, output, op, -1, 0, stream, work); });
}

tsr_status tsr_comm_all_gather(tsr_comm* comm, const tsr_tensor* input, const tsr_tensor* output, void* stream,
                               tsr_work** work) {
    return guard([&] { issue(comm, Collective::all_gather, input, output, 0, -1, 0, stream, work); });
}

tsr_status tsr_comm_reduce_scatter_coalesced(tsr_comm* comm, const tsr_tensor* inputs, const tsr_tensor* outputs,
                                             size_t n, tsr_reduce_op op, void* stream, tsr_work** work) {
    return guard([&] { issue_pairs(comm, Collective::reduce_scatter, inputs, outputs, n, op, stream, work); });
}

tsr_status tsr_comm_all_gather_coalesced(tsr_comm* comm, const tsr_tensor* inputs, const tsr_tensor* outputs, size_t n,
                                         void* stream, tsr_work** work) {
    return guard([&] { issue_pairs(comm, Collective::all_gather, inputs, outputs, n, 0, stream, work); });
}

tsr_status tsr_comm_all_gather_v(tsr_comm* comm, const tsr_tensor* input, const tsr_tensor* outputs, void* stream,
                                 tsr_work** work) {
    return guard([&] {
        const auto n = static_cast<size_t>(object_of(comm, "comm")->world_size());
        issue_list(comm, Collective::all_gather_v, input, outputs, n, "outputs", 0, -1, stream, work);
    });
}

tsr_status tsr_comm_broadcast(tsr_comm* comm, const tsr_tensor* tensors, size_t n, int32_t root, void* stream,
                              tsr_work** work) {
    return guard(
        [&] { issue_list(comm, Collective::broadcast, nullptr, tensors, n, "tensors", 0, root, stream, work); });
}

tsr_status tsr_comm_reduce(tsr_comm* comm, const tsr_tensor* input, const tsr_tensor* output, tsr_reduce_op op,
                           int32_t root, void* stream, tsr_work** work) {
    return guard([&] { issue(comm, Collective::reduce, input, output, op, root, 0, stream, work); });
}

tsr_status tsr_comm_gather(tsr_comm* comm, const tsr_tensor* input, const tsr_tensor* output, int32_t root,
                           void* stream, tsr_work** work) {
    return guard([&] { issue(comm, Collective::gather, input, output, 0, root, 0, stream, work); });
}

tsr_status tsr_comm_scatter(tsr_comm* comm, const tsr_tensor* input, const tsr_tensor* output, int32_t root,
                            void* stream, tsr_work** work) {
    return guard([&] { issue(comm, Collective::scatter, input, output, 0, root, 0, stream, work); });
}

tsr_status tsr_comm_all_to_all(tsr_comm* comm, const tsr_tensor* input, const tsr_tensor* output, void* stream,
                               tsr_work** work) {
    return guard([&] { issue(comm, Collective::all_to_all, input, output, 0, -1, 0, stream, work); });
}

tsr_status tsr_comm_send(tsr_comm* comm, const tsr_tensor* tensor, int32_t peer, int32_t tag, void* stream,
                         tsr_work** work) {
    return guard([&] { issue(comm, Collective::send, tensor, nullptr, 0, peer, tag, stream, work); });
}

tsr_status tsr_comm_recv(tsr_comm* comm, const tsr_tensor* tensor, int32_t peer, int32_t tag, void* stream,
                         tsr_work** work) {
    return guard([&] { issue(comm, Collective::recv, nullptr, tensor, 0, peer, tag, stream, work); });
}

tsr_status tsr_comm_barrier(tsr_comm* comm, tsr_work** work) {
    return guard([&] { issue(comm, Collective::barrier, nullptr, nullptr, 0, -1, 0, nullptr, work); });
}

tsr_status tsr_work_wait(const tsr_work* work, int32_t timeout_ms) {
    return guard([&] { own_object_of(work, "work")->wait(patience(timeout_ms)); });
}

tsr_status tsr_work_order(const tsr_work* work, void* stream, int32_t timeout_ms) {
    return guard([&] { own_object_of(work, "work")->order(stream, patience(timeout_ms)); });
}

tsr_status tsr_work_test(const tsr_work* work, int32_t* done) {
    return guard([&] { required(done, "done") = own_object_of(work, "work")->done() ? 1 : 0; });
}

tsr_status tsr_work_error(const tsr_work* work, tsr_error** error) {
    return guard([&] {
        const auto found = own_object_of(work, "work")->error();
        tsr_error*& slot = required(error, "error");  // before there is something to lose
        slot = found ? detached(*found) : nullptr;
    });
}

tsr_status tsr_work_staged(const tsr_work* work, tsr_work** staged) {
    return guard([&] {
        create(staged, [&] {
            const auto save = std::dynamic_pointer_cast<SaveWork>(own_object_of(work, "work"));
            if (save == nullptr) {
                throw Error(Code::invalid_argument, "the work is not from tsr_saver_save_async; only saves are staged");
            }
            return save->staged();
        });
    });
}

tsr_status tsr_work_on_done(const tsr_work* work, tsr_work_fn fn, void* user_data, tsr_destroy_fn destroy_data) {
    return guard([&] {
        const auto& w = own_object_of(work, "work");
        if (fn == nullptr) throw Error(Code::invalid_argument, "fn is NULL");
        w->on_done([fn, user_data, destroy_data](const std::optional<Error>& error) {
            fn(error ? static_cast<tsr_status>(error->code()) : TSR_OK, user_data);
            if (destroy_data != nullptr) destroy_data(user_data);
        });
    });
}

void tsr_work_destroy(tsr_work* work) { destroy(work); }

}  // extern "C"

}  // namespace tsr::capi
