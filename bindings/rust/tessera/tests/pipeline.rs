//! Pipelines over ranks as threads: chains of small tanh stages, trained like the same model on one rank.

mod common;

use std::collections::BTreeMap;
use std::error::Error as _;
use std::fmt;
use std::io;
use std::panic::{self, AssertUnwindSafe};
use std::slice;
use std::sync::{Condvar, Mutex};
use std::time::Duration;

use common::{alone, deadline, ranks};
use tessera::PipelineSchedule::{
    DualPipeV, GPipe, Interleaved1F1B, InterleavedZeroBubble, LoopedBfs, OneFOneB, ZbH2, Zbv,
};
use tessera::{CallbackResult, Code, Comm, DType, Error, Local, Params, Pipeline, PipelineSchedule, Saver, Sgd};
use tessera::{StageCall, Stages, State, Tensor};

/// Numbers between -1 and 1 that differ from place to place.
fn numbers(count: usize, seed: usize) -> Vec<f64> {
    (0..count).map(|i| ((i * 7 + 1) as f64 + seed as f64 * 1.7).sin()).collect()
}

/// Stages have different widths, so that no shape fits by chance.
fn width(stage: usize) -> usize {
    2 + stage % 3
}

fn matrix(rows: usize, columns: usize, seed: usize) -> Tensor {
    Tensor::new(numbers(rows * columns, seed), [rows, columns]).unwrap()
}

/// x -> tanh(x W + b).
#[derive(Clone)]
struct Layer {
    inputs: usize,
    outputs: usize,
    w: Vec<f64>,
    b: Vec<f64>,
    dw: Vec<f64>,
    db: Vec<f64>,
}

impl Layer {
    fn of(stage: usize) -> Self {
        let (inputs, outputs) = (width(stage), width(stage + 1));
        let (w, b) = (numbers(inputs * outputs, stage), numbers(outputs, stage + 100));
        Layer { inputs, outputs, dw: vec![0.0; w.len()], db: vec![0.0; b.len()], w, b }
    }

    fn forward(&self, x: &[f64], y: &mut [f64]) {
        for (x, y) in x.chunks(self.inputs).zip(y.chunks_mut(self.outputs)) {
            for (j, y) in y.iter_mut().enumerate() {
                let z: f64 = x.iter().enumerate().map(|(i, x)| x * self.w[i * self.outputs + j]).sum();
                *y = (z + self.b[j]).tanh();
            }
        }
    }

    fn backward_input(&self, y: &[f64], dy: &[f64], dx: &mut [f64]) {
        let dz: Vec<f64> = y.iter().zip(dy).map(|(y, dy)| dy * (1.0 - y * y)).collect();
        for (dx, dz) in dx.chunks_mut(self.inputs).zip(dz.chunks(self.outputs)) {
            for (i, dx) in dx.iter_mut().enumerate() {
                *dx += dz.iter().zip(&self.w[i * self.outputs..]).map(|(dz, w)| dz * w).sum::<f64>();
            }
        }
    }

    fn backward_weight(&mut self, x: &[f64], y: &[f64], dy: &[f64]) {
        let dz: Vec<f64> = y.iter().zip(dy).map(|(y, dy)| dy * (1.0 - y * y)).collect();
        for (x, dz) in x.chunks(self.inputs).zip(dz.chunks(self.outputs)) {
            for (j, dz) in dz.iter().enumerate() {
                self.db[j] += dz;
                x.iter().enumerate().for_each(|(i, x)| self.dw[i * self.outputs + j] += x * dz);
            }
        }
    }

    fn descend(&mut self) {
        self.w.iter_mut().zip(&mut self.dw).for_each(|(w, dw)| *w -= 0.5 * std::mem::take(dw));
        self.b.iter_mut().zip(&mut self.db).for_each(|(b, db)| *b -= 0.5 * std::mem::take(db));
    }
}

/// Half the squared distance from the targets, a mean over rows.
fn loss(y: &[f64], targets: &[f64], rows: usize) -> f64 {
    y.iter().zip(targets).map(|(y, t)| (y - t) * (y - t) / 2.0).sum::<f64>() / rows as f64
}

