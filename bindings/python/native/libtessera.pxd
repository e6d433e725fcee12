# tessera/*.h as Cython sees it, header by header, in their order. Nothing but declarations; `_core.pyx` uses them.
from libc.stdint cimport int32_t, int64_t, uint16_t, uint32_t, uint64_t


cdef extern from "tessera/types.h" nogil:
    ctypedef int32_t tsr_status
    ctypedef int32_t tsr_dtype
    ctypedef int32_t tsr_reduce_op
    ctypedef struct tsr_error
    ctypedef struct tsr_store
    ctypedef struct tsr_store_server
    ctypedef struct tsr_comm
    ctypedef struct tsr_work
    ctypedef struct tsr_buffer
    ctypedef struct tsr_mesh
    ctypedef struct tsr_plan
    ctypedef struct tsr_layout
    ctypedef struct tsr_ddp
    ctypedef struct tsr_fsdp
    ctypedef struct tsr_optimizer
    ctypedef struct tsr_grad_scaler
    ctypedef struct tsr_sampler
    ctypedef struct tsr_state
    ctypedef struct tsr_saver
    ctypedef struct tsr_checkpoint
    ctypedef struct tsr_storage
    int TSR_DTYPE_F16
    int TSR_DTYPE_BF16
    int TSR_DTYPE_F32
    int TSR_DTYPE_F64
    int TSR_DTYPE_I8
    int TSR_DTYPE_U8
    int TSR_DTYPE_I32
    int TSR_DTYPE_I64
    int TSR_DTYPE_I16
    int TSR_DTYPE_BOOL
    int TSR_DTYPE_U16
    int TSR_DTYPE_U32
    int TSR_DTYPE_U64
    int TSR_DTYPE_F8_E4M3
    int TSR_DTYPE_F8_E5M2
    int TSR_DTYPE_F8_E8M0
    int TSR_DTYPE_C64
    int TSR_DTYPE_C128
    int TSR_DEVICE_CPU
    int TSR_DEVICE_CUDA
    int TSR_REDUCE_SUM
    int TSR_REDUCE_AVG
    int TSR_REDUCE_MIN
    int TSR_REDUCE_MAX
    int TSR_REDUCE_PROD
    int TSR_MAX_NDIM
    ctypedef struct tsr_tensor:
        void *data
        const int64_t *shape
        const int64_t *strides
        int32_t ndim
        tsr_dtype dtype
        int32_t device_type
        int32_t device_index
        uint64_t byte_offset
    ctypedef struct tsr_param:
        const char *name
        tsr_tensor tensor
    ctypedef void (*tsr_destroy_fn)(void *user_data) noexcept


cdef extern from "tessera/error.h" nogil:
    int TSR_OK
    int TSR_E_INVALID_ARGUMENT
    int TSR_E_INVALID_STATE
    int TSR_E_TIMEOUT
    int TSR_E_ABORTED
    int TSR_E_PEER_LOST
    int TSR_E_MISMATCH
    int TSR_E_IO
    int TSR_E_CORRUPT
    int TSR_E_NOT_FOUND
    int TSR_E_NOT_READY
    int TSR_E_INTERRUPTED
    int TSR_E_COMMIT_UNKNOWN
    int TSR_E_NO_MEMORY
    int TSR_E_UNSUPPORTED
    int TSR_E_VERSION
    int TSR_E_PERMISSION
    int TSR_E_CUDA
    int TSR_E_NCCL
    int TSR_E_USER
    int TSR_E_INTERNAL
    const char *tsr_status_name(tsr_status status)
    const tsr_error *tsr_error_last()
    tsr_status tsr_error_take(tsr_error **out)
    void tsr_error_destroy(tsr_error *error)
    tsr_status tsr_error_code(const tsr_error *error)
    const char *tsr_error_message(const tsr_error *error)
    const tsr_error *tsr_error_cause(const tsr_error *error)
    int32_t tsr_error_rank(const tsr_error *error)
    int32_t tsr_error_peer(const tsr_error *error)
    const char *tsr_error_operation(const tsr_error *error)
    int64_t tsr_error_sequence(const tsr_error *error)
    int32_t tsr_error_native(const tsr_error *error, int32_t *domain)
    int32_t tsr_error_retriable(const tsr_error *error)


cdef extern from "tessera/version.h" nogil:
    int TSR_ABI_VERSION
    uint32_t tsr_abi_version()
    const char *tsr_version()
    const char *tsr_library_path()


