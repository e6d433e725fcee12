//! DeepSpeed's engine: trainings that equal those of DDP at every stage, boundaries, overflows, schedules, checkpoints at other
//! sizes, and what is refused.

mod common;

use std::fmt::Debug;
use std::path::Path;

use common::{alone, ranks};
use half::{bf16, f16};
use tessera::{
    params, AdamW, Code, Comm, DType, Ddp, Element, Engine, EngineCounts, LrSchedule, Params, Result, Saver, State,
    Tensor, Value, ViewMut,
};

const BATCH: usize = 12; // samples of all ranks per step
const HIDDEN: usize = 4;
const IN: usize = 3;

// --- configurations

/// Whose defaults are not those of the optimizer.
fn adamw(stage: usize, accumulation: usize, more: &str) -> String {
    format!(
        "{{\"train_batch_size\": {BATCH}, \"gradient_accumulation_steps\": {accumulation}, \"gradient_clipping\": 0.3,
           \"optimizer\": {{\"type\": \"AdamW\", \"params\": {{\"lr\": 0.02, \"weight_decay\": 0.1}}}},
           \"zero_optimization\": {{\"stage\": {stage}}}{more}}}"
    )
}

/// With a rate of 1, so that parameters are minus the sum of their gradients.
fn sgd(stage: usize, accumulation: usize, more: &str) -> String {
    format!(
        "{{\"train_micro_batch_size_per_gpu\": 1, \"gradient_accumulation_steps\": {accumulation}, \"gradient_clipping\": 0,
           \"optimizer\": {{\"type\": \"SGD\", \"params\": {{\"lr\": 1}}}},
           \"zero_optimization\": {{\"stage\": {stage}}}{more}}}"
    )
}

// --- a network with one hidden layer of tanh, in two units

