//! `tessera/grad_scaler.h`.

use crate::{tsr_grad_scaler, tsr_optimizer, tsr_status};

structs! {
    /// `tsr_grad_scaler_options`.
    struct tsr_grad_scaler_options {
        struct_size: usize,
        init_scale: f64,
        growth_factor: f64,
        backoff_factor: f64,
        growth_interval: i64,
    }
}

functions! { "grad_scaler":
    fn tsr_grad_scaler_options_init(options: *mut tsr_grad_scaler_options, struct_size: usize) -> tsr_status;
    fn tsr_grad_scaler_create(
        options: *const tsr_grad_scaler_options,
        out: *mut *mut tsr_grad_scaler,
    ) -> tsr_status;
    fn tsr_grad_scaler_scale(scaler: *const tsr_grad_scaler, scale: *mut f64) -> tsr_status;
    fn tsr_grad_scaler_unscale(scaler: *mut tsr_grad_scaler, optimizer: *mut tsr_optimizer) -> tsr_status;
    fn tsr_grad_scaler_step(
        scaler: *mut tsr_grad_scaler,
        optimizer: *mut tsr_optimizer,
        stepped: *mut i32,
    ) -> tsr_status;
    fn tsr_grad_scaler_update(scaler: *mut tsr_grad_scaler) -> tsr_status;
    fn tsr_grad_scaler_destroy(scaler: *mut tsr_grad_scaler);
}
