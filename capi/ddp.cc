// tessera/ddp.h: data-parallel training.
#include "tessera/ddp.h"

#include "comm/communicator.hpp"
#include "comm/fingerprint.hpp"
#include "handles.hpp"
#include "parallel/ddp/ddp.hpp"
#include "train/optimizer_of.hpp"

namespace tsr::capi {

namespace {

static_assert(static_cast<int>(DdpHook::power_sgd) == TSR_DDP_HOOK_POWER_SGD);
static_assert(static_cast<int>(DdpHook::noop) == TSR_DDP_HOOK_NOOP);
static_assert(static_cast<int>(DdpJoin::divide_by_world) == TSR_DDP_JOIN_DIVIDE_BY_WORLD);
static_assert(static_cast<int>(DdpJoin::divide_by_active) == TSR_DDP_JOIN_DIVIDE_BY_ACTIVE);

constexpr tsr_ddp_options default_options{.struct_size = sizeof(tsr_ddp_options),
                                          .bucket_bytes = size_t{25} << 20,
                                          .first_bucket_bytes = size_t{1} << 20,
                                          .op = TSR_REDUCE_AVG,
                                          .pre_divide = 1,
                                          .find_unused = 0,
                                          .static_graph = 0,
                                          .rebuild_buckets = 0,
                                          .reduce_dtype = 0,
                                          .hook = TSR_DDP_HOOK_ALL_REDUCE,
                                          .powersgd_rank = 1,
                                          .powersgd_start_step = 1000,
                                          .join = TSR_DDP_JOIN_OFF,
                                          .share_params = 0,
                                          .tp = nullptr};

DdpOptions core_options(const tsr_ddp_options* options) {
    const auto o = options_in(options, default_options, "options");
    DdpOptions core;
    core.bucket_bytes = o.bucket_bytes;
    core.first_bucket_bytes = o.first_bucket_bytes;
    core.op = static_cast<ReduceOp>(o.op);
    core.pre_divide = o.pre_divide;
    core.find_unused = flag(o.find_unused, "find_unused");
    core.static_graph = flag(o.static_graph, "static_graph");
    core.rebuild_buckets = flag(o.rebuild_buckets, "rebuild_buckets");
    if (o.reduce_dtype != 0) core.reduce_dtype = static_cast<DType>(o.reduce_dtype);
    core.hook = static_cast<DdpHook>(o.hook);
    core.power_sgd_rank = o.powersgd_rank;
    core.power_sgd_start_step = o.powersgd_start_step;
    core.join = static_cast<DdpJoin>(o.join);
    core.share_params = flag(o.share_params, "share_params");
    return core;
}

// The caller's hook, with the communicator handle lent to it.
class Hook {
   public:
    Hook(const std::shared_ptr<Communicator>& comm, tsr_ddp_hook_fn fn) : fn_(fn) { comm_.object = comm; }
    ~Hook() {
        if (destroy_data_ != nullptr) destroy_data_(user_data_);
    }
    Hook(const Hook&) = delete;
    Hook& operator=(const Hook&) = delete;

    // From now on the user's data is freed with this object.
    void own(void* user_data, tsr_destroy_fn destroy_data) {
        user_data_ = user_data;
        destroy_data_ = destroy_data;
    }

    void operator()(const BucketView& bucket) {
        std::vector<tsr_tensor> grads;
        grads.reserve(bucket.grads.size());
        for (const Tensor& grad : bucket.grads) grads.push_back(tensor_out(grad));
        const tsr_ddp_bucket view{bucket.bucket, grads.size(), bucket.params.data(),
                                  grads.data(),  &comm_,       bucket.stream};
        const int32_t failed = fn_(&view, user_data_);
        if (failed == 0) return;
        // If a collective of the hook failed, report that error.
        if (const auto error = comm_.object->error()) throw Error(*error);
        const int rank = comm_.object->rank();
        throw Error(Code::user, fmt::format("rank {}: the hook for bucket {} returned {}", rank, bucket.bucket, failed))
            .with_rank(rank)
            .with_native(NativeDomain::user, failed);
    }