/// Only rank 0's values count.
fn network(rank: usize) -> [(&'static str, Params); 2] {
    let values = |count, offset: usize| {
        (0..count).map(|i| ((i * 7 + offset) as f64).sin() / 2.0 + rank as f64).collect::<Vec<f64>>()
    };
    [
        ("first", params!["module.w" => (values(HIDDEN * IN, 1), [HIDDEN, IN]), "b" => (values(HIDDEN, 2), [HIDDEN])]),
        ("second", params!["v" => (values(HIDDEN, 3), [HIDDEN])]),
    ]
}

/// The gradients of the mean squared error over samples `begin` to `begin + count`, times a factor.
fn gradients(p: &[Vec<f64>], begin: usize, count: usize, factor: f64) -> Vec<Vec<f64>> {
    let mut grads = vec![vec![0.0; HIDDEN * IN], vec![0.0; HIDDEN], vec![0.0; HIDDEN]];
    for sample in (begin..begin + count).map(|sample| sample as f64) {
        let x = [sample.sin(), (3.0 * sample).cos(), (5.0 * sample).sin()];
        let h: Vec<f64> =
            (0..HIDDEN).map(|j| ((0..IN).map(|k| p[0][j * IN + k] * x[k]).sum::<f64>() + p[1][j]).tanh()).collect();
        let error = (0..HIDDEN).map(|j| p[2][j] * h[j]).sum::<f64>() - (2.0 * sample).sin();
        let d = 2.0 * error * factor / count as f64;
        for j in 0..HIDDEN {
            let dh = d * p[2][j] * (1.0 - h[j] * h[j]);
            grads[2][j] += d * h[j];
            grads[1][j] += dh;
            (0..IN).for_each(|k| grads[0][j * IN + k] += dh * x[k]);
        }
    }
    grads
}

/// Copies of all parameters, from a forward.
fn forward<T: Element>(engine: &Engine<'_>) -> Vec<Vec<T>> {
    let mut found = Vec::new();
    for unit in 0..engine.unit_count() {
        let guard = engine.forward(unit).unwrap();
        found.extend(guard.indices().map(|i| guard.param_as::<T>(i).unwrap().to_vec()));
        guard.done().unwrap();
    }
    found
}

/// The same between steps.
fn values<T: Element>(engine: &mut Engine<'_>) -> Vec<Vec<T>> {
    engine.set_training(false).unwrap();
    assert!(!engine.is_training().unwrap());
    let found = forward(engine);
    engine.set_training(true).unwrap();
    found
}

fn write(mut to: ViewMut<'_, f64>, adds: bool, from: &[f64]) {
    to.iter_mut().zip(from).for_each(|(to, from)| *to = from + if adds { *to } else { 0.0 });
}

fn train(engine: &mut Engine<'_>, comm: &Comm, steps: std::ops::Range<usize>) {
    let (micro, passes) = (engine.train_micro_batch_size().unwrap(), engine.gradient_accumulation_steps().unwrap());
    for step in steps {
        for pass in 0..passes {
            let begin = step * BATCH + (pass * comm.world_size().unwrap() + comm.rank().unwrap()) * micro;
            let grads = gradients(&forward(engine), begin, micro, engine.loss_factor().unwrap());
            let adds = engine.adds_gradients().unwrap();
            for unit in (0..engine.unit_count()).rev() {
                let guard = engine.backward(unit).unwrap();
                guard.indices().for_each(|i| write(guard.grad_mut_as(i).unwrap(), adds, &grads[i]));
                guard.ready().unwrap();
            }
            engine.backward_done().unwrap();
            assert_eq!(engine.step().unwrap(), pass + 1 == passes);
        }
    }
}

/// What `adamw` means, by DDP.
fn trained_by_ddp(comm: &Comm, steps: usize) -> Vec<Vec<f64>> {
    let [w, b, v] = [(HIDDEN * IN, 1), (HIDDEN, 2), (HIDDEN, 3)]
        .map(|(count, offset)| (0..count).map(|i| ((i * 7 + offset) as f64).sin() / 2.0).collect::<Vec<f64>>());
    let all = params!["w" => (w, [HIDDEN, IN]), "b" => (b, [HIDDEN]), "v" => (v, [HIDDEN])];
    let mut ddp = Ddp::new(comm, all).unwrap();
    let mut opt = AdamW::new(&mut ddp).lr(0.02).weight_decay(0.1).build().unwrap();
    let share = BATCH / comm.world_size().unwrap();
    let copies = |ddp: &Ddp<'_>| (0..3).map(|i| ddp.param_as::<f64>(i).unwrap().to_vec()).collect::<Vec<_>>();
    for step in 0..steps {
        let grads = gradients(&copies(&ddp), step * BATCH + comm.rank().unwrap() * share, share, 1.0);
        (0..3).for_each(|i| ddp.grad_mut_as::<f64>(i).unwrap().copy_from_slice(&grads[i]));
        ddp.ready_all().unwrap();
        ddp.wait().unwrap();
        opt.clip_grad_norm(0.3, 2.0).unwrap();
        opt.step().unwrap();
    }
    copies(&ddp)
}

fn assert_close(found: &[Vec<f64>], wanted: &[Vec<f64>]) {
    assert_eq!(found.len(), wanted.len());
    for (found, wanted) in found.iter().zip(wanted) {
        assert_eq!(found.len(), wanted.len());
        for (found, wanted) in found.iter().zip(wanted) {
            assert!((found - wanted).abs() <= 1e-12 + 1e-10 * wanted.abs(), "{found} is not {wanted}");
        }
    }
}

// --- a model of one tensor

fn one() -> [(&'static str, Params); 1] {
    [("u", params!["w" => (vec![0.0f32; 6], [6])])]
}

/// A pass in which every gradient has this value everywhere, in a model of `f32`.
fn filled(engine: &mut Engine<'_>, value: f32) {
    filled_as(engine, value, |value, old| value + old);
}

fn filled_as<T: Element + Default + Copy>(engine: &mut Engine<'_>, value: T, sum: impl Fn(T, T) -> T) {
    let adds = engine.adds_gradients().unwrap();
    for unit in (0..engine.unit_count()).rev() {
        let guard = engine.backward(unit).unwrap();
        for i in guard.indices() {
            for grad in guard.grad_mut_as::<T>(i).unwrap().iter_mut() {
                *grad = sum(value, if adds { *grad } else { T::default() });
            }
        }
        guard.ready().unwrap();
    }
    engine.backward_done().unwrap();
}

fn expect(engine: &mut Engine<'_>, value: f32) {
    let found = values::<f32>(engine);
    assert!(found.iter().flatten().all(|&each| each == value), "{found:?}, not {value}");
}

fn counted(counts: EngineCounts) -> [u64; 4] {
    [counts.global_steps, counts.global_samples, counts.skipped_steps, counts.micro_steps]
}

fn refused<T: Debug>(result: Result<T>, code: Code, said: &str) {
    let error = result.expect_err(said);
    assert!(error.code() == code && error.message().contains(said), "{error:?}, not {code}: {said}");
}

// --- training

#[test]
fn every_stage_trains_as_ddp_does() {
    let wanted = ranks(2, |comm| trained_by_ddp(&comm, 10)).remove(0);
    for (stage, accumulation) in (0..4).flat_map(|stage| [(stage, 1), (stage, 3)]) {
        ranks(2, |comm| {
            let rank = comm.rank().unwrap();
            let mut engine = Engine::new(&comm, network(rank), &adamw(stage, accumulation, "")).unwrap();
            assert_eq!(engine.train_micro_batch_size().unwrap(), BATCH / 2 / accumulation);
            train(&mut engine, &comm, 0..10);
            assert_close(&values(&mut engine), &wanted);
            let (steps, passes) = (10, 10 * accumulation as u64);
            assert_eq!(counted(engine.counts().unwrap()), [steps, steps * BATCH as u64, 0, passes]);
        });
    }
}

#[test]
fn it_describes_its_model() {
    let comm = alone();
    let engine = Engine::new(&comm, network(0), &adamw(1, 1, "")).unwrap();
    assert_eq!((engine.len(), engine.is_empty(), engine.unit_count()), (3, false, 2));
    assert_eq!((engine.name(0), engine.name(2), engine.name(3)), (Some("w"), Some("v"), None));
    assert_eq!((engine.index("v"), engine.index("module.w"), engine.index("w\0")), (Some(2), None, None));
    assert_eq!((engine.shape(0), engine.shape(3)), (Some(&[HIDDEN, IN][..]), None));
    assert_eq!((engine.unit("second"), engine.unit("third")), (Some(1), None));
    assert_eq!((engine.unit_name(0), engine.unit_name(2)), (Some("first"), None));
    assert_eq!((engine.indices(0), engine.indices(2)), (Some(0..2), None));
    assert_eq!((engine.unit_of(2), engine.unit_of(3)), (Some(1), None));
    assert_eq!(engine.description().unwrap().get("train_batch_size"), Some(&12.into()));
    assert_eq!(format!("{:?}", engine.forward(0).unwrap()), "EngineForward { unit: \"first\", indices: 0..2 }");
    assert_eq!(format!("{engine:?}"), "{\"w\": [4, 3], \"b\": [4], \"v\": [4]}");
}

#[test]
fn tensors_are_trained_in_place_at_stage_0_alone() {
    for stage in 0..4 {
        ranks(2, |comm| {
            let tensor = Tensor::new(vec![comm.rank().unwrap() as f32; 6], [6]).unwrap();
            let view = tensor.view::<f32>().unwrap();
            let units = || [("u", params!["w" => &tensor])];
            let create = Engine::new(&comm, units(), &sgd(stage, 1, ""));
            refused(create, Code::InvalidState, "w: a view of the tensor is alive");
            drop(view);
            let mut engine = Engine::new(&comm, units(), &sgd(stage, 1, "")).unwrap();
            filled(&mut engine, 1.0);
            if stage == 0 {
                let view = tensor.view::<f32>().unwrap();
                refused(engine.step(), Code::InvalidState, "w: a view of the tensor is alive");
                drop(view);
                let written = tensor.view_mut::<f32>().unwrap();
                let guard = engine.forward(0).unwrap();
                refused(guard.param(0), Code::InvalidState, "a mutable view");
                drop(written);
                let _read = guard.param(0).unwrap();
                refused(tensor.view_mut::<f32>(), Code::InvalidState, "a view of the tensor is alive");
            }
            assert!(engine.step().unwrap());
            expect(&mut engine, -1.0);
            let given = if stage == 0 { -1.0 } else { comm.rank().unwrap() as f32 };
            assert_eq!(tensor.view::<f32>().unwrap()[..], [given; 6]);
        });
    }
}

#[test]
fn gradients_add_up_until_a_boundary() {
    for stage in 0..4 {
        ranks(2, |comm| {
            let mut engine = Engine::new(&comm, one(), &sgd(stage, 3, "")).unwrap();
            assert_eq!(engine.train_batch_size().unwrap(), 6);
            assert_eq!(engine.loss_factor().unwrap(), 1.0 / 3.0);
            for pass in 1..8 {
                assert_eq!(engine.is_boundary().unwrap(), pass % 3 == 0);
                assert_eq!(engine.adds_gradients().unwrap(), stage < 2 && pass % 3 != 1);
                filled(&mut engine, 2.0 * comm.rank().unwrap() as f32);
                assert_eq!(engine.step().unwrap(), pass % 3 == 0);
            }
            expect(&mut engine, -6.0);
            assert!((engine.grad_norm().unwrap().unwrap() - 3.0 * 6.0f64.sqrt()).abs() < 1e-6);
            engine.set_boundary(Some(true)).unwrap();
            filled(&mut engine, 1.0);
            assert!(engine.step().unwrap());
            engine.set_boundary(Some(false)).unwrap();
            for _ in 0..4 {
                filled(&mut engine, 1.0);
                assert!(!engine.step().unwrap());
            }
            engine.set_boundary(None).unwrap();
            filled(&mut engine, 1.0);
            assert!(engine.step().unwrap());
            expect(&mut engine, -13.0);
            assert_eq!(counted(engine.counts().unwrap()), [4, 24, 0, 13]);
        });
    }
}

#[test]
fn passes_in_no_sync_are_reduced_by_the_next() {
    for stage in 0..4 {
        ranks(2, |comm| {
            let rank = comm.rank().unwrap() as f32;
            let mut engine = Engine::new(&comm, one(), &sgd(stage, 1, "")).unwrap();
            refused(engine.end_no_sync(), Code::InvalidState, "no_sync is not on");
            if stage >= 2 {
                let said = format!("no_sync is not possible at stage {stage}");
                return refused(engine.begin_no_sync(), Code::InvalidState, &said);
            }
            engine.begin_no_sync().unwrap();
            (0..3).for_each(|_| filled(&mut engine, rank));
            refused(engine.step(), Code::InvalidState, "inside no_sync");
            refused(engine.begin_no_sync(), Code::InvalidState, "no_sync is already on");
            engine.end_no_sync().unwrap();
            filled(&mut engine, rank);
            assert!(engine.step().unwrap());
            expect(&mut engine, -2.0); // the mean of 0 and 4
        });
    }
}

#[test]
fn an_infinity_of_one_rank_skips_the_step_of_all() {
    let more = r#", "fp16": {"enabled": true, "initial_scale_power": 4, "hysteresis": 1, "loss_scale_window": 2},
        "scheduler": {"type": "LRRangeTest", "params": {"lr_range_test_min_lr": 0.5, "lr_range_test_step_size": 1}}"#;
    let sum = |value: f16, old: f16| f16::from_f32(value.to_f32() + old.to_f32());
    for stage in 0..4 {
        ranks(2, |comm| {
            let mut engine = Engine::new(&comm, one(), &sgd(stage, 1, more)).unwrap();
            assert_eq!((engine.loss_scale().unwrap(), engine.loss_factor().unwrap()), (16.0, 16.0));
            assert_eq!(engine.grad_norm().unwrap(), None);
            let before = engine.lr().unwrap();
            let bad = if comm.rank().unwrap() == 1 { f16::INFINITY } else { f16::ONE };
            filled_as(&mut engine, bad, sum);
            assert!(!engine.step().unwrap());
            assert_eq!((engine.loss_scale().unwrap(), engine.lr().unwrap()), (8.0, before));
            assert_eq!(engine.grad_norm().unwrap(), Some(f64::INFINITY));
            assert!(values::<f16>(&mut engine)[0].iter().all(|&value| value == f16::ZERO));
            filled_as(&mut engine, f16::from_f32(8.0), sum);
            assert!(engine.step().unwrap());
            assert_eq!(counted(engine.counts().unwrap()), [2, 4, 1, 2]);
            assert!((engine.grad_norm().unwrap().unwrap() - 6.0f64.sqrt()).abs() < 1e-6, "without the scale");
            assert_eq!(values::<f16>(&mut engine)[0], [f16::from_f32(-before as f32); 6]);
            assert_ne!(engine.lr().unwrap(), before);
        });
    }
}

#[test]
fn a_loss_scale_at_its_minimum_is_an_error_of_all_ranks() {
    let more = r#", "fp16": {"enabled": true, "initial_scale_power": 0, "hysteresis": 1}"#;
    ranks(2, |comm| {
        let mut engine = Engine::new(&comm, one(), &sgd(2, 1, more)).unwrap();
        let value = if comm.rank().unwrap() == 0 { f16::NAN } else { f16::ONE };
        filled_as(&mut engine, value, |value, _| value);
        refused(engine.step(), Code::InvalidState, "the loss scale is at its minimum 1");
    });
}

#[test]
fn bf16_computes_in_bf16_and_keeps_the_parameters_dtype() {
    for stage in [0, 3] {
        ranks(2, |comm| {
            let mut engine = Engine::new(&comm, one(), &sgd(stage, 1, ", \"bf16\": {\"enabled\": true}")).unwrap();
            let guard = engine.backward(0).unwrap();
            refused(guard.param(0), Code::InvalidArgument, "not f32");
            refused(guard.grad_mut(0), Code::InvalidArgument, "not f32");
            guard.grad_mut_as::<bf16>(0).unwrap().fill(bf16::from_f32(comm.rank().unwrap() as f32));
            guard.ready().unwrap();
            engine.backward_done().unwrap();
            assert!(engine.step().unwrap());
            let state = State::new().with("engine", &engine);
            let whole = state.gather(&comm, "engine.model.w", None).unwrap().unwrap();
            assert_eq!((whole.dtype(), whole.to_vec::<f32>().unwrap()), (DType::F32, vec![-0.5; 6]));
        });
    }
}

#[test]
fn batch_sizes_change_between_steps() {
    ranks(2, |comm| {
        let mut engine = Engine::new(&comm, one(), &sgd(0, 2, "")).unwrap();
        engine.set_train_batch_size(12).unwrap();
        assert_eq!(engine.gradient_accumulation_steps().unwrap(), 6);
        assert_eq!(engine.description().unwrap().get("train_batch_size"), Some(&12.into()));
        engine.set_train_micro_batch_size(3).unwrap();
        assert_eq!(engine.train_batch_size().unwrap(), 36);
        refused(engine.set_train_batch_size(8), Code::InvalidArgument, "train_batch_size 8 is not divisible by");
        refused(engine.set_train_batch_size(usize::MAX), Code::InvalidArgument, "train_batch_size is");
        refused(engine.set_train_micro_batch_size(0), Code::InvalidArgument, "train_micro_batch_size_per_gpu is 0");
        filled(&mut engine, 1.0);
        engine.step().unwrap();
        let said = "train_batch_size cannot be changed while the gradients of 1";
        refused(engine.set_train_batch_size(12), Code::InvalidState, said);
        assert_eq!(engine.train_batch_size().unwrap(), 36);
    });
}

#[test]
fn gradients_may_be_ready_one_by_one() {
    for stage in 0..4 {
        ranks(2, |comm| {
            let mut engine = Engine::new(&comm, network(0), &adamw(stage, 1, "")).unwrap();
            let second = engine.backward(1).unwrap();
            second.grad_mut_as::<f64>(2).unwrap().fill(1.0);
            second.ready().unwrap();
            let mut first = engine.backward(0).unwrap();
            first.grad_mut_as::<f64>(1).unwrap().fill(comm.rank().unwrap() as f64);
            first.ready_param(1).unwrap();
            refused(first.ready_param(1), Code::InvalidState, "ready twice");
            refused(first.grad_mut_as::<f64>(1), Code::InvalidState, "the gradient of \"b\" is ready");
            drop(first);
            let mut first = engine.backward(0).unwrap(); // goes on where it was left
            refused(first.grad_mut_as::<f64>(1), Code::InvalidState, "the gradient of \"b\" is ready");
            first.grad_mut_as::<f64>(0).unwrap().fill(3.0);
            first.ready_param(0).unwrap();
            refused(first.param_as::<f64>(0), Code::InvalidState, "its backward has ended");
            refused(first.grad_mut_as::<f64>(0), Code::InvalidState, "its backward has ended");
            refused(first.ready_param(0), Code::InvalidState, "its backward has ended");
            first.ready().unwrap();
            refused(engine.backward(0), Code::InvalidState, "cannot begin twice");
            engine.backward_done().unwrap();
            assert!(engine.step().unwrap());
            let norm = (4.0 + 4.0 * 0.25 + 12.0 * 9.0f64).sqrt();
            assert!((engine.grad_norm().unwrap().unwrap() - norm).abs() < 1e-9);
            train(&mut engine, &comm, 0..1);
        });
    }
}

#[test]
fn a_unit_has_one_backward_in_a_pass() {
    for stage in 0..4 {
        ranks(2, |comm| {
            let mut engine = Engine::new(&comm, one(), &sgd(stage, 1, "")).unwrap();
            let first = engine.backward(0).unwrap();
            first.grad_mut(0).unwrap().fill(1.0);
            first.ready().unwrap();
            refused(engine.backward(0), Code::InvalidState, "cannot begin twice");
            engine.backward_done().unwrap();
            assert!(engine.step().unwrap());
            expect(&mut engine, -1.0);
        });
    }
}

#[test]
fn gradients_that_are_not_ready_are_zeros_or_refused() {
    for stage in 0..4 {
        ranks(2, |comm| {
            let mut engine = Engine::new(&comm, network(0), &adamw(stage, 1, "")).unwrap();
            drop(engine.backward(1).unwrap());
            drop(engine.backward(0).unwrap());
            engine.backward_done().unwrap();
            assert!(engine.step().unwrap());
            assert_eq!(engine.grad_norm().unwrap(), Some(0.0));

            let strict = adamw(stage, 1, "").replace("\"stage\"", "\"ignore_unused_parameters\": false, \"stage\"");
            let mut engine = Engine::new(&comm, network(0), &strict).unwrap();
            let second = engine.backward(1).unwrap();
            second.grad_mut_as::<f64>(2).unwrap().fill(1.0);
            second.ready().unwrap();
            let mut first = engine.backward(0).unwrap();
            first.grad_mut_as::<f64>(0).unwrap().fill(1.0);
            first.ready_param(0).unwrap();
            drop(first);
            refused(engine.backward_done(), Code::InvalidState, if stage == 0 { "\"b\"" } else { "first" });
            let first = engine.backward(0).unwrap();
            refused(first.grad_mut_as::<f64>(0), Code::InvalidState, "is ready");
            first.grad_mut_as::<f64>(1).unwrap().fill(1.0);
            first.ready().unwrap();
            engine.backward_done().unwrap();
            assert!(engine.step().unwrap());
            assert!((engine.grad_norm().unwrap().unwrap() - 20.0f64.sqrt()).abs() < 1e-9);
        });
    }
}

// --- optimizer and schedule

#[test]
fn the_optimizer_and_the_schedule_are_the_engines() {
    let config = sgd(
        0,
        1,
        r#", "scheduler": {"type": "WarmupLR",
            "params": {"warmup_max_lr": 0.5, "warmup_num_steps": 4, "warmup_type": "linear"}}"#,
    );
    let comm = alone();
    let mut engine = Engine::new(&comm, one(), &config).unwrap();
    let (mut optimizer, schedule) = (engine.optimizer().unwrap(), engine.schedule().unwrap().unwrap());
    let wanted = LrSchedule::from_config(&config).unwrap();
    for step in 0..6 {
        assert_eq!(engine.lr().unwrap(), wanted.lr_at(step, 1.0).unwrap());
        assert_eq!(optimizer.lr().unwrap(), engine.lr().unwrap());
        assert_eq!((optimizer.steps().unwrap(), schedule.steps().unwrap()), (step, step));
        filled(&mut engine, 0.0);
        engine.step().unwrap();
    }
    engine.set_lr(0.25).unwrap();
    assert_eq!((engine.lr().unwrap(), optimizer.lr().unwrap()), (0.25, 0.25));
    let guard = engine.backward(0).unwrap();
    let said = "unit \"u\" is in use";
    refused(optimizer.step(), Code::InvalidState, said);
    refused(optimizer.zero_grad(), Code::InvalidState, said);
    refused(optimizer.clip_grad_norm(1.0, 2.0), Code::InvalidState, said);
    drop(guard);
    drop(engine);
    assert_eq!((optimizer.steps().unwrap(), schedule.steps().unwrap()), (6, 6));
}

#[test]
fn a_schedule_of_the_program_is_stepped() {
    let comm = alone();
    let mut schedule = LrSchedule::exponential(0.5).unwrap();
    let mut engine = Engine::with_schedule(&comm, one(), &sgd(0, 1, ""), &mut schedule).unwrap();
    filled(&mut engine, 1.0);
    engine.step().unwrap();
    assert_eq!((engine.lr().unwrap(), schedule.steps().unwrap()), (0.5, 1));
    drop(schedule);
    filled(&mut engine, 1.0);
    engine.step().unwrap();
    assert_eq!((engine.lr().unwrap(), engine.schedule().unwrap().unwrap().steps().unwrap()), (0.25, 2));
    expect(&mut engine, -1.5);
    assert!(Engine::new(&comm, one(), &sgd(0, 1, "")).unwrap().schedule().unwrap().is_none());
}

// --- states

#[test]
fn it_is_saved_and_loaded_at_other_sizes_and_stages() {
    let more = r#", "scheduler": {"type": "WarmupDecayLR",
        "params": {"total_num_steps": 20, "warmup_num_steps": 5, "warmup_max_lr": 0.05}}"#;
    let folder = tempfile::tempdir().unwrap();
    let run = |comm: Comm, stage, accumulation, begin: usize, end: usize, saves: bool| {
        let units = network(comm.rank().unwrap());
        let mut engine = Engine::new(&comm, units, &adamw(stage, accumulation, more)).unwrap();
        let mut state = State::new().with("engine", &engine);
        let saver = Saver::at(&comm, folder.path()).open().unwrap();
        if saves {
            assert_eq!(saver.resume(&mut state).unwrap(), begin as u64);
        }
        train(&mut engine, &comm, begin..end);
        if saves {
            saver.save(end as u64, &state).unwrap();
        }
        let counts = engine.counts().unwrap();
        (values::<f64>(&mut engine), counted(counts)[..3].to_vec(), engine.lr().unwrap())
    };
    let wanted = ranks(1, |comm| run(comm, 0, 1, 0, 20, false)).remove(0);
    let mut found = Vec::new();
    for (part, (world, stage, accumulation)) in
        [(2, 2, 1), (3, 0, 2), (1, 3, 4), (4, 1, 3), (2, 3, 2)].into_iter().enumerate()
    {
        found = ranks(world, |comm| run(comm, stage, accumulation, 4 * part, 4 * part + 4, true));
    }
    for (values, counts, lr) in found {
        assert_close(&values, &wanted.0);
        assert_eq!(counts, wanted.1);
        assert!((lr - wanted.2).abs() < 1e-12);
    }
}