cdef extern from "tessera/log.h" nogil:
    ctypedef void (*tsr_log_fn)(int32_t level, const char *line, void *user_data) noexcept
    ctypedef int32_t (*tsr_interrupt_fn)(void *user_data) noexcept
    tsr_status tsr_log_set_level(int32_t level)
    tsr_status tsr_log_set_callback(tsr_log_fn fn, void *user_data, tsr_destroy_fn destroy)
    tsr_status tsr_interrupt_set(tsr_interrupt_fn fn, void *user_data)


cdef extern from "tessera/store.h" nogil:
    ctypedef struct tsr_store_options:
        size_t struct_size
        int32_t timeout_ms
        int32_t insecure
        const char *token
        const char *job_id
        uint64_t epoch
    tsr_status tsr_store_options_init(tsr_store_options *options, size_t struct_size)
    tsr_status tsr_store_serve(const char *host, uint16_t port, const tsr_store_options *options,
                               tsr_store_server **out)
    tsr_status tsr_store_server_port(const tsr_store_server *server, uint16_t *port)
    void tsr_store_server_destroy(tsr_store_server *server)
    tsr_status tsr_store_open(const char *uri, const tsr_store_options *options, tsr_store **out)
    void tsr_store_destroy(tsr_store *store)
    tsr_status tsr_store_set(const tsr_store *store, const char *key, const void *value, size_t size)
    tsr_status tsr_store_get(const tsr_store *store, const char *key, void *value, size_t capacity, size_t *size)
    tsr_status tsr_store_wait(const tsr_store *store, const char *key, int32_t timeout_ms)
    tsr_status tsr_store_add(const tsr_store *store, const char *key, int64_t delta, int64_t *result)
    tsr_status tsr_store_compare_set(const tsr_store *store, const char *key, const void *expected,
                                     size_t expected_size, const void *desired, size_t desired_size,
                                     int32_t *swapped)
    tsr_status tsr_store_delete(const tsr_store *store, const char *key, int32_t *existed)


