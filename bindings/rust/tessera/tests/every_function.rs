//! A tour through the whole API in one process, after which every function of the C library has been called. What each
//! does is tested elsewhere; this sees to it that none is left without a binding that works.

mod common;

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use common::{deadline, options, ranks, serve};
use tessera::{
    params, random, units, Adagrad, Adam, AdamW, CallbackResult, Checkpoint, Code, Comm, CrossEntropy, DType, Ddp,
    DdpJoin, DdpOptions, Engine, ExportOptions, Fsdp, GradScaler, Lamb, Layout, Level, Lion, LoadOptions, Local,
    LossScale, LrDecay, LrSchedule, Mesh, Metric, MetricKind, ObjectStorage, Optimizer, Pipeline, Placement, ReduceOp,
    Region, Sampler, Saver, Sgd, StageCall, Stages, State, StateDict, Stateful, Store, Style, Tensor, TensorParallel,
    Verify,
};

#[test]
fn every_function_of_the_c_library_is_called() {
    library_and_log();
    store();
    ranks(2, |comm| {
        collectives(&comm);
        training(&comm);
        training_with_options(&comm);
        training_on_one_copy(&comm);
        training_in_shards(&comm);
        training_in_slices(&comm);
        training_in_stages(&comm);
        training_as_configured(&comm);
        comm.finalize().unwrap();
    });
    let folder = tempfile::tempdir().unwrap();
    ranks(2, |comm| checkpoints(&comm, folder.path()));
    environment();

    let forgotten: Vec<_> = tessera_sys::meta::FUNCTIONS
        .iter()
        .map(|f| f.name)
        .filter(|name| !tessera_sys::meta::was_called(name))
        .collect();
    assert!(forgotten.is_empty(), "never called: {}", forgotten.join(", "));
}

struct Epoch(i64);

impl Stateful for Epoch {
    fn state_dict(&self) -> CallbackResult<StateDict> {
        Ok(StateDict::from([("epoch".to_owned(), self.0.into())]))
    }
    fn load_state_dict(&mut self, _values: StateDict) -> CallbackResult<()> {
        Ok(())
    }
}

fn library_and_log() {
    assert_eq!(tessera::version().unwrap(), "0.1.0");
    assert_eq!(tessera::abi_version().unwrap(), tessera::ABI_VERSION);
    assert!(tessera::library_path().unwrap().is_file());
    let lines = Arc::new(Mutex::new(Vec::new()));
    let kept = Arc::clone(&lines);
    tessera::set_log_level(Some(Level::Debug)).unwrap();
    tessera::set_log_callback(move |level, line| {
        kept.lock().unwrap().push((level, line.to_owned()));
        panic!("a log callback that panics (expected in this test)");
    })
    .unwrap();
    {
        let (_server, uri) = serve(); // a client of another epoch is worth a line
        let _refused = Store::open(&uri, &options().epoch(3).timeout(Duration::from_secs(5))).unwrap_err();
    }
    tessera::reset_log_callback().unwrap();
    tessera::set_log_level(Some(Level::Warning)).unwrap();
    assert!(!lines.lock().unwrap().is_empty());
    assert_eq!(Arc::strong_count(&lines), 1, "the callback was freed");
}

fn store() {
    let (server, uri) = serve();
    let store = Store::open(&uri, &options()).unwrap();
    store.set("key", b"1").unwrap();
    assert_eq!(store.add("key", 1).unwrap(), 2);
    assert!(store.compare_set("key", Some(b"2"), b"3").unwrap());
    store.wait("key", Some(deadline())).unwrap();
    assert_eq!(store.get("key").unwrap().unwrap(), b"3");
    assert!(store.delete("key").unwrap());
    drop((store, server));
}

