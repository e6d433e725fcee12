/* Tessera: basic types shared by every header. C99, and clean as C++17. */
#ifndef TESSERA_TYPES_H
#define TESSERA_TYPES_H

#include <stddef.h>
#include <stdint.h>

#if defined(__GNUC__)
#define TSR_API __attribute__((visibility("default")))
#define TSR_MUST_USE __attribute__((warn_unused_result))
#else
#define TSR_API
#define TSR_MUST_USE
#endif

#ifdef __cplusplus
extern "C" {
#endif

/** 0 or 1. */
typedef int32_t tsr_flag;

/** The result of every call that can fail: 0 (TSR_OK) or a TSR_E_ code of error.h. */
typedef int32_t tsr_status;

/* Handles. Each is created by a `_create` or `_open` function and freed by its own `_destroy`. A handle belongs to the
 * process that created it. A forked child may destroy its copy and make the calls that take the handle as const, except
 * for a work or a plan; every other call there is INVALID_STATE. A store may be used in the child. */
typedef struct tsr_error tsr_error;
typedef struct tsr_store tsr_store;
typedef struct tsr_store_server tsr_store_server;
typedef struct tsr_comm tsr_comm;
typedef struct tsr_work tsr_work;
typedef struct tsr_buffer tsr_buffer;
typedef struct tsr_mesh tsr_mesh;
typedef struct tsr_plan tsr_plan;
typedef struct tsr_turn tsr_turn;
typedef struct tsr_layout tsr_layout;
typedef struct tsr_ddp tsr_ddp;
typedef struct tsr_fsdp tsr_fsdp;
typedef struct tsr_tp tsr_tp;
typedef struct tsr_pipeline tsr_pipeline;
typedef struct tsr_engine tsr_engine;
typedef struct tsr_optimizer tsr_optimizer;
typedef struct tsr_grad_scaler tsr_grad_scaler;
typedef struct tsr_loss_scale tsr_loss_scale;
typedef struct tsr_lr_schedule tsr_lr_schedule;
typedef struct tsr_sampler tsr_sampler;
typedef struct tsr_metric tsr_metric;
typedef struct tsr_state tsr_state;
typedef struct tsr_saver tsr_saver;
typedef struct tsr_checkpoint tsr_checkpoint;
typedef struct tsr_storage tsr_storage;

/** Element types. Stored as int32_t; numbers are never reused. */
enum {
    TSR_DTYPE_F16 = 1,
    TSR_DTYPE_BF16 = 2,
    TSR_DTYPE_F32 = 3,
    TSR_DTYPE_F64 = 4,
    TSR_DTYPE_I8 = 5,
    TSR_DTYPE_U8 = 6,
    TSR_DTYPE_I32 = 7,
    TSR_DTYPE_I64 = 8,
    TSR_DTYPE_I16 = 9,   /* can be saved and moved; reducing it is UNSUPPORTED */
    TSR_DTYPE_BOOL = 10, /* one byte, 0 or 1; likewise */
    /* Likewise; these are not converted either. But F8_E4M3 and F8_E5M2 are reduced on CUDA devices, from NCCL 2.24 on. */
    TSR_DTYPE_U16 = 11,
    TSR_DTYPE_U32 = 12,
    TSR_DTYPE_U64 = 13,
    TSR_DTYPE_F8_E4M3 = 14, /* no infinities; float8_e4m3fn in PyTorch and ml_dtypes */
    TSR_DTYPE_F8_E5M2 = 15,
    TSR_DTYPE_F8_E8M0 = 16, /* exponent only; float8_e8m0fnu */
    TSR_DTYPE_C64 = 17,     /* two f32: real, imaginary */
    TSR_DTYPE_C128 = 18     /* two f64; not in the native format, which uses safetensors files */
};
typedef int32_t tsr_dtype;

/** Device kinds; the numbers are DLPack's. */
enum { TSR_DEVICE_CPU = 1, TSR_DEVICE_CUDA = 2 };

/** Reductions. AVG divides the sum by the number of ranks (integers: truncated towards zero). */
enum { TSR_REDUCE_SUM = 1, TSR_REDUCE_AVG = 2, TSR_REDUCE_MIN = 3, TSR_REDUCE_MAX = 4, TSR_REDUCE_PROD = 5 };
typedef int32_t tsr_reduce_op;

#define TSR_MAX_NDIM 8

/** A view of memory that the caller owns. The size of this struct is frozen.
 *  `shape` and `strides` hold `ndim` numbers; strides count elements, NULL means row-major contiguous.
 *  A 0-d tensor (ndim 0) has one element. `reserved` must be zero. */
typedef struct tsr_tensor {
    void *data;             /* first byte of the allocation; NULL only if the tensor is empty */
    const int64_t *shape;   /* may be NULL if ndim is 0 */
    const int64_t *strides; /* may be NULL */
    int32_t ndim;           /* 0 to TSR_MAX_NDIM */
    tsr_dtype dtype;
    int32_t device_type;  /* TSR_DEVICE_ */
    int32_t device_index; /* 0 on the CPU */
    uint64_t byte_offset; /* the view begins at data + byte_offset */
    uint64_t reserved[3];
} tsr_tensor;

/** A named tensor: one parameter of a model. `name` is UTF-8, with dots between modules ("fc1.weight"). */
typedef struct tsr_param {
    const char *name;
    tsr_tensor tensor;
} tsr_param;

/** Size of the message buffer of a callback that has one, terminating 0 included. */
#define TSR_MESSAGE_BYTES 1024

/** Frees `user_data` of a callback, once, when the library no longer needs it. May be NULL. */
typedef void (*tsr_destroy_fn)(void *user_data);

/* Contiguous CPU tensors as values: tsr_f32_2d(weight, 128, 64). */
#if !defined(__cplusplus)
/* The shape lives as long as the enclosing block. */
#define TSR_CPU_TENSOR(ptr, type, nd, ...) \
    ((tsr_tensor){(ptr), (const int64_t[]){__VA_ARGS__}, NULL, (nd), (type), TSR_DEVICE_CPU, 0, 0, {0, 0, 0}})
#define tsr_f32_1d(ptr, d0) TSR_CPU_TENSOR(ptr, TSR_DTYPE_F32, 1, d0)
#define tsr_f32_2d(ptr, d0, d1) TSR_CPU_TENSOR(ptr, TSR_DTYPE_F32, 2, d0, d1)
#define tsr_i64_1d(ptr, d0) TSR_CPU_TENSOR(ptr, TSR_DTYPE_I64, 1, d0)
#define tsr_u8_1d(ptr, d0) TSR_CPU_TENSOR(ptr, TSR_DTYPE_U8, 1, d0)
#endif

#ifdef __cplusplus
}

