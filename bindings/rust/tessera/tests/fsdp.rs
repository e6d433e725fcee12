//! Fully sharded data parallelism: units that are whole under their guards, shards in between, trainings that equal those of
//! one rank, checkpoints at other sizes.

mod common;

use std::panic::{catch_unwind, AssertUnwindSafe};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Instant;

use common::{alone, deadline, ranks};
use tessera::{
    params, units, Adam, AdamW, Checkpoint, Code, Comm, DType, Fsdp, FsdpOptions, FsdpUnit, Optimizer, ReduceOp, Saver,
    Sgd, State, Tensor, UnitPhase, Units,
};

/// `value(i)` for each element.
fn filled(count: usize, value: impl Fn(usize) -> f32) -> Vec<f32> {
    (0..count).map(value).collect()
}

/// 7 rows, which neither 2 nor 3 ranks divide, and 2, of which the third of 3 ranks has none.
fn uneven(rank: usize) -> Units {
    let own = 100.0 * rank as f32;
    units![
        "first" => params!["module.w" => (filled(14, |i| own + i as f32), [7, 2]), "b" => (filled(2, |i| own - i as f32), [2])],
        "second" => params!["v" => (filled(5, |i| own + 50.0 + i as f32), [5])],
    ]
}

/// Every gradient is `value`, in a whole backward.
fn backward(fsdp: &Fsdp, unit: usize, value: f32) {
    let guard = fsdp.backward(unit).unwrap();
    guard.indices().for_each(|i| guard.grad_mut(i).unwrap().fill(value));
    guard.ready().unwrap();
}

fn expect_shard_grads(fsdp: &Fsdp, value: f32) {
    for i in 0..fsdp.len() {
        assert!(fsdp.shard_grad(i).unwrap().iter().all(|&grad| grad == value), "{i}, not {value}");
    }
}

fn until(done: impl Fn() -> bool) {
    let begun = Instant::now();
    while !done() {
        assert!(begun.elapsed() < deadline(), "it was never done");
        std::thread::yield_now();
    }
}

/// The rows of a parameter of `rows` that rank `rank` of `world` has: `torch.chunk`'s.
fn rows(rows: usize, world: usize, rank: usize) -> std::ops::Range<usize> {
    let chunk = rows.div_ceil(world);
    (chunk * rank).min(rows)..(chunk * (rank + 1)).min(rows)
}

#[test]
fn shards_whole_parameters_and_gradients_are_right_at_any_number_of_ranks() {
    for world in [1, 2, 3] {
        ranks(world, |comm| {
            let rank = comm.rank().unwrap();
            let mut fsdp = Fsdp::new(&comm, uneven(rank)).unwrap();
            assert_eq!((fsdp.len(), fsdp.is_empty(), fsdp.unit_count()), (3, false, 2));
            assert_eq!((fsdp.name(0), fsdp.index("b"), fsdp.name(3)), (Some("w"), Some(1), None));
            assert_eq!((fsdp.unit("second"), fsdp.unit_name(0), fsdp.unit("third")), (Some(1), Some("first"), None));
            assert_eq!((fsdp.indices(0), fsdp.unit_of(2), fsdp.shape(0)), (Some(0..2), Some(1), Some(&[7, 2][..])));
            let first = [filled(14, |i| i as f32), filled(2, |i| -(i as f32)), filled(5, |i| 50.0 + i as f32)];
            let mine = |i: usize, width: usize, height: usize| {
                let rows = rows(height, world, rank);
                first[i][rows.start * width..rows.end * width].to_vec()
            };
            let expected = [mine(0, 2, 7), mine(1, 1, 2), mine(2, 1, 5)];
            for (i, expected) in expected.iter().enumerate() {
                assert_eq!(fsdp.shard(i).unwrap()[..], expected[..], "{world} ranks");
            }
            let held = fsdp.layout(0).unwrap().regions(rank).unwrap();
            assert_eq!(
                (held[0].offsets[0], held[0].sizes[0]),
                (rows(7, world, rank).start, rows(7, world, rank).len())
            );
            for step in 1..4 {
                for unit in 0..2 {
                    let whole = fsdp.forward(unit).unwrap();
                    for i in whole.indices() {
                        assert_eq!(whole.param(i).unwrap(), first[i]);
                    }
                    whole.done().unwrap();
                }
                for unit in [1, 0] {
                    let guard = fsdp.backward(unit).unwrap();
                    for i in guard.indices() {
                        assert_eq!(guard.param(i).unwrap(), first[i]);
                        // The mean over the ranks of (rank + 1) * step * place.
                        let place = |at: usize| ((rank + 1) * step * at) as f32;
                        guard.grad_mut(i).unwrap().iter_mut().enumerate().for_each(|(at, grad)| *grad = place(at));
                    }
                    guard.ready().unwrap();
                }
                fsdp.wait().unwrap();
                let mean = (world + 1) as f32 / 2.0 * step as f32;
                for (i, (width, height)) in [(2, 7), (1, 2), (1, 5)].into_iter().enumerate() {
                    let rows = rows(height, world, rank);
                    let expected: Vec<_> = (rows.start * width..rows.end * width).map(|at| mean * at as f32).collect();
                    assert_eq!(fsdp.shard_grad(i).unwrap()[..], expected[..], "{world} ranks, step {step}");
                }
            }
        });
    }
}

#[test]
fn each_rank_may_begin_with_its_own_values_and_sum() {
    ranks(2, |comm| {
        let rank = comm.rank().unwrap();
        let options = FsdpOptions::new().sync_values(false).op(ReduceOp::Sum).pre_divide(4.0);
        let mut fsdp = Fsdp::with_options(&comm, uneven(rank), &options).unwrap();
        let whole = fsdp.forward(1).unwrap();
        assert_eq!(whole.param(2).unwrap(), [50.0, 51.0, 52.0, 153.0, 154.0]);
        drop(whole);
        for unit in [1, 0] {
            let guard = fsdp.backward(unit).unwrap();
            guard.indices().for_each(|i| guard.grad_mut(i).unwrap().fill(3.0));
            guard.ready().unwrap();
        }
        fsdp.wait().unwrap();
        assert!(fsdp.shard_grad(0).unwrap().iter().all(|&grad| grad == 6.0));
    });
}

#[test]
fn whole_parameters_and_gradients_may_be_of_other_types_than_shards() {
    use half::bf16;
    ranks(2, |comm| {
        let options = FsdpOptions::new().param_dtype(DType::BF16).reduce_dtype(DType::F64);
        let mut fsdp =
            Fsdp::with_options(&comm, units!["u" => params!["w" => (vec![1.5f32; 3], [3])]], &options).unwrap();
        let guard = fsdp.backward(0).unwrap();
        assert_eq!(guard.param_as::<bf16>(0).unwrap(), [bf16::from_f32(1.5); 3]);
        let error = guard.param(0).unwrap_err();
        assert!(error.code() == Code::InvalidArgument && error.message().contains("bf16"), "{error}");
        assert_eq!(guard.grad_mut(0).unwrap_err().code(), Code::InvalidArgument);
        guard.grad_mut_as::<f64>(0).unwrap().fill(comm.rank().unwrap() as f64);
        guard.ready().unwrap();
        fsdp.wait().unwrap();
        assert!(fsdp.shard_grad(0).unwrap().iter().all(|&grad| grad == 0.5));
        assert_eq!(fsdp.shard_as::<f64>(0).unwrap_err().code(), Code::InvalidArgument);
    });
}

#[test]
fn a_unit_may_have_other_types_than_the_rest() {
    use half::bf16;
    ranks(2, |comm| {
        let own =
            FsdpUnit::new(params!["w" => (vec![1.5f32; 3], [3])]).param_dtype(DType::F64).reduce_dtype(DType::F32);
        let options = FsdpOptions::new().param_dtype(DType::BF16);
        let model = units!["own" => own, "rest" => params!["v" => (vec![0.5f32; 2], [2])]];
        let mut fsdp = Fsdp::with_options(&comm, model, &options).unwrap();
        let guard = fsdp.backward(0).unwrap();
        assert_eq!(guard.param_as::<f64>(0).unwrap(), [1.5; 3]);
        guard.grad_mut(0).unwrap().fill(comm.rank().unwrap() as f32);
        guard.ready().unwrap();
        let guard = fsdp.backward(1).unwrap();
        assert_eq!(guard.param_as::<bf16>(1).unwrap(), [bf16::from_f32(0.5); 2]);
        guard.grad_mut_as::<bf16>(1).unwrap().fill(bf16::from_f32(3.0));
        guard.ready().unwrap();
        fsdp.wait().unwrap();
        assert!(fsdp.shard_grad(0).unwrap().iter().all(|&grad| grad == 0.5));
        assert!(fsdp.shard_grad(1).unwrap().iter().all(|&grad| grad == 3.0));
        let bad = units!["own" => FsdpUnit::new(params!["w" => (vec![1.5f32; 3], [3])]).reduce_dtype(DType::I8)];
        let error = Fsdp::new(&comm, bad).unwrap_err();
        assert!(error.code() == Code::InvalidArgument && error.message().contains("unit \"own\": reduce_dtype is i8"));
    });
}

const STEPS: usize = 50;
const SAMPLES: usize = 24;
const INPUTS: usize = 5;
const HIDDEN: usize = 8;