cdef extern from "tessera/comm.h" nogil:
    ctypedef struct tsr_comm_options:
        size_t struct_size
        int32_t timeout_ms
        int32_t spin_count
        const char *backend
        const char *name
        int32_t heartbeat_timeout_ms
    ctypedef void (*tsr_work_fn)(tsr_status status, void *user_data) noexcept
    tsr_status tsr_comm_options_init(tsr_comm_options *options, size_t struct_size)
    tsr_status tsr_comm_from_env(const tsr_comm_options *options, tsr_comm **out)
    tsr_status tsr_comm_create(tsr_store *store, int32_t rank, int32_t world_size, const tsr_comm_options *options,
                               tsr_comm **out)
    tsr_status tsr_comm_split(tsr_comm *comm, int32_t color, int32_t key, const tsr_comm_options *options,
                              tsr_comm **out)
    tsr_status tsr_comm_shrink(tsr_comm *comm, const tsr_comm_options *options, tsr_comm **out)
    tsr_status tsr_comm_finalize(tsr_comm *comm)
    tsr_status tsr_comm_abort(const tsr_comm *comm, const char *reason)
    void tsr_comm_destroy(tsr_comm *comm)
    tsr_status tsr_comm_rank(const tsr_comm *comm, int32_t *rank)
    tsr_status tsr_comm_world_size(const tsr_comm *comm, int32_t *world_size)
    tsr_status tsr_comm_transport(const tsr_comm *comm, const char **name)
    tsr_status tsr_comm_set_timeout(const tsr_comm *comm, int32_t timeout_ms)
    tsr_status tsr_comm_timeout(const tsr_comm *comm, int32_t *timeout_ms)
    tsr_status tsr_comm_error(const tsr_comm *comm, tsr_error **error)
    tsr_status tsr_comm_write_trace(const tsr_comm *comm, const char *path)
    tsr_status tsr_comm_all_reduce(tsr_comm *comm, const tsr_tensor *tensors, size_t n, tsr_reduce_op op,
                                   void *stream, tsr_work **work)
    tsr_status tsr_comm_reduce_scatter(tsr_comm *comm, const tsr_tensor *input, const tsr_tensor *output,
                                       tsr_reduce_op op, void *stream, tsr_work **work)
    tsr_status tsr_comm_all_gather(tsr_comm *comm, const tsr_tensor *input, const tsr_tensor *output, void *stream,
                                   tsr_work **work)
    tsr_status tsr_comm_reduce_scatter_coalesced(tsr_comm *comm, const tsr_tensor *inputs, const tsr_tensor *outputs,
                                                 size_t n, tsr_reduce_op op, void *stream, tsr_work **work)
    tsr_status tsr_comm_all_gather_coalesced(tsr_comm *comm, const tsr_tensor *inputs, const tsr_tensor *outputs,
                                             size_t n, void *stream, tsr_work **work)
    tsr_status tsr_comm_all_gather_v(tsr_comm *comm, const tsr_tensor *input, const tsr_tensor *outputs,
                                     void *stream, tsr_work **work)
    tsr_status tsr_comm_broadcast(tsr_comm *comm, const tsr_tensor *tensors, size_t n, int32_t root, void *stream,
                                  tsr_work **work)
    tsr_status tsr_comm_reduce(tsr_comm *comm, const tsr_tensor *input, const tsr_tensor *output, tsr_reduce_op op,
                               int32_t root, void *stream, tsr_work **work)
    tsr_status tsr_comm_gather(tsr_comm *comm, const tsr_tensor *input, const tsr_tensor *output, int32_t root,
                               void *stream, tsr_work **work)
    tsr_status tsr_comm_scatter(tsr_comm *comm, const tsr_tensor *input, const tsr_tensor *output, int32_t root,
                                void *stream, tsr_work **work)
    tsr_status tsr_comm_all_to_all(tsr_comm *comm, const tsr_tensor *input, const tsr_tensor *output, void *stream,
                                   tsr_work **work)
    tsr_status tsr_comm_send(tsr_comm *comm, const tsr_tensor *tensor, int32_t peer, int32_t tag, void *stream,
                             tsr_work **work)
    tsr_status tsr_comm_recv(tsr_comm *comm, const tsr_tensor *tensor, int32_t peer, int32_t tag, void *stream,
                             tsr_work **work)
    tsr_status tsr_comm_barrier(tsr_comm *comm, tsr_work **work)
    tsr_status tsr_work_wait(const tsr_work *work, int32_t timeout_ms)
    tsr_status tsr_work_test(const tsr_work *work, int32_t *done)
    tsr_status tsr_work_error(const tsr_work *work, tsr_error **error)
    tsr_status tsr_work_on_done(const tsr_work *work, tsr_work_fn fn, void *user_data, tsr_destroy_fn destroy)
    tsr_status tsr_work_staged(const tsr_work *work, tsr_work **staged)
    void tsr_work_destroy(tsr_work *work)


cdef extern from "tessera/memory.h" nogil:
    tsr_status tsr_buffer_create(tsr_comm *comm, size_t size, tsr_buffer **out)
    tsr_status tsr_buffer_data(const tsr_buffer *buffer, void **data, size_t *size)
    void tsr_buffer_destroy(tsr_buffer *buffer)


cdef extern from "tessera/mesh.h" nogil:
    tsr_status tsr_mesh_create(tsr_comm *comm, const char *const *names, const int32_t *sizes, int32_t ndim,
                               tsr_mesh **out)
    tsr_status tsr_mesh_ndim(const tsr_mesh *mesh, int32_t *ndim)
    tsr_status tsr_mesh_dim(const tsr_mesh *mesh, const char *name, int32_t *size, int32_t *coordinate)
    tsr_status tsr_mesh_comm(const tsr_mesh *mesh, const char *name, tsr_comm **comm)
    tsr_status tsr_mesh_slice(const tsr_mesh *mesh, const char *const *names, int32_t ndim, tsr_mesh **out)
    tsr_status tsr_mesh_flatten(const tsr_mesh *mesh, tsr_comm *comm, const char *name, tsr_mesh **out)
    void tsr_mesh_destroy(tsr_mesh *mesh)


cdef extern from "tessera/plan.h" nogil:
    tsr_status tsr_plan_create(tsr_comm *comm, int32_t collective, const tsr_tensor *inputs, size_t n_inputs,
                               const tsr_tensor *outputs, size_t n_outputs, tsr_reduce_op op, int32_t root,
                               void *stream, tsr_plan **out)
    tsr_status tsr_plan_run(tsr_plan *plan)
    tsr_status tsr_plan_start(tsr_plan *plan)
    tsr_status tsr_plan_wait(const tsr_plan *plan, int32_t timeout_ms)
    void tsr_plan_destroy(tsr_plan *plan)