/** A tensor that holds its shape. Pass it where a call takes a `const tsr_tensor *`. A tsr_tensor or tsr_param made
 *  from it points to its shape, so the object must be a named variable (`const auto w = tsr_f32_2d(...)`) that outlives
 *  it. */
template <int NDIM>
class tsr_shaped_tensor {
   public:
    template <class... Sizes>
    tsr_shaped_tensor(void *data, tsr_dtype dtype, Sizes... sizes) noexcept
        : shape_{static_cast<int64_t>(sizes)...},
          tensor_{data, shape_, nullptr, NDIM, dtype, TSR_DEVICE_CPU, 0, 0, {0, 0, 0}} {
        static_assert(sizeof...(Sizes) == NDIM, "a size for each dimension");
    }
    tsr_shaped_tensor(const tsr_shaped_tensor &) = delete;
    tsr_shaped_tensor &operator=(const tsr_shaped_tensor &) = delete;

    /* NOLINTBEGIN(google-explicit-constructor): it stands where the C functions take a tensor. */
    operator const tsr_tensor *() const noexcept { return &tensor_; }
    operator tsr_tensor() const & noexcept { return tensor_; }
    /* NOLINTEND(google-explicit-constructor) */
    operator tsr_tensor() const && = delete; /* its shape would dangle */

   private:
    int64_t shape_[NDIM];
    tsr_tensor tensor_;
};
#define TSR_CPU_TENSOR(ptr, type, nd, ...) (tsr_shaped_tensor<nd>((ptr), (type), __VA_ARGS__))
inline tsr_shaped_tensor<1> tsr_f32_1d(float *ptr, int64_t d0) { return {ptr, TSR_DTYPE_F32, d0}; }
inline tsr_shaped_tensor<2> tsr_f32_2d(float *ptr, int64_t d0, int64_t d1) { return {ptr, TSR_DTYPE_F32, d0, d1}; }
inline tsr_shaped_tensor<1> tsr_i64_1d(int64_t *ptr, int64_t d0) { return {ptr, TSR_DTYPE_I64, d0}; }
inline tsr_shaped_tensor<1> tsr_u8_1d(uint8_t *ptr, int64_t d0) { return {ptr, TSR_DTYPE_U8, d0}; }
#endif
#endif