   private:
    tsr_comm comm_;
    tsr_ddp_hook_fn fn_;
    void* user_data_ = nullptr;
    tsr_destroy_fn destroy_data_ = nullptr;
};

std::vector<NamedTensor> params_in(const tsr_param* params, size_t n, const char* list = "params",
                                   const char* kind = "parameter") {
    required(params, list);
    std::vector<NamedTensor> out;
    out.reserve(n);
    for (size_t i = 0; i < n; ++i) {
        const std::string name = name_in(params[i].name, fmt::format("a {}'s name", kind).c_str());
        const std::string what = fmt::format("{} {} (\"{}\")", kind, i, name);
        out.push_back({name, tensor_in(&params[i].tensor, what.c_str())});
    }
    return out;
}

// The tensor-parallel model whose slices the parameters are, if any.
std::shared_ptr<TensorParallel> slices_in(const tsr_ddp_options* options) {
    const auto o = options_in(options, default_options, "options");
    return o.tp == nullptr ? nullptr : object_of(o.tp, "tp");
}

}  // namespace

extern "C" {

tsr_status tsr_ddp_options_init(tsr_ddp_options* options, size_t struct_size) {
    return options_init(options, struct_size, default_options, "options");
}

tsr_status tsr_ddp_create(tsr_comm* comm, const tsr_param* params, size_t n, const tsr_ddp_options* options,
                          tsr_ddp** out) {
    return guard([&] {
        create(out, [&] {
            const auto& ranks = object_of(comm, "comm");
            auto model = or_refuse_on_all_ranks(*ranks, Compared::models, [&] {
                return std::tuple(params_in(params, n), core_options(options), slices_in(options));
            });
            return std::make_shared<Ddp>(ranks, std::move(std::get<0>(model)), std::get<1>(model), std::get<2>(model));
        });
    });
}

tsr_status tsr_ddp_param_count(const tsr_ddp* ddp, size_t* count) {
    return guard([&] { required(count, "count") = object_of(ddp, "ddp")->params().size(); });
}

tsr_status tsr_ddp_param(const tsr_ddp* ddp, size_t index, tsr_param* param) {
    return guard([&] {
        const auto& [name, tensor] = object_of(ddp, "ddp")->param(index);
        required(param, "param") = {name.c_str(), tensor_out(tensor)};
    });
}

tsr_status tsr_ddp_grad(const tsr_ddp* ddp, size_t index, tsr_tensor* grad) {
    return guard([&] { required(grad, "grad") = tensor_out(object_of(ddp, "ddp")->grad(index)); });
}

tsr_status tsr_ddp_ready(tsr_ddp* ddp, size_t index) {
    return guard([&] { object_of(ddp, "ddp")->ready(index); });
}

tsr_status tsr_ddp_ready_all(tsr_ddp* ddp) {
    return guard([&] { object_of(ddp, "ddp")->ready_all(); });
}

tsr_status tsr_ddp_wait(tsr_ddp* ddp) {
    return guard([&] { object_of(ddp, "ddp")->wait(); });
}

tsr_status tsr_ddp_set_stream(tsr_ddp* ddp, void* stream) {
    return guard([&] { object_of(ddp, "ddp")->set_stream(stream); });
}

tsr_status tsr_ddp_set_sync(tsr_ddp* ddp, int32_t sync) {
    return guard([&] { object_of(ddp, "ddp")->set_sync(flag(sync, "sync")); });
}

tsr_status tsr_ddp_used(tsr_ddp* ddp, size_t index, int32_t* used) {
    return guard([&] { required(used, "used") = object_of(ddp, "ddp")->used(index) ? 1 : 0; });
}

tsr_status tsr_ddp_bucket_count(tsr_ddp* ddp, size_t* count) {
    return guard([&] { required(count, "count") = object_of(ddp, "ddp")->buckets().size(); });
}

tsr_status tsr_ddp_stats(tsr_ddp* ddp, size_t bucket, tsr_bucket_stats* stats) {
    return guard([&] {
        const BucketStats& found = object_of(ddp, "ddp")->stats(bucket);
        const tsr_bucket_stats values{sizeof(tsr_bucket_stats), found.size_bytes,    found.params,
                                      found.ready.count(),      found.start.count(), found.end.count(),
                                      found.exposed.count()};
        write_options(stats, required(stats, "stats").struct_size, &values, sizeof values, "stats");
    });
}

tsr_status tsr_ddp_set_hook(tsr_ddp* ddp, tsr_ddp_hook_fn fn, void* user_data, tsr_destroy_fn destroy_data) {
    return guard([&] {
        const auto& model = object_of(ddp, "ddp");
        if (fn == nullptr) return model->set_hook({});
        const auto hook = std::make_shared<Hook>(model->comm(), fn);
        model->set_hook([hook](const BucketView& bucket) { (*hook)(bucket); });
        hook->own(user_data, destroy_data);
    });
}

tsr_status tsr_ddp_step_in_backward(tsr_ddp* ddp, tsr_optimizer* optimizer) {
    return guard([&] {
        Ddp& model = *object_of(ddp, "ddp");
        step_in_backward(model, *object_of(optimizer, "optimizer"));
    });
}

tsr_status tsr_ddp_shared_step(tsr_ddp* ddp, int64_t* steps) {
    return guard([&] { required(steps, "steps") = object_of(ddp, "ddp")->shared_step(); });
}

tsr_status tsr_ddp_register_buffers(tsr_ddp* ddp, const tsr_param* buffers, size_t n) {
    return guard(
        [&] { object_of(ddp, "ddp")->register_buffers([&] { return params_in(buffers, n, "buffers", "buffer"); }); });
}

tsr_status tsr_ddp_broadcast_buffers(tsr_ddp* ddp) {
    return guard([&] { object_of(ddp, "ddp")->broadcast_buffers(); });
}

tsr_status tsr_ddp_join(tsr_ddp* ddp, int32_t sync_params) {
    return guard([&] { object_of(ddp, "ddp")->join(flag(sync_params, "sync_params")); });
}

tsr_status tsr_ddp_zero_grad(tsr_ddp* ddp) {
    return guard([&] { object_of(ddp, "ddp")->zero_grad(); });
}

void tsr_ddp_destroy(tsr_ddp* ddp) { destroy(ddp); }

}  // extern "C"

}  // namespace tsr::capi