#[test]
fn a_state_is_refused_while_gradients_wait_or_parameters_are_viewed() {
    let folder = tempfile::tempdir().unwrap();
    for stage in 0..4 {
        let root = folder.path().join(stage.to_string());
        ranks(2, |comm| {
            let mut engine = Engine::new(&comm, one(), &sgd(stage, 2, "")).unwrap();
            let mut state = State::new().with("engine", &engine);
            let saver = Saver::at(&comm, &root).open().unwrap();
            filled(&mut engine, 1.0);
            engine.step().unwrap();
            refused(saver.save(1, &state), Code::InvalidState, "the state cannot be saved or loaded");
            filled(&mut engine, 1.0);
            engine.step().unwrap();
            saver.save(2, &state).unwrap();
            let guard = engine.forward(0).unwrap();
            let view = guard.param(0).unwrap();
            let said = if stage == 0 { "w: a view of the tensor is alive" } else { "" };
            refused(saver.resume(&mut state), Code::InvalidState, said);
            drop(view);
            guard.done().unwrap();
            let other = [("u", params!["w" => (vec![0.0f32; 5], [5])])];
            let other = Engine::new(&comm, other, &sgd(stage, 2, "")).unwrap();
            refused(saver.resume(&mut State::new().with("engine", &other)), Code::Mismatch, "engine.model.w");
        });
    }
}

