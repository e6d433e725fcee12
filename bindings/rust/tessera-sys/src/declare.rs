//! The macros with which the modules declare the C API. Each declares the item itself and a line of metadata about it.

/// A C function: its name and the Rust types of its arguments and result.
#[doc(hidden)]
#[derive(Clone, Copy)]
pub struct Function {
    pub name: &'static str,
    pub arguments: &'static [&'static str],
    pub result: &'static str,
}

/// One field of a C struct.
#[doc(hidden)]
#[derive(Clone, Copy)]
pub struct Field {
    pub name: &'static str,
    pub offset: usize,
    pub type_name: &'static str,
}

/// One C struct.
#[doc(hidden)]
#[derive(Clone, Copy)]
pub struct Layout {
    pub name: &'static str,
    pub size: usize,
    pub align: usize,
    pub fields: &'static [Field],
}

/// The names of the functions called so far, for tests that check that all are called.
#[cfg(feature = "record-calls")]
pub(crate) static CALLED: std::sync::Mutex<std::collections::BTreeSet<&str>> =
    std::sync::Mutex::new(std::collections::BTreeSet::new());

#[cfg(feature = "record-calls")]
pub(crate) fn record(name: &'static str) {
    CALLED.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).insert(name);
}

/// Declares the functions of each header: a table of pointers that the loader fills, and a function of the same name
/// for each, which costs one load and one well-predicted branch more than a linked call.
macro_rules! functions {
    ($($header:literal: $(fn $name:ident($($arg:ident: $type:ty),* $(,)?) $(-> $result:ty)?;)*)*) => {
        struct Table { $($($name: unsafe extern "C" fn($($type),*) $(-> $result)?,)*)* }

        static TABLE: std::sync::OnceLock<Table> = std::sync::OnceLock::new();

        /// Fills the table. The library stays loaded for the life of the process.
        ///
        /// # Safety
        /// `symbol` returns the address of the C function of that name, never null.
        pub(crate) unsafe fn bind(symbol: &dyn Fn(&str) -> *mut std::ffi::c_void) {
            let table = Table {
                // SAFETY: each pointer is the function of that name; tests/abi.rs compares the types with C's.
                $($($name: unsafe {
                    std::mem::transmute::<*mut std::ffi::c_void, unsafe extern "C" fn($($type),*) $(-> $result)?>(
                        symbol(stringify!($name)))
                },)*)*
            };
            let _ = TABLE.set(table);
        }

        $($(
            #[doc = concat!("`", stringify!($name), "` of `tessera/", $header, "`.")]
            ///
            /// # Safety
            /// [`load`](crate::load) has succeeded, and the arguments are as the C header demands.
            #[inline]
            #[allow(clippy::too_many_arguments)] // as many as the C function has
            pub unsafe fn $name($($arg: $type),*) $(-> $result)? {
                #[cfg(feature = "record-calls")]
                crate::declare::record(stringify!($name));
                match TABLE.get() {
                    // SAFETY: the caller's promise is the C function's.
                    Some(table) => unsafe { (table.$name)($($arg),*) },
                    None => crate::loader::not_loaded(stringify!($name)),
                }
            }
        )*)*

        #[doc(hidden)]
        pub const FUNCTIONS: &[crate::declare::Function] = &[$($(crate::declare::Function {
            name: stringify!($name),
            arguments: &[$(stringify!($type)),*],
            result: functions!(@result $($result)?),
        },)*)*];
    };
    (@result) => { "()" };
    (@result $result:ty) => { stringify!($result) };
}

/// Declares opaque handles.
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

/// Declares constants with their C names and values.
macro_rules! constants {
    ($($name:ident: $type:ty = $value:literal;)*) => {
        $(
            #[doc = concat!("`", stringify!($name), "`.")]
            pub const $name: $type = $value;
        )*
        #[doc(hidden)]
        pub const CONSTANTS: &[(&str, i64)] = &[$((stringify!($name), $value)),*];
    };
}

/// Declares structs with C's layout.
macro_rules! structs {
    ($(struct $name:ident { $($field:ident: $type:ty,)* })*) => {
        $(
            #[doc = concat!("`", stringify!($name), "` of the C header.")]
            #[repr(C)]
            #[derive(Clone, Copy)]
            pub struct $name {
                $(
                    #[doc = concat!("`", stringify!($name), ".", stringify!($field), "` of the C header.")]
                    pub $field: $type,
                )*
            }
        )*
        #[doc(hidden)]
        pub const LAYOUTS: &[crate::declare::Layout] = &[$(crate::declare::Layout {
            name: stringify!($name),
            size: std::mem::size_of::<$name>(),
            align: std::mem::align_of::<$name>(),
            fields: &[$(crate::declare::Field {
                name: stringify!($field),
                offset: std::mem::offset_of!($name, $field),
                type_name: stringify!($type),
            }),*],
        }),*];
    };
}