cdef extern from "tessera/layout.h" nogil:
    int TSR_PLACE_REPLICATE
    int TSR_PLACE_SHARD
    ctypedef struct tsr_placement:
        int32_t kind
        int32_t dim
    ctypedef struct tsr_box:
        int64_t offsets[8]
        int64_t sizes[8]
    tsr_status tsr_layout_create(const int64_t *shape, int32_t ndim, const int32_t *mesh_sizes,
                                 const tsr_placement *placements, int32_t mesh_ndim, tsr_layout **out)
    tsr_status tsr_layout_from_boxes(const int64_t *shape, int32_t ndim, const tsr_box *boxes, const int32_t *counts,
                                     int32_t world_size, tsr_layout **out)
    tsr_status tsr_layout_gather(tsr_comm *comm, const int64_t *shape, int32_t ndim, const tsr_box *boxes,
                                 int32_t count, tsr_layout **out)
    tsr_status tsr_layout_box_count(const tsr_layout *layout, int32_t rank, int32_t *count)
    tsr_status tsr_layout_box(const tsr_layout *layout, int32_t rank, int32_t index, tsr_box *box)
    void tsr_layout_destroy(tsr_layout *layout)


cdef extern from "tessera/ddp.h" nogil:
    ctypedef struct tsr_ddp_options:
        size_t struct_size
        size_t bucket_bytes
        size_t first_bucket_bytes
        int32_t op
        double pre_divide
        int32_t find_unused
        int32_t static_graph
        int32_t rebuild_buckets
        int32_t reduce_dtype
        int32_t hook
        int32_t powersgd_rank
        int32_t powersgd_start_step
        int32_t join
        int32_t share_params
    ctypedef struct tsr_bucket_stats:
        size_t struct_size
        size_t size_bytes
        size_t params
        int64_t ready_ns
        int64_t start_ns
        int64_t end_ns
        int64_t exposed_ns
    ctypedef struct tsr_ddp_bucket:
        size_t bucket
        size_t n
        const size_t *params
        const tsr_tensor *grads
        tsr_comm *comm
    ctypedef int32_t (*tsr_ddp_hook_fn)(const tsr_ddp_bucket *bucket, void *user_data) noexcept nogil
    tsr_status tsr_ddp_options_init(tsr_ddp_options *options, size_t struct_size)
    tsr_status tsr_ddp_create(tsr_comm *comm, const tsr_param *params, size_t n, const tsr_ddp_options *options,
                              tsr_ddp **out)
    tsr_status tsr_ddp_param_count(const tsr_ddp *ddp, size_t *count)
    tsr_status tsr_ddp_param(const tsr_ddp *ddp, size_t index, tsr_param *param)
    tsr_status tsr_ddp_grad(const tsr_ddp *ddp, size_t index, tsr_tensor *grad)
    tsr_status tsr_ddp_ready(tsr_ddp *ddp, size_t index)
    tsr_status tsr_ddp_ready_all(tsr_ddp *ddp)
    tsr_status tsr_ddp_wait(tsr_ddp *ddp)
    tsr_status tsr_ddp_set_sync(tsr_ddp *ddp, int32_t sync)
    tsr_status tsr_ddp_used(tsr_ddp *ddp, size_t index, int32_t *used)
    tsr_status tsr_ddp_bucket_count(tsr_ddp *ddp, size_t *count)
    tsr_status tsr_ddp_stats(tsr_ddp *ddp, size_t bucket, tsr_bucket_stats *stats)
    tsr_status tsr_ddp_set_hook(tsr_ddp *ddp, tsr_ddp_hook_fn fn, void *user_data, tsr_destroy_fn destroy_data)
    tsr_status tsr_ddp_step_in_backward(tsr_ddp *ddp, tsr_optimizer *optimizer)
    tsr_status tsr_ddp_register_buffers(tsr_ddp *ddp, const tsr_param *buffers, size_t n)
    tsr_status tsr_ddp_broadcast_buffers(tsr_ddp *ddp)
    tsr_status tsr_ddp_join(tsr_ddp *ddp, int32_t sync_params)
    tsr_status tsr_ddp_shared_step(tsr_ddp *ddp, int64_t *steps)
    tsr_status tsr_ddp_zero_grad(tsr_ddp *ddp)
    void tsr_ddp_destroy(tsr_ddp *ddp)


