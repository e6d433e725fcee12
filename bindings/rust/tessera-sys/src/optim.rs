//! `tessera/optim.h`.

use crate::{tsr_ddp, tsr_fsdp, tsr_optimizer, tsr_param, tsr_status, tsr_tensor};

structs! {
    /// `tsr_sgd_options`.
    struct tsr_sgd_options {
        struct_size: usize,
        lr: f64,
        momentum: f64,
        dampening: f64,
        weight_decay: f64,
        nesterov: i32,
    }
    /// `tsr_adam_options`.
    struct tsr_adam_options {
        struct_size: usize,
        lr: f64,
        beta1: f64,
        beta2: f64,
        eps: f64,
        weight_decay: f64,
    }
    /// `tsr_adamw_options`.
    struct tsr_adamw_options {
        struct_size: usize,
        lr: f64,
        beta1: f64,
        beta2: f64,
        eps: f64,
        weight_decay: f64,
    }
}

functions! { "optim":
    fn tsr_sgd_options_init(options: *mut tsr_sgd_options, struct_size: usize) -> tsr_status;
    fn tsr_sgd_create(
        params: *const tsr_param,
        grads: *const tsr_tensor,
        n: usize,
        options: *const tsr_sgd_options,
        out: *mut *mut tsr_optimizer,
    ) -> tsr_status;
    fn tsr_ddp_sgd(ddp: *mut tsr_ddp, options: *const tsr_sgd_options, out: *mut *mut tsr_optimizer) -> tsr_status;
    fn tsr_fsdp_sgd(fsdp: *mut tsr_fsdp, options: *const tsr_sgd_options, out: *mut *mut tsr_optimizer) -> tsr_status;
    fn tsr_adam_options_init(options: *mut tsr_adam_options, struct_size: usize) -> tsr_status;
    fn tsr_adam_create(
        params: *const tsr_param,
        grads: *const tsr_tensor,
        n: usize,
        options: *const tsr_adam_options,
        out: *mut *mut tsr_optimizer,
    ) -> tsr_status;
    fn tsr_ddp_adam(ddp: *mut tsr_ddp, options: *const tsr_adam_options, out: *mut *mut tsr_optimizer) -> tsr_status;
    fn tsr_fsdp_adam(fsdp: *mut tsr_fsdp, options: *const tsr_adam_options, out: *mut *mut tsr_optimizer) -> tsr_status;
    fn tsr_adamw_options_init(options: *mut tsr_adamw_options, struct_size: usize) -> tsr_status;
    fn tsr_adamw_create(
        params: *const tsr_param,
        grads: *const tsr_tensor,
        n: usize,
        options: *const tsr_adamw_options,
        out: *mut *mut tsr_optimizer,
    ) -> tsr_status;
    fn tsr_ddp_adamw(ddp: *mut tsr_ddp, options: *const tsr_adamw_options, out: *mut *mut tsr_optimizer) -> tsr_status;
    fn tsr_fsdp_adamw(
        fsdp: *mut tsr_fsdp,
        options: *const tsr_adamw_options,
        out: *mut *mut tsr_optimizer,
    ) -> tsr_status;
    fn tsr_optimizer_step(optimizer: *mut tsr_optimizer) -> tsr_status;
    fn tsr_optimizer_zero_grad(optimizer: *mut tsr_optimizer) -> tsr_status;
    fn tsr_optimizer_clip_grad_norm(
        optimizer: *mut tsr_optimizer,
        max_norm: f64,
        p: f64,
        norm: *mut f64,
    ) -> tsr_status;
    fn tsr_optimizer_clip_grad_value(optimizer: *mut tsr_optimizer, most: f64) -> tsr_status;
    fn tsr_optimizer_lr(optimizer: *const tsr_optimizer, lr: *mut f64) -> tsr_status;
    fn tsr_optimizer_set_lr(optimizer: *mut tsr_optimizer, lr: f64) -> tsr_status;
    fn tsr_optimizer_steps(optimizer: *const tsr_optimizer, steps: *mut i64) -> tsr_status;
    fn tsr_optimizer_destroy(optimizer: *mut tsr_optimizer);
}