fn loss_grad(y: &[f64], targets: &[f64], rows: usize, weight: f64) -> Vec<f64> {
    y.iter().zip(targets).map(|(y, t)| weight * (y - t) / rows as f64).collect()
}

/// What one rank has of the chain.
struct Net {
    layers: BTreeMap<usize, Layer>,
    before: fn(&StageCall<'_>) -> CallbackResult<()>,
    last_backwards: usize,
    rows: Vec<usize>, // of each forward
    weights: Vec<f64>,
}

impl Net {
    fn of(stages: &[usize]) -> Self {
        let layers = stages.iter().map(|&stage| (stage, Layer::of(stage))).collect();
        Net { layers, before: |_| Ok(()), last_backwards: 0, rows: Vec::new(), weights: Vec::new() }
    }

    fn differentiate(&mut self, call: &StageCall<'_>, input: bool, weight: bool) -> CallbackResult<()> {
        (self.before)(call)?;
        assert!(call.is_training() && call.outputs().len() == 1);
        self.last_backwards += usize::from(call.is_last_backward());
        let layer = self.layers.get_mut(&call.stage()).unwrap();
        let (x, y): (&[f64], &[f64]) = (call.inputs()[0].view()?, call.outputs()[0].view()?);
        let dy = match call.targets() {
            [targets] => loss_grad(y, targets.view()?, targets.shape()[0], call.weight()),
            _ => call.output_grads()[0].view()?.to_vec(),
        };
        assert_eq!(call.has_input_grad(0), input && call.stage() > 0);
        if call.has_input_grad(0) {
            layer.backward_input(y, &dy, &mut call.input_grad_mut(0)?);
        }
        if weight {
            layer.backward_weight(x, y, &dy);
        }
        Ok(())
    }
}

impl Stages for Net {
    fn forward(&mut self, call: &StageCall<'_>) -> CallbackResult<()> {
        (self.before)(call)?;
        let [x] = call.inputs() else { return Err("one input was expected".into()) };
        let (layer, rows) = (&self.layers[&call.stage()], x.shape()[0]);
        self.rows.push(rows);
        self.weights.push(call.weight());
        assert!(call.outputs().is_empty() && !call.has_input_grad(0));
        let y = call.output([rows, layer.outputs])?;
        layer.forward(x.view()?, y);
        if let [targets] = call.targets() {
            call.loss(loss(y, targets.view()?, rows))?;
        }
        Ok(())
    }

    fn backward(&mut self, call: &StageCall<'_>) -> CallbackResult<()> {
        self.differentiate(call, true, true)
    }

    fn backward_input(&mut self, call: &StageCall<'_>) -> CallbackResult<()> {
        self.differentiate(call, true, false)
    }