cdef extern from "tessera/fsdp.h" nogil:
    ctypedef struct tsr_fsdp_unit:
        const char *name
        const tsr_param *params
        size_t n
        const int32_t *trained
        int32_t reshard_after_forward
        int32_t param_dtype
        int32_t reduce_dtype
        int32_t row_block
        int32_t flat
    ctypedef struct tsr_fsdp_options:
        size_t struct_size
        int32_t shard_ranks
        int32_t forward_prefetch
        int32_t backward_prefetch
        int32_t grads_in_flight
        int32_t param_dtype
        int32_t reduce_dtype
        int32_t op
        double pre_divide
        int32_t sync_values
    tsr_status tsr_fsdp_options_init(tsr_fsdp_options *options, size_t struct_size)
    tsr_status tsr_fsdp_create(tsr_comm *comm, const tsr_fsdp_unit *units, size_t n, const tsr_fsdp_options *options,
                               tsr_fsdp **out)
    tsr_status tsr_fsdp_unit_count(const tsr_fsdp *fsdp, size_t *count)
    tsr_status tsr_fsdp_param_count(const tsr_fsdp *fsdp, size_t *count)
    tsr_status tsr_fsdp_unit_name(const tsr_fsdp *fsdp, size_t unit, const char **name)
    tsr_status tsr_fsdp_param(const tsr_fsdp *fsdp, size_t index, tsr_param *param, size_t *unit, int32_t *trained)
    int TSR_FSDP_BACKWARD
    tsr_status tsr_fsdp_unit_phase(const tsr_fsdp *fsdp, size_t unit, int32_t *phase)
    tsr_status tsr_fsdp_shard(const tsr_fsdp *fsdp, size_t index, tsr_param *shard)
    tsr_status tsr_fsdp_shard_grad(const tsr_fsdp *fsdp, size_t index, tsr_tensor *grad)
    tsr_status tsr_fsdp_layout(const tsr_fsdp *fsdp, size_t index, tsr_layout **out)
    tsr_status tsr_fsdp_whole(tsr_fsdp *fsdp, size_t index, tsr_tensor *whole)
    tsr_status tsr_fsdp_grad(tsr_fsdp *fsdp, size_t index, tsr_tensor *grad)
    tsr_status tsr_fsdp_forward(tsr_fsdp *fsdp, size_t unit)
    tsr_status tsr_fsdp_forward_done(tsr_fsdp *fsdp, size_t unit)
    tsr_status tsr_fsdp_backward(tsr_fsdp *fsdp, size_t unit)
    tsr_status tsr_fsdp_unused(tsr_fsdp *fsdp, size_t index)
    tsr_status tsr_fsdp_used(const tsr_fsdp *fsdp, size_t index, int32_t *used)
    tsr_status tsr_fsdp_grads_ready(tsr_fsdp *fsdp, size_t unit)
    tsr_status tsr_fsdp_wait(tsr_fsdp *fsdp)
    tsr_status tsr_fsdp_abandon(tsr_fsdp *fsdp)
    tsr_status tsr_fsdp_unshard(tsr_fsdp *fsdp, size_t unit)
    tsr_status tsr_fsdp_await(tsr_fsdp *fsdp, size_t unit)
    tsr_status tsr_fsdp_reshard(tsr_fsdp *fsdp, size_t unit)
    tsr_status tsr_fsdp_set_sync(tsr_fsdp *fsdp, int32_t sync)
    tsr_status tsr_fsdp_set_accumulate(tsr_fsdp *fsdp, int32_t accumulate)
    tsr_status tsr_fsdp_set_all_reduce(tsr_fsdp *fsdp, int32_t all_reduce)
    tsr_status tsr_fsdp_set_reshard_after_backward(tsr_fsdp *fsdp, size_t unit, int32_t reshard)
    tsr_status tsr_fsdp_zero_grad(tsr_fsdp *fsdp)
    void tsr_fsdp_destroy(tsr_fsdp *fsdp)