/// Uniform in ±1.
fn uniform(state: &mut u64) -> f32 {
    *state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
    (*state >> 40) as f32 / (1 << 23) as f32 - 1.0
}

type Sample = ([f32; INPUTS], f32);

fn samples() -> Vec<Sample> {
    let mut random = 5;
    (0..SAMPLES).map(|_| (std::array::from_fn(|_| uniform(&mut random)), uniform(&mut random))).collect()
}

/// A network of two layers whose values are of `seed`.
fn network(seed: usize, cut: impl Fn(FsdpUnit) -> FsdpUnit) -> Units {
    let mut random = 7 + seed as u64;
    let mut initial = |count| (0..count).map(|_| uniform(&mut random) / 2.0).collect::<Vec<_>>();
    let first = params!["w1" => (initial(HIDDEN * INPUTS), [HIDDEN, INPUTS]), "b1" => (initial(HIDDEN), [HIDDEN])];
    let second = params!["w2" => (initial(HIDDEN), [HIDDEN])];
    units!["first" => cut(FsdpUnit::new(first)), "second" => second]
}

fn plain(unit: FsdpUnit) -> FsdpUnit {
    unit
}

/// A whole parameter that is f32, or else bf16.
fn values(as_f32: tessera::Result<&[f32]>, as_bf16: tessera::Result<&[half::bf16]>) -> Vec<f32> {
    as_f32.map_or_else(|_| as_bf16.unwrap().iter().map(|value| value.to_f32()).collect(), <[f32]>::to_vec)
}

/// One forward and backward over some of the samples: adds the gradients of the mean over `share` samples to what is there, if
/// `add`. Returns the sum of the squared errors.
fn step(fsdp: &mut Fsdp, samples: &[&Sample], share: f32, add: bool) -> f64 {
    let first = fsdp.forward(0).unwrap();
    let (w1, b1) = (values(first.param(0), first.param_as(0)), values(first.param(1), first.param_as(1)));
    let hidden: Vec<[f32; HIDDEN]> = samples
        .iter()
        .map(|(input, _)| {
            std::array::from_fn(|j| {
                let row = &w1[j * INPUTS..(j + 1) * INPUTS];
                (b1[j] + row.iter().zip(input).map(|(w, x)| w * x).sum::<f32>()).tanh()
            })
        })
        .collect();
    first.done().unwrap();
    let second = fsdp.forward(1).unwrap();
    let w2 = values(second.param(2), second.param_as(2));
    let errors: Vec<f32> = samples
        .iter()
        .zip(&hidden)
        .map(|((_, target), hidden)| hidden.iter().zip(&w2).map(|(h, w)| h * w).sum::<f32>() - target)
        .collect();
    second.done().unwrap();

    let second = fsdp.backward(1).unwrap();
    let w2 = values(second.param(2), second.param_as(2));
    {
        let mut g2 = second.grad_mut(2).unwrap();
        if !add {
            g2.fill(0.0);
        }
        for (hidden, error) in hidden.iter().zip(&errors) {
            g2.iter_mut().zip(hidden).for_each(|(grad, h)| *grad += 2.0 * error / share * h);
        }
    }
    second.ready().unwrap();
    let first = fsdp.backward(0).unwrap();
    {
        let (mut g1, mut gb) = (first.grad_mut(0).unwrap(), first.grad_mut(1).unwrap());
        if !add {
            g1.fill(0.0);
            gb.fill(0.0);
        }
        for (((input, _), hidden), error) in samples.iter().zip(&hidden).zip(&errors) {
            for j in 0..HIDDEN {
                let inner = 2.0 * error / share * w2[j] * (1.0 - hidden[j] * hidden[j]);
                gb[j] += inner;
                g1[j * INPUTS..(j + 1) * INPUTS].iter_mut().zip(input).for_each(|(grad, x)| *grad += inner * x);
            }
        }
    }
    first.ready().unwrap();
    fsdp.wait().unwrap();
    errors.iter().map(|error| f64::from(*error).powi(2)).sum()
}

/// All parameters.
fn gathered(fsdp: &Fsdp) -> Vec<f32> {
    (0..fsdp.unit_count()).for_each(|unit| fsdp.unshard(unit).unwrap());
    let mut all = Vec::new();
    for unit in 0..fsdp.unit_count() {
        let whole = fsdp.whole(unit).unwrap();
        whole.indices().for_each(|i| all.extend(values(whole.param(i), whole.param_as(i))));
        whole.reshard().unwrap();
    }
    all
}

#[derive(Clone, Default)]
struct Way {
    options: FsdpOptions,
    keep_whole: bool,
    row_block: usize,
    flat: bool,
    /// Parts of a rank's share of the batch: of all but the last, gradients add up whole,
    without_sync: bool,
    /// or in the shards,
    accumulates: bool,
    /// or within each replica.
    delays_all_reduce: bool,
}

/// The mean of the squared errors before each step, and the parameters at the end.
fn train(comm: &Comm, way: &Way) -> (Vec<f64>, Vec<f32>) {
    let (rank, world) = (comm.rank().unwrap(), comm.world_size().unwrap());
    let samples = samples();
    let mut fsdp = Fsdp::with_options(
        comm,
        network(rank, |unit| unit.reshard_after_forward(!way.keep_whole).row_block(way.row_block).flat(way.flat)),
        &way.options,
    )
    .unwrap();
    let mut opt = AdamW::new(&mut fsdp).lr(0.02).build().unwrap();
    let micro_steps = if way.without_sync || way.accumulates || way.delays_all_reduce { 3 } else { 1 };
    let mut losses = Vec::new();
    for _ in 0..STEPS {
        let mut squares = [0.0];
        for micro in 0..micro_steps {
            let part: Vec<_> = samples.iter().skip(rank + world * micro).step_by(world * micro_steps).collect();
            let last = micro + 1 == micro_steps;
            fsdp.set_sync(last || !way.without_sync).unwrap();
            fsdp.set_accumulate(micro > 0 && way.accumulates).unwrap();
            fsdp.set_all_reduce(last || !way.delays_all_reduce).unwrap();
            squares[0] += step(&mut fsdp, &part, SAMPLES as f32 / world as f32, way.without_sync);
        }
        comm.all_reduce(&mut squares, ReduceOp::Sum).unwrap();
        losses.push(squares[0] / SAMPLES as f64);
        opt.step().unwrap();
    }
    (losses, gathered(&fsdp))
}

fn expect_world_size_does_not_matter(worlds: &[usize], way: &Way, near: f64) {
    let (expected, _) = train(&alone(), &Way::default());
    assert!(expected[STEPS - 1] < 0.5 * expected[0], "it learns something: {} to {}", expected[0], expected[STEPS - 1]);
    for &world in worlds {
        let together = ranks(world, |comm| train(&comm, way));
        for (step, (loss, expected)) in together[0].0.iter().zip(&expected).enumerate() {
            assert!((loss - expected).abs() <= near * expected, "{world} ranks, step {step}: {loss}, not {expected}");
        }
        assert!(together.iter().all(|rank| *rank == together[0]), "ranks ended with different bits");
        assert!(ranks(world, |comm| train(&comm, way)) == together, "a second run gave other bits");
    }
}

#[test]
fn ranks_with_a_share_of_the_batch_equal_one_rank_with_all_of_it() {
    expect_world_size_does_not_matter(&[2, 3], &Way::default(), 1e-4);
}

#[test]
fn ranks_that_compute_in_bf16_and_reduce_in_f32_learn_the_same() {
    let options = FsdpOptions::new().param_dtype(DType::BF16).reduce_dtype(DType::F32);
    expect_world_size_does_not_matter(&[2, 3], &Way { options, ..Way::default() }, 2e-2);
}

#[test]
fn units_that_stay_whole_and_units_one_by_one_train_alike() {
    expect_world_size_does_not_matter(&[3], &Way { keep_whole: true, ..Way::default() }, 1e-4);
    let options = FsdpOptions::new().forward_prefetch(0).backward_prefetch(0).grads_in_flight(1);
    expect_world_size_does_not_matter(&[3], &Way { options, ..Way::default() }, 1e-4);
}

#[test]
fn a_unit_kept_among_some_ranks_stays_whole_on_their_host() {
    ranks(4, |comm| {
        let unit = FsdpUnit::new(params!["w" => (vec![1.0f32; 8], [8])]).keep_among(2);
        let fsdp = Fsdp::new(&comm, units!["u" => unit]).unwrap();
        fsdp.forward(0).unwrap().done().unwrap();
        assert_eq!(fsdp.phase(0).unwrap(), UnitPhase::Whole);
    });
}

#[test]
fn units_cut_in_blocks_of_rows_or_anywhere_train_alike() {
    expect_world_size_does_not_matter(&[3], &Way { row_block: 3, ..Way::default() }, 1e-4);
    expect_world_size_does_not_matter(&[3], &Way { flat: true, ..Way::default() }, 1e-4);
}