fn collectives(comm: &Comm) {
    let (rank, n) = (comm.rank().unwrap(), comm.world_size().unwrap());
    assert_eq!((n, comm.transport().unwrap().as_str()), (2, "shm"));
    let (own, mut two, mut one) = ([rank as f32], [0.0f32; 2], [0.0f32]);
    comm.all_gather(&own, &mut two).unwrap();
    comm.all_reduce(&mut two, ReduceOp::Sum).unwrap();
    assert_eq!(two, [0.0, 2.0]);
    comm.reduce_scatter(&two, &mut one, ReduceOp::Max).unwrap();
    comm.broadcast(&mut two, 0).unwrap();
    comm.reduce(&own, (rank == 0).then_some(&mut one[..]), ReduceOp::Sum, 0).unwrap();
    comm.gather(&own, (rank == 0).then_some(&mut two[..]), 0).unwrap();
    comm.scatter((rank == 0).then_some(&[3.0f32, 4.0][..]), &mut one, 0).unwrap();
    assert_eq!(one, [3.0 + rank as f32]);
    comm.all_to_all(&[1.0, 2.0], &mut two).unwrap();
    let (mut first, mut second) = ([0.0f32; 2], [0.0f32; 2]);
    comm.all_gather_coalesced(&[&own, &[10.0]], &mut [&mut first, &mut second]).unwrap();
    assert_eq!((first, second), ([0.0, 1.0], [10.0; 2]));
    let mut parts = [[0.0f32], [0.0f32]];
    let [p, q] = &mut parts;
    comm.reduce_scatter_coalesced(&[&first, &second], &mut [p, q], ReduceOp::Sum).unwrap();
    assert_eq!(parts, [[2.0 * rank as f32], [20.0]]);
    let (mut a, mut b) = ([0.0f32], [0.0f32]);
    comm.all_gather_v(&own, &mut [&mut a, &mut b]).unwrap();
    if rank == 0 {
        comm.send(&own, 1, 0).unwrap();
    } else {
        comm.recv(&mut one, 0, 0).unwrap();
    }
    let mut work = comm.barrier_async().unwrap();
    work.on_done(|result| assert_eq!(result, Ok(())));
    // SAFETY: null is the default stream.
    unsafe { work.order(std::ptr::null_mut()) }.unwrap();
    assert!(work.wait_for(deadline()).unwrap() && work.is_done().unwrap() && work.error().unwrap().is_none());
    tessera::with_interrupt(|| false, || comm.barrier()).unwrap();
    let mut plan =
        comm.prepare(tessera::Collective::AllReduce, vec![], vec![vec![1.0f32; 3]], ReduceOp::Sum, 0).unwrap();
    plan.run().unwrap();
    plan.start().unwrap();
    plan.wait().unwrap();
    assert!(plan.wait_for(deadline()).unwrap());
    assert_eq!(plan.outputs().unwrap()[0], [4.0; 3]);
    assert!(plan.inputs().unwrap().is_empty());
    drop(plan);
    let turn = comm.turn(0, deadline(), |turn| turn.progress(1, 1)).unwrap();
    assert_eq!(turn.is_some(), rank == 0);
    random::uniform(&mut two, 1, 0, 0.0, 1.0, None).unwrap();
    random::normal(&mut two, 1, 0, 0.0, 1.0, None).unwrap();
    random::bernoulli(&mut two, 1, 0, 1.0, None).unwrap();
    assert_eq!(two, [1.0; 2]);
    let mut buffer = comm.buffer::<f32>(4).unwrap();
    comm.all_reduce(&mut buffer, ReduceOp::Sum).unwrap();

    let mesh = Mesh::new(comm, &[("dp", 2)]).unwrap();
    assert_eq!((mesh.ndim().unwrap(), mesh.size("dp").unwrap()), (1, 2));
    mesh.comm("dp").unwrap().barrier().unwrap();
    let flat = mesh.slice(&["dp"]).unwrap().flatten(comm, Some("all")).unwrap();
    flat.comm("all").unwrap().barrier().unwrap();

    let group = comm.split(Some(0), 0).unwrap().unwrap();
    let error = group.broadcast(&mut one, 5).unwrap_err();
    assert_eq!((error.code(), error.code().to_string().as_str()), (Code::InvalidArgument, "INVALID_ARGUMENT"));
    assert!(tessera::Error::last().is_none(), "taken");
    group.abort("enough").unwrap();
    assert!(group.error().unwrap().is_some());
    let error = group.grow().unwrap_err();
    assert_eq!(error.code(), Code::InvalidState);
    assert!(error.to_string().contains("tessera run --on-loss replace"), "{error}");
    let rest = group.shrink().unwrap();
    assert_eq!(rest.world_size().unwrap(), 2);
    rest.barrier().unwrap();
    assert_eq!(comm.refuse(tessera::Creation::Mesh, Code::Io, "no file").code(), Code::Io);
    comm.set_timeout(std::time::Duration::from_secs(90)).unwrap();
    assert_eq!(comm.timeout().unwrap(), std::time::Duration::from_secs(90));
    let trace = std::env::temp_dir().join(format!("tessera-trace-{}-{}", std::process::id(), comm.rank().unwrap()));
    comm.write_trace(&trace).unwrap();
    assert!(std::fs::read_to_string(&trace).unwrap().starts_with("{\"tessera_flight\":1,"));
    std::fs::remove_file(&trace).unwrap();
}