    fn backward_weight(&mut self, call: &StageCall<'_>) -> CallbackResult<()> {
        self.differentiate(call, false, true)
    }
}

const ROWS: usize = 11;
const STEPS: usize = 3;

fn batch_and_targets(rows: usize, stages: usize) -> ([Tensor; 1], [Tensor; 1]) {
    ([matrix(rows, width(0), 1)], [matrix(rows, width(stages), 2)])
}

/// The losses and the model after some steps over the full batch, without a pipeline.
fn trained_without(stages: usize) -> (Vec<f64>, Vec<Layer>) {
    let mut layers: Vec<Layer> = (0..stages).map(Layer::of).collect();
    let ([batch], [targets]) = batch_and_targets(ROWS, stages);
    let targets = targets.to_vec::<f64>().unwrap();
    let mut losses = Vec::new();
    for _ in 0..STEPS {
        let mut values = vec![batch.to_vec::<f64>().unwrap()];
        for layer in &layers {
            let mut y = vec![0.0; ROWS * layer.outputs];
            layer.forward(values.last().unwrap(), &mut y);
            values.push(y);
        }
        losses.push(loss(&values[stages], &targets, ROWS));
        let mut dy = loss_grad(&values[stages], &targets, ROWS, 1.0);
        for (stage, layer) in layers.iter_mut().enumerate().rev() {
            layer.backward_weight(&values[stage], &values[stage + 1], &dy);
            let mut dx = vec![0.0; values[stage].len()];
            layer.backward_input(&values[stage + 1], &dy, &mut dx);
            dy = dx;
            layer.descend();
        }
    }
    (losses, layers)
}

fn placed(schedule: PipelineSchedule, rank: usize, world: usize) -> Vec<usize> {
    match schedule {
        GPipe | OneFOneB | ZbH2 => vec![rank],
        Zbv | DualPipeV => vec![2 * world - 1 - rank, rank],
        _ => vec![rank, world + rank],
    }
}

fn same(found: &[f64], expected: &[f64]) {
    assert_eq!(found.len(), expected.len());
    for (found, expected) in found.iter().zip(expected) {
        assert!((found - expected).abs() < 1e-12, "{found} is not {expected}");
    }
}

#[test]
fn every_schedule_trains_like_one_rank_without() {
    const M: usize = 8; // of 11 rows: micro-batches of two rows and of one
    for world in [1, 2, 4] {
        ranks(world, |comm| {
            let rank = comm.rank().unwrap();
            for schedule in [GPipe, OneFOneB, LoopedBfs, Interleaved1F1B, InterleavedZeroBubble, ZbH2, Zbv, DualPipeV] {
                let own = placed(schedule, rank, world);
                let stages = own.len() * world;
                let (losses, layers) = trained_without(stages);
                let mut net = Net::of(&own);
                let mut pipe = Pipeline::builder(&comm, &own).schedule(schedule).microbatches(M).build().unwrap();
                let (batch, targets) = batch_and_targets(ROWS, stages);
                for expected in losses {
                    let found = pipe.step(&mut net, &batch, &targets).unwrap();
                    let mean: f64 = found.iter().enumerate().map(|(i, x)| x * if i < 3 { 2.0 } else { 1.0 }).sum();
                    same(&[mean / ROWS as f64], &[expected]);
                    assert_eq!(std::mem::take(&mut net.last_backwards), own.len(), "{schedule:?}");
                    net.layers.values_mut().for_each(Layer::descend);
                }
                for (&stage, layer) in &net.layers {
                    same(&layer.w, &layers[stage].w);
                    same(&layer.b, &layers[stage].b);
                }
                let stats = pipe.stats().unwrap();
                assert!(stats.wall >= stats.busy && (1..=2 * M).contains(&stats.peak_activations));
                assert_eq!(stats.longest_rank.is_some(), world > 1, "{stats:?}");
            }
        });
    }
}

#[test]
fn an_uneven_batch_is_cut_like_tensor_split_and_weighted_by_rows() {
    ranks(2, |comm| {
        let rank = comm.rank().unwrap();
        let mut pipe = Pipeline::builder(&comm, &[rank]).schedule(GPipe).microbatches(3).build().unwrap();
        let mut net = Net::of(&[rank]);
        let (batch, targets) = batch_and_targets(5, 2);
        let none: &[Tensor] = &[];
        let (batch, targets) = if rank == 0 { (&batch[..], none) } else { (none, &targets[..]) };
        let losses = pipe.step(&mut net, batch, targets).unwrap();
        assert_eq!((net.rows.clone(), losses.len(), pipe.microbatches()), (vec![2, 2, 1], 3, 3));
        assert_eq!(pipe.stage_count(), 2);
        same(&net.weights, &if rank == 0 { [0.0; 3] } else { [0.4, 0.4, 0.2] });

        net.weights.clear();
        let own: &[f64] = if rank == 1 { &[0.0, 1.0, 2.0] } else { &[] };
        assert_eq!(pipe.step_weighted(&mut net, batch, targets, own).unwrap(), losses);
        same(&net.weights, if rank == 1 { own } else { &[0.0; 3] });

        let error = pipe.step_weighted(&mut net, batch, targets, &own[rank..]).unwrap_err();
        assert_eq!(error.code(), if rank == 1 { Code::InvalidArgument } else { Code::Aborted });
        assert!(error.message().contains("2 weights for 3 micro-batches"), "{error}");
    });
}

#[test]
fn a_batch_with_too_few_rows_fails_on_every_rank() {
    ranks(2, |comm| {
        let rank = comm.rank().unwrap();
        let mut pipe = Pipeline::builder(&comm, &[rank]).microbatches(4).build().unwrap();
        let (batch, targets) = batch_and_targets(3, 2);
        let error = pipe.step(&mut Net::of(&[rank]), &batch, &targets).unwrap_err();
        assert!([Code::InvalidArgument, Code::Aborted].contains(&error.code()), "{error:?}");
        assert!(error.message().contains('3') && error.message().contains("micro-batches"), "{error}");
    });
}

#[test]
fn an_evaluation_makes_the_losses_of_a_step_and_nothing_else() {
    ranks(2, |comm| {
        let own = placed(Zbv, comm.rank().unwrap(), 2);
        let mut pipe = Pipeline::builder(&comm, &own).schedule(Zbv).microbatches(4).build().unwrap();
        let mut net = Net::of(&own);
        let (batch, targets) = batch_and_targets(ROWS, 4);
        let losses = pipe.step(&mut net, &batch, &targets).unwrap();
        net.before = |call| if call.is_training() { Err("a step".into()) } else { Ok(()) };
        assert_eq!(pipe.eval(&mut net, &batch, &targets).unwrap(), losses);
        let unknown = pipe.eval(&mut net, &batch, &[]).unwrap();
        assert!(unknown.iter().all(|loss| loss.is_nan()), "no loss without targets: {unknown:?}");
    });
}

/// Stage 0 makes 2x for the next stage, 3x for the stage after it, and numbers without a gradient; stage 1 makes 5 times
/// its input, stage 2 the sum of what it gets. The loss is the mean: of 13x.
#[derive(Default)]
struct Skipping {
    grads: BTreeMap<usize, f64>, // of all outputs, by stage
}

impl Stages for Skipping {
    fn forward(&mut self, call: &StageCall<'_>) -> CallbackResult<()> {
        let scale = |by: f64| -> CallbackResult<()> {
            let x: &[f64] = call.inputs()[0].view()?;
            call.output::<f64>([x.len()])?.iter_mut().zip(x).for_each(|(y, x)| *y = by * x);
            Ok(())
        };
        match call.stage() {
            0 => {
                scale(2.0)?;
                scale(3.0)?;
                call.output_bytes(DType::I64, [])?.copy_from_slice(&42i64.to_ne_bytes());
            }
            1 => {
                assert_eq!(call.inputs()[1].view::<i64>()?, [42]);
                assert_eq!(call.inputs()[1].bytes()?, 42i64.to_ne_bytes());
                assert_eq!(call.inputs()[0].as_array::<f64>()?.shape(), call.inputs()[0].shape());
                assert_eq!(call.inputs()[1].view::<f64>().unwrap_err().code(), Code::InvalidArgument);
                scale(5.0)?;
            }
            _ => {
                let [a, b] = call.inputs() else { return Err("two inputs were expected".into()) };
                let sum: f64 = a.view::<f64>()?.iter().zip(b.view::<f64>()?).map(|(a, b)| a + b).sum();
                call.loss(sum / a.len() as f64)?;
            }
        }
        Ok(())
    }