cdef extern from "tessera/grad_scaler.h" nogil:
    ctypedef struct tsr_grad_scaler_options:
        size_t struct_size
        double init_scale
        double growth_factor
        double backoff_factor
        int64_t growth_interval
    tsr_status tsr_grad_scaler_options_init(tsr_grad_scaler_options *options, size_t struct_size)
    tsr_status tsr_grad_scaler_create(const tsr_grad_scaler_options *options, tsr_grad_scaler **out)
    tsr_status tsr_grad_scaler_scale(const tsr_grad_scaler *scaler, double *scale)
    tsr_status tsr_grad_scaler_unscale(tsr_grad_scaler *scaler, tsr_optimizer *optimizer)
    tsr_status tsr_grad_scaler_step(tsr_grad_scaler *scaler, tsr_optimizer *optimizer, int32_t *stepped)
    tsr_status tsr_grad_scaler_update(tsr_grad_scaler *scaler)
    void tsr_grad_scaler_destroy(tsr_grad_scaler *scaler)


cdef extern from "tessera/optim.h" nogil:
    ctypedef struct tsr_sgd_options:
        size_t struct_size
        double lr
        double momentum
        double dampening
        double weight_decay
        int32_t nesterov
    ctypedef struct tsr_adam_options:
        size_t struct_size
        double lr
        double beta1
        double beta2
        double eps
        double weight_decay
    ctypedef struct tsr_adamw_options:
        size_t struct_size
        double lr
        double beta1
        double beta2
        double eps
        double weight_decay
    tsr_status tsr_sgd_options_init(tsr_sgd_options *options, size_t struct_size)
    tsr_status tsr_sgd_create(const tsr_param *params, const tsr_tensor *grads, size_t n,
                              const tsr_sgd_options *options, tsr_optimizer **out)
    tsr_status tsr_ddp_sgd(tsr_ddp *ddp, const tsr_sgd_options *options, tsr_optimizer **out)
    tsr_status tsr_fsdp_sgd(tsr_fsdp *fsdp, const tsr_sgd_options *options, tsr_optimizer **out)
    tsr_status tsr_adam_options_init(tsr_adam_options *options, size_t struct_size)
    tsr_status tsr_adam_create(const tsr_param *params, const tsr_tensor *grads, size_t n,
                               const tsr_adam_options *options, tsr_optimizer **out)
    tsr_status tsr_ddp_adam(tsr_ddp *ddp, const tsr_adam_options *options, tsr_optimizer **out)
    tsr_status tsr_fsdp_adam(tsr_fsdp *fsdp, const tsr_adam_options *options, tsr_optimizer **out)
    tsr_status tsr_adamw_options_init(tsr_adamw_options *options, size_t struct_size)
    tsr_status tsr_adamw_create(const tsr_param *params, const tsr_tensor *grads, size_t n,
                                const tsr_adamw_options *options, tsr_optimizer **out)
    tsr_status tsr_ddp_adamw(tsr_ddp *ddp, const tsr_adamw_options *options, tsr_optimizer **out)
    tsr_status tsr_fsdp_adamw(tsr_fsdp *fsdp, const tsr_adamw_options *options, tsr_optimizer **out)
    tsr_status tsr_optimizer_step(tsr_optimizer *optimizer)
    tsr_status tsr_optimizer_zero_grad(tsr_optimizer *optimizer)
    tsr_status tsr_optimizer_clip_grad_norm(tsr_optimizer *optimizer, double max_norm, double p, double *norm)
    tsr_status tsr_optimizer_clip_grad_value(tsr_optimizer *optimizer, double most)
    tsr_status tsr_optimizer_lr(const tsr_optimizer *optimizer, double *lr)
    tsr_status tsr_optimizer_set_lr(tsr_optimizer *optimizer, double lr)
    tsr_status tsr_optimizer_steps(const tsr_optimizer *optimizer, int64_t *steps)
    void tsr_optimizer_destroy(tsr_optimizer *optimizer)


cdef extern from "tessera/data.h" nogil:
    ctypedef struct tsr_sampler_options:
        size_t struct_size
        uint64_t seed
        int32_t shuffle
        int32_t drop_last
    tsr_status tsr_sampler_options_init(tsr_sampler_options *options, size_t struct_size)
    tsr_status tsr_sampler_create(const tsr_comm *comm, int64_t length, const tsr_sampler_options *options,
                                  tsr_sampler **out)
    tsr_status tsr_sampler_next(tsr_sampler *sampler, int64_t *indices, size_t size, size_t *count)
    tsr_status tsr_sampler_position(const tsr_sampler *sampler, int64_t *epoch, int64_t *consumed)
    tsr_status tsr_sampler_set_epoch(tsr_sampler *sampler, int64_t epoch)
    void tsr_sampler_destroy(tsr_sampler *sampler)