fn training(comm: &Comm) {
    let weights = || params!["w" => (vec![1.0f32; 4], [2, 2])];
    let mut ddp = Ddp::new(comm, weights()).unwrap();
    let mut opts = [
        Sgd::new(&mut ddp).build().unwrap(),
        Adam::new(&mut ddp).build().unwrap(),
        AdamW::new(&mut ddp).build().unwrap(),
        Adagrad::new(&mut ddp).build().unwrap(),
        Lion::new(&mut ddp).build().unwrap(),
        Lamb::new(&mut ddp).build().unwrap(),
    ];
    ddp.zero_grad().unwrap();
    // SAFETY: null is the only stream of the CPU.
    unsafe { ddp.set_stream(std::ptr::null_mut()) }.unwrap();
    ddp.grad_mut(0).unwrap().fill(1.0);
    ddp.ready(0).unwrap();
    ddp.ready_all().unwrap();
    ddp.wait().unwrap();
    for opt in &mut opts {
        unsafe { opt.set_stream(std::ptr::null_mut()) }.unwrap();
        opt.set_lr(0.5).unwrap();
        assert!(opt.clip_grad_norm(1.0, 2.0).unwrap() <= 2.0);
        opt.clip_grad_value(0.5).unwrap();
        opt.step().unwrap();
        assert_eq!((opt.lr().unwrap(), opt.steps().unwrap()), (0.5, 1));
        opt.zero_grad().unwrap();
    }
    let mut local = Local::new(weights()).unwrap();
    Sgd::new(&mut local).build().unwrap().step().unwrap();
    Adam::new(&mut local).build().unwrap().step().unwrap();
    AdamW::new(&mut local).build().unwrap().step().unwrap();
    Adagrad::new(&mut local).build().unwrap().step().unwrap();
    Lion::new(&mut local).build().unwrap().step().unwrap();
    Lamb::new(&mut local).build().unwrap().step().unwrap();
    let mut scaler = GradScaler::builder().init_scale(2.0).build().unwrap();
    let mut opt = Sgd::new(&mut local).build().unwrap();
    scaler.unscale(&mut opt).unwrap();
    assert!(scaler.step(&mut opt).unwrap());
    scaler.update().unwrap();
    assert_eq!(scaler.scale().unwrap(), 2.0);
    schedules(&mut opt);
    let mut sampler = Sampler::new(comm, 10).build().unwrap();
    sampler.set_epoch(1).unwrap();
    assert_eq!((sampler.batch(2).unwrap().len(), sampler.epoch().unwrap()), (2, 1));
    assert_eq!(sampler.valid().unwrap(), [1, 1]);
    let mut matrix = Metric::new(MetricKind::ConfusionMatrix).build().unwrap();
    let labels = Tensor::new(vec![0i64, 1], [2]).unwrap();
    matrix.update(&labels, Some(&labels)).unwrap();
    matrix.merge(&Metric::new(MetricKind::ConfusionMatrix).build().unwrap()).unwrap();
    matrix.gather(comm).unwrap();
    State::new().add("matrix", &matrix.on(comm)).unwrap();
    assert!(matrix.compute(Some(comm)).unwrap().is_nan());
    assert_eq!(matrix.counts("matrix").unwrap(), [2, 0, 0, 2]);
    matrix.reset().unwrap();
}