    fn backward(&mut self, call: &StageCall<'_>) -> CallbackResult<()> {
        let fill = |index: usize, value: &[f64]| -> CallbackResult<()> {
            call.input_grad_mut::<f64>(index)?.copy_from_slice(value);
            Ok(())
        };
        let grads = call.output_grads();
        match call.stage() {
            0 => {
                let [doubled, number, tripled] = grads else { return Err("three gradients were expected".into()) };
                assert_eq!(number.view::<i64>().unwrap_err().code(), Code::InvalidState);
                let (doubled, tripled) = (doubled.view::<f64>()?, tripled.view::<f64>()?);
                let dx: f64 = doubled.iter().zip(tripled).map(|(d, t)| 2.0 * d + 3.0 * t).sum();
                *self.grads.entry(0).or_default() += dx;
            }
            1 => {
                assert!(call.has_input_grad(0) && !call.has_input_grad(1));
                assert_eq!(call.input_grad_mut::<i64>(1).unwrap_err().code(), Code::InvalidArgument);
                fill(0, &grads[0].view::<f64>()?.iter().map(|dy| 5.0 * dy).collect::<Vec<_>>())?;
            }
            _ => {
                let rows = call.inputs()[0].len();
                let each = vec![call.weight() / rows as f64; rows];
                fill(0, &each)?;
                fill(1, &each)?;
                let held = call.input_grad_mut::<f64>(0)?;
                assert_eq!(call.input_grad_mut::<f64>(0).unwrap_err().code(), Code::InvalidState, "{held:?}");
                assert_eq!(call.input_grad_mut::<f64>(2).unwrap_err().code(), Code::InvalidArgument);
            }
        }
        Ok(())
    }
}

#[test]
fn an_edge_skips_a_stage_in_a_schedule_of_ones_own() {
    let csv =
        ["0F0,1F0,2F0,0F1,1F1,2F1,2B0,1B0,0B0,2B1,1B1,0B1\n", "0F0,0F1,2F0,2B0,2F1,2B1,0B0,0B1\n1F0,1F1,1B0,1B1\n"];
    for world in [1, 2] {
        ranks(world, |comm| {
            let rank = comm.rank().unwrap();
            let own = [&[0, 1, 2][..], &[2, 0]][world - 1];
            let own = if rank == 0 { own } else { &[1] };
            let mut pipe = Pipeline::builder(&comm, own).schedule_csv(csv[world - 1]).edge(0, 1, 2).build().unwrap();
            assert_eq!(pipe.microbatches(), 2);
            let batch = [Tensor::new(vec![1.0, 2.0, 6.0], [3]).unwrap()];
            let mut stages = Skipping::default();
            let losses = pipe.step(&mut stages, &batch, &[]).unwrap();
            same(&losses, &[13.0 * 1.5, 13.0 * 6.0]);
            if rank == 0 {
                same(&[stages.grads[&0]], &[13.0]);
            }
        });
    }
}

#[test]
fn the_gradient_of_a_tied_parameter_is_summed_over_its_stages() {
    ranks(4, |comm| {
        let rank = comm.rank().unwrap();
        let mut pipe = Pipeline::builder(&comm, &[rank]).microbatches(4).build().unwrap();
        let mut grad = vec![rank as f32 + 1.0; 3];
        if rank == 0 || rank == 3 {
            pipe.sum_tied(&mut grad, &[0, 3]).unwrap();
            assert_eq!(grad, [5.0; 3]);
        }
        let mut net = Net::of(&[rank]);
        let (batch, targets) = batch_and_targets(4, 4);
        pipe.step(&mut net, &batch, &targets).unwrap();
        let error = pipe.sum_tied(&mut grad, &[0, usize::MAX]).unwrap_err();
        assert!([Code::InvalidArgument, Code::Aborted].contains(&error.code()), "{error:?}");
        let later = pipe.step(&mut net, &batch, &targets).unwrap_err();
        assert_eq!(later.code(), Code::Aborted);
        assert!(later.source().is_some(), "{later:?}");
    });
}

#[derive(Debug)]
struct OutOfInk(u8);

impl fmt::Display for OutOfInk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "out of ink, color {}", self.0)
    }
}

