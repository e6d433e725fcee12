//! `tessera/types.h`.

use std::ffi::{c_char, c_void};

/// `tsr_status`: 0 or a `TSR_E_` code.
pub type tsr_status = i32;
/// `tsr_dtype`.
pub type tsr_dtype = i32;
/// `tsr_reduce_op`.
pub type tsr_reduce_op = i32;
/// `tsr_destroy_fn`.
pub type tsr_destroy_fn = Option<unsafe extern "C" fn(user_data: *mut c_void)>;

macro_rules! handles {
    ($($name:ident)*) => {
        $(
            #[doc = concat!("The opaque handle `", stringify!($name), "`.")]
            #[repr(C)]
            pub struct $name {
                _opaque: [u8; 0],
                _neither_send_nor_unpin: std::marker::PhantomData<(*mut u8, std::marker::PhantomPinned)>,
            }
        )*
    };
}
handles! {
    tsr_error tsr_store tsr_store_server tsr_comm tsr_work tsr_buffer tsr_mesh tsr_plan tsr_layout tsr_ddp tsr_fsdp
    tsr_optimizer tsr_grad_scaler tsr_sampler tsr_state tsr_saver tsr_checkpoint tsr_storage
}

constants! { i32:
    TSR_DTYPE_F16 = 1;
    TSR_DTYPE_BF16 = 2;
    TSR_DTYPE_F32 = 3;
    TSR_DTYPE_F64 = 4;
    TSR_DTYPE_I8 = 5;
    TSR_DTYPE_U8 = 6;
    TSR_DTYPE_I32 = 7;
    TSR_DTYPE_I64 = 8;
    TSR_DTYPE_I16 = 9;
    TSR_DTYPE_BOOL = 10;
    TSR_DTYPE_U16 = 11;
    TSR_DTYPE_U32 = 12;
    TSR_DTYPE_U64 = 13;
    TSR_DTYPE_F8_E4M3 = 14;
    TSR_DTYPE_F8_E5M2 = 15;
    TSR_DTYPE_F8_E8M0 = 16;
    TSR_DTYPE_C64 = 17;
    TSR_DTYPE_C128 = 18;
    TSR_DEVICE_CPU = 1;
    TSR_DEVICE_CUDA = 2;
    TSR_REDUCE_SUM = 1;
    TSR_REDUCE_AVG = 2;
    TSR_REDUCE_MIN = 3;
    TSR_REDUCE_MAX = 4;
    TSR_REDUCE_PROD = 5;
    TSR_MAX_NDIM = 8;
    TSR_MESSAGE_BYTES = 1024;
}

structs! {
    /// `tsr_tensor`: a view of memory that the caller owns. Its size is frozen.
    struct tsr_tensor {
        data: *mut c_void,
        shape: *const i64,
        strides: *const i64,
        ndim: i32,
        dtype: tsr_dtype,
        device_type: i32,
        device_index: i32,
        byte_offset: u64,
        reserved: [u64; 3],
    }
    /// `tsr_param`: a named tensor.
    struct tsr_param {
        name: *const c_char,
        tensor: tsr_tensor,
    }
}