#[test]
fn flat_units_have_parts_of_parameters() {
    ranks(2, |comm| {
        let params = params!["scale" => (vec![2.0f32], []), "w" => (vec![1.0f32; 90], [3, 30])];
        let fsdp = Fsdp::new(&comm, units!["all" => FsdpUnit::new(params).flat(true)]).unwrap();
        let rank = comm.rank().unwrap();
        assert_eq!(fsdp.shard(0).unwrap().len(), if rank == 0 { 1 } else { 0 });
        assert_eq!(fsdp.shard(1).unwrap().len(), if rank == 0 { 32 } else { 58 });
        let boxes = fsdp.layout(1).unwrap().regions(rank).unwrap();
        assert_eq!(boxes.len(), 2, "one whole row and a part of another");
        let blocks = params!["w" => (vec![1.0f32; 8], [8])];
        let fsdp = Fsdp::new(&comm, units!["u" => FsdpUnit::new(blocks).row_block(5)]).unwrap();
        assert_eq!(fsdp.shard(0).unwrap().len(), if rank == 0 { 5 } else { 3 });
    });
}

#[test]
fn full_states_are_gathered_tensor_by_tensor() {
    ranks(3, |comm| {
        let rank = comm.rank().unwrap();
        let values: Vec<f32> = (0..8u8).map(f32::from).collect();
        let mut fsdp = Fsdp::new(&comm, units!["u" => params!["w" => (values.clone(), [4, 2])]]).unwrap();
        let optimizer = AdamW::new(&mut fsdp).build().unwrap();
        let state = State::new().with("model", &fsdp).with("optim", &optimizer);
        let names: Vec<_> = state.tensors().unwrap().into_iter().map(|tensor| tensor.name).collect();
        assert_eq!(names, ["model.w", "optim.state.w.exp_avg", "optim.state.w.exp_avg_sq", "optim.state.w.step"]);
        for root in [None, Some(2)] {
            let whole = state.gather(&comm, "model.w", root).unwrap();
            assert_eq!(whole.is_some(), root.is_none_or(|root| root == rank));
            if let Some(whole) = whole {
                assert_eq!(whole.shape(), [4, 2]);
                assert_eq!(*whole.view::<f32>().unwrap(), values[..]);
            }
        }
        let refused = |name, root| state.gather(&comm, name, root).unwrap_err().code();
        assert_eq!(refused("model.w", Some(3)), Code::InvalidArgument);
        let (name, code) = if rank == 1 { ("model.v", Code::NotFound) } else { ("model.w", Code::Mismatch) };
        assert_eq!(refused(name, None), code);
    });
}

#[test]
fn gradients_divided_before_they_are_summed_equal_one_rank_with_all_of_it() {
    let options = FsdpOptions::new().pre_divide(2.0);
    expect_world_size_does_not_matter(&[3], &Way { options, ..Way::default() }, 1e-4);
}

#[test]
fn replicas_train_as_one_rank_does() {
    let options = FsdpOptions::new().shard_ranks(2);
    let plain = Way { options, ..Way::default() };
    expect_world_size_does_not_matter(&[4], &plain, 1e-4);
    expect_world_size_does_not_matter(&[4], &Way { delays_all_reduce: true, ..plain }, 1e-4);
}

#[test]
fn gradients_added_up_in_micro_steps_equal_one_rank_with_all_of_it() {
    expect_world_size_does_not_matter(&[2], &Way { without_sync: true, ..Way::default() }, 1e-4);
    expect_world_size_does_not_matter(&[2], &Way { accumulates: true, ..Way::default() }, 1e-4);
}

#[test]
fn an_optimizer_steps_once_for_gradients_that_were_reduced() {
    ranks(2, |comm| {
        let mut fsdp = Fsdp::new(&comm, uneven(0)).unwrap();
        let mut opt = Sgd::new(&mut fsdp).lr(1.0).build().unwrap();
        let refused = |opt: &mut Optimizer<'_>, why: &str| {
            let error = opt.step().unwrap_err();
            assert!(error.code() == Code::InvalidState && error.message().contains(why), "{error:?}");
        };
        refused(&mut opt, "before any gradients were reduced");
        backward(&fsdp, 1, 1.0);
        backward(&fsdp, 0, 1.0);
        fsdp.wait().unwrap();
        opt.step().unwrap();
        refused(&mut opt, "no gradients were reduced since its last step");
    });
}

#[test]
fn memory_that_is_left_to_a_unit_has_what_shards_have() {
    ranks(2, |comm| {
        let mut fsdp = Fsdp::new(&comm, units!["u" => params!["w" => (vec![0.0f32; 4], [4])]]).unwrap();
        fsdp.set_reshard_after_backward(0, false).unwrap();
        assert_eq!(fsdp.set_reshard_after_backward(1, false).unwrap_err().code(), Code::InvalidArgument);
        for (value, next) in [(0.0, 0.0), (0.0, 5.0), (5.0, 6.0)] {
            let guard = fsdp.forward(0).unwrap();
            assert!(guard.param(0).unwrap().iter().all(|&one| one == value));
            guard.done().unwrap();
            let guard = fsdp.backward(0).unwrap();
            guard.grad_mut(0).unwrap().fill(1.0);
            guard.ready().unwrap();
            assert_eq!(fsdp.set_reshard_after_backward(0, true).unwrap_err().code(), Code::InvalidState);
            fsdp.wait().unwrap();
            fsdp.shard_mut(0).unwrap().fill(next);
        }
    });
}

#[test]
fn a_reduction_over_replicas_may_wait() {
    ranks(4, |comm| {
        let rank = comm.rank().unwrap() as f32;
        let options = FsdpOptions::new().shard_ranks(2);
        let model = units!["u" => params!["w" => (vec![0.0f32; 5], [5])]];
        let mut fsdp = Fsdp::with_options(&comm, model, &options).unwrap();
        let backward = |fsdp: &mut Fsdp, value: f32| {
            let guard = fsdp.backward(0).unwrap();
            guard.grad_mut(0).unwrap().fill(value * rank);
            guard.ready().unwrap();
            fsdp.wait().unwrap();
        };
        fsdp.set_all_reduce(false).unwrap();
        backward(&mut fsdp, 2.0);
        assert!(fsdp.shard_grad(0).unwrap().iter().all(|&grad| grad == 0.0));
        fsdp.set_all_reduce(true).unwrap();
        backward(&mut fsdp, 4.0);
        assert!(fsdp.shard_grad(0).unwrap().iter().all(|&grad| grad == 9.0));
        let layout = fsdp.layout(0).unwrap();
        assert_eq!(layout.regions(1).unwrap(), layout.regions(3).unwrap(), "replicas hold the same");
    });
}