impl std::error::Error for OutOfInk {}

/// One step in which the second micro-batch of stage 1 does `what`: what the step returned, and a later one.
fn failing(comm: &Comm, what: fn(&StageCall<'_>) -> CallbackResult<()>) -> (Error, Error) {
    let rank = comm.rank().unwrap();
    let mut pipe = Pipeline::builder(comm, &[rank]).schedule(GPipe).microbatches(2).build().unwrap();
    let mut net = Net::of(&[rank]);
    net.before = what;
    let (batch, targets) = batch_and_targets(4, 2);
    let first = pipe.step(&mut net, &batch, &targets).unwrap_err();
    (first, pipe.step(&mut net, &batch, &targets).unwrap_err())
}

fn is_second_of_stage_1(call: &StageCall<'_>) -> bool {
    (call.stage(), call.microbatch()) == (1, 1)
}

#[test]
fn an_error_of_a_callback_is_the_cause_of_the_steps() {
    ranks(2, |comm| {
        let (error, later) =
            failing(&comm, |call| if is_second_of_stage_1(call) { Err(OutOfInk(3).into()) } else { Ok(()) });
        for error in [&error, &later] {
            let says = "stage 1, micro-batch 1, forward: the callback failed: out of ink, color 3";
            assert!(error.message().contains(says), "{error}");
        }
        assert_eq!(later.code(), Code::Aborted);
        if comm.rank().unwrap() == 0 {
            assert_eq!(error.code(), Code::Aborted);
            return;
        }
        assert_eq!(error.code(), Code::User);
        assert_eq!(error.source().unwrap().downcast_ref::<OutOfInk>().unwrap().0, 3);
        assert!(format!("{error:?}").ends_with("caused by out of ink, color 3"), "{error:?}");
    });
}

#[test]
fn an_error_of_io_or_of_the_library_keeps_its_code() {
    ranks(2, |comm| {
        let io = failing(
            &comm,
            |call| if is_second_of_stage_1(call) { Err(io::Error::other("full").into()) } else { Ok(()) },
        );
        let own = failing(&comm, |call| {
            if is_second_of_stage_1(call) {
                call.output::<f32>([1 << 40])?;
            }
            Ok(())
        });
        if comm.rank().unwrap() == 1 {
            assert_eq!((io.0.code(), own.0.code()), (Code::Io, Code::InvalidArgument));
            assert_eq!(io.0.source().unwrap().downcast_ref::<io::Error>().unwrap().kind(), io::ErrorKind::Other);
            let cause = own.0.source().unwrap().downcast_ref::<Error>().unwrap();
            assert!(cause.message().contains("max_message_bytes"), "{cause}");
        }
    });
}

#[test]
fn a_panic_of_a_callback_fails_the_step_and_resumes_on_its_rank() {
    ranks(2, |comm| {
        let rank = comm.rank().unwrap();
        let mut pipe = Pipeline::builder(&comm, &[rank]).schedule(OneFOneB).microbatches(2).build().unwrap();
        let mut net = Net::of(&[rank]);
        net.before = |call| {
            let backward = !call.outputs().is_empty();
            assert!(!(is_second_of_stage_1(call) && backward), "a stage that panics (expected in this test)");
            Ok(())
        };
        let (batch, targets) = batch_and_targets(4, 2);
        let mut step = || pipe.step(&mut net, &batch, &targets);
        let says = "stage 1, micro-batch 1, backward: the callback failed: it panicked: a stage that panics";
        if rank == 1 {
            let panic = panic::catch_unwind(AssertUnwindSafe(&mut step)).unwrap_err();
            assert!(panic.downcast_ref::<&str>().unwrap().starts_with("a stage that panics"));
        } else {
            let error = step().unwrap_err();
            assert!(error.code() == Code::Aborted && error.message().contains(says), "{error:?}");
        }
        let later = step().unwrap_err();
        assert!(later.code() == Code::Aborted && later.message().contains(says), "{later:?}");
        batch[0].view_mut::<f64>().unwrap().fill(0.0); // ours again
    });
}

/// Stages that hand their inputs on, after what `0` does.
struct Passing<F>(F);

impl<F: FnMut(&StageCall<'_>) -> CallbackResult<()>> Stages for Passing<F> {
    fn forward(&mut self, call: &StageCall<'_>) -> CallbackResult<()> {
        (self.0)(call)?;
        let x = call.inputs()[0].view::<f64>()?;
        if call.stage() < 2 {
            call.output::<f64>([x.len()])?.copy_from_slice(x);
        }
        Ok(())
    }

    fn backward(&mut self, _: &StageCall<'_>) -> CallbackResult<()> {
        Ok(())
    }
}

#[test]
fn a_late_callback_is_named_on_every_rank() {
    let (failed, changed) = (Mutex::new(0), Condvar::new());
    let codes = ranks(3, |comm| {
        let rank = comm.rank().unwrap();
        // The other ranks wait for nobody but the late one, which goes on when they have failed.
        let mut stages = Passing(|call: &StageCall<'_>| {
            if call.stage() == 1 {
                let others = changed.wait_timeout_while(failed.lock().unwrap(), deadline(), |failed| *failed < 2);
                assert!(!others.unwrap().1.timed_out());
            }
            Ok(())
        });
        let mut pipe = Pipeline::builder(&comm, &[rank]).microbatches(3).build().unwrap();
        if rank != 1 {
            comm.set_timeout(Duration::from_millis(300)).unwrap();
        }
        let batch = [Tensor::new(vec![1.0; 3], [3]).unwrap()];
        let error = pipe.step(&mut stages, &batch, &[]).unwrap_err();
        if rank != 1 {
            *failed.lock().unwrap() += 1;
            changed.notify_one();
        }
        assert!(error.message().contains(" of micro-batch 0 from stage 1 on rank 1, in vain for 0.3 s"), "{error}");
        let waited = ["stage 0 waited for the gradient", "stage 2 waited for the activation"];
        assert!(waited.iter().any(|waited| error.message().contains(waited)), "{error}");
        assert!(error.code() != Code::Timeout || error.peer() == Some(1), "{error:?}");
        error.code()
    });
    assert!(codes[0] == Code::Timeout || codes[2] == Code::Timeout, "{codes:?}");
    assert_eq!(codes[1], Code::Aborted);
}