// --- configurations

#[test]
fn a_configuration_is_a_text_or_a_file() {
    let text = "// ours\n{\"train_batch_size\": 8, \"fp16\": {\"enabled\": true,},\"fp\": 1}";
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("ds_config.json");
    std::fs::write(&path, text).unwrap();
    let resolved = Engine::resolve(text, 2).unwrap();
    assert_eq!(resolved.get("train_micro_batch_size_per_gpu"), Some(&4.into()));
    assert_eq!((resolved.get("precision"), resolved.get("optimizer")), (Some(&"fp16".into()), Some(&Value::Null)));
    let Some(Value::List(reports)) = resolved.get("reports") else { panic!("{resolved:?}") };
    assert_eq!((reports.len(), reports[0].get("kind")), (1, Some(&"unknown".into())));
    assert_eq!(Engine::resolve(&text.to_owned(), 2).unwrap(), resolved);
    assert_eq!(Engine::resolve(&path, 2).unwrap(), resolved);
    assert_eq!(Engine::resolve(path.as_path(), 2).unwrap(), resolved);

    refused(Engine::resolve(Path::new("missing.json"), 2), Code::NotFound, "missing.json cannot be read");
    refused(Engine::resolve(folder.path(), 2), Code::Io, "cannot be read");
    std::fs::write(&path, b"{\"train_batch_size\"\0: 8}").unwrap();
    refused(Engine::resolve(&path, 2), Code::InvalidArgument, "line 1, column 20");
    std::fs::write(&path, b"{\"\xff\": 8}").unwrap();
    refused(Engine::resolve(&path, 2), Code::InvalidArgument, "UTF-8");
    std::fs::write(&path, vec![b' '; 1 << 19]).unwrap();
    refused(Engine::resolve(&path, 2), Code::InvalidArgument, "the limit is 262144");
}