#[test]
fn a_model_is_saved_at_3_ranks_and_loaded_at_2_optimizer_and_all() {
    let folder = tempfile::tempdir().unwrap();
    let job = |comm: &Comm, steps: usize| {
        let (rank, world) = (comm.rank().unwrap(), comm.world_size().unwrap());
        let samples = samples();
        let mut fsdp = Fsdp::new(comm, network(rank + 10 * steps, plain)).unwrap();
        let mut opt = Adam::new(&mut fsdp).lr(0.02).build().unwrap();
        let saver = Saver::at(comm, folder.path()).open().unwrap();
        let mut state = State::new().with("model", &fsdp).with("optim", &opt);
        let first = saver.resume(&mut state).unwrap() as usize;
        let part: Vec<_> = samples.iter().skip(rank).step_by(world).collect();
        for _ in first..steps {
            step(&mut fsdp, &part, SAMPLES as f32 / world as f32, false);
            opt.step().unwrap();
        }
        let all = gathered(&fsdp);
        saver.save(steps as u64, &state).unwrap();
        assert_eq!(opt.steps().unwrap(), steps as u64);
        all
    };
    ranks(3, |comm| job(&comm, 5));
    let ended = ranks(2, |comm| job(&comm, 10)).remove(0);
    let expected = {
        let comm = alone();
        let mut fsdp = Fsdp::new(&comm, network(50, plain)).unwrap(); // as rank 0 of the first job
        let mut opt = Adam::new(&mut fsdp).lr(0.02).build().unwrap();
        let samples = samples();
        for _ in 0..10 {
            step(&mut fsdp, &samples.iter().collect::<Vec<_>>(), SAMPLES as f32, false);
            opt.step().unwrap();
        }
        gathered(&fsdp)
    };
    let far = ended.iter().zip(&expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    assert!(far < 1e-4, "{far}");
    let checkpoint = Checkpoint::open(folder.path()).unwrap();
    let tensors = checkpoint.tensors().unwrap();
    for name in ["model.w1", "optim.state.w1.exp_avg"] {
        assert!(tensors.iter().any(|tensor| tensor.name == name && tensor.shape == [8, 5]), "{name}");
    }
}

#[test]
fn the_cpu_has_no_streams_and_a_device_no_views() {
    ranks(1, |comm| {
        let refused = |result: tessera::Result<()>, words: &str| {
            let error = result.unwrap_err();
            assert!(error.code() == Code::InvalidArgument && error.message().contains(words), "{error}");
        };
        let mut fsdp = Fsdp::new(&comm, units!["u" => params!["w" => (vec![1.0f32; 4], [4])]]).unwrap();
        refused(unsafe { fsdp.set_stream(std::ptr::dangling_mut()) }, "the CPU has no streams");
        refused(fsdp.cuda_shard(0).map(drop), "shard of w is on the CPU: use shard");
        refused(fsdp.cuda_shard_grad(0).map(drop), "gradient of w is on the CPU: use shard_grad");
        let layer = fsdp.backward(0).unwrap();
        refused(layer.cuda_param(0).map(|_| ()), "w is on the CPU: use param");
        refused(layer.cuda_grad(0).map(|_| ()), "gradient of w is on the CPU: use grad_mut");
        layer.unused(0).unwrap();
        layer.ready().unwrap();
        fsdp.wait().unwrap();

        let later = Tensor::deferred_on(3, DType::F32, [4]).unwrap();
        assert!(later.cuda().is_none() && later.view::<f32>().is_err());
        let error = Fsdp::new(&comm, units!["u" => params!["w" => later]]).unwrap_err();
        assert_eq!(error.code(), Code::Unsupported, "{error}");
        assert!(error.message().contains("is on CUDA device 3"), "{error}");
    });
}

#[test]
fn deferred_parameters_get_their_values_in_shards() {
    ranks(3, |comm| {
        let (rank, world) = (comm.rank().unwrap(), comm.world_size().unwrap());
        let w = Tensor::deferred(DType::F32, [8, 5]).unwrap();
        assert_eq!(w.view::<f32>().unwrap_err().code(), Code::InvalidState);
        assert_eq!(w.bytes_mut().unwrap_err().code(), Code::InvalidState);
        let model = units!["u" => params!["w" => &w, "b" => Tensor::deferred(DType::F64, [2]).unwrap()]];
        let mut fsdp = Fsdp::new(&comm, model).unwrap();
        assert!(fsdp.shard(0).unwrap().iter().all(|&value| value == 0.0));
        let rows = rows(8, world, rank);
        for (row, values) in rows.zip(fsdp.shard_mut(0).unwrap().chunks_mut(5)) {
            values.fill(row as f32);
        }
        let whole = fsdp.forward(0).unwrap();
        assert!(whole.param(0).unwrap().chunks(5).enumerate().all(|(row, values)| values == [row as f32; 5]));
        assert_eq!(whole.param_as::<f64>(1).unwrap(), [0.0; 2]);
        drop(whole);
        let error = tessera::Ddp::new(&comm, params!["w" => &w]).unwrap_err();
        assert!(error.code() == Code::InvalidState && error.message().contains("deferred"), "{error}");
        assert_eq!(State::new().add("w", &w).unwrap_err().code(), Code::InvalidArgument);
    });
}

#[test]
fn deferred_parameters_are_loaded_at_another_size() {
    let folder = tempfile::tempdir().unwrap();
    let saved = ranks(2, |comm| {
        let mut fsdp = Fsdp::new(&comm, network(3, plain)).unwrap();
        let mut opt = Adam::new(&mut fsdp).build().unwrap();
        (0..2).for_each(|unit| backward(&fsdp, unit, 1.0));
        fsdp.wait().unwrap();
        opt.step().unwrap();
        let saver = Saver::at(&comm, folder.path()).open().unwrap();
        saver.save(1, &State::new().with("model", &fsdp).with("optim", &opt)).unwrap();
        gathered(&fsdp)
    });
    let loaded = ranks(3, |comm| {
        let deferred = |shape: &[usize]| Tensor::deferred(DType::F32, shape).unwrap();
        let model = units![
            "first" => params!["w1" => deferred(&[HIDDEN, INPUTS]), "b1" => deferred(&[HIDDEN])],
            "second" => params!["w2" => deferred(&[HIDDEN])],
        ];
        let mut fsdp = Fsdp::new(&comm, model).unwrap();
        let opt = Adam::new(&mut fsdp).build().unwrap();
        let saver = Saver::at(&comm, folder.path()).open().unwrap();
        assert_eq!(saver.resume(&mut State::new().with("model", &fsdp).with("optim", &opt)).unwrap(), 1);
        assert_eq!(opt.steps().unwrap(), 1);
        gathered(&fsdp)
    });
    assert!(saved.iter().chain(&loaded).all(|rank| *rank == saved[0]), "other bits");
}

#[test]
fn ranks_without_rows_train_and_save_with_the_others() {
    let folder = tempfile::tempdir().unwrap();
    for (done, world) in [(0u8, 4), (1, 3)] {
        ranks(world, |comm| {
            let rank = comm.rank().unwrap();
            let mut fsdp = Fsdp::new(&comm, units!["u" => params!["w" => (vec![8.0f32, 9.0], [2, 1])]]).unwrap();
            let mut opt = Sgd::new(&mut fsdp).lr(1.0).build().unwrap();
            let saver = Saver::at(&comm, folder.path()).open().unwrap();
            let mut state = State::new().with("model", &fsdp).with("optim", &opt);
            assert_eq!(saver.resume(&mut state).unwrap(), u64::from(done));
            backward(&fsdp, 0, 3.0 * rank as f32 / (world - 1) as f32);
            fsdp.wait().unwrap();
            assert!((opt.clip_grad_norm(10.0, 2.0).unwrap() - 1.5 * 2f64.sqrt()).abs() < 1e-6);
            opt.step().unwrap();
            let expected: &[f32] = if rank < 2 { &[8.0 + rank as f32 - 1.5 * f32::from(done + 1)] } else { &[] };
            assert_eq!(fsdp.shard(0).unwrap()[..], *expected);
            saver.save(u64::from(done) + 1, &state).unwrap();
        });
    }
}

#[test]
fn frozen_parameters_have_no_gradient_and_unused_ones_count_as_zeros() {
    ranks(2, |comm| {
        let unit = FsdpUnit::new(params!["w" => (vec![1.0f32; 4], [4]), "b" => (vec![1.0f32; 3], [3])]).frozen(["w"]);
        let still = FsdpUnit::new(params!["s" => (vec![1.0f32; 4], [4])]).frozen(["s"]);
        let last = params!["t" => (vec![1.0f32; 2], [2])];
        let mut fsdp = Fsdp::new(&comm, units!["u" => unit, "still" => still, "last" => last]).unwrap();
        assert_eq!([0, 1, 2, 3, 9].map(|i| fsdp.is_trained(i)), [false, true, false, true, false]);
        let guard = fsdp.backward(2).unwrap();
        guard.unused(3).unwrap();
        guard.ready().unwrap();
        let error = fsdp.shard_grad(0).unwrap_err();
        assert!(error.code() == Code::InvalidState && error.message().contains("\"w\" is frozen"), "{error}");
        let error = fsdp.backward(0).unwrap().ready().unwrap_err();
        let said = "1 of 1 gradients of unit \"u\" were not written: \"b\"";
        assert!(error.code() == Code::InvalidState && error.message().contains(said), "{error}");
        let guard = fsdp.backward(0).unwrap();
        assert_eq!(guard.grad_mut(0).unwrap_err().code(), Code::InvalidState);
        assert_eq!(guard.unused(0).unwrap_err().code(), Code::InvalidState);
        if comm.rank().unwrap() == 0 {
            guard.grad_mut(1).unwrap().fill(8.0);
        } else {
            guard.grad_mut(1).unwrap().fill(5.0);
            let view = guard.grad_mut(1).unwrap();
            assert_eq!(guard.unused(1).unwrap_err().code(), Code::InvalidState, "under a view");
            drop(view);
            guard.unused(1).unwrap();
        }
        guard.ready().unwrap();
        fsdp.wait().unwrap();
        assert!(fsdp.shard_grad(1).unwrap().iter().all(|&grad| grad == 4.0));
        assert_eq!([0, 1, 2, 3].map(|i| fsdp.used(i).unwrap()), [false, true, false, false]);
        assert_eq!(fsdp.used(4).unwrap_err().code(), Code::InvalidArgument);
        Sgd::new(&mut fsdp).lr(0.25).weight_decay(0.0).build().unwrap().step().unwrap();
        assert!(fsdp.shard(3).unwrap().iter().all(|&value| value == 1.0), "no rank used it");
        assert!(fsdp.shard(1).unwrap().iter().all(|&value| value == 0.0));
        assert!(fsdp.shard(0).unwrap().iter().all(|&value| value == 1.0));
        fsdp.zero_grad().unwrap();
        assert!(fsdp.shard_grad(1).unwrap().iter().all(|&grad| grad == 0.0));
    });
}

#[test]
fn a_backward_dropped_before_it_is_ready_goes_on() {
    ranks(2, |comm| {
        let mut fsdp = Fsdp::new(&comm, uneven(0)).unwrap();
        let fill =
            |guard: &tessera::Backward, value| guard.indices().for_each(|i| guard.grad_mut(i).unwrap().fill(value));
        let guard = fsdp.backward(1).unwrap();
        fill(&guard, 3.0);
        drop(guard); // an error in between
        assert_eq!(fsdp.forward(0).unwrap_err().code(), Code::InvalidState);
        let error = fsdp.wait().unwrap_err();
        assert!(error.code() == Code::InvalidState && error.message().contains("\"first\", \"second\""), "{error}");
        let guard = fsdp.backward(1).unwrap();
        assert_eq!(guard.grad_mut(2).unwrap()[..], [3.0; 5], "what was written is there");
        guard.ready().unwrap();
        std::mem::forget(fsdp.backward(0).unwrap());
        assert_eq!(fsdp.backward(0).unwrap_err().code(), Code::InvalidState, "its guard was forgotten");
        assert_eq!(fsdp.reshard(0).unwrap_err().code(), Code::InvalidState);
        drop(fsdp); // in the middle of everything
    });
}

#[test]
fn a_unit_tells_where_it_is() {
    use UnitPhase::{Backward, OnItsWay, Reducing, Sharded, Whole};
    ranks(2, |comm| {
        let mut fsdp = Fsdp::new(&comm, uneven(0)).unwrap();
        let phases = |fsdp: &Fsdp| [0, 1].map(|unit| fsdp.phase(unit).unwrap());
        assert_eq!(phases(&fsdp), [Sharded, Sharded]);
        let guard = fsdp.forward(0).unwrap();
        assert_eq!(phases(&fsdp), [Whole, OnItsWay]);
        guard.done().unwrap();
        assert_eq!(phases(&fsdp), [Sharded, OnItsWay]);
        fsdp.forward(1).unwrap().done().unwrap();
        let guard = fsdp.backward(1).unwrap();
        assert_eq!(phases(&fsdp), [OnItsWay, Backward]);
        guard.unused(2).unwrap();
        guard.ready().unwrap();
        assert_eq!(phases(&fsdp), [OnItsWay, Reducing]);
        fsdp.shard_mut(2).unwrap().fill(1.0);
        assert_eq!(fsdp.shard_mut(0).unwrap_err().code(), Code::InvalidState);
        backward(&fsdp, 0, 1.0);
        fsdp.wait().unwrap();
        assert_eq!(phases(&fsdp), [Sharded, Sharded]);
    });
}

#[test]
fn a_step_is_abandoned_anywhere() {
    let calls: [fn(&mut Fsdp); 9] = [
        |fsdp| fsdp.forward(0).unwrap().done().unwrap(),
        |fsdp| std::mem::forget(fsdp.forward(1).unwrap()),
        |fsdp| assert_eq!(fsdp.forward(1).unwrap_err().code(), Code::InvalidState),
        |fsdp| fsdp.reshard(1).unwrap(),
        |fsdp| {
            let failing = || {
                let guard = fsdp.backward(1).unwrap();
                guard.grad_mut(2).unwrap()[0] = 7.0;
                panic!("a network that panics (expected in this test)");
            };
            catch_unwind(AssertUnwindSafe(failing)).unwrap_err();
        },
        |fsdp| backward(fsdp, 1, 3.0),
        |fsdp| drop(fsdp.backward(0).unwrap()),
        |fsdp| backward(fsdp, 0, 3.0),
        |fsdp| fsdp.wait().unwrap(),
    ];
    ranks(2, |comm| {
        let mut fsdp = Fsdp::new(&comm, uneven(0)).unwrap();
        for sync in [true, false] {
            for end in 0..=calls.len() {
                fsdp.set_sync(sync).unwrap();
                calls[..end].iter().for_each(|call| call(&mut fsdp));
                fsdp.abandon().unwrap();
                assert_eq!([0, 1].map(|unit| fsdp.phase(unit).unwrap()), [UnitPhase::Sharded; 2]);
                expect_shard_grads(&fsdp, 0.0);
                (0..3).for_each(|i| drop(fsdp.shard_grad_mut(i).unwrap()));
                fsdp.set_sync(true).unwrap();
                calls.iter().for_each(|call| call(&mut fsdp));
                expect_shard_grads(&fsdp, 3.0); // nothing of what was abandoned is in them
            }
        }
        std::mem::forget(fsdp.shard_grad(2).unwrap()); // no other way compiles
        let error = fsdp.abandon().unwrap_err();
        assert!(error.code() == Code::InvalidState && error.message().starts_with("gradient of v: a view"), "{error}");
    });
}

#[test]
fn nothing_is_loaded_into_a_model_while_a_unit_is_not_sharded() {
    let folder = tempfile::tempdir().unwrap();
    ranks(2, |comm| {
        let mut fsdp = Fsdp::new(&comm, network(0, |unit| unit.reshard_after_forward(false))).unwrap();
        let saver = Saver::at(&comm, folder.path()).open().unwrap();
        let mut state = State::new().with("model", &fsdp);
        saver.save(1, &state).unwrap();
        let saved = gathered(&fsdp);
        for i in 0..fsdp.len() {
            fsdp.shard_mut(i).unwrap().fill(9.0);
        }
        let nines = gathered(&fsdp);
        let mut refused = |said: &str| {
            for error in [
                saver.resume(&mut state).unwrap_err(),
                Checkpoint::open(folder.path()).unwrap().load(&mut state, &Default::default()).unwrap_err(),
            ] {
                assert!(error.code() == Code::InvalidState && error.message().contains(said), "{said}: {error}");
            }
        };
        fsdp.unshard(1).unwrap();
        refused("\"second\" is being unsharded");
        let guard = fsdp.forward(0).unwrap();
        refused("\"first\" is unsharded");
        guard.done().unwrap();
        refused("\"first\" is unsharded"); // it stays so
        fsdp.forward(1).unwrap().done().unwrap();
        let guard = fsdp.backward(1).unwrap();
        refused("is unsharded");
        guard.unused(2).unwrap();
        guard.ready().unwrap();
        fsdp.reshard(0).unwrap();
        refused("\"second\" are being reduced");
        let guard = fsdp.backward(0).unwrap();
        assert_eq!(guard.param(1).unwrap(), [9.0; HIDDEN]);
        drop(guard);
        refused("\"first\" is unsharded");
        fsdp.abandon().unwrap();
        assert_eq!(gathered(&fsdp), nines);
        assert_eq!(saver.resume(&mut state).unwrap(), 1);
        assert_eq!(gathered(&fsdp), saved);
    });
}

#[test]
fn gradients_are_bounded_by_the_norm_of_all_shards() {
    /// Of 1 to 7 and -2, -2, -2.
    const CASES: [(f64, f64); 4] =
        [(1.0, 34.0), (2.0, 12.328_828_005_937_952), (3.0, 9.314_019_015_607_67), (f64::INFINITY, 7.0)];
    for (world, shard_ranks) in [(1, 1), (2, 2), (3, 3), (4, 2)] {
        ranks(world, |comm| {
            let model = units![
                "first" => params!["w" => (vec![0.0f32; 7], [7])],
                "second" => params!["v" => (vec![0.0f32; 3], [3])],
            ];
            let options = FsdpOptions::new().shard_ranks(shard_ranks);
            let mut fsdp = Fsdp::with_options(&comm, model, &options).unwrap();
            let mut opt = Sgd::new(&mut fsdp).build().unwrap();
            let rank = comm.rank().unwrap() % shard_ranks;
            let (of_w, of_v) = (rows(7, shard_ranks, rank), rows(3, shard_ranks, rank));
            let fill = |fsdp: &Fsdp| {
                let mut w = fsdp.shard_grad_mut(0).unwrap();
                w.iter_mut().zip(of_w.clone()).for_each(|(grad, row)| *grad = row as f32 + 1.0);
                fsdp.shard_grad_mut(1).unwrap().fill(-2.0);
            };
            let expect = |fsdp: &Fsdp, factor: f64, far: f64| {
                let near = |grad: f32, value: f64| assert!((f64::from(grad) - value * factor).abs() <= far, "{grad}");
                fsdp.shard_grad(0).unwrap().iter().zip(of_w.clone()).for_each(|(&g, row)| near(g, row as f64 + 1.0));
                fsdp.shard_grad(1).unwrap().iter().for_each(|&g| near(g, -2.0));
                assert_eq!([0, 1].map(|i| fsdp.shard_grad(i).unwrap().len()), [of_w.len(), of_v.len()]);
            };
            for (p, norm) in CASES {
                fill(&fsdp);
                let told = opt.clip_grad_norm(norm + 1.0, p).unwrap();
                assert!((told - norm).abs() < 1e-9, "{world} ranks, p {p}: {told}");
                expect(&fsdp, 1.0, 0.0); // below the bound nothing is changed
                assert_eq!(opt.clip_grad_norm(2.5, p).unwrap(), told);
                expect(&fsdp, 2.5 / norm, 1e-6);
                assert!((opt.clip_grad_norm(2.5, p).unwrap() - 2.5).abs() < 1e-5);
                for bad in [f32::NAN, f32::NEG_INFINITY] {
                    fill(&fsdp);
                    if comm.rank().unwrap() == 0 {
                        fsdp.shard_grad_mut(0).unwrap()[0] = bad;
                    }
                    assert_eq!(opt.clip_grad_norm(0.5, p).unwrap(), f64::INFINITY, "on every rank");
                    assert!(fsdp.shard_grad(1).unwrap().iter().all(|&grad| grad == -2.0), "they are left alone");
                }
            }
            fill(&fsdp);
            opt.clip_grad_value(1.5).unwrap();
            assert!(fsdp.shard_grad(0).unwrap().iter().all(|grad| (1.0..=1.5).contains(grad)));
            assert!(fsdp.shard_grad(1).unwrap().iter().all(|&grad| grad == -1.5));
            for (max_norm, p) in [(-1.0, 2.0), (f64::NAN, 2.0), (f64::INFINITY, 2.0), (1.0, 0.5), (1.0, f64::NAN)] {
                assert_eq!(opt.clip_grad_norm(max_norm, p).unwrap_err().code(), Code::InvalidArgument);
            }
            std::mem::forget(fsdp.shard_grad(0).unwrap());
            let error = opt.clip_grad_norm(1.0, 2.0).unwrap_err();
            assert!(error.message().starts_with("gradient of w: a view"), "{error}");
        });
    }
}

#[test]
fn guards_of_different_units_live_together() {
    ranks(2, |comm| {
        let mut fsdp = Fsdp::new(&comm, uneven(0)).unwrap();
        let outer = fsdp.forward(0).unwrap();
        let before = outer.param(0).unwrap().to_vec();
        let inner = fsdp.forward(1).unwrap();
        assert_eq!((inner.param(2).unwrap()[0], outer.param(0).unwrap()), (50.0, &before[..]));
        let error = fsdp.forward(0).unwrap_err();
        assert!(error.code() == Code::InvalidState && error.message().contains("\"first\" is in use"), "{error}");
        let other = inner.param(0).unwrap_err();
        let said = "does not belong to unit \"second\"";
        assert!(other.code() == Code::InvalidArgument && other.message().contains(said), "{other}");
        assert!(format!("{inner:?} {outer:?} {fsdp:?}").contains("second"));
        drop((outer, inner));
        // Units are sharded now, as far as anybody knows.
        for unit in 0..2 {
            fsdp.reshard(unit).unwrap();
        }
        fsdp.shard_mut(0).unwrap().fill(1.0);
    });
}

#[test]
fn the_library_reads_no_shard_under_a_mutable_view() {
    let comm = alone();
    let mut fsdp = Fsdp::new(&comm, uneven(0)).unwrap();
    std::mem::forget(fsdp.shard_mut(0).unwrap()); // no other way compiles
    for error in
        [fsdp.forward(1).map(drop).unwrap_err(), fsdp.backward(1).map(drop).unwrap_err(), fsdp.unshard(1).unwrap_err()]
    {
        assert!(error.code() == Code::InvalidState && error.message().starts_with("w: a mutable view"), "{error}");
    }
    assert!(fsdp.shard_grad(2).is_ok(), "the refused backward gave it back");
}

#[test]
fn a_unit_is_sharded_after_forward_or_stays_whole() {
    ranks(2, |comm| {
        for keep in [false, true] {
            let mut fsdp = Fsdp::new(&comm, network(0, |unit| unit.reshard_after_forward(!keep))).unwrap();
            fsdp.forward(0).unwrap().done().unwrap();
            assert_eq!(fsdp.whole(0).is_ok(), keep, "without being asked for");
            fsdp.reshard(1).unwrap(); // it was on its way
            fsdp.zero_grad().unwrap();
        }
    });
}

#[test]
fn what_comes_at_the_wrong_time_is_refused() {
    ranks(2, |comm| {
        let mut fsdp = Fsdp::new(&comm, uneven(0)).unwrap();
        let mut opt = Sgd::new(&mut fsdp).build().unwrap();
        let error = fsdp.whole(0).unwrap_err();
        assert!(error.code() == Code::InvalidState && error.message().contains("unshard"), "{error}");
        fsdp.unshard(0).unwrap();
        let error = fsdp.shard_mut(0).unwrap_err();
        let said = "unit \"first\" cannot be written unless it is sharded";
        assert!(error.code() == Code::InvalidState && error.message().contains(said), "{error}");
        fsdp.shard_mut(2).unwrap().fill(2.0); // of a unit that is sharded
        assert_eq!(fsdp.zero_grad().unwrap_err().code(), Code::InvalidState);
        let error = opt.step().unwrap_err();
        assert!(error.code() == Code::InvalidState && error.message().contains("\"first\""), "{error}");
        assert_eq!(opt.clip_grad_norm(1.0, 2.0).unwrap_err().code(), Code::InvalidState);
        assert_eq!(opt.clip_grad_value(1.0).unwrap_err().code(), Code::InvalidState);
        fsdp.reshard(0).unwrap();
        opt.clip_grad_value(1.0).unwrap();
        {
            let _shard = fsdp.shard(0).unwrap();
            let error = opt.step().unwrap_err();
            assert!(error.code() == Code::InvalidState && error.message().starts_with("w: "), "{error}");
        }
        {
            let _grad = fsdp.shard_grad(2).unwrap();
            let error = fsdp.backward(1).unwrap_err();
            assert!(error.code() == Code::InvalidState && error.message().starts_with("gradient of v: "), "{error}");
        }
        let guard = fsdp.backward(1).unwrap();
        guard.grad_mut(2).unwrap().fill(1.0);
        guard.ready().unwrap();
        assert_eq!(fsdp.shard_grad(2).unwrap_err().code(), Code::InvalidState, "it is being reduced");
        assert_eq!(fsdp.shard_grad_mut(2).unwrap_err().code(), Code::InvalidState);
        assert_eq!(opt.zero_grad().unwrap_err().code(), Code::InvalidState);
        assert_eq!(opt.clip_grad_norm(1.0, 2.0).unwrap_err().code(), Code::InvalidState);
        for refused in [fsdp.set_sync(false), fsdp.set_accumulate(true), fsdp.set_all_reduce(false)] {
            assert_eq!(refused.unwrap_err().code(), Code::InvalidState);
        }
        let guard = fsdp.backward(1).unwrap(); // of another use in the same step
        guard.grad_mut(2).unwrap().fill(1.0);
        guard.ready().unwrap();
        let guard = fsdp.backward(0).unwrap();
        guard.indices().for_each(|i| guard.grad_mut(i).unwrap().fill(1.0));
        guard.ready().unwrap();
        let error = fsdp.forward(0).unwrap_err();
        assert!(error.code() == Code::InvalidState && error.message().contains("during a backward pass"), "{error}");
        fsdp.wait().unwrap();
        fsdp.shard_grad_mut(2).unwrap().fill(0.0);
        assert_eq!(fsdp.shard_grad(0).unwrap()[0], 1.0);
        for error in [
            fsdp.forward(2).map(drop).unwrap_err(),
            fsdp.backward(2).map(drop).unwrap_err(),
            fsdp.whole(2).map(drop).unwrap_err(),
            fsdp.unshard(2).unwrap_err(),
            fsdp.reshard(2).unwrap_err(),
            fsdp.shard(3).map(drop).unwrap_err(),
            fsdp.shard_mut(3).map(drop).unwrap_err(),
            fsdp.shard_grad(3).map(drop).unwrap_err(),
            fsdp.phase(2).map(drop).unwrap_err(),
            fsdp.layout(3).map(drop).unwrap_err(),
        ] {
            assert!(error.code() == Code::InvalidArgument && error.message().contains(['2', '3']), "{error}");
        }
    });
}

#[test]
fn a_gradient_of_another_shape_or_type_is_refused() {
    ranks(2, |comm| {
        let rank = comm.rank().unwrap();
        let mut fsdp = Fsdp::new(&comm, uneven(0)).unwrap();
        let guard = fsdp.backward(1).unwrap();
        for error in [guard.grad_mut_as::<f64>(2).unwrap_err(), guard.grad_mut_as::<half::bf16>(2).unwrap_err()] {
            assert!(error.code() == Code::InvalidArgument && error.message().contains("f32"), "{error}");
        }
        for len in [4, 6] {
            let copy = || guard.grad_mut(2).unwrap().copy_from_slice(&vec![1.0; len]); // panics, as of any slice
            catch_unwind(AssertUnwindSafe(copy)).unwrap_err();
        }
        guard.grad_mut(2).unwrap()[..4].fill(1.0); // of a shorter one; the rest would be another unit's
        let error = guard.ready().unwrap_err();
        let said = "1 of 1 gradients of unit \"second\" were not written: \"v\"";
        assert!(error.code() == Code::InvalidState && error.message().contains(said), "{error}");
        let guard = fsdp.backward(1).unwrap();
        guard.grad_mut(2).unwrap().copy_from_slice(&[rank as f32; 5]);
        guard.ready().unwrap();
        backward(&fsdp, 0, rank as f32);
        fsdp.wait().unwrap();
        expect_shard_grads(&fsdp, 0.5);
    });
}

#[test]
fn peers_hear_of_a_model_that_is_dropped_in_a_step() {
    let dropped = AtomicBool::new(false);
    ranks(2, |comm| {
        let fsdp = Fsdp::with_options(&comm, uneven(0), &FsdpOptions::new().forward_prefetch(0)).unwrap();
        let guard = fsdp.forward(0).unwrap();
        if comm.rank().unwrap() == 1 {
            std::mem::forget(guard);
            drop(fsdp);
            dropped.store(true, Ordering::SeqCst);
            return;
        }
        until(|| dropped.load(Ordering::SeqCst));
        drop(guard);
        let error = fsdp.forward(1).unwrap_err();
        assert!(matches!(error.code(), Code::PeerLost | Code::Aborted), "{error}");
        assert!(error.message().contains("rank 1"), "{error}");
    });
}

#[test]
fn after_a_failed_collective_every_call_says_why_and_shards_are_as_they_were() {
    ranks(2, |comm| {
        let mut fsdp = Fsdp::with_options(&comm, uneven(0), &FsdpOptions::new().forward_prefetch(0)).unwrap();
        let mut opt = Sgd::new(&mut fsdp).lr(1.0).build().unwrap();
        backward(&fsdp, 1, 1.0);
        backward(&fsdp, 0, 1.0);
        fsdp.wait().unwrap();
        let before: Vec<_> = (0..3).map(|i| fsdp.shard(i).unwrap().to_vec()).collect();
        fsdp.forward(comm.rank().unwrap()).unwrap_err();
        for (number, outcome) in [
            fsdp.forward(0).map(drop),
            fsdp.backward(0).map(drop),
            fsdp.unshard(0),
            fsdp.whole(0).map(drop),
            fsdp.reshard(0),
            fsdp.wait(),
            fsdp.abandon(),
            fsdp.zero_grad(),
            opt.step(),
            opt.clip_grad_norm(1.0, 2.0).map(drop),
            opt.clip_grad_value(1.0),
        ]
        .into_iter()
        .enumerate()
        {
            let error = outcome.unwrap_err();
            assert!(error.code() == Code::Aborted && error.message().contains("unshards unit \""), "{number}: {error}");
        }
        assert_eq!(opt.steps().unwrap(), 0);
        assert!((0..3).all(|i| fsdp.shard(i).unwrap()[..] == before[i][..]));
    });
}

type Refused = (fn() -> Units, Code, &'static str);

#[test]
fn a_bad_model_is_an_error_of_all_ranks_also_where_one_alone_has_it() {
    let refused: [Refused; 6] = [
        (|| units![], Code::InvalidArgument, "the model has no units"),
        (|| units!["u" => params![]], Code::InvalidArgument, "\"u\" has no parameters"),
        (
            || units!["u" => params!["w" => (vec![1.0f32], [1])], "v" => params!["module.w" => (vec![1.0f32], [1])]],
            Code::InvalidArgument,
            "two parameters are named \"w\"",
        ),
        (|| units!["u" => params!["w" => (vec![1i32], [1])]], Code::InvalidArgument, "floating-point"),
        (|| units!["u" => params!["w" => (vec![1.0f32], [2])]], Code::InvalidArgument, "2 elements"),
        (|| units!["u" => FsdpUnit::new(params!["w" => (vec![1.0f32], [1])]).frozen(["w9"])], Code::NotFound, "\"w9\""),
    ];
    for (bad, code, said) in refused {
        ranks(2, |comm| {
            let error = Fsdp::new(&comm, bad()).unwrap_err();
            assert!(error.code() == code && error.message().contains(said), "{said}: {error}");
            drop(Fsdp::new(&comm, uneven(0)).unwrap()); // nothing is out of use
        });
        ranks(2, |comm| {
            let alone = comm.rank().unwrap() == 1;
            let error = Fsdp::new(&comm, if alone { bad() } else { uneven(0) }).unwrap_err();
            if alone {
                assert!(error.code() == code && error.message().contains(said), "{said}: {error}");
            } else {
                assert!(error.code() != Code::Timeout && error.message().contains("rank 1"), "{said}: {error}");
            }
        });
    }
}

#[test]
fn bad_models_and_options_are_refused() {
    let comm = alone();
    let refused = |units: Units, said: &str| {
        let error = Fsdp::new(&comm, units).unwrap_err();
        assert!(error.message().contains(said), "{said}: {error}");
        error.code()
    };
    let w = || params!["w" => (vec![1.0f32; 3], [3])];
    assert_eq!(refused(units![], "the model has no units"), Code::InvalidArgument);
    assert_eq!(refused(units!["u" => params![]], "\"u\" has no parameters"), Code::InvalidArgument);
    assert_eq!(refused(units!["u" => params!["w" => (vec![1.0f32], [0; 0])]], "shape [1]"), Code::InvalidArgument);
    assert_eq!(refused(units!["u" => params!["w" => (vec![1i32], [1])]], "floating-point"), Code::InvalidArgument);
    assert_eq!(refused(units!["u" => params!["w" => (vec![1.0f32], [2])]], "2 elements"), Code::InvalidArgument);
    assert_eq!(
        refused(units!["u" => w(), "v" => params!["module.w" => (vec![1.0f32; 3], [3])]], "named"),
        Code::InvalidArgument
    );
    let same = units!["u" => w(), "u" => params!["v" => (vec![1.0f32; 3], [3])]];
    assert_eq!(refused(same, "two units are named \"u\""), Code::InvalidArgument);
    assert_eq!(refused(units!["u\0" => w()], "zero byte"), Code::InvalidArgument);
    assert_eq!(refused(units!["u" => params!["w\0" => (vec![1.0f32], [1])]], "zero byte"), Code::InvalidArgument);
    assert_eq!(refused(units!["u" => FsdpUnit::new(w()).frozen(["w9"])], "\"w9\""), Code::NotFound);
    let huge = FsdpUnit::new(w()).row_block(usize::MAX);
    assert_eq!(refused(units!["u" => huge], "row_block is"), Code::InvalidArgument);
    let kept = FsdpUnit::new(w()).keep_among(2);
    assert_eq!(refused(units!["u" => kept], "reshard_after_forward is 2"), Code::InvalidArgument);
    let both = FsdpUnit::new(w()).row_block(2).flat(true);
    assert_eq!(refused(units!["u" => both], "a flat unit cannot have a row_block"), Code::InvalidArgument);
    let tensor = Tensor::new(vec![1.0f32; 3], [3]).unwrap();
    {
        let _view = tensor.view_mut::<f32>().unwrap();
        assert_eq!(refused(units!["u" => params!["w" => &tensor]], "mutable view"), Code::InvalidState);
    }
    let _view = tensor.view::<f32>().unwrap(); // it is read only
    drop(Fsdp::new(&comm, units!["u" => params!["w" => &tensor]]).unwrap());
    let options = FsdpOptions::new;
    for (options, said) in [
        (options().shard_ranks(2), "not divisible by shard_ranks 2"),
        (options().shard_ranks(usize::MAX), "shard_ranks is"),
        (options().forward_prefetch(usize::MAX), "forward_prefetch is"),
        (options().backward_prefetch(1 << 40), "backward_prefetch is"),
        (options().grads_in_flight(0), "at least 1"),
        (options().param_dtype(DType::I32), "param_dtype"),
        (options().reduce_dtype(DType::Bool), "reduce_dtype"),
        (options().op(ReduceOp::Max), "averaged or summed"),
        (options().pre_divide(0.0), "above 0"),
        (options().pre_divide(f64::NAN), "finite"),
    ] {
        let error = Fsdp::with_options(&comm, units!["u" => w()], &options).unwrap_err();
        assert!(error.code() == Code::InvalidArgument && error.message().contains(said), "{said}: {error}");
    }
    assert_eq!((units!["u" => w()].len(), Units::new().is_empty()), (1, true));
}

type Different = (fn() -> Units, FsdpOptions, [&'static str; 2]);

#[test]
fn models_that_differ_are_a_mismatch_on_every_rank() {
    fn first() -> tessera::Params {
        params!["w" => (vec![0.0f32; 8], [2, 4]), "b" => (vec![0.0f32; 2], [2])]
    }
    fn second() -> tessera::Params {
        params!["x" => (vec![0.0f32; 8], [8])]
    }
    let plain = FsdpOptions::new;
    // What rank 1 has, and what is said of rank 1 and of rank 0.
    let different: [Different; 11] = [
        (|| units!["u" => first(), "other" => second()], plain(), ["unit \"other\"", "unit \"v\""]),
        (
            || units!["u" => first(), "v" => second(), "y" => params!["y" => (vec![0.0f32], [1])]],
            plain(),
            ["unit \"y\"", "nothing"],
        ),
        (|| units!["u" => first()], plain(), ["nothing", "unit \"v\""]),
        (|| units!["v" => second(), "u" => first()], plain(), ["unit \"v\"", "unit \"u\""]),
        (
            || {
                let moved = params!["b" => (vec![0.0f32; 2], [2]), "x" => (vec![0.0f32; 8], [8])];
                units!["u" => params!["w" => (vec![0.0f32; 8], [2, 4])], "v" => moved]
            },
            plain(),
            ["unit \"u\" of 1 parameters", "unit \"u\" of 2 parameters"],
        ),
        (
            || units!["u" => first(), "v" => params!["z" => (vec![0.0f32; 8], [8])]],
            plain(),
            ["parameter 0 \"z\"", "parameter 0 \"x\""],
        ),
        (|| units!["u" => first(), "v" => params!["x" => (vec![0.0f32; 8], [2, 4])]], plain(), ["[2, 4]", "[8]"]),
        (|| units!["u" => first(), "v" => params!["x" => (vec![0.0f64; 8], [8])]], plain(), ["\"x\" f64", "\"x\" f32"]),
        (
            || units!["u" => first(), "v" => FsdpUnit::new(second()).frozen(["x"])],
            plain(),
            ["parameter \"x\" is not trained", "nothing"],
        ),
        (
            || units!["u" => first(), "v" => FsdpUnit::new(second()).row_block(2)],
            plain(),
            ["unit \"v\" with row_block 2", "unit \"v\" with row_block 0"],
        ),
        (
            || units!["u" => first(), "v" => second()],
            plain().grads_in_flight(3),
            ["the option grads_in_flight 3", "the option grads_in_flight 2"],
        ),
    ];
    for (units, options, said) in different {
        for error in ranks(2, |comm| match comm.rank().unwrap() {
            0 => Fsdp::new(&comm, units!["u" => first(), "v" => second()]).unwrap_err(),
            _ => Fsdp::with_options(&comm, units(), &options).unwrap_err(),
        }) {
            assert_eq!(error.code(), Code::Mismatch, "{error}");
            let (of_1, of_0) = error.message().split_once(", rank 0 has ").unwrap();
            assert!(of_1.contains(said[0]) && of_0.contains(said[1]), "{error}");
        }
    }
}

#[test]
fn ranks_that_enter_different_units_are_a_mismatch() {
    let errors = ranks(2, |comm| {
        let fsdp = Fsdp::with_options(&comm, uneven(0), &FsdpOptions::new().forward_prefetch(0)).unwrap();
        let error = fsdp.forward(comm.rank().unwrap()).unwrap_err();
        assert_eq!(fsdp.forward(0).unwrap_err().code(), Code::Aborted, "the model is out of use");
        error
    });
    let told: Vec<_> = errors.iter().filter(|error| error.code() == Code::Mismatch).collect();
    assert!(
        !told.is_empty() && errors.iter().all(|e| matches!(e.code(), Code::Mismatch | Code::Aborted)),
        "{errors:?}"
    );
    assert!(told.iter().all(|e| e.message().contains("\"first\"") && e.message().contains("\"second\"")), "{told:?}");
}

#[test]
fn an_interrupted_forward_is_made_again() {
    let interrupted = AtomicBool::new(false);
    ranks(2, |comm| {
        let mut fsdp = Fsdp::new(&comm, uneven(0)).unwrap();
        if comm.rank().unwrap() == 0 {
            let error = tessera::with_interrupt(|| true, || fsdp.forward(0)).unwrap_err();
            assert_eq!(error.code(), Code::Interrupted);
            interrupted.store(true, Ordering::SeqCst);
        } else {
            until(|| interrupted.load(Ordering::SeqCst));
        }
        let guard = fsdp.forward(0).unwrap();
        assert_eq!(guard.param(0).unwrap()[1], 1.0);
        drop(guard);
        fsdp.reshard(1).unwrap();
    });
}

#[test]
fn what_was_interrupted_in_a_step_is_called_again() {
    struct Call {
        make: fn(&mut Fsdp, f32) -> tessera::Result<()>,
        /// Rank 0 is interrupted in it, and makes it again.
        interrupted: bool,
        /// Rank 1 makes it after the next interruption.
        late: bool,
    }
    fn write(fsdp: &Fsdp, unit: usize, value: f32) -> tessera::Result<()> {
        let guard = fsdp.backward(unit)?;
        guard.indices().for_each(|i| guard.grad_mut(i).unwrap().fill(value));
        Ok(())
    }
    let calls = [
        Call { make: |fsdp, _| fsdp.forward(0)?.done(), interrupted: true, late: true },
        Call { make: |fsdp, _| fsdp.forward(1)?.done(), interrupted: false, late: false },
        Call { make: |fsdp, value| write(fsdp, 1, value), interrupted: true, late: true },
        Call { make: |fsdp, _| fsdp.backward(1)?.ready(), interrupted: false, late: true },
        Call { make: |fsdp, value| write(fsdp, 0, value), interrupted: true, late: false }, // its memory is the other's
        Call { make: |fsdp, _| fsdp.backward(0)?.ready(), interrupted: false, late: true },
        Call { make: |fsdp, _| fsdp.wait(), interrupted: true, late: false },
    ];
    let interrupts = AtomicUsize::new(0);
    ranks(2, |comm| {
        let rank = comm.rank().unwrap();
        let model = units![
            "first" => params!["w" => (vec![0.0f32; 5], [5])],
            "second" => params!["v" => (vec![0.0f32; 5], [5])],
        ];
        let mut fsdp = Fsdp::with_options(&comm, model, &FsdpOptions::new().grads_in_flight(1)).unwrap();
        let mut awaited = 0;
        for step in 1..4 {
            let value = ((rank + 1) * step) as f32;
            for call in &calls {
                if rank == 0 && call.interrupted {
                    let error = tessera::with_interrupt(|| true, || (call.make)(&mut fsdp, value)).unwrap_err();
                    assert_eq!(error.code(), Code::Interrupted, "step {step}");
                    interrupts.fetch_add(1, Ordering::SeqCst);
                }
                if rank == 1 && call.late {
                    awaited += 1;
                    until(|| interrupts.load(Ordering::SeqCst) == awaited);
                }
                (call.make)(&mut fsdp, value).unwrap();
            }
            expect_shard_grads(&fsdp, 1.5 * step as f32);
        }
    });
    assert_eq!(interrupts.into_inner(), 12);
}

#[test]
fn an_interrupted_norm_ends_the_communicator() {
    let interrupted = AtomicBool::new(false);
    ranks(2, |comm| {
        let mut fsdp = Fsdp::new(&comm, uneven(0)).unwrap();
        let mut opt = Sgd::new(&mut fsdp).build().unwrap();
        if comm.rank().unwrap() == 0 {
            let error = tessera::with_interrupt(|| true, || opt.clip_grad_norm(1.0, 2.0)).unwrap_err();
            assert_eq!(error.code(), Code::Interrupted);
            interrupted.store(true, Ordering::SeqCst);
        } else {
            until(|| interrupted.load(Ordering::SeqCst));
        }
        assert!(opt.clip_grad_norm(1.0, 2.0).is_err());
        assert!(comm.barrier().is_err());
        fsdp.shard_grad_mut(0).unwrap().fill(1.0);
    });
}

#[test]
fn callbacks_of_a_norm_get_nothing_that_it_uses() {
    let called = AtomicBool::new(false);
    ranks(2, |comm| {
        let mut fsdp = Fsdp::new(&comm, uneven(0)).unwrap();
        let mut opt = Sgd::new(&mut fsdp).lr(1.0).build().unwrap();
        let mut other = Sgd::new(&mut fsdp).build().unwrap();
        (0..3).for_each(|i| fsdp.shard_grad_mut(i).unwrap().fill(3.0));
        if comm.rank().unwrap() == 1 {
            until(|| called.load(Ordering::SeqCst));
            assert_eq!(opt.clip_grad_norm(1.0, f64::INFINITY).unwrap(), 3.0);
        } else {
            let check = || {
                if called.load(Ordering::SeqCst) {
                    return false;
                }
                assert_eq!(fsdp.backward(1).unwrap_err().code(), Code::InvalidState);
                for refused in [fsdp.abandon(), fsdp.zero_grad(), other.step(), other.clip_grad_value(1.0)] {
                    assert_eq!(refused.unwrap_err().code(), Code::InvalidState);
                }
                fsdp.set_sync(false).unwrap();
                fsdp.wait().unwrap();
                fsdp.set_sync(true).unwrap();
                assert_eq!(fsdp.shard_grad(2).unwrap_err().code(), Code::InvalidState, "after a wait for nothing, too");
                called.store(true, Ordering::SeqCst);
                false
            };
            assert_eq!(tessera::with_interrupt(check, || opt.clip_grad_norm(1.0, f64::INFINITY)).unwrap(), 3.0);
        }
        for i in 0..3 {
            assert!(fsdp.shard_grad(i).unwrap().iter().all(|grad| (grad - 1.0).abs() < 1e-6));
        }
    });
    assert!(called.load(Ordering::SeqCst));
}

#[test]
fn callbacks_of_a_wait_get_nothing_that_it_uses() {
    let called = AtomicBool::new(false);
    ranks(2, |comm| {
        let mut fsdp = Fsdp::new(&comm, uneven(0)).unwrap();
        let mut opt = Sgd::new(&mut fsdp).build().unwrap();
        if comm.rank().unwrap() == 1 {
            until(|| called.load(Ordering::SeqCst));
            fsdp.forward(0).unwrap().done().unwrap();
            return;
        }
        let mut inside = Some(|| {
            let in_use = fsdp.whole(0).unwrap_err();
            assert!(in_use.code() == Code::InvalidState && in_use.message().contains("in use"), "{in_use}");
            assert_eq!(fsdp.forward(1).unwrap_err().code(), Code::InvalidState);
            assert_eq!(fsdp.backward(1).unwrap_err().code(), Code::InvalidState);
            assert_eq!(opt.step().unwrap_err().code(), Code::InvalidState);
            assert_eq!(fsdp.unshard(1).unwrap_err().code(), Code::InvalidState);
            assert_eq!(fsdp.phase(0).unwrap(), UnitPhase::OnItsWay);
            assert_eq!(fsdp.shard(0).unwrap()[1], 1.0);
            called.store(true, Ordering::SeqCst);
        });
        let check = || {
            if let Some(mut inside) = inside.take() {
                inside();
            }
            false
        };
        let guard = tessera::with_interrupt(check, || fsdp.forward(0)).unwrap();
        assert_eq!(guard.param(0).unwrap()[1], 1.0);
        guard.done().unwrap();
        assert_eq!(fsdp.shard_grad(2).unwrap()[0], 0.0, "the refused backward gave it back");
    });
    assert!(called.load(Ordering::SeqCst));
}