#[test]
fn a_shape_that_a_stage_does_not_expect_is_named_on_every_rank() {
    let codes = ranks(3, |comm| {
        let mut stages = Passing(|call: &StageCall<'_>| match call.inputs()[0].shape() {
            shape if call.stage() == 1 && shape != [2] => {
                Err(format!("the input is {shape:?}, expected was [2]").into())
            }
            _ => Ok(()),
        });
        let mut pipe = Pipeline::builder(&comm, &[comm.rank().unwrap()]).microbatches(3).build().unwrap();
        let batch = [Tensor::new(vec![1.0; 5], [5]).unwrap()]; // in parts of 2, 2 and 1
        let error = pipe.step(&mut stages, &batch, &[]).unwrap_err();
        let says = "stage 1, micro-batch 2, forward: the callback failed: the input is [1], expected was [2]";
        assert!(error.message().contains(says), "{error}");
        error.code()
    });
    assert_eq!(codes, [Code::Aborted, Code::User, Code::Aborted]);
}

#[test]
fn a_csv_that_cannot_be_used_is_refused() {
    let comm = alone();
    for (csv, says) in [
        ("0F0,0X0".to_owned(), "line 1, cell 2: '0X0' has an unknown action"),
        ("0F0,0B0\n1F0,1B0".to_owned(), "the CSV has a schedule of 2 ranks; the communicator has 1"),
        ("0F0,0F0".to_owned(), "0F0: already computed before"),
        (",".repeat((256 << 20) + 1), "a schedule of 268435457 bytes; at most 268435456 are allowed"),
    ] {
        let error = Pipeline::builder(&comm, &[0]).schedule_csv(csv).build().unwrap_err();
        assert_eq!(error.code(), Code::InvalidArgument);
        assert!(error.message().contains(says), "{error}");
    }
}

