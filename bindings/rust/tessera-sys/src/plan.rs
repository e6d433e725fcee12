//! `tessera/plan.h`.

use crate::{tsr_comm, tsr_plan, tsr_reduce_op, tsr_status, tsr_tensor};
use std::ffi::c_void;

constants! { i32:
    TSR_COLLECTIVE_BARRIER = 1;
    TSR_COLLECTIVE_ALL_REDUCE = 2;
    TSR_COLLECTIVE_REDUCE_SCATTER = 3;
    TSR_COLLECTIVE_ALL_GATHER = 4;
    TSR_COLLECTIVE_ALL_GATHER_V = 5;
    TSR_COLLECTIVE_BROADCAST = 6;
    TSR_COLLECTIVE_REDUCE = 7;
    TSR_COLLECTIVE_GATHER = 8;
    TSR_COLLECTIVE_SCATTER = 9;
    TSR_COLLECTIVE_ALL_TO_ALL = 10;
}

functions! { "plan":
    fn tsr_plan_create(
        comm: *mut tsr_comm,
        collective: i32,
        inputs: *const tsr_tensor,
        n_inputs: usize,
        outputs: *const tsr_tensor,
        n_outputs: usize,
        op: tsr_reduce_op,
        root: i32,
        stream: *mut c_void,
        out: *mut *mut tsr_plan,
    ) -> tsr_status;
    fn tsr_plan_run(plan: *mut tsr_plan) -> tsr_status;
    fn tsr_plan_start(plan: *mut tsr_plan) -> tsr_status;
    fn tsr_plan_wait(plan: *const tsr_plan, timeout_ms: i32) -> tsr_status;
    fn tsr_plan_destroy(plan: *mut tsr_plan);
}