cdef extern from "tessera/state.h" nogil:
    tsr_status tsr_state_create(tsr_state **out)
    tsr_status tsr_state_add_tensor(tsr_state *state, const char *name, const tsr_tensor *tensor)
    tsr_status tsr_state_add_sharded(tsr_state *state, const char *name, const tsr_layout *layout, tsr_dtype dtype,
                                     const tsr_tensor *pieces, int32_t rank)
    tsr_status tsr_state_add_ddp(tsr_state *state, const char *prefix, tsr_ddp *ddp)
    tsr_status tsr_state_add_fsdp(tsr_state *state, const char *prefix, tsr_fsdp *fsdp)
    tsr_status tsr_state_add_optimizer(tsr_state *state, const char *prefix, tsr_optimizer *optimizer)
    tsr_status tsr_state_add_grad_scaler(tsr_state *state, const char *prefix, tsr_grad_scaler *scaler)
    tsr_status tsr_state_add_sampler(tsr_state *state, const char *prefix, tsr_sampler *sampler)
    tsr_status tsr_state_set_int64(tsr_state *state, const char *name, int64_t value)
    tsr_status tsr_state_get_int64(const tsr_state *state, const char *name, int64_t *value)
    tsr_status tsr_state_set_double(tsr_state *state, const char *name, double value)
    tsr_status tsr_state_get_double(const tsr_state *state, const char *name, double *value)
    tsr_status tsr_state_set_value(tsr_state *state, const char *name, const char *json)
    tsr_status tsr_state_get_value(const tsr_state *state, const char *name, char *json, size_t capacity,
                                   size_t *size)
    tsr_status tsr_state_tensor_count(const tsr_state *state, size_t *count)
    tsr_status tsr_state_tensor(const tsr_state *state, size_t index, tsr_param *tensor)
    tsr_status tsr_state_gather(tsr_state *state, tsr_comm *comm, const char *name, int32_t root,
                                const tsr_tensor *whole)
    tsr_status tsr_state_set_metric(tsr_state *state, const char *name, double value)
    void tsr_state_destroy(tsr_state *state)


cdef extern from "tessera/storage.h" nogil:
    int TSR_STORAGE_PARTS_IN_ANY_ORDER
    int TSR_STORAGE_PUT_IF_ABSENT
    int TSR_STORAGE_OBJECT
    int TSR_STORAGE_DIRECTORY
    int TSR_MESSAGE_BYTES
    ctypedef void (*tsr_storage_found_fn)(const char *name, void *found_data)
    ctypedef struct tsr_storage_vtable:
        size_t struct_size
        int32_t capabilities
        int64_t part_bytes
        int32_t (*status)(const char *key, int32_t *kind, int64_t *size, int64_t *modified_ms, char *message,
                          void *user_data) noexcept
        int32_t (*open)(const char *key, void **object, int64_t *size, char *message, void *user_data) noexcept
        int32_t (*read)(void *object, int64_t offset, void *data, int64_t size, int64_t *got, char *message,
                        void *user_data) noexcept
        void (*close)(void *object, void *user_data) noexcept
        int32_t (*put)(const char *key, const void *data, int64_t size, int32_t if_absent, char *message,
                       void *user_data) noexcept
        int32_t (*begin)(const char *key, int64_t size, void **upload, char *message, void *user_data) noexcept
        int32_t (*part)(void *upload, int64_t index, int64_t offset, const void *data, int64_t size, char *message,
                        void *user_data) noexcept
        int32_t (*finish)(void *upload, char *message, void *user_data) noexcept
        void (*drop)(void *upload, void *user_data) noexcept
        int32_t (*list)(const char *key, tsr_storage_found_fn found, void *found_data, char *message,
                        void *user_data) noexcept
        int32_t (*remove)(const char *key, char *message, void *user_data) noexcept
        int32_t (*remove_directory)(const char *key, char *message, void *user_data) noexcept
    tsr_status tsr_storage_create(const tsr_storage_vtable *vtable, void *user_data, tsr_destroy_fn destroy,
                                  tsr_storage **out)
    void tsr_storage_destroy(tsr_storage *storage)