fn schedules(opt: &mut Optimizer<'_>) {
    let kinds = [
        LrSchedule::constant(0.5, 2).unwrap(),
        LrSchedule::linear(0.5, 1.0, 2).unwrap(),
        LrSchedule::step_decay(2, 0.5).unwrap(),
        LrSchedule::multi_step_decay(&[1, 2], 0.5).unwrap(),
        LrSchedule::exponential(0.5).unwrap(),
        LrSchedule::polynomial(9, 2.0).unwrap(),
        LrSchedule::cosine(9, 0.1).unwrap(),
        LrSchedule::cosine_restarts(9, 2, 0.1).unwrap(),
        LrSchedule::inverse_sqrt(2).unwrap(),
        LrSchedule::wsd(1, 1, 9, LrDecay::Sqrt, 0.1).unwrap(),
        LrSchedule::warmup().build().unwrap(),
        LrSchedule::warmup_cosine().total_num_steps(1000).build().unwrap(),
    ];
    let cycle = LrSchedule::one_cycle().cycle_max_lr(1.0).build().unwrap();
    let range = LrSchedule::range_test(0.1, 2, 1.0, false).unwrap();
    let mut schedule = LrSchedule::sequential([&LrSchedule::chained(&kinds).unwrap(), &range], &[2]).unwrap();
    schedule.attach(opt).unwrap();
    schedule.step().unwrap();
    schedule.set_steps(4).unwrap();
    assert_eq!((schedule.steps().unwrap(), opt.lr().unwrap()), (4, schedule.lr_at(4, 1.0).unwrap()));
    assert_eq!(cycle.momentum_at(0).unwrap(), Some(0.9));
}

fn training_with_options(comm: &Comm) {
    let weights = params!["w" => (vec![1.0f32; 4], [2, 2])];
    let options = DdpOptions::new().join(DdpJoin::DivideByWorld);
    let mut ddp = Ddp::with_options(comm, weights, &options).unwrap();
    let mut opt = Sgd::new(&mut ddp).build().unwrap();
    let counts = Tensor::new(vec![7i64], [1]).unwrap();
    ddp.register_buffers(params!["counts" => &counts]).unwrap();
    ddp.broadcast_buffers().unwrap();
    ddp.set_sync(false).unwrap();
    ddp.set_sync(true).unwrap();
    ddp.set_hook(|_| Ok(())).unwrap();
    ddp.step_in_backward(&mut opt).unwrap();
    ddp.ready_all().unwrap();
    ddp.wait().unwrap();
    assert_eq!((opt.steps().unwrap(), ddp.used(0).unwrap(), ddp.stats().unwrap().len()), (1, true, 1));
    ddp.join(false).unwrap();
}

fn training_on_one_copy(comm: &Comm) {
    let weights = params!["w" => (vec![1.0f32; 4], [2, 2])];
    let mut ddp = Ddp::with_options(comm, weights, &DdpOptions::new().share_params(true)).unwrap();
    let _opt = Sgd::new(&mut ddp).build().unwrap();
    ddp.ready_all().unwrap();
    ddp.wait().unwrap();
    assert_eq!(ddp.shared_step().unwrap(), 1);
}

fn training_in_shards(comm: &Comm) {
    let mut fsdp = Fsdp::new(comm, units!["u" => params!["w" => (vec![1.0f32; 6], [3, 2])]]).unwrap();
    let mut opts = [
        Sgd::new(&mut fsdp).build().unwrap(),
        Adam::new(&mut fsdp).build().unwrap(),
        AdamW::new(&mut fsdp).build().unwrap(),
        Adagrad::new(&mut fsdp).build().unwrap(),
        Lion::new(&mut fsdp).build().unwrap(),
        Lamb::new(&mut fsdp).build().unwrap(),
    ];
    State::new().add("model", &fsdp).unwrap();
    assert_eq!(fsdp.layout(0).unwrap().regions(1).unwrap()[0].sizes, [1, 2]);
    unsafe { fsdp.set_stream(std::ptr::null_mut()) }.unwrap();
    fsdp.set_sync(true).unwrap();
    fsdp.set_accumulate(false).unwrap();
    fsdp.set_all_reduce(true).unwrap();
    fsdp.set_reshard_after_backward(0, true).unwrap();
    assert_eq!((fsdp.phase(0).unwrap(), fsdp.unit_name(0)), (tessera::UnitPhase::Sharded, Some("u")));
    fsdp.forward(0).unwrap().done().unwrap();
    fsdp.abandon().unwrap();
    let guard = fsdp.backward(0).unwrap();
    guard.grad_mut(0).unwrap().fill(1.0);
    guard.unused(0).unwrap();
    guard.ready().unwrap();
    fsdp.wait().unwrap();
    assert!(!fsdp.used(0).unwrap());
    assert_eq!(fsdp.shard_grad(0).unwrap()[0], 0.0);
    opts.iter_mut().for_each(|opt| opt.step().unwrap());
    fsdp.unshard(0).unwrap();
    fsdp.whole(0).unwrap().reshard().unwrap();
    fsdp.zero_grad().unwrap();
}

