//! `tessera/checkpoint.h`.

use crate::{tsr_checkpoint, tsr_comm, tsr_dtype, tsr_saver, tsr_state, tsr_status, tsr_storage, tsr_tensor, tsr_work};
use std::ffi::{c_char, c_void};

/// `tsr_progress_fn`.
pub type tsr_progress_fn = Option<unsafe extern "C" fn(phase: i32, done: i64, total: i64, user_data: *mut c_void)>;

/// `tsr_load_report_fn`.
pub type tsr_load_report_fn = Option<unsafe extern "C" fn(json: *const c_char, user_data: *mut c_void)>;

constants! { i32:
    TSR_PHASE_STAGE = 1;
    TSR_PHASE_WRITE = 2;
    TSR_PHASE_COMMIT = 3;
    TSR_PHASE_READ = 4;
    TSR_PHASE_VERIFY = 5;
    TSR_BUSY_WAIT = 0;
    TSR_BUSY_REFUSE = 1;
    TSR_BUSY_REPLACE = 2;
}

structs! {
    /// `tsr_saver_options`.
    struct tsr_saver_options {
        struct_size: usize,
        keep_latest: i32,
        timeout_ms: i32,
        writer: *const c_char,
        writer_version: *const c_char,
        format: *const c_char,
        best_metric: *const c_char,
        best_is_higher: i32,
        keep_best: i32,
        keep_every: i64,
        when_busy: i32,
        low_priority: i32,
        staging_bytes: i64,
        write_bytes_per_s: i64,
        progress: tsr_progress_fn,
        progress_data: *mut c_void,
        storage: *const tsr_storage,
        copy_on_demand: i32,
        check_replicas: i32,
    }
    /// `tsr_open_options`.
    struct tsr_open_options {
        struct_size: usize,
        storage: *const tsr_storage,
    }
    /// `tsr_name_rule`.
    struct tsr_name_rule {
        saved: *const c_char,
        here: *const c_char,
    }
    /// `tsr_load_options`.
    struct tsr_load_options {
        struct_size: usize,
        verify: i32,
        allow_missing: i32,
        allow_unexpected: i32,
        allow_cast: i32,
        progress: tsr_progress_fn,
        progress_data: *mut c_void,
        comm: *mut tsr_comm,
        only: *const *const c_char,
        only_count: usize,
        rules: *const tsr_name_rule,
        rule_count: usize,
        report: tsr_load_report_fn,
        report_data: *mut c_void,
    }
    /// `tsr_export_options`.
    struct tsr_export_options {
        struct_size: usize,
        format: *const c_char,
        max_file_bytes: i64,
        under: *const c_char,
        timeout_ms: i32,
        progress: tsr_progress_fn,
        progress_data: *mut c_void,
    }
}

functions! { "checkpoint":
    fn tsr_saver_options_init(options: *mut tsr_saver_options, struct_size: usize) -> tsr_status;
    fn tsr_saver_create(
        comm: *mut tsr_comm,
        root: *const c_char,
        options: *const tsr_saver_options,
        out: *mut *mut tsr_saver,
    ) -> tsr_status;
    fn tsr_saver_save(saver: *mut tsr_saver, step: i64, state: *mut tsr_state) -> tsr_status;
    fn tsr_saver_save_async(
        saver: *mut tsr_saver,
        step: i64,
        state: *mut tsr_state,
        work: *mut *mut tsr_work,
    ) -> tsr_status;
    fn tsr_saver_wait(saver: *mut tsr_saver) -> tsr_status;
    fn tsr_saver_resume(saver: *mut tsr_saver, state: *mut tsr_state, step: *mut i64) -> tsr_status;
    fn tsr_saver_should_stop(saver: *mut tsr_saver, step: i64, told: i32, stop: *mut i32) -> tsr_status;
    fn tsr_saver_trim(saver: *mut tsr_saver) -> tsr_status;
    fn tsr_saver_destroy(saver: *mut tsr_saver);
    fn tsr_load_options_init(options: *mut tsr_load_options, struct_size: usize) -> tsr_status;
    fn tsr_checkpoint_open(path: *const c_char, out: *mut *mut tsr_checkpoint) -> tsr_status;
    fn tsr_open_options_init(options: *mut tsr_open_options, struct_size: usize) -> tsr_status;
    fn tsr_checkpoint_open_with(
        path: *const c_char,
        options: *const tsr_open_options,
        out: *mut *mut tsr_checkpoint,
    ) -> tsr_status;
    fn tsr_checkpoint_path(
        checkpoint: *const tsr_checkpoint,
        text: *mut c_char,
        capacity: usize,
        size: *mut usize,
    ) -> tsr_status;
    fn tsr_checkpoint_manifest(
        checkpoint: *const tsr_checkpoint,
        text: *mut c_char,
        capacity: usize,
        size: *mut usize,
    ) -> tsr_status;
    fn tsr_checkpoint_step(checkpoint: *const tsr_checkpoint, step: *mut i64) -> tsr_status;
    fn tsr_checkpoint_tensor_count(checkpoint: *const tsr_checkpoint, count: *mut usize) -> tsr_status;
    fn tsr_checkpoint_tensor(
        checkpoint: *const tsr_checkpoint,
        index: usize,
        name: *mut *const c_char,
        dtype: *mut tsr_dtype,
        shape: *mut *const i64,
        ndim: *mut i32,
    ) -> tsr_status;
    fn tsr_checkpoint_read(
        checkpoint: *const tsr_checkpoint,
        name: *const c_char,
        tensor: *const tsr_tensor,
    ) -> tsr_status;
    fn tsr_checkpoint_load(
        checkpoint: *const tsr_checkpoint,
        state: *mut tsr_state,
        options: *const tsr_load_options,
    ) -> tsr_status;
    fn tsr_checkpoint_verify(checkpoint: *const tsr_checkpoint, full: i32) -> tsr_status;
    fn tsr_checkpoint_verify_progress(
        checkpoint: *const tsr_checkpoint,
        full: i32,
        progress: tsr_progress_fn,
        user_data: *mut c_void,
    ) -> tsr_status;
    fn tsr_export_options_init(options: *mut tsr_export_options, struct_size: usize) -> tsr_status;
    fn tsr_checkpoint_export(
        checkpoint: *const tsr_checkpoint,
        comm: *mut tsr_comm,
        directory: *const c_char,
        options: *const tsr_export_options,
    ) -> tsr_status;
    fn tsr_checkpoint_destroy(checkpoint: *mut tsr_checkpoint);
}