cdef extern from "tessera/checkpoint.h" nogil:
    ctypedef void (*tsr_progress_fn)(int32_t phase, int64_t done, int64_t total, void *user_data)
    ctypedef struct tsr_saver_options:
        size_t struct_size
        int32_t keep_latest
        int32_t timeout_ms
        const char *writer
        const char *writer_version
        const char *format
        const char *best_metric
        int32_t best_is_higher
        int32_t keep_best
        int64_t keep_every
        int32_t when_busy
        int32_t low_priority
        int64_t staging_bytes
        int64_t write_bytes_per_s
        tsr_progress_fn progress
        void *progress_data
        const tsr_storage *storage
        int32_t copy_on_demand
        int32_t check_replicas
    ctypedef struct tsr_open_options:
        size_t struct_size
        const tsr_storage *storage
    ctypedef struct tsr_name_rule:
        const char *saved
        const char *here
    ctypedef void (*tsr_load_report_fn)(const char *json, void *user_data)
    ctypedef struct tsr_load_options:
        size_t struct_size
        int32_t verify
        int32_t allow_missing
        int32_t allow_unexpected
        int32_t allow_cast
        tsr_progress_fn progress
        void *progress_data
        tsr_comm *comm
        const char **only
        size_t only_count
        const tsr_name_rule *rules
        size_t rule_count
        tsr_load_report_fn report
        void *report_data
    tsr_status tsr_saver_options_init(tsr_saver_options *options, size_t struct_size)
    tsr_status tsr_saver_create(tsr_comm *comm, const char *root, const tsr_saver_options *options, tsr_saver **out)
    tsr_status tsr_saver_save(tsr_saver *saver, int64_t step, tsr_state *state)
    tsr_status tsr_saver_save_async(tsr_saver *saver, int64_t step, tsr_state *state, tsr_work **work)
    tsr_status tsr_saver_wait(tsr_saver *saver)
    tsr_status tsr_saver_should_stop(tsr_saver *saver, int64_t step, int32_t told, int32_t *stop)
    tsr_status tsr_saver_trim(tsr_saver *saver)
    tsr_status tsr_saver_resume(tsr_saver *saver, tsr_state *state, int64_t *step)
    void tsr_saver_destroy(tsr_saver *saver)
    tsr_status tsr_load_options_init(tsr_load_options *options, size_t struct_size)
    tsr_status tsr_checkpoint_open(const char *path, tsr_checkpoint **out)
    tsr_status tsr_open_options_init(tsr_open_options *options, size_t struct_size)
    tsr_status tsr_checkpoint_open_with(const char *path, const tsr_open_options *options, tsr_checkpoint **out)
    tsr_status tsr_checkpoint_path(const tsr_checkpoint *checkpoint, char *text, size_t capacity, size_t *size)
    tsr_status tsr_checkpoint_manifest(const tsr_checkpoint *checkpoint, char *text, size_t capacity, size_t *size)
    tsr_status tsr_checkpoint_step(const tsr_checkpoint *checkpoint, int64_t *step)
    tsr_status tsr_checkpoint_tensor_count(const tsr_checkpoint *checkpoint, size_t *count)
    tsr_status tsr_checkpoint_tensor(const tsr_checkpoint *checkpoint, size_t index, const char **name,
                                     tsr_dtype *dtype, const int64_t **shape, int32_t *ndim)
    tsr_status tsr_checkpoint_read(const tsr_checkpoint *checkpoint, const char *name, const tsr_tensor *tensor)
    tsr_status tsr_checkpoint_load(const tsr_checkpoint *checkpoint, tsr_state *state,
                                   const tsr_load_options *options)
    tsr_status tsr_checkpoint_verify(const tsr_checkpoint *checkpoint, int32_t full)
    tsr_status tsr_checkpoint_verify_progress(const tsr_checkpoint *checkpoint, int32_t full, tsr_progress_fn progress,
                                              void *user_data)
    ctypedef struct tsr_export_options:
        size_t struct_size
        const char *format
        int64_t max_file_bytes
        const char *under
        int32_t timeout_ms
        tsr_progress_fn progress
        void *progress_data
    tsr_status tsr_export_options_init(tsr_export_options *options, size_t struct_size)
    tsr_status tsr_checkpoint_export(const tsr_checkpoint *checkpoint, tsr_comm *comm, const char *directory,
                                     const tsr_export_options *options)
    void tsr_checkpoint_destroy(tsr_checkpoint *checkpoint)


cdef extern from "tessera/launch.h" nogil:
    int32_t tsr_preempt_requested()
    tsr_status tsr_record_error(const char *message, const char *traceback)
    tsr_status tsr_record_error_about(const char *message, const char *traceback, tsr_status code, int32_t peer)