#[test]
fn what_the_stages_see_of_the_batch_is_not_written_meanwhile() {
    struct Writing(Tensor);
    impl Stages for Writing {
        fn forward(&mut self, call: &StageCall<'_>) -> CallbackResult<()> {
            assert_eq!(self.0.view_mut::<f64>().unwrap_err().code(), Code::InvalidState);
            assert_eq!(self.0.view::<f64>()?[..], *call.inputs()[0].view::<f64>()?);
            Ok(())
        }
    }
    let comm = alone();
    let mut pipe = Pipeline::builder(&comm, &[0]).microbatches(1).build().unwrap();
    let batch = matrix(2, 2, 0);
    let mut stages = Writing(batch.clone());
    pipe.eval(&mut stages, slice::from_ref(&batch), &[]).unwrap();
    let error = pipe.step(&mut stages, slice::from_ref(&batch), &[]).unwrap_err();
    assert_eq!(error.code(), Code::Unsupported);
    assert!(error.message().contains("Stages::backward_input is not implemented"), "{error}");

    let mut pipe = Pipeline::builder(&comm, &[0]).microbatches(1).build().unwrap();
    let _view = batch.view_mut::<f64>().unwrap();
    let error = pipe.eval(&mut stages, slice::from_ref(&batch), &[]).unwrap_err();
    assert_eq!(error.code(), Code::InvalidState);
    assert!(error.message().contains("the batch: a mutable view"), "{error}");
}