fn training_in_slices(comm: &Comm) {
    let mesh = Mesh::new(comm, &[("dp", 1), ("tp", 2)]).unwrap();
    let mut tp = TensorParallel::builder(&mesh, params!["tok" => (vec![1.0f32; 6], [3, 2])])
        .dim("tp")
        .plan([("tok", Style::Vocabulary)])
        .build()
        .unwrap();
    let mut opts = [
        Sgd::new(&mut tp).build().unwrap(),
        Adam::new(&mut tp).build().unwrap(),
        AdamW::new(&mut tp).build().unwrap(),
        Adagrad::new(&mut tp).build().unwrap(),
        Lion::new(&mut tp).build().unwrap(),
        Lamb::new(&mut tp).build().unwrap(),
    ];
    State::new().add("model", &tp).unwrap();
    assert_eq!((tp.cut(0), tp.layout(0).unwrap().regions(1).unwrap()[0].offsets[0]), (Some(0), 2));
    let (mut part, mut whole) = ([0.0f32; 2], [0.0f32; 4]);
    tp.embed(0, &[0i64, 2], &mut part, &[2, 2], Some(0)).unwrap();
    tp.enter(&part, &mut whole, &[2, 2], Some(0)).unwrap();
    tp.leave(&whole, &mut part, &[2, 2], Some(0), None).unwrap();
    tp.enter_parts(&part, &mut whole, &[2, 2], 0, |_, _| Ok(())).unwrap();
    tp.leave_parts(&mut part, &[2, 2], 0, None, |_, part| {
        part.fill(1.0);
        Ok(())
    })
    .unwrap();
    tp.leave_backward(&part, &mut whole, &[2, 2], Some(0)).unwrap();
    tp.enter_backward(&whole, &mut part, &[2, 2], Some(0)).unwrap();
    tp.gather(&part, &mut whole, &[2, 2], 0).unwrap();
    tp.split(&whole, &mut part, &[2, 2], 0).unwrap();
    tp.embed_backward(0, &[0i64, 2], &part, &[2, 2], Some(0)).unwrap();
    assert_eq!((part, tp.grad(0).unwrap()[0]), ([4.0; 2], 4.0));
    let logits = vec![0.0f32; tp.part(3).len()];
    let mut loss = [0.0f32];
    tp.cross_entropy(&CrossEntropy::new(3), &logits, &[1i64], &mut loss, None).unwrap();
    unsafe { tp.set_stream(std::ptr::null_mut()) }.unwrap();
    tp.sum_grads().unwrap();
    opts.iter_mut().for_each(|opt| opt.step().unwrap());
    tp.zero_grad().unwrap();
}

struct Pass;

impl Stages for Pass {
    fn forward(&mut self, call: &StageCall<'_>) -> CallbackResult<()> {
        call.output::<f32>(call.inputs()[0].shape())?.copy_from_slice(call.inputs()[0].view()?);
        if !call.targets().is_empty() {
            call.loss(0.5)?;
        }
        Ok(())
    }
    fn backward(&mut self, _call: &StageCall<'_>) -> CallbackResult<()> {
        Ok(())
    }
}

