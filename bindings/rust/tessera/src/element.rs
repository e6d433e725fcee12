//! Element types and reductions.

use std::fmt;

use tessera_sys as sys;

/// The type of a tensor's elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum DType {
    /// IEEE half precision.
    F16,
    /// bfloat16, the upper half of an `f32`.
    BF16,
    /// Single precision.
    F32,
    /// Double precision.
    F64,
    /// Signed byte.
    I8,
    /// Byte.
    U8,
    /// 32-bit integer.
    I32,
    /// 64-bit integer.
    I64,
    /// 16-bit integer; for checkpoints only, cannot be reduced.
    I16,
    /// One byte, 0 or 1 ([`Bool`]); for checkpoints only.
    Bool,
    /// Unsigned 16-bit integer; like all that follow for checkpoints only.
    U16,
    /// Unsigned 32-bit integer.
    U32,
    /// Unsigned 64-bit integer.
    U64,
    /// 8-bit float without infinities, `float8_e4m3fn`; its elements are read as bytes.
    F8E4M3,
    /// 8-bit float, `float8_e5m2`.
    F8E5M2,
    /// 8-bit exponent, `float8_e8m0fnu`.
    F8E8M0,
    /// Complex number of two `f32`.
    C64,
    /// Complex number of two `f64`; not in the native format.
    C128,
}

impl DType {
    /// Bytes of one element.
    pub fn size(self) -> usize {
        match self {
            DType::I8 | DType::U8 | DType::Bool | DType::F8E4M3 | DType::F8E5M2 | DType::F8E8M0 => 1,
            DType::F16 | DType::BF16 | DType::I16 | DType::U16 => 2,
            DType::F32 | DType::I32 | DType::U32 => 4,
            DType::F64 | DType::I64 | DType::U64 | DType::C64 => 8,
            DType::C128 => 16,
        }
    }

    pub(crate) fn as_raw(self) -> sys::tsr_dtype {
        match self {
            DType::F16 => sys::TSR_DTYPE_F16,
            DType::BF16 => sys::TSR_DTYPE_BF16,
            DType::F32 => sys::TSR_DTYPE_F32,
            DType::F64 => sys::TSR_DTYPE_F64,
            DType::I8 => sys::TSR_DTYPE_I8,
            DType::U8 => sys::TSR_DTYPE_U8,
            DType::I32 => sys::TSR_DTYPE_I32,
            DType::I64 => sys::TSR_DTYPE_I64,
            DType::I16 => sys::TSR_DTYPE_I16,
            DType::Bool => sys::TSR_DTYPE_BOOL,
            DType::U16 => sys::TSR_DTYPE_U16,
            DType::U32 => sys::TSR_DTYPE_U32,
            DType::U64 => sys::TSR_DTYPE_U64,
            DType::F8E4M3 => sys::TSR_DTYPE_F8_E4M3,
            DType::F8E5M2 => sys::TSR_DTYPE_F8_E5M2,
            DType::F8E8M0 => sys::TSR_DTYPE_F8_E8M0,
            DType::C64 => sys::TSR_DTYPE_C64,
            DType::C128 => sys::TSR_DTYPE_C128,
        }
    }

    pub(crate) fn from_raw(dtype: sys::tsr_dtype) -> Option<Self> {
        Some(match dtype {
            sys::TSR_DTYPE_F16 => DType::F16,
            sys::TSR_DTYPE_BF16 => DType::BF16,
            sys::TSR_DTYPE_F32 => DType::F32,
            sys::TSR_DTYPE_F64 => DType::F64,
            sys::TSR_DTYPE_I8 => DType::I8,
            sys::TSR_DTYPE_U8 => DType::U8,
            sys::TSR_DTYPE_I32 => DType::I32,
            sys::TSR_DTYPE_I64 => DType::I64,
            sys::TSR_DTYPE_I16 => DType::I16,
            sys::TSR_DTYPE_BOOL => DType::Bool,
            sys::TSR_DTYPE_U16 => DType::U16,
            sys::TSR_DTYPE_U32 => DType::U32,
            sys::TSR_DTYPE_U64 => DType::U64,
            sys::TSR_DTYPE_F8_E4M3 => DType::F8E4M3,
            sys::TSR_DTYPE_F8_E5M2 => DType::F8E5M2,
            sys::TSR_DTYPE_F8_E8M0 => DType::F8E8M0,
            sys::TSR_DTYPE_C64 => DType::C64,
            sys::TSR_DTYPE_C128 => DType::C128,
            _ => return None,
        })
    }
}

impl fmt::Display for DType {
    /// Lower-case name: `f32`, `bf16`, `bool`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&format!("{self:?}").to_lowercase())
    }
}

/// A Rust type that tensors and collectives hold. With the feature `half`, also `half::f16` and `half::bf16`.
///
/// # Safety
/// The type is plain data of `DTYPE.size()` bytes, and every bit pattern is a value of it (Rust's `bool` is not, see
/// [`Bool`]): the library writes into it what other ranks and files hold.
#[diagnostic::on_unimplemented(
    message = "tensors and collectives do not hold `{Self}`",
    note = "`half::f16` and `half::bf16` need the feature `half` of tessera, and its version of the crate `half`"
)]
pub unsafe trait Element: Copy + Send + Sync + 'static {
    /// The library's name of this type.
    const DTYPE: DType;
}

macro_rules! elements {
    ($($type:ty = $dtype:ident,)*) => {
        $(
            // SAFETY: plain data of that size, every bit pattern valid.
            unsafe impl Element for $type {
                const DTYPE: DType = DType::$dtype;
            }
        )*
    };
}

elements! { f32 = F32, f64 = F64, i8 = I8, u8 = U8, i16 = I16, u16 = U16, i32 = I32, u32 = U32, i64 = I64, u64 = U64, Bool = Bool, }
#[cfg(feature = "half")]
elements! { half::f16 = F16, half::bf16 = BF16, }

/// An element of a `bool` tensor: one byte of which 0 is false. Not Rust's `bool`, in which a byte of 2, from a file or
/// from another rank, would be undefined behaviour.
#[derive(Clone, Copy, Default)]
#[repr(transparent)]
pub struct Bool(u8);

impl From<bool> for Bool {
    fn from(value: bool) -> Self {
        Bool(u8::from(value))
    }
}

impl From<Bool> for bool {
    fn from(value: Bool) -> Self {
        value.0 != 0
    }
}

impl PartialEq for Bool {
    fn eq(&self, other: &Self) -> bool {
        bool::from(*self) == bool::from(*other)
    }
}

impl Eq for Bool {}

impl fmt::Debug for Bool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        bool::from(*self).fmt(f)
    }
}

/// Reduction operations. The order of the additions is fixed: every rank and every run gets the same bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ReduceOp {
    /// The sum.
    Sum,
    /// The sum divided by the number of ranks; integers are truncated towards zero.
    Avg,
    /// The smallest.
    Min,
    /// The largest.
    Max,
    /// The product.
    Prod,
}

impl ReduceOp {
    pub(crate) fn as_raw(self) -> sys::tsr_reduce_op {
        match self {
            ReduceOp::Sum => sys::TSR_REDUCE_SUM,
            ReduceOp::Avg => sys::TSR_REDUCE_AVG,
            ReduceOp::Min => sys::TSR_REDUCE_MIN,
            ReduceOp::Max => sys::TSR_REDUCE_MAX,
            ReduceOp::Prod => sys::TSR_REDUCE_PROD,
        }
    }
}