#[test]
fn the_cpu_has_no_streams_and_no_tensors_of_devices() {
    fn refused<T>(result: tessera::Result<T>, words: &str) {
        let error = result.err().expect(words);
        assert!(error.code() == Code::InvalidArgument && error.message().contains(words), "{error}");
    }
    struct Looking;
    impl Stages for Looking {
        fn forward(&mut self, call: &StageCall<'_>) -> CallbackResult<()> {
            refused(call.inputs()[0].cuda(), "is on the CPU: use view");
            refused(call.cuda_output(DType::F32, [1]), "an output is on the CPU: use output");
            refused(call.cuda_input_grad(0), "there is no gradient of input 0");
            Ok(())
        }
    }
    let comm = alone();
    let mut pipe = Pipeline::builder(&comm, &[0]).microbatches(1).on_device(false).build().unwrap();
    refused(unsafe { pipe.set_stream(std::ptr::dangling_mut()) }, "on the CPU, which has none");
    pipe.eval(&mut Looking, slice::from_ref(&matrix(2, 2, 0)), &[]).unwrap();
    let error = Pipeline::builder(&comm, &[0]).microbatches(1).on_device(true).build().unwrap_err();
    assert_eq!(error.code(), Code::Unsupported, "{error}");
}

#[test]
fn stages_that_are_missing_are_named_on_every_rank() {
    ranks(2, |comm| {
        let refused = |stages: &[usize], schedule, m| {
            let error = Pipeline::builder(&comm, stages).schedule(schedule).microbatches(m).build().unwrap_err();
            assert_eq!(error.code(), Code::InvalidArgument, "{error:?}");
            error.message().to_owned()
        };
        let rank = comm.rank().unwrap();
        let message = refused(&[0], GPipe, 2);
        assert!(message.contains("stage 1 is missing"), "{message}");
        assert!(message.contains("stage 0 is on rank 0 and on rank 1"), "{message}");
        let message = refused(&[1 - rank], GPipe, 2);
        assert!(message.contains("stage 0 is on rank 1; it belongs to rank 0"), "{message}");
        let message = refused(&[rank, usize::MAX], LoopedBfs, 2);
        assert!(message.contains("stage 2 is missing") && message.contains("does not exist"), "{message}");
        let message = refused(&[rank], GPipe, 0);
        assert!(message.contains("microbatches is 0"), "{message}");
        let message = refused(&[rank], OneFOneB, 1);
        assert!(message.contains("the next number that works is 2"), "{message}");
        let error = Pipeline::builder(&comm, &[rank]).microbatches(2).edge(1, 0, 0).build().unwrap_err();
        assert_eq!(error.code(), Code::InvalidArgument, "{error:?}");
        let error = Pipeline::builder(&comm, &[rank]).microbatches(2 + rank).build().unwrap_err();
        assert_eq!(error.code(), Code::Mismatch, "{error:?}");
        comm.barrier().unwrap(); // which still works
    });
}

#[test]
fn states_and_optimizers_of_ranks_with_different_parameters_are_joined() {
    let folder = tempfile::tempdir().unwrap();
    ranks(2, |comm| {
        let rank = comm.rank().unwrap();
        let weight = Tensor::new(vec![rank as f32 + 1.0], [1]).unwrap();
        let name = ["first", "second"][rank];
        let mut model = Local::new(Params::new().with(name, weight.clone())).unwrap();
        model.grad_mut(0).unwrap()[0] = rank as f32 + 3.0;
        let mut sgd = Sgd::new(&mut model).build().unwrap();
        sgd.join(&comm).unwrap();
        assert!((sgd.clip_grad_norm(100.0, 2.0).unwrap() - 5.0).abs() < 1e-9);
        assert_eq!(sgd.join(&comm).unwrap_err().code(), Code::InvalidState);
        let mut state = State::new().with(name, &weight).with("optim", &sgd);
        let saver = Saver::at(&comm, folder.path()).open().unwrap();
        assert_eq!(saver.save(1, &state).unwrap_err().code(), Code::Mismatch);
        state.join(&comm).unwrap();
        saver.save(1, &state).unwrap();
        weight.view_mut::<f32>().unwrap().fill(0.0);
        assert_eq!(saver.resume(&mut state).unwrap(), 1);
        assert_eq!(weight.view::<f32>().unwrap()[0], rank as f32 + 1.0);
        let whole = state.gather(&comm, "second", None).unwrap().unwrap();
        assert_eq!(whole.view::<f32>().unwrap()[0], 2.0);
    });
}
