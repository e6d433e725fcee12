//! A rank on a simulated CUDA device, for test_devices.py: collectives over memory of the device, a checkpoint of it,
//! what is refused, and steps of DDP and of an optimizer.

use std::ffi::{c_char, c_int, c_void};
use std::ptr;

use tessera::{
    params, Code, Comm, CommOptions, CudaParams, CudaTensor, DType, Ddp, ReduceOp, Result, Saver, Sgd, State,
};

extern "C" {
    fn dlopen(name: *const c_char, flags: c_int) -> *mut c_void;
    fn dlsym(library: *mut c_void, name: *const c_char) -> *mut c_void;
}

fn function(name: &std::ffi::CStr) -> *mut c_void {
    let found = unsafe { dlsym(dlopen(c"libcuda.so.1".as_ptr(), 2), name.as_ptr()) };
    assert!(!found.is_null(), "{name:?}");
    found
}

fn refused<T>(code: Code, words: &str, result: Result<T>) {
    let error = result.err().expect(words);
    assert_eq!(error.code(), code, "{error}");
    assert!(error.message().contains(words), "{error}");
}

fn main() -> Result<()> {
    let comm = Comm::from_env_with(&CommOptions::new().backend("cpu:auto,cuda:nccl"))?;
    let (rank, ranks) = (comm.rank()?, comm.world_size()?);
    let (allocate, store, load): (
        extern "C" fn(c_int, usize) -> usize,
        extern "C" fn(usize, f32),
        extern "C" fn(usize) -> f32,
    ) = unsafe {
        (
            std::mem::transmute(function(c"simulated_cuda_allocate")),
            std::mem::transmute(function(c"simulated_cuda_store")),
            std::mem::transmute(function(c"simulated_cuda_load")),
        )
    };
    let memory = allocate(i32::try_from(rank).unwrap(), 8);
    let tensor = |address: usize, device: usize| unsafe { CudaTensor::new(address, DType::F32, [2], device) };
    let x = [tensor(memory, rank)?];
    store(memory, rank as f32 + 1.0);
    store(memory + 4, 10.0);
    let on_stream = unsafe { comm.on_stream(ptr::null_mut()) };
    on_stream.all_reduce(&x, ReduceOp::Sum)?;
    assert_eq!(load(memory), (ranks * (ranks + 1) / 2) as f32);
    assert_eq!(load(memory + 4), (10 * ranks) as f32);
    let work = unsafe { comm.after_stream(ptr::null_mut()) }.all_reduce(&x, ReduceOp::Max)?;
    unsafe { work.order(ptr::null_mut()) }?;
    assert_eq!(load(memory + 4), (10 * ranks) as f32);
    work.wait()?;

    let host = [1.0f32, 2.0];
    let wrong = [tensor(host.as_ptr() as usize, rank)?];
    refused(Code::InvalidArgument, "memory of the host", on_stream.all_reduce(&wrong, ReduceOp::Sum));
    let elsewhere = [tensor(memory, rank + 1)?];
    refused(Code::InvalidArgument, "communicates from CUDA device", on_stream.all_reduce(&elsewhere, ReduceOp::Sum));

    let mut state = State::new().with("x", &x[0]);
    unsafe { state.set_stream(rank, ptr::null_mut()) }?;
    refused(Code::InvalidArgument, "memory of the host", state.add("wrong", &wrong[0]));
    let saver = Saver::at(&comm, std::env::var("CHECKPOINTS").expect("CHECKPOINTS")).open()?;
    saver.save(1, &state)?;
    store(memory + 4, 0.0);
    assert_eq!(saver.resume(&mut state)?, 1);
    assert_eq!(load(memory + 4), (10 * ranks) as f32);
    drop((saver, state));
    on_stream.all_reduce(&x, ReduceOp::Sum)?;
    assert_eq!(load(memory + 4), (10 * ranks * ranks) as f32);

    store(memory, 5.0 + rank as f32);
    let mut ddp = Ddp::new(&comm, params!["w" => x[0].clone()])?;
    assert_eq!(load(memory), 5.0);
    unsafe { ddp.set_stream(ptr::null_mut()) }?;
    refused(Code::InvalidArgument, "is on CUDA device", ddp.grad(0));
    let grad = ddp.cuda_grad(0)?.address();
    store(grad, rank as f32 + 1.0);
    ddp.ready(0)?;
    ddp.wait()?;
    assert_eq!(load(grad), (ranks + 1) as f32 / 2.0);
    drop(ddp);
    comm.finalize()?;

    let gradient = allocate(i32::try_from(rank).unwrap(), 8);
    let mut model = CudaParams::new().with("x", tensor(memory, rank)?, tensor(gradient, rank)?);
    let mut optimizer = Sgd::new(&mut model).lr(0.5).build()?;
    unsafe { optimizer.set_stream(ptr::null_mut()) }?;
    store(memory, 1.0);
    store(gradient, 2.0);
    store(gradient + 4, 0.0);
    optimizer.step()?;
    assert_eq!(load(memory), 0.0);
    assert_eq!(optimizer.clip_grad_norm(1.0, 2.0)?, 2.0);
    assert!((0.999..1.0).contains(&load(gradient)));
    optimizer.zero_grad()?;
    assert_eq!(load(gradient), 0.0);
    let mut wrong = CudaParams::new().with("x", tensor(host.as_ptr() as usize, rank)?, tensor(gradient, rank)?);
    refused(Code::InvalidArgument, "is memory of the host", Sgd::new(&mut wrong).build());
    println!("rank {rank}: rust is well");
    Ok(())
}