#[test]
fn what_other_engines_have_is_passed_through() {
    let config = r#"{"train_batch_size": 8, "optimizer": {"type": "RAdam", "params": {"lr": 0.1, "~": "int"}},
        "scheduler": {"type": "StepLR", "params": {"step_size": 3}}}"#;
    let resolved = Engine::resolve(config, 1).unwrap();
    let optimizer = resolved.get("optimizer").unwrap();
    assert_eq!((optimizer.get("type"), optimizer.get("core")), (Some(&"RAdam".into()), Some(&false.into())));
    assert_eq!(optimizer.get("params").and_then(|params| params.get("~")), Some(&"int".into()));
    refused(LrSchedule::from_config(config), Code::Unsupported, "StepLR");
    refused(LrSchedule::from_config(&sgd(0, 1, "")), Code::InvalidArgument, "no \"scheduler\"");
    refused(Engine::new(&alone(), one(), config), Code::Unsupported, "RAdam");
}

#[test]
fn a_bad_configuration_is_refused_by_key_and_line() {
    let comm = alone();
    let deep = "{\"a\":".repeat(99);
    let (argument, unsupported) = (Code::InvalidArgument, Code::Unsupported);
    for (config, code, said) in [
        ("", argument, "line 1"),
        ("{", argument, "line 1, column 2: expected a key in double quotes"),
        ("{\"a\": 1} {", argument, "line 1, column 10: '{' comes after the end"),
        ("{\n\"train_batch_size\": 8,\n \"a\": 1 \"b\": 2}", argument, "line 3, column 9: expected a comma"),
        ("{\"a\": 1,\n\"a\": 2}", argument, "line 2, column 1: the key \"a\" occurs twice"),
        ("[{}]", argument, "a configuration is an object"),
        (deep.as_str(), argument, "nested more than 32 levels"),
        ("{\"a\": \"\0\"}", argument, "the configuration has a zero byte at byte 7"),
        ("{}", argument, "neither train_batch_size nor train_micro_batch_size_per_gpu"),
        ("{\n\"train_batch_size\": \"auto\"}", argument, "\"train_batch_size\" (line 2, column 1) is \"auto\""),
        (
            "{\"train_batch_size\": 8,\n \"fp16\": {\"enabled\": true,\n \"hysteresis\": 0}}",
            argument,
            "\"fp16.hysteresis\" (line 3, column 2) is 0; it must be at least 1",
        ),
        ("{\"train_batch_size\": 8, \"zero_optimization\": {\"stage\": 4}}", argument, "stages are 0 to 3"),
        (
            "{\"train_batch_size\": 8, \"zero_optimization\": {\"offload_param\": {\"device\": \"nvme\"}}}",
            unsupported,
            "\"zero_optimization.offload_param.device\"",
        ),
    ] {
        refused(Engine::resolve(config, 1), code, said);
        refused(Engine::new(&comm, one(), config), code, said);
    }
    let config = "{\"train_batch_size\": 8}";
    refused(Engine::resolve(config, 0), argument, "ranks is 0");
    refused(Engine::resolve(config, usize::MAX), argument, "ranks is 18446744073709551615");
    refused(Engine::resolve("{\"train_batch_size\": 7}", 2), argument, "data-parallel ranks");
    refused(Engine::new(&comm, one(), config), argument, "no \"optimizer\"");
}

