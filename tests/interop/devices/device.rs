//! A rank on a simulated CUDA device, for test_devices.py: collectives over memory of the device, a checkpoint of it,
//! what is refused, and steps of DDP, of FSDP, of tensor-parallel models, of a pipeline and of optimizers.

use std::ffi::{c_char, c_int, c_void};
use std::ptr;

use tessera::{
    params, units, CallbackResult, Code, Comm, CommOptions, CrossEntropy, CudaParams, CudaTensor, DType, Ddp, Fsdp,
    FsdpUnit, IntoTensor, Mesh, Pipeline, ReduceOp, Result, Saver, Sgd, StageCall, Stages, State, Style, Tensor,
    TensorParallel,
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

/// Memory of the simulated devices.
#[derive(Clone, Copy)]
struct Devices {
    allocate: extern "C" fn(c_int, usize) -> usize,
    store: extern "C" fn(usize, f32),
    load: extern "C" fn(usize) -> f32,
}

impl Devices {
    fn find() -> Self {
        unsafe {
            Devices {
                allocate: std::mem::transmute(function(c"simulated_cuda_allocate")),
                store: std::mem::transmute(function(c"simulated_cuda_store")),
                load: std::mem::transmute(function(c"simulated_cuda_load")),
            }
        }
    }

    fn write(&self, tensor: &CudaTensor, values: &[f32]) {
        values.iter().enumerate().for_each(|(i, &value)| (self.store)(tensor.address() + 4 * i, value));
    }

    fn read(&self, tensor: &CudaTensor, count: usize) -> Vec<f32> {
        (0..count).map(|i| (self.load)(tensor.address() + 4 * i)).collect()
    }
}

fn times(values: &[f32], factor: f32) -> Vec<f32> {
    values.iter().map(|value| value * factor).collect()
}

/// Three steps of SGD, in which rank r's gradient is (r + 1) times the parameter; all ranks make these calls.
fn fsdp_trains(comm: &Comm, devices: Devices) -> Result<()> {
    let (rank, ranks) = (comm.rank()?, comm.world_size()?);
    let mut expected: [Vec<f32>; 2] =
        [(1..=8).map(|i| 8.0 * i as f32).collect(), (1..=4).map(|i| -4.0 * i as f32).collect()];
    let given = expected.clone().map(|full| {
        let address = (devices.allocate)(i32::try_from(rank).unwrap(), 4 * full.len());
        let tensor = unsafe { CudaTensor::new(address, DType::F32, [full.len()], rank) }.unwrap();
        devices.write(&tensor, &if rank == 0 { full } else { vec![rank as f32; full.len()] });
        tensor
    });
    let [w, v] = given;
    let late = Tensor::deferred_on(rank, DType::F32, [3])?;
    let second = FsdpUnit::new(params!["v" => v, "late" => late]).frozen(["late"]);
    let mut fsdp = Fsdp::new(comm, units!["first" => params!["w" => w], "second" => second])?;
    unsafe { fsdp.set_stream(ptr::null_mut()) }?;
    let mut optimizer = Sgd::new(&mut fsdp).lr(0.25).build()?;
    unsafe { optimizer.set_stream(ptr::null_mut()) }?;
    let rows = |full: &[f32]| {
        let each = full.len().div_ceil(ranks);
        full.chunks(each).nth(rank).unwrap_or_default().to_vec()
    };
    let average = (ranks + 1) as f32 / 2.0;
    for _ in 0..3 {
        let layer = fsdp.forward(0)?;
        assert_eq!(devices.read(layer.cuda_param(0)?, 8), expected[0]);
        refused(Code::InvalidArgument, "is on CUDA device", layer.param(0));
        layer.done()?;
        let layer = fsdp.forward(1)?;
        assert_eq!(devices.read(layer.cuda_param(1)?, 4), expected[1]);
        assert_eq!(devices.read(layer.cuda_param(2)?, 3), [0.0; 3]);
        layer.done()?;
        for p in [1, 0] {
            let layer = fsdp.backward(p)?;
            let full = &expected[p];
            assert_eq!(devices.read(layer.cuda_param(p)?, full.len()), *full);
            refused(Code::InvalidArgument, "is on CUDA device", layer.grad_mut(p).map(|_| ()));
            devices.write(layer.cuda_grad(p)?, &times(full, (rank + 1) as f32));
            layer.ready()?;
        }
        fsdp.wait()?;
        refused(Code::InvalidState, "is frozen", fsdp.cuda_shard_grad(2));
        let mut squares = 0.0;
        for (p, full) in expected.iter().enumerate() {
            let own = rows(full);
            assert_eq!(devices.read(&fsdp.cuda_shard_grad(p)?, own.len()), times(&own, average));
            squares += full.iter().map(|value| f64::from(value * average).powi(2)).sum::<f64>();
        }
        assert!((optimizer.clip_grad_norm(1e6, 2.0)? / squares.sqrt() - 1.0).abs() < 1e-5);
        optimizer.step()?;
        expected = expected.map(|full| full.iter().map(|value| value - 0.25 * average * value).collect());
    }
    let mut state = State::new().with("model", &fsdp).with("optim", &optimizer);
    unsafe { state.set_stream(rank, ptr::null_mut()) }?;
    let saver = Saver::at(comm, std::env::var("CHECKPOINTS").expect("CHECKPOINTS") + "/fsdp").open()?;
    saver.save(3, &state)?;
    for (p, full) in expected.iter().enumerate() {
        devices.write(&fsdp.cuda_shard(p)?, &vec![7.0; rows(full).len()]);
    }
    assert_eq!(saver.resume(&mut state)?, 3);
    for (p, full) in expected.iter().enumerate() {
        let own = rows(full);
        assert_eq!(devices.read(&fsdp.cuda_shard(p)?, own.len()), own);
    }
    drop((saver, state));
    refused(Code::InvalidArgument, "is on CUDA device", fsdp.shard(0));
    fsdp.unshard(0)?;
    fsdp.unshard(1)?;
    let layers = [fsdp.whole(0)?, fsdp.whole(1)?];
    for (p, (layer, full)) in layers.iter().zip(&expected).enumerate() {
        assert_eq!(devices.read(layer.cuda_param(p)?, full.len()), *full);
    }
    for layer in layers {
        layer.reshard()?;
    }
    fsdp.forward(0)?.done()?;
    fsdp.abandon()
}

/// An embedding of 5 words over the ranks, and a norm's weight; all ranks make these calls.
fn tensor_parallel_trains(comm: &Comm, devices: Devices) -> Result<()> {
    let (rank, ranks) = (comm.rank()?, comm.world_size()?);
    let at = |shape: &[usize], dtype: DType, values: &[f32]| {
        let address = (devices.allocate)(i32::try_from(rank).unwrap(), 4 * values.len().max(1));
        let tensor = unsafe { CudaTensor::new(address, dtype, shape, rank) }.unwrap();
        devices.write(&tensor, values);
        tensor
    };
    let tok: Vec<f32> = (0..10).map(|k| if rank == 0 { k as f32 } else { -1.0 }).collect();
    let (tok, norm) = (at(&[5, 2], DType::F32, &tok), at(&[2], DType::F32, &[1.0; 2]));
    let mesh = Mesh::new(comm, &[("tp", ranks)])?;
    let mut tp = TensorParallel::builder(&mesh, params!["tok" => tok, "norm" => norm])
        .plan([("tok", Style::Vocabulary), ("norm", Style::Sequence)])
        .build()?;
    unsafe { tp.set_stream(ptr::null_mut()) }?;
    let mut optimizer = Sgd::new(&mut tp).lr(0.5).build()?;
    let own = tp.part(5);
    let expected: Vec<f32> = own.clone().flat_map(|i| [2.0 * i as f32, 2.0 * i as f32 + 1.0]).collect();
    assert_eq!(devices.read(&tp.cuda_slice(0)?, 2 * own.len()), expected);
    refused(Code::InvalidArgument, "is on CUDA device", tp.slice(0).map(|_| ()));

    let (own_rank, n, total) = (rank as f32 + 1.0, ranks as f32, (ranks * (ranks + 1)) as f32 / 2.0);
    let x = at(&[1, 2], DType::F32, &[own_rank; 2]);
    let part = at(&[1, 2], DType::F32, &[0.0; 2]);
    let whole = at(&[ranks, 2], DType::F32, &vec![0.0; 2 * ranks]);
    let on_stream = unsafe { tp.on_stream(ptr::null_mut()) };
    on_stream.enter(&x, &whole, Some(0))?;
    assert_eq!(devices.read(&whole, 2 * ranks)[2 * ranks - 1], n);
    on_stream.leave(&whole, &part, Some(0), Some(&tp.cuda_slice(1)?))?;
    assert_eq!(devices.read(&part, 2), [n * own_rank + 1.0; 2]);
    let work = unsafe { tp.after_stream(ptr::null_mut()) }.enter_backward(&part, &part, None)?;
    unsafe { work.order(ptr::null_mut()) }?;
    assert_eq!(devices.read(&part, 2), [n * total + n; 2]);
    work.wait()?;
    let mut seen = 0.0;
    on_stream.enter_parts(&x, &whole, 0, |begin, one| {
        seen += begin as f32 + devices.read(one, 1)[0];
        Ok(())
    })?;
    assert_eq!(seen, n * n);
    on_stream.leave_parts(&part, ranks, 0, None, |begin, one| {
        devices.write(one, &[begin as f32; 2]);
        Ok(())
    })?;
    assert_eq!(devices.read(&part, 2), [n * rank as f32; 2]);

    let ids = at(&[2], DType::I32, &[f32::from_bits(4), f32::from_bits(0)]);
    let rows = at(&[2, 2], DType::F32, &[7.0; 4]);
    on_stream.embed(0, &ids, &rows, None)?;
    assert_eq!(devices.read(&rows, 4), [8.0, 9.0, 0.0, 1.0]);
    on_stream.embed_backward(0, &ids, &rows, None)?;
    let expected: Vec<f32> = own
        .clone()
        .flat_map(|i| [2 * i, 2 * i + 1].map(|value| if i == 0 || i == 4 { value as f32 } else { 0.0 }))
        .collect();
    assert_eq!(devices.read(&tp.cuda_grad(0)?, 2 * own.len()), expected);
    let logits = at(&[2, own.len()], DType::F32, &vec![0.0; 2 * own.len()]);
    let loss = at(&[], DType::F32, &[0.0]);
    on_stream.cross_entropy(&CrossEntropy::new(5), &logits, &ids, &loss, Some(&logits))?;
    assert!((devices.read(&loss, 1)[0] / 5f32.ln() - 1.0).abs() < 1e-6);

    devices.write(&tp.cuda_grad(1)?, &[own_rank; 2]);
    refused(Code::InvalidState, "call sum_grads", optimizer.step());
    tp.sum_grads()?;
    assert_eq!(devices.read(&tp.cuda_grad(1)?, 2), [total; 2]);
    optimizer.step()?;
    assert_eq!(devices.read(&tp.cuda_slice(1)?, 2), [1.0 - 0.5 * total; 2]);
    tp.zero_grad()?;
    assert_eq!(devices.read(&tp.cuda_grad(1)?, 2), [0.0; 2]);
    Ok(())
}

/// A stage y = (stage + 2) * x, element by element. The loss is the sum of the last y.
struct Stage {
    devices: Devices,
    last: usize,
    grad: f32,
}

impl Stages for Stage {
    fn forward(&mut self, call: &StageCall<'_>) -> CallbackResult<()> {
        let count = call.inputs()[0].len();
        let made = call.cuda_output(DType::F32, [count])?;
        refused(Code::InvalidArgument, "use cuda_output", call.output::<f32>([count]));
        refused(Code::InvalidArgument, "is on CUDA device", call.inputs()[0].view::<f32>());
        let y = times(&self.devices.read(&call.inputs()[0].cuda()?, count), (call.stage() + 2) as f32);
        self.devices.write(&made, &y);
        if call.stage() == self.last {
            call.loss(f64::from(y.iter().sum::<f32>()))?;
        }
        Ok(())
    }

    fn backward(&mut self, call: &StageCall<'_>) -> CallbackResult<()> {
        let count = call.inputs()[0].len();
        let x = self.devices.read(&call.inputs()[0].cuda()?, count);
        let delta = match call.output_grads() {
            [grad] => self.devices.read(&grad.cuda()?, count),
            _ => vec![call.weight() as f32; count],
        };
        self.grad += x.iter().zip(&delta).map(|(x, delta)| x * delta).sum::<f32>();
        if call.has_input_grad(0) {
            self.devices.write(&call.cuda_input_grad(0)?, &times(&delta, (call.stage() + 2) as f32));
        }
        Ok(())
    }
}

/// Two steps, after which each stage's gradient is added to the others'; all ranks make these calls.
fn pipeline_trains(comm: &Comm, devices: Devices) -> Result<()> {
    let (rank, ranks) = (comm.rank()?, comm.world_size()?);
    let on = |values: &[f32]| {
        let address = (devices.allocate)(i32::try_from(rank).unwrap(), 4 * values.len());
        let tensor = unsafe { CudaTensor::new(address, DType::F32, [values.len()], rank) }.unwrap();
        devices.write(&tensor, values);
        tensor
    };
    let mut stage = Stage { devices, last: ranks - 1, grad: 0.0 };
    let mut pipe = Pipeline::builder(comm, &[rank]).microbatches(4).on_device(true).build()?;
    unsafe { pipe.set_stream(ptr::null_mut()) }?;
    let batch = [on(&[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]).into_tensor()?]; // in micro-batches of 2, 2, 1 and 1
    let product: f32 = (0..ranks).map(|stage| (stage + 2) as f32).product();
    let grad = |stage: usize| 21.0 * product / (stage + 2) as f32 / 4.0;
    for step in [1.0, 2.0] {
        let losses = pipe.step(&mut stage, &batch, &[])?;
        assert_eq!(losses, [3.0, 7.0, 5.0, 6.0].map(|sum| f64::from(sum * product)));
        assert_eq!(stage.grad, grad(rank) * step);
    }
    let tied = on(&[stage.grad]);
    pipe.cuda_sum_tied(&tied, &(0..ranks).collect::<Vec<_>>())?;
    assert_eq!(devices.read(&tied, 1), [(0..ranks).map(|stage| 2.0 * grad(stage)).sum::<f32>()]);
    Ok(())
}

fn main() -> Result<()> {
    let comm = Comm::from_env_with(&CommOptions::new().backend("cpu:auto,cuda:nccl"))?;
    let (rank, ranks) = (comm.rank()?, comm.world_size()?);
    let devices = Devices::find();
    let Devices { allocate, store, load } = devices;
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
    fsdp_trains(&comm, devices)?;
    tensor_parallel_trains(&comm, devices)?;
    pipeline_trains(&comm, devices)?;
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