fn training_in_stages(comm: &Comm) {
    let mut pipe = Pipeline::builder(comm, &[comm.rank().unwrap()]).microbatches(2).build().unwrap();
    let batch = [Tensor::zeros(DType::F32, [2, 3]).unwrap()];
    assert_eq!(pipe.step(&mut Pass, &batch, &batch).unwrap(), [0.5; 2]);
    assert_eq!(pipe.eval(&mut Pass, &batch, &batch).unwrap(), [0.5; 2]);
    let mut grad = [1.0f32];
    pipe.sum_tied(&mut grad, &[0, 1]).unwrap();
    unsafe { pipe.set_stream(std::ptr::null_mut()) }.unwrap();
    assert_eq!((grad, pipe.stats().unwrap().peak_activations), ([2.0], 1));
}

fn training_as_configured(comm: &Comm) {
    let config = r#"{"train_batch_size": 4, "optimizer": {"type": "SGD", "params": {"lr": 1}},
        "zero_optimization": {"stage": 1}, "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.5}}}"#;
    assert_eq!(Engine::resolve(config, 2).unwrap().get("train_micro_batch_size_per_gpu"), Some(&2.into()));
    let schedule = LrSchedule::from_config(config).unwrap();
    let mut engine = Engine::new(comm, [("u", params!["w" => (vec![1.0f32; 6], [3, 2])])], config).unwrap();
    State::new().add("engine", &engine).unwrap();
    assert_eq!(engine.description().unwrap().get("train_batch_size"), Some(&4.into()));
    assert_eq!((engine.unit_count(), engine.len(), engine.name(0), engine.index("w")), (1, 1, Some("w"), Some(0)));
    assert_eq!(engine.optimizer().unwrap().lr().unwrap(), schedule.lr_at(0, 1.0).unwrap());
    assert_eq!(engine.schedule().unwrap().unwrap().steps().unwrap(), 0);
    engine.set_lr(0.5).unwrap();
    assert_eq!(engine.lr().unwrap(), 0.5);
    engine.set_train_micro_batch_size(1).unwrap();
    engine.set_train_batch_size(6).unwrap();
    assert_eq!((engine.train_batch_size().unwrap(), engine.gradient_accumulation_steps().unwrap()), (6, 3));
    engine.set_boundary(Some(true)).unwrap();
    assert!(engine.is_boundary().unwrap());
    assert_eq!((engine.loss_factor().unwrap(), engine.loss_scale().unwrap()), (1.0 / 3.0, 1.0));
    engine.forward(0).unwrap().done().unwrap();
    let mut guard = engine.backward(0).unwrap();
    assert_eq!(guard.param(0).unwrap()[..], [1.0; 6]);
    guard.grad_mut(0).unwrap().fill(0.1);
    guard.ready_param(0).unwrap();
    drop(guard);
    engine.backward_done().unwrap();
    assert!(engine.step().unwrap() && engine.grad_norm().unwrap().is_some());
    engine.begin_no_sync().unwrap();
    engine.backward(0).unwrap().ready().unwrap();
    engine.backward_done().unwrap();
    assert!(engine.adds_gradients().unwrap());
    engine.end_no_sync().unwrap();
    engine.set_training(false).unwrap();
    assert!(!engine.is_training().unwrap());
    assert_eq!(engine.counts().unwrap().micro_steps, 1);
    let mut scale = LossScale::builder().initial(4.0).hysteresis(1).build().unwrap();
    assert_eq!((scale.update(true).unwrap(), scale.value().unwrap()), (2.0, 2.0));
    let state = scale.state_dict().unwrap();
    scale.load_state_dict(state).unwrap();
}