#[test]
fn ranks_with_other_configurations_or_models_are_named() {
    ranks(2, |comm| {
        let rank = comm.rank().unwrap();
        let config = sgd(0, 1, "");
        let other = config.replace("\"gradient_clipping\": 0", &format!("\"gradient_clipping\": {rank}"));
        refused(Engine::new(&comm, one(), &other), Code::Mismatch, "gradient_clipping");
        let mut schedule = LrSchedule::exponential(0.5 + rank as f64).unwrap();
        refused(Engine::with_schedule(&comm, one(), &config, &mut schedule), Code::Mismatch, "schedule");
        let model = [("u", params!["w" => (vec![0.0f32; 6 + rank], [6 + rank])])];
        refused(Engine::new(&comm, model, &config), Code::Mismatch, "\"w\"");
        let config = if rank == 0 { config } else { "{\"train_batch_size\": 2}".to_owned() };
        refused(Engine::new(&comm, one(), &config), Code::InvalidArgument, "optimizer"); // rank 1's fault, told to all
        let mut engine = Engine::new(&comm, one(), &sgd(0, 1, "")).unwrap();
        filled(&mut engine, 1.0);
        assert!(engine.step().unwrap(), "nothing of it harms what comes later");
    });
}

// --- what is refused

#[test]
fn bad_models_are_refused() {
    let (comm, config) = (alone(), sgd(0, 1, ""));
    let two = |first, second| {
        [(first, params!["w" => (vec![0.0f32; 2], [2])]), (second, params!["w" => (vec![0.0f32; 2], [2])])]
    };
    let argument = Code::InvalidArgument;
    let none: [(&str, Params); 0] = [];
    refused(Engine::new(&comm, none, &config), argument, "no units");
    refused(Engine::new(&comm, [("u", Params::new())], &config), argument, "unit \"u\" has no parameters");
    refused(Engine::new(&comm, two("u", "v"), &config), argument, "\"w\"");
    refused(Engine::new(&comm, two("u\0", "v"), &config), argument, "contains a zero byte");
    let integers = [("u", params!["w" => (vec![0i64; 2], [2])])];
    let error = Engine::new(&comm, integers, &config).unwrap_err();
    assert!(error.message().contains("\"w\""), "{error:?}");
    let short = [("u", params!["w" => (vec![0.0f32; 2], [3])])];
    refused(Engine::new(&comm, short, &config), argument, "w: a tensor of shape [3] has 3 elements");
    let deferred = [("u", params!["w" => Tensor::deferred(DType::F32, [2]).unwrap()])];
    refused(Engine::new(&comm, deferred, &config), Code::InvalidState, "w: the tensor is deferred");
    let both = sgd(0, 1, r#", "scheduler": {"type": "WarmupLR"}"#);
    let mut schedule = LrSchedule::exponential(0.5).unwrap();
    refused(Engine::with_schedule(&comm, one(), &both, &mut schedule), argument, "leave one of the two out");
    let muon = config.replace("SGD", "Muon");
    refused(Engine::new(&comm, one(), &muon), Code::Unsupported, "\"optimizer.type\" (line 2");
    filled(&mut Engine::new(&comm, one(), &config).unwrap(), 1.0);
}

#[test]
fn calls_out_of_order_are_refused() {
    let comm = alone();
    for stage in 0..4 {
        let (state, argument) = (Code::InvalidState, Code::InvalidArgument);
        let mut engine = Engine::new(&comm, one(), &sgd(stage, 2, "")).unwrap();
        refused(engine.step(), state, "without a backward pass");
        refused(engine.forward(1), argument, "unit 1 does not exist; the model has 1");
        refused(engine.backward(1), argument, "unit 1 does not exist");
        refused(engine.set_lr(-1.0), argument, "-1");
        refused(engine.set_lr(f64::NAN), argument, "nan");
        let guard = engine.forward(0).unwrap();
        refused(engine.forward(0), state, "unit \"u\" is in use");
        refused(engine.backward(0), state, "unit \"u\" is in use");
        refused(guard.param(1), argument, "parameter 1 does not belong to unit \"u\", which has 0 to 0");
        refused(guard.param_as::<f64>(0), argument, "not f64");
        guard.done().unwrap();
        let mut guard = engine.backward(0).unwrap();
        refused(guard.grad_mut(1), argument, "parameter 1 does not belong to unit \"u\"");
        refused(guard.ready_param(1), argument, "parameter 1 does not belong to unit \"u\"");
        guard.grad_mut(0).unwrap().fill(1.0);
        let mut view = guard.grad_mut(0).unwrap();
        refused(guard.grad_mut(0), state, "a mutable view");
        view.fill(1.0);
        drop(view);
        drop(guard);
        refused(engine.step(), state, "backward_done");
        refused(engine.set_boundary(Some(true)), state, "the boundary cannot be set");
        refused(engine.set_train_batch_size(4), state, "train_batch_size cannot be changed");
        refused(engine.set_train_micro_batch_size(4), state, "cannot be changed");
        if stage < 2 {
            refused(engine.begin_no_sync(), state, "no_sync cannot begin");
        }
        engine.backward(0).unwrap().ready().unwrap();
        engine.backward_done().unwrap();
        refused(engine.backward(0), state, "step() was not called after the last");
        refused(engine.set_boundary(Some(true)), state, "the boundary cannot be set");
        assert!(!engine.step().unwrap());
        filled(&mut engine, 1.0);
        assert!(engine.step().unwrap());
        expect(&mut engine, -2.0); // refusals change nothing
    }
}

#[test]
fn forgotten_guards_and_views_are_harmless() {
    let comm = alone();
    for stage in 0..4 {
        let mut engine = Engine::new(&comm, one(), &sgd(stage, 1, "")).unwrap();
        std::mem::forget(engine.backward(0).unwrap());
        refused(engine.backward(0), Code::InvalidState, "unit \"u\" is in use");
        engine.backward_done().unwrap();
        assert!(engine.step().unwrap());
        filled(&mut engine, 1.0);
        assert!(engine.step().unwrap());
        expect(&mut engine, -1.0);
    }
}

#[test]
fn an_aborted_communicator_refuses_every_collective_call() {
    for stage in 0..4 {
        let comm = alone();
        let mut engine = Engine::new(&comm, one(), &sgd(stage, 1, "")).unwrap();
        comm.abort("enough").unwrap();
        let failed = engine.backward(0).and_then(|guard| guard.ready()).and_then(|()| engine.backward_done());
        refused(failed.and_then(|()| engine.step()), Code::Aborted, "enough");
        assert_eq!(counted(engine.counts().unwrap()), [0; 4]);
    }
}

#[test]
fn gradients_of_a_pass_that_failed_are_the_librarys() {
    for stage in 0..4 {
        ranks(2, |comm| {
            let unit = |name| params![name => (vec![0.0f32; 3], [3])];
            let mut engine = Engine::new(&comm, [("a", unit("v")), ("b", unit("w"))], &sgd(stage, 1, "")).unwrap();
            let written = engine.backward(1).unwrap();
            written.grad_mut(1).unwrap().fill(1.0);
            written.ready().unwrap();
            drop(engine.backward(0).unwrap());
            comm.barrier().unwrap();
            if comm.rank().unwrap() == 1 {
                comm.abort("enough").unwrap();
            }
            refused(engine.backward_done(), Code::Aborted, "enough");
            // It may still reduce those that are ready; in place, all of the pass.
            for unit in usize::from(stage > 0)..2 {
                match engine.backward(unit) {
                    Ok(guard) => refused(guard.grad_mut(unit), Code::InvalidState, "is ready"),
                    Err(error) => assert!([Code::Aborted, Code::InvalidState].contains(&error.code()), "{error:?}"),
                }
            }
        });
    }
}