fn checkpoints(comm: &Comm, root: &std::path::Path) {
    let rank = comm.rank().unwrap();
    let mut ddp = Ddp::new(comm, params!["w" => (vec![1.0f32; 4], [2, 2])]).unwrap();
    let mut opt = AdamW::new(&mut ddp).build().unwrap();
    opt.join(comm).unwrap();
    let data = Sampler::new(comm, 10).build().unwrap();
    let plain = Tensor::zeros(DType::F32, [3]).unwrap();
    let layout = Layout::new(&[4], &[2], &[Placement::Shard(0)]).unwrap();
    let part = Region { offsets: vec![0], sizes: vec![4] };
    assert_eq!(Layout::from_regions(&[4], &[vec![part.clone()]]).unwrap().regions(0).unwrap(), [part]);
    let gathered = Layout::gather(comm, &[4], &[Region { offsets: vec![2 * rank], sizes: vec![2] }]).unwrap();
    assert_eq!(gathered.regions(1).unwrap(), layout.regions(1).unwrap());
    let mut state = State::new().with("model", &ddp).with("optim", &opt).with("data", &data).with("plain", &plain);
    // SAFETY: null is the default stream of any device.
    let refused = unsafe { state.set_stream(1000, std::ptr::null_mut()) }.unwrap_err();
    assert!(matches!(refused.code(), Code::Unsupported | Code::InvalidArgument), "{refused}");
    state.add_sharded("parts", &layout, DType::F32, &[Tensor::zeros(DType::F32, [2]).unwrap()], rank).unwrap();
    state.add("scaler", &GradScaler::builder().build().unwrap()).unwrap();
    state.add("schedule", &LrSchedule::exponential(0.5).unwrap()).unwrap();
    state.add("own", &Rc::new(RefCell::new(Epoch(1)))).unwrap();
    state.set("int", 1i64).unwrap();
    state.set("double", 0.5).unwrap();
    state.set("text", "x").unwrap();
    state.set_metric("loss", 1.0).unwrap();
    assert!(!state.tensors().unwrap().is_empty());
    state.join(comm).unwrap();
    assert!(state.gather(comm, "plain", None).unwrap().is_some());
    assert_eq!((state.get_int("int").unwrap(), state.get_double("double").unwrap()), (1, 0.5));
    assert_eq!(state.get("text").unwrap(), "x".into());
    let saver = Saver::at(comm, root).open().unwrap();
    saver.save(1, &state).unwrap();
    let mut save = saver.save_async(2, &state).unwrap();
    assert!(save.staged().is_done().unwrap());
    save.wait().unwrap();
    saver.wait().unwrap();
    saver.trim().unwrap();
    assert!(!saver.should_stop(2, false).unwrap());
    assert_eq!(saver.resume(&mut state).unwrap(), 2);
    let checkpoint = Checkpoint::open(root).unwrap();
    assert!(checkpoint.path().unwrap().is_dir() && checkpoint.manifest().unwrap().starts_with('{'));
    assert_eq!((checkpoint.step().unwrap(), checkpoint.tensors().unwrap().len() > 3), (2, true));
    assert_eq!(checkpoint.read("parts").unwrap().len(), 4);
    assert!(checkpoint.load(&mut state, &LoadOptions::new()).unwrap().verified);
    checkpoint.verify(Verify::Full).unwrap();
    checkpoint.verify_with_progress(Verify::Headers, |_| {}).unwrap();
    checkpoint.export(root.join("exported"), Some(comm), &ExportOptions::new()).unwrap();
    let storage = Arc::new(ObjectStorage::new(Arc::new(object_store::memory::InMemory::new())).unwrap());
    Saver::alone("root").storage(storage.clone()).open().unwrap().save(5, &State::new().with("plain", &plain)).unwrap();
    assert_eq!(Checkpoint::open_in(storage, "root").unwrap().step().unwrap(), 5);
}

/// The environment is the process's: this comes last, when no other thread is left.
fn environment() {
    for name in ["RANK", "WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_NTASKS"] {
        std::env::remove_var(name);
    }
    let comm = Comm::from_env().unwrap();
    assert_eq!((comm.rank().unwrap(), comm.world_size().unwrap()), (0, 1));
    assert!(!tessera::preempt_requested());
    let file = tempfile::NamedTempFile::new().unwrap();
    std::env::set_var("TESSERA_ERROR_FILE", file.path());
    tessera::record_error("it failed", Some("at line 1")).unwrap();
    assert!(std::fs::read_to_string(file.path()).unwrap().contains("it failed"));
    tessera::record_error_about("a later one", Code::Timeout, Some(1)).unwrap();
    let refused = tessera::record_error_about("of no code", Code::Other(0), None).unwrap_err();
    assert_eq!(refused.code(), Code::InvalidArgument);
}
