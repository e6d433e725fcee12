//! Tensor parallelism: models that are cut over any number of ranks compute what one rank does, losses and gradients
//! included, and are saved and loaded at other sizes.

mod common;

use std::mem;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use common::{alone, block_on, deadline, ranks};
use half::f16;
use tessera::{
    params, units, Adam, AdamW, Checkpoint, Code, Comm, CrossEntropy, DType, Ddp, DdpOptions, Element, Fsdp,
    FsdpOptions, GradScaler, Layout, LoadOptions, LossReduction, Mesh, Params, ReduceOp, Region, Result, Saver, Sgd,
    State, Style, Tensor, TensorParallel,
};

/// Uniform in ±1.
fn uniform(state: &mut u64) -> f64 {
    *state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
    (*state >> 11) as f64 / (1u64 << 52) as f64 - 1.0
}

fn values(seed: u64, count: usize) -> Vec<f64> {
    let mut state = seed;
    (0..count).map(|_| uniform(&mut state)).collect()
}

fn line(comm: &Comm) -> Mesh {
    Mesh::new(comm, &[("tp", comm.world_size().unwrap())]).unwrap()
}

fn near(found: &[f64], expected: &[f64], what: &str) {
    assert_eq!(found.len(), expected.len(), "{what}");
    for (i, (x, y)) in found.iter().zip(expected).enumerate() {
        assert!((x - y).abs() <= 1e-12 * y.abs().max(1.0), "{what}[{i}] is {x}, not {y}");
    }
}

/// a [n, k] times the transpose of b [m, k].
fn times_transposed(a: &[f64], b: &[f64], [n, m, k]: [usize; 3]) -> Vec<f64> {
    let at = |i: usize, j: usize| (0..k).map(|l| a[i * k + l] * b[j * k + l]).sum();
    (0..n * m).map(|ij| at(ij / m, ij % m)).collect()
}

/// a [n, k] times b [k, m].
fn times(a: &[f64], b: &[f64], [n, m, k]: [usize; 3]) -> Vec<f64> {
    let at = |i: usize, j: usize| (0..k).map(|l| a[i * k + l] * b[l * m + j]).sum();
    (0..n * m).map(|ij| at(ij / m, ij % m)).collect()
}

/// The transpose of a [k, n] times b [k, m].
fn transposed_times(a: &[f64], b: &[f64], [n, m, k]: [usize; 3]) -> Vec<f64> {
    let at = |i: usize, j: usize| (0..k).map(|l| a[l * n + i] * b[l * m + j]).sum();
    (0..n * m).map(|ij| at(ij / m, ij % m)).collect()
}

fn column_sums(a: &[f64], width: usize) -> Vec<f64> {
    (0..width).map(|j| a.iter().skip(j).step_by(width).sum()).collect()
}

const BATCH: usize = 2;
const SEQUENCE: usize = 4;
const FEATURES: usize = 3;
const SHAPE: [usize; 3] = [BATCH, SEQUENCE, FEATURES];
const ROWS: usize = BATCH * SEQUENCE;

/// A perceptron of two layers after a scale, which stands for a norm. Its values are of `seed`.
fn perceptron(hidden: usize, seed: u64) -> Params {
    params![
        "norm.weight" => (values(seed, FEATURES), [FEATURES]),
        "fc1.weight" => (values(seed + 1, hidden * FEATURES), [hidden, FEATURES]),
        "fc1.bias" => (values(seed + 2, hidden), [hidden]),
        "fc2.weight" => (values(seed + 3, FEATURES * hidden), [FEATURES, hidden]),
        "fc2.bias" => (values(seed + 4, FEATURES), [FEATURES]),
    ]
}

fn described(hidden: usize) -> Params {
    let of = |shape: &[usize]| Tensor::deferred(DType::F64, shape).unwrap();
    params![
        "norm.weight" => of(&[FEATURES]),
        "fc1.weight" => of(&[hidden, FEATURES]),
        "fc1.bias" => of(&[hidden]),
        "fc2.weight" => of(&[FEATURES, hidden]),
        "fc2.bias" => of(&[FEATURES]),
    ]
}

const MLP: [(&str, Style); 2] = [("fc1", Style::Column), ("fc2", Style::Row)];

/// The perceptron, whose activations are cut along `dim` outside of its region.
fn cut(mesh: &Mesh, params: Params, dim: Option<usize>) -> TensorParallel<'_> {
    let norm = if dim.is_some() { Style::Sequence } else { Style::Replicate };
    TensorParallel::builder(mesh, params)
        .plan([("fc1", Style::Column), ("fc2", Style::Row), ("norm", norm)])
        .sequence_parallel(dim.is_some())
        .build()
        .unwrap()
}

fn part_len(tp: &TensorParallel, shape: &[usize], dim: Option<usize>) -> usize {
    shape.iter().enumerate().map(|(d, &size)| if Some(d) == dim { tp.part(size).len() } else { size }).product()
}

fn part(tp: &TensorParallel, whole: &[f64], shape: &[usize], dim: Option<usize>) -> Vec<f64> {
    let Some(at) = dim else { return whole.to_vec() };
    let mut part = vec![f64::NAN; part_len(tp, shape, dim)];
    tp.split(whole, &mut part, shape, at).unwrap();
    part
}

fn whole(tp: &TensorParallel, part: &[f64], shape: &[usize], dim: Option<usize>) -> Vec<f64> {
    let Some(at) = dim else { return part.to_vec() };
    let mut whole = vec![f64::NAN; shape.iter().product()];
    tp.gather(part, &mut whole, shape, at).unwrap();
    whole
}

/// Forward and backward of the loss that is half the sum of the squares of y = fc2(tanh(fc1(x * norm))). Returns the
/// complete y and the complete gradient of x; the gradients of the parameters are in the model.
fn forward_backward(tp: &mut TensorParallel, x: &[f64], hidden: usize, dim: Option<usize>) -> [Vec<f64>; 2] {
    let width = tp.part(hidden).len();
    let x = part(tp, x, &SHAPE, dim);
    let norm = tp.slice_as::<f64>(0).unwrap();
    let normed: Vec<_> = x.chunks(FEATURES).flat_map(|row| row.iter().zip(&norm[..]).map(|(x, g)| x * g)).collect();
    let mut inputs = vec![f64::NAN; ROWS * FEATURES];
    tp.enter(&normed, &mut inputs, &SHAPE, dim).unwrap();
    let (w1, w2) = (tp.slice_as::<f64>(1).unwrap(), tp.slice_as::<f64>(3).unwrap());
    let b1 = tp.slice_as::<f64>(2).unwrap();
    let mut h = times_transposed(&inputs, &w1, [ROWS, width, FEATURES]);
    h.iter_mut().enumerate().for_each(|(i, h)| *h = (*h + b1[i % width]).tanh());
    let mut y = vec![f64::NAN; x.len()];
    let summand = times_transposed(&h, &w2, [ROWS, FEATURES, width]);
    tp.leave(&summand, &mut y, &SHAPE, dim, Some(&tp.slice_as::<f64>(4).unwrap())).unwrap();

    let mut ds = vec![f64::NAN; ROWS * FEATURES];
    tp.leave_backward(&y, &mut ds, &SHAPE, dim).unwrap();
    let mut da = times(&ds, &w2, [ROWS, width, FEATURES]);
    da.iter_mut().zip(&h).for_each(|(d, h)| *d *= 1.0 - h * h);
    let mut dn = vec![f64::NAN; x.len()];
    tp.enter_backward(&times(&da, &w1, [ROWS, FEATURES, width]), &mut dn, &SHAPE, dim).unwrap();
    let dg: Vec<_> = dn.iter().zip(&x).map(|(d, x)| d * x).collect();
    let grads = [
        column_sums(&dg, FEATURES),
        transposed_times(&da, &inputs, [width, FEATURES, ROWS]),
        column_sums(&da, width),
        transposed_times(&ds, &h, [FEATURES, width, ROWS]),
        column_sums(&y, FEATURES),
    ];
    for (i, grad) in grads.iter().enumerate() {
        tp.grad_mut_as::<f64>(i).unwrap().copy_from_slice(grad);
    }
    let dx: Vec<_> = dn.iter().enumerate().map(|(i, d)| d * norm[i % FEATURES]).collect();
    let out = [whole(tp, &y, &SHAPE, dim), whole(tp, &dx, &SHAPE, dim)];
    drop((norm, w1, w2, b1));
    tp.sum_grads().unwrap();
    out
}

/// All slices, or their gradients, as complete parameters.
fn gathered(tp: &TensorParallel, grads: bool) -> Vec<Vec<f64>> {
    let one = |i: usize| {
        let own = if grads { tp.grad_as::<f64>(i) } else { tp.slice_as(i) };
        whole(tp, &own.unwrap(), tp.shape(i).unwrap(), tp.cut(i))
    };
    (0..tp.len()).map(one).collect()
}

#[test]
fn a_perceptron_cut_by_columns_and_rows_equals_one_rank() {
    for hidden in [5, 2] {
        let x = values(17, ROWS * FEATURES);
        let run = |comm: &Comm, dim| {
            let mesh = line(comm);
            let own = 100 * comm.rank().unwrap() as u64; // rank 0's values count
            let mut tp = cut(&mesh, perceptron(hidden, 3 + own), dim);
            let [y, dx] = forward_backward(&mut tp, &x, hidden, dim);
            [vec![y, dx], gathered(&tp, true)].concat()
        };
        let expected = run(&alone(), None);
        for (world, dim) in [(1, Some(1)), (2, None), (2, Some(0)), (2, Some(1)), (3, None), (3, Some(0)), (3, Some(1))]
        {
            for found in ranks(world, |comm| run(&comm, dim)) {
                for (i, (found, expected)) in found.iter().zip(&expected).enumerate() {
                    near(found, expected, &format!("{world} ranks, along {dim:?}, {hidden} hidden: {i}"));
                }
            }
        }
    }
}

#[test]
fn the_gradient_of_one_rank_is_that_of_differences() {
    let comm = alone();
    let (mesh, x, step) = (line(&comm), values(17, ROWS * FEATURES), 1e-5);
    let mut tp = cut(&mesh, perceptron(5, 3), Some(1));
    let loss = |tp: &mut TensorParallel| {
        let [y, _] = forward_backward(tp, &x, 5, Some(1));
        y.iter().map(|y| y * y / 2.0).sum::<f64>()
    };
    loss(&mut tp);
    let grads = gathered(&tp, true);
    for (i, grad) in grads.iter().enumerate() {
        let mut shifted = |by: f64| {
            tp.slice_mut_as::<f64>(i).unwrap()[1] += by;
            loss(&mut tp)
        };
        let difference = (shifted(step) - shifted(-2.0 * step)) / (2.0 * step);
        shifted(step);
        assert!((difference - grad[1]).abs() < 1e-8, "{i}: {difference}, not {}", grad[1]);
    }
}

/// Three steps of the perceptron from the values of seed 3, on rank 0 of `data_ranks`, and the norms of their gradients.
/// `averaged` computes gradients, averages them over the ranks with other samples, and clips and steps.
fn trained(tp: &mut TensorParallel, mut averaged: impl FnMut(&mut TensorParallel) -> f64) -> (Vec<f64>, Vec<Vec<f64>>) {
    let norms = (0..3).map(|_| averaged(tp)).collect();
    (norms, gathered(tp, false))
}

const CLIP: f64 = 0.5;

/// On one rank, with the samples of two.
fn trained_alone(hidden: usize, samples: &[Vec<f64>; 2]) -> (Vec<f64>, Vec<Vec<f64>>) {
    let comm = alone();
    let mesh = line(&comm);
    let mut tp = cut(&mesh, perceptron(hidden, 3), None);
    let mut opt = AdamW::new(&mut tp).lr(0.1).build().unwrap();
    trained(&mut tp, |tp| {
        let [first, second] = [0, 1].map(|of| {
            forward_backward(tp, &samples[of], hidden, None);
            gathered(tp, true)
        });
        for (i, (a, b)) in first.iter().zip(&second).enumerate() {
            let mean: Vec<_> = a.iter().zip(b).map(|(a, b)| (a + b) / 2.0).collect();
            tp.grad_mut_as::<f64>(i).unwrap().copy_from_slice(&mean);
        }
        let norm = opt.clip_grad_norm(CLIP, 2.0).unwrap();
        opt.step().unwrap();
        norm
    })
}

#[test]
fn ddp_and_fsdp_over_slices_equal_one_rank() {
    let (hidden, samples) = (5, [values(17, ROWS * FEATURES), values(18, ROWS * FEATURES)]);
    let (norms, expected) = trained_alone(hidden, &samples);
    let over_ddp = |comm: &Comm| {
        let mesh = Mesh::new(comm, &[("dp", 2), ("tp", 2)]).unwrap();
        let mut tp = TensorParallel::builder(&mesh, perceptron(hidden, 3)).dim("tp").plan(MLP).build().unwrap();
        let others = mesh.comm("dp").unwrap();
        let x = &samples[others.rank().unwrap()];
        let mut ddp = Ddp::over_slices(others, &tp, &DdpOptions::new()).unwrap();
        let mut opt = AdamW::new(&mut ddp).lr(0.1).build().unwrap();
        trained(&mut tp, |tp| {
            forward_backward(tp, x, hidden, None);
            for i in 0..tp.len() {
                ddp.grad_mut_as::<f64>(i).unwrap().copy_from_slice(&tp.grad_as(i).unwrap());
                ddp.ready(i).unwrap();
            }
            ddp.wait().unwrap();
            let norm = opt.clip_grad_norm(CLIP, 2.0).unwrap();
            opt.step().unwrap();
            norm
        })
    };
    let over_fsdp = |comm: &Comm| {
        let mesh = Mesh::new(comm, &[("dp", 2), ("tp", 2)]).unwrap();
        let mut tp = TensorParallel::builder(&mesh, perceptron(hidden, 3)).dim("tp").plan(MLP).build().unwrap();
        let others = mesh.comm("dp").unwrap();
        let x = &samples[others.rank().unwrap()];
        let units = units!["all" => tp.slices()];
        let mut fsdp = Fsdp::over_slices(others, &tp, units, &FsdpOptions::new()).unwrap();
        let mut opt = AdamW::new(&mut fsdp).lr(0.1).build().unwrap();
        let unsharded = |fsdp: &Fsdp, tp: &TensorParallel| {
            let whole = fsdp.forward(0).unwrap();
            (0..tp.len()).for_each(|i| tp.slice_mut_as::<f64>(i).unwrap().copy_from_slice(whole.param_as(i).unwrap()));
            whole.done().unwrap();
        };
        let (norms, _) = trained(&mut tp, |tp| {
            unsharded(&fsdp, tp);
            forward_backward(tp, x, hidden, None);
            let whole = fsdp.backward(0).unwrap();
            (0..tp.len()).for_each(|i| {
                whole.grad_mut_as::<f64>(i).unwrap().copy_from_slice(&tp.grad_as(i).unwrap());
            });
            whole.ready().unwrap();
            fsdp.wait().unwrap();
            let norm = opt.clip_grad_norm(CLIP, 2.0).unwrap();
            opt.step().unwrap();
            norm
        });
        unsharded(&fsdp, &tp);
        (norms, gathered(&tp, false))
    };
    for (found_norms, found) in [ranks(4, |comm| over_ddp(&comm)), ranks(4, |comm| over_fsdp(&comm))].concat() {
        near(&found_norms, &norms, "norms");
        for (i, (found, expected)) in found.iter().zip(&expected).enumerate() {
            near(found, expected, &format!("parameter {i}"));
        }
    }
}

#[test]
fn a_model_over_slices_keeps_them() {
    let comm = alone();
    let mesh = Mesh::new(&comm, &[("dp", 1), ("tp", 1)]).unwrap();
    let tp = TensorParallel::builder(&mesh, perceptron(5, 3)).dim("tp").plan(MLP).build().unwrap();
    let slice = tp.slice_tensor(4).unwrap();
    let refused = |result: Result<()>, why: &str| {
        let error = result.unwrap_err();
        assert!(error.message().contains(why), "{error}");
    };
    let (dp, options) = (mesh.comm("dp").unwrap(), FsdpOptions::new());
    let mut ddp = Ddp::over_slices(dp, &tp, &DdpOptions::new()).unwrap();
    let other = units!["u" => params!["other" => slice.clone()]];
    refused(Fsdp::over_slices(dp, &tp, other, &options).map(drop), "other");
    refused(tp.slice_tensor(5).map(drop), "parameter 5 does not exist");
    drop(tp);
    let mut opt = Sgd::new(&mut ddp).lr(1.0).build().unwrap();
    (0..ddp.len()).for_each(|i| ddp.grad_mut_as::<f64>(i).unwrap().fill(1.0));
    (0..ddp.len()).for_each(|i| ddp.ready(i).unwrap());
    ddp.wait().unwrap();
    let before = slice.to_vec::<f64>().unwrap();
    {
        let _view = slice.view::<f64>().unwrap();
        refused(opt.step(), "fc2.bias");
    }
    opt.step().unwrap();
    drop((opt, ddp));
    assert_eq!(slice.to_vec::<f64>().unwrap(), before.iter().map(|value| value - 1.0).collect::<Vec<_>>());
}

#[test]
fn activations_move_along_any_dimension() {
    for (world, shape) in [(1, [2, 3, 4]), (2, [2, 3, 4]), (3, [4, 5, 7])] {
        ranks(world, |comm| {
            let (mesh, mine) = (line(&comm), comm.rank().unwrap() as f64);
            let tp = TensorParallel::builder(&mesh, params!["w" => (vec![0.0f64], [1])]).build().unwrap();
            let all = values(5, shape.iter().product());
            let ranks_sum: f64 = (0..world).map(|rank| 1.0 + rank as f64).sum();
            let summand: Vec<_> = all.iter().map(|x| x * (1.0 + mine)).collect();
            let sum: Vec<_> = all.iter().map(|x| x * ranks_sum).collect();
            let bias = |len: usize| -> Vec<f64> { (0..len).map(|i| 10.0 + i as f64).collect() };
            for dim in [None, Some(0), Some(1), Some(2)] {
                let own = part(&tp, &all, &shape, dim);
                let mut full = vec![f64::NAN; all.len()];
                tp.enter(&own, &mut full, &shape, dim).unwrap();
                assert_eq!(full, all);
                full.fill(f64::NAN);
                tp.leave_backward(&own, &mut full, &shape, dim).unwrap();
                assert_eq!(full, all);
                let mut left = vec![f64::NAN; own.len()];
                let width = if dim == Some(2) { tp.part(shape[2]).len() } else { shape[2] };
                tp.leave(&summand, &mut left, &shape, dim, Some(&bias(width))).unwrap();
                let expected = part(&tp, &sum, &shape, dim);
                let biased: Vec<_> = expected.iter().enumerate().map(|(i, y)| y + bias(width)[i % width]).collect();
                near(&left, &biased, "leave");
                tp.enter_backward(&summand, &mut left, &shape, dim).unwrap();
                near(&left, &expected, "enter_backward");
            }
            let mut data = summand.clone();
            tp.leave_in_place(&mut data, &shape, Some(&bias(shape[2]))).unwrap();
            near(&data, &sum.iter().enumerate().map(|(i, y)| y + bias(shape[2])[i % shape[2]]).collect::<Vec<_>>(), "");
            data.copy_from_slice(&summand);
            tp.enter_backward_in_place(&mut data).unwrap();
            near(&data, &sum, "in place");
        });
    }
}

#[test]
fn activations_move_in_the_background() {
    ranks(2, |comm| {
        let rank = comm.rank().unwrap();
        let mesh = line(&comm);
        let tp = TensorParallel::builder(&mesh, params!["w" => (vec![0.0f64], [1])]).build().unwrap();
        let shape = [2, 3]; // 2 and 1 columns
        let own = vec![rank as f64 + 1.0; 2 * tp.part(3).len()];
        let entering = tp.enter_async(own.clone(), vec![0.0; 6], &shape, Some(1)).unwrap();
        let gathering = tp.gather_async(own.clone().into_boxed_slice(), vec![0.0; 6], &shape, 1).unwrap();
        let back = tp.leave_backward_async(own.clone(), vec![0.0; 6], &shape, Some(1)).unwrap();
        for (input, output) in [entering.wait().unwrap(), back.wait().unwrap()] {
            assert_eq!((input, output), (own.clone(), vec![1.0, 1.0, 2.0, 1.0, 1.0, 2.0]));
        }
        assert_eq!(block_on(gathering).unwrap().1[2], 2.0);
        let left = {
            let bias = [0.5; 3]; // gone before the sum is
            tp.leave_async(vec![1.0; 6], vec![0.0; 6], &shape, None, Some(&bias)).unwrap()
        };
        let in_place = tp.leave_in_place_async(vec![1.0; 6], &shape, Some(&[0.25; 3])).unwrap();
        let without = tp.leave_in_place_async(comm.buffer::<f64>(6).unwrap(), &shape, None).unwrap();
        let cut = tp.leave_async(vec![1.0; 6], own.clone(), &shape, Some(1), None).unwrap();
        assert_eq!(left.wait().unwrap().1, [2.5; 6]);
        assert_eq!(in_place.wait().unwrap(), [2.25; 6]);
        assert_eq!(without.wait().unwrap()[..], [0.0; 6]);
        assert_eq!(cut.wait().unwrap().1, vec![2.0; own.len()]);
        let summed = tp.enter_backward_async(vec![3.0; 6], own.clone(), &shape, Some(1)).unwrap();
        let grad = tp.enter_backward_in_place_async(vec![1.5; 5]).unwrap();
        let mut after = [1.0; 2];
        tp.enter_backward_in_place(&mut after).unwrap(); // waits for the others
        assert_eq!(after, [2.0; 2]);
        assert!(summed.is_done().unwrap() && grad.is_done().unwrap());
        assert_eq!((summed.wait().unwrap().1, grad.wait().unwrap()), (vec![6.0; own.len()], vec![3.0; 5]));
        let error = tp.enter_async(vec![0.0; 5], vec![0.0; 6], &shape, Some(1)).unwrap_err();
        assert!(error.code() == Code::InvalidArgument && error.message().contains("input has 5"), "{error}");
    });
}

#[test]
fn an_operation_keeps_the_model_and_its_mesh() {
    ranks(2, |comm| {
        for forget in [false, true] {
            let work = {
                let mesh = line(&comm);
                let tp = TensorParallel::builder(&mesh, params!["w" => (vec![0.0f64], [1])]).build().unwrap();
                tp.leave_async(vec![1.0; 3000], vec![0.0; 3000], &[3, 1000], None, Some(&[1.0; 1000])).unwrap()
            };
            if forget {
                mem::forget(work);
                comm.barrier().unwrap();
            } else {
                assert_eq!(work.wait().unwrap().1, [3.0; 3000]);
            }
        }
        let mesh = line(&comm);
        let tp = TensorParallel::builder(&mesh, params!["w" => (vec![0.0f64], [1])]).build().unwrap();
        drop(tp.enter_backward_in_place_async(vec![1.0; 3000]).unwrap());
        drop(tp);
        drop(mesh);
        comm.barrier().unwrap();
    });
}

const WORDS: usize = 7;

#[test]
fn words_are_looked_up_in_a_vocabulary_that_is_cut() {
    let ids = [6i64, 0, 3, 3, 2, 6, 5, 3];
    let shape = [2, 4, FEATURES];
    let words = values(9, WORDS * FEATURES);
    let grad = values(10, ids.len() * FEATURES);
    let expected: Vec<_> = ids.iter().flat_map(|&id| &words[id as usize * FEATURES..][..FEATURES]).copied().collect();
    let mut sum = vec![0.0; words.len()];
    for (row, &id) in ids.iter().enumerate() {
        (0..FEATURES).for_each(|j| sum[id as usize * FEATURES + j] += grad[row * FEATURES + j]);
    }
    for (world, style) in
        [(1, Style::Vocabulary), (2, Style::Vocabulary), (3, Style::Vocabulary), (2, Style::Replicate)]
    {
        ranks(world, |comm| {
            let mesh = line(&comm);
            let mut tp = TensorParallel::builder(&mesh, params!["tok.weight" => (words.clone(), [WORDS, FEATURES])])
                .plan([("tok", style)])
                .build()
                .unwrap();
            for dim in [None, Some(0), Some(1), Some(2)] {
                let mut rows = vec![f64::NAN; part_len(&tp, &shape, dim)];
                tp.embed(0, &ids, &mut rows, &shape, dim).unwrap();
                assert_eq!(rows, part(&tp, &expected, &shape, dim));
                let small = ids.map(|id| id as i32);
                tp.zero_grad().unwrap();
                for _ in 0..2 {
                    tp.embed_backward(0, &small, &part(&tp, &grad, &shape, dim), &shape, dim).unwrap();
                }
                let found = gathered(&tp, true);
                near(&found[0], &sum.iter().map(|x| 2.0 * x).collect::<Vec<_>>(), "gradient of the words");
            }
            let mut rows = [0.0; FEATURES];
            let error = tp.embed(0, &[7i64], &mut rows, &[1, FEATURES], None).unwrap_err();
            assert!(error.code() == Code::InvalidArgument && error.message().contains("id 7"), "{error}");
            let error = tp.embed(0, &[1.0f32], &mut rows, &[1, FEATURES], None).unwrap_err();
            assert!(error.code() == Code::InvalidArgument && error.message().contains("ids are f32"), "{error}");
            let error = tp.embed(0, &[1i32], &mut [0.0f32; FEATURES], &[1, FEATURES], None).unwrap_err();
            assert!(error.code() == Code::InvalidArgument && error.message().contains("dtypes differ"), "{error}");
            let error = tp.embed(0, &[1i32, 2], &mut rows, &[1, FEATURES], None).unwrap_err();
            assert!(error.code() == Code::InvalidArgument && error.message().contains("ids has 2 elements"), "{error}");
            assert_eq!(
                tp.embed(1, &[1i32], &mut rows, &[1, FEATURES], None).unwrap_err().code(),
                Code::InvalidArgument
            );
        });
    }
}

/// How a loss is computed, without ranks: the loss of each row, the divisor of their sum, and its gradient by the logits.
fn plain_loss(
    logits: &[f64],
    classes: usize,
    targets: &[i64],
    weights: Option<&[f64]>,
    smoothing: f64,
    reduction: LossReduction,
) -> (Vec<f64>, Vec<f64>) {
    let weight = |c: usize| weights.map_or(1.0, |weights| weights[c]);
    let counts = |&&y: &&i64| y != -100;
    let divisor = match reduction {
        LossReduction::Mean => targets.iter().filter(counts).map(|&y| weight(y as usize)).sum(),
        _ => 1.0,
    };
    let (mut losses, mut grad) = (Vec::new(), Vec::new());
    for (row, &target) in logits.chunks(classes).zip(targets) {
        let log_sum = row.iter().map(|x| x.exp()).sum::<f64>().ln();
        let aim = |c: usize| {
            let sharp = if c as i64 == target { (1.0 - smoothing) * weight(c) } else { 0.0 };
            if target == -100 {
                0.0
            } else {
                sharp + smoothing / classes as f64 * weight(c)
            }
        };
        let total: f64 = (0..classes).map(aim).sum();
        losses.push((0..classes).map(|c| aim(c) * (log_sum - row[c])).sum());
        grad.extend((0..classes).map(|c| ((row[c] - log_sum).exp() * total - aim(c)) / divisor));
    }
    if reduction != LossReduction::None {
        losses = vec![losses.iter().sum::<f64>() / divisor];
    }
    (losses, grad)
}

#[test]
fn the_loss_of_a_vocabulary_that_is_cut_is_that_of_a_plain_computation() {
    let (classes, targets) = (WORDS, [2i64, 6, -100, 0, 4]);
    let logits: Vec<_> = values(21, targets.len() * classes).iter().map(|x| 3.0 * x).collect();
    let weights: Vec<_> = (0..classes).map(|c| 0.25 + c as f64).collect();
    for world in [1, 2, 3] {
        ranks(world, |comm| {
            let mesh = line(&comm);
            let tp = TensorParallel::builder(&mesh, params!["w" => (vec![0.0f64], [1])]).build().unwrap();
            let shape = [targets.len(), classes];
            let own = part(&tp, &logits, &shape, Some(1));
            for reduction in [LossReduction::Mean, LossReduction::Sum, LossReduction::None] {
                for (weights, smoothing) in
                    [(None, 0.0), (Some(&weights[..]), 0.0), (None, 0.2), (Some(&weights[..]), 0.2)]
                {
                    let mut settings =
                        CrossEntropy::new(classes).reduction(reduction).label_smoothing(smoothing).grad_scale(4.0);
                    if let Some(weights) = weights {
                        settings = settings.class_weights(weights);
                    }
                    let (expected, plain) = plain_loss(&logits, classes, &targets, weights, smoothing, reduction);
                    let mut loss = vec![f64::NAN; expected.len()];
                    let mut grad = vec![f64::NAN; own.len()];
                    tp.cross_entropy(&settings, &own, &targets, &mut loss, Some(&mut grad)).unwrap();
                    near(&loss, &expected, "loss");
                    let scaled: Vec<_> = plain.iter().map(|g| 4.0 * g).collect();
                    near(&whole(&tp, &grad, &shape, Some(1)), &scaled, "gradient");
                    let (mut replaced, mut again) = (own.clone(), vec![f64::NAN; expected.len()]);
                    let small = targets.map(|target| target as i32);
                    tp.cross_entropy_in_place(&settings, &mut replaced, &small, &mut again).unwrap();
                    assert_eq!((&replaced, &again), (&grad, &loss));
                }
            }
            // The other types, and a row of another number that does not count.
            let halves: Vec<_> = own.iter().map(|&x| f16::from_f64(x)).collect();
            let (mut loss, mut grad) = ([f32::NAN], vec![f16::NAN; own.len()]);
            let settings = CrossEntropy::new(classes).ignore_index(6).class_weights(&[1.0f32; WORDS]);
            let others = targets.map(|y| if y < 0 { 6 } else { y });
            tp.cross_entropy(&settings, &halves, &others, &mut loss, Some(&mut grad)).unwrap();
            let ignored = targets.map(|y| if y == 6 { -100 } else { y });
            let (expected, plain) = plain_loss(&logits, classes, &ignored, None, 0.0, LossReduction::Mean);
            assert!((f64::from(loss[0]) - expected[0]).abs() < 0.01, "{loss:?}, not {expected:?}");
            let own_grad = part(&tp, &plain, &shape, Some(1));
            assert!(grad.iter().zip(&own_grad).all(|(g, plain)| (g.to_f64() - plain).abs() < 0.01));
            let mut none = [0.0f64];
            tp.cross_entropy(&CrossEntropy::new(classes), &own, &[-100i64; 5], &mut none, None).unwrap();
            assert!(none[0].is_nan());
        });
    }
}

#[test]
fn activations_enter_and_leave_part_by_part() {
    ranks(3, |comm| {
        let (mesh, rank) = (line(&comm), comm.rank().unwrap());
        let tp = TensorParallel::builder(&mesh, params!["w" => (vec![0.0f64], [1])]).build().unwrap();
        for (dim, shape) in [(0, [4, 2]), (1, [2, 4])] {
            let whole: Vec<f64> = (0..8).map(f64::from).collect();
            let mut mine = vec![0.0; tp.part(4).len() * 2];
            tp.split(&whole, &mut mine, &shape, dim).unwrap();
            let (mut out, mut seen) = (vec![0.0; 8], Vec::new());
            tp.enter_parts(&mine, &mut out, &shape, dim, |begin, part| {
                seen.push((begin, part.to_vec()));
                Ok(())
            })
            .unwrap();
            assert_eq!(out, whole);
            assert_eq!(seen.iter().map(|(begin, _)| *begin).collect::<Vec<_>>(), [0, 2], "the third part is empty");
            assert!(rank == 2 || seen[rank].1 == mine);
            let mut sum = vec![0.0; mine.len()];
            let bias = vec![0.5; shape[1]];
            let bias = if dim == 0 { &bias[..] } else { &bias[..tp.part(4).len()] };
            tp.leave_parts(&mut sum, &shape, dim, (!bias.is_empty()).then_some(bias), |begin, part| {
                part.fill((begin + 1) as f64);
                Ok(())
            })
            .unwrap();
            assert!(sum.iter().all(|&x| x == 3.0 * (2 * rank + 1) as f64 + 0.5), "{sum:?}");
        }
        let mut out = [0.0; 2];
        let error =
            tp.leave_parts(&mut out[..1 - rank.min(1)], &[1], 0, None, |_, _| Err("no more".into())).unwrap_err();
        assert!(error.message().contains("compute failed for the part of rank 0: no more"), "{error}");
    });
}

#[test]
fn heads_are_whole_on_each_rank() {
    ranks(2, |comm| {
        let mesh = line(&comm);
        let with = |style| {
            let params = params!["wq.weight" => (vec![0.0f32; 24], [12, 2])];
            TensorParallel::builder(&mesh, params).plan([("wq", style)]).build()
        };
        assert_eq!(with(Style::ColumnHeads(4)).unwrap().slice(0).unwrap().len(), 12);
        for (style, why) in [
            (Style::ColumnHeads(3), "3 heads do not divide over 2 ranks"),
            (Style::RowHeads(5), "do not divide into 5 heads"),
            (Style::RowHeads(0), "the number of heads is 0"),
        ] {
            let error = with(style).unwrap_err();
            assert!(error.code() == Code::InvalidArgument && error.message().contains(why), "{error}");
        }
    });
}

#[test]
fn bad_losses_are_refused() {
    let comm = alone();
    let mesh = line(&comm);
    let tp = TensorParallel::builder(&mesh, params!["w" => (vec![0.0f64], [1])]).build().unwrap();
    let refused = |result: Result<()>, why: &str| {
        let error = result.unwrap_err();
        assert!(error.code() == Code::InvalidArgument && error.message().contains(why), "{error}");
    };
    let (plain, mut loss) = (CrossEntropy::new(3), [0.0f64]);
    refused(tp.cross_entropy(&plain, &[0.0f64; 5], &[0i64; 2], &mut loss, None), "logits has 5 elements");
    refused(tp.cross_entropy(&plain, &[0.0f64; 6], &[0i64; 2], &mut loss, Some(&mut [0.0; 5])), "grad has 5 elements");
    refused(tp.cross_entropy(&plain, &[0.0f64; 6], &[0i64; 2], &mut [0.0f64; 2], None), "the loss has 2 elements");
    refused(tp.cross_entropy(&plain, &[0.0f64; 6], &[0i64; 2], &mut [0.0f32], None), "the loss is f32");
    refused(tp.cross_entropy(&plain, &[0i32; 6], &[0i64; 2], &mut loss, None), "logits are i32");
    refused(tp.cross_entropy(&plain, &[0.0f64; 6], &[0.0f32; 2], &mut loss, None), "targets are f32");
    refused(tp.cross_entropy(&plain, &[0.0f64; 6], &[0i64, 3], &mut loss, None), "target 3 of row 1");
    let weighted = plain.clone().class_weights(&[1.0f32; 2]);
    refused(tp.cross_entropy(&weighted, &[0.0f64; 6], &[0i64; 2], &mut loss, None), "class weights are f32 [2]");
    let smooth = plain.clone().label_smoothing(1.5);
    refused(tp.cross_entropy(&smooth, &[0.0f64; 6], &[0i64; 2], &mut loss, None), "label_smoothing is 1.5");
    refused(tp.cross_entropy(&CrossEntropy::new(0), &[0.0f64; 0], &[0i64; 2], &mut loss, None), "0 classes");
}

#[test]
fn data_ranks_share_the_mean() {
    let (classes, targets) = (5, [[2i64, -100, 4], [0, 1, 3]]);
    let logits = values(31, 6 * classes);
    let (expected, plain) = plain_loss(&logits, classes, &targets.concat(), None, 0.0, LossReduction::Mean);
    ranks(4, |comm| {
        let mesh = Mesh::new(&comm, &[("dp", 2), ("tp", 2)]).unwrap();
        let tp = TensorParallel::builder(&mesh, params!["w" => (vec![0.0f64; 6], [3, 2])])
            .dim("tp")
            .plan([("w", Style::Column)])
            .build()
            .unwrap();
        assert_eq!(tp.layout(0).unwrap().regions(3).unwrap()[0].offsets, [2, 0]); // of all ranks
        let dp = mesh.comm("dp").unwrap();
        let place = dp.rank().unwrap();
        let rows = 3 * classes;
        let own = part(&tp, &logits[place * rows..][..rows], &[3, classes], Some(1));
        let (mut loss, mut grad) = ([f64::NAN], vec![f64::NAN; own.len()]);
        let settings = CrossEntropy::new(classes).data_ranks(dp);
        tp.cross_entropy(&settings, &own, &targets[place], &mut loss, Some(&mut grad)).unwrap();
        dp.all_reduce(&mut loss, ReduceOp::Sum).unwrap();
        near(&loss, &expected, "loss");
        near(&whole(&tp, &grad, &[3, classes], Some(1)), &plain[place * rows..][..rows], "gradient");
    });
}

/// Three steps, of which the norm of the gradients is bounded.
fn train(tp: &mut TensorParallel, opt: &mut tessera::Optimizer, steps: usize) -> Vec<f64> {
    let x = values(17, ROWS * FEATURES);
    let mut norms = Vec::new();
    for _ in 0..steps {
        forward_backward(tp, &x, 5, Some(1));
        norms.push(opt.clip_grad_norm(0.5, 2.0).unwrap());
        opt.step().unwrap();
    }
    norms
}

#[test]
fn a_model_saved_by_2_ranks_goes_on_at_1_and_3() {
    let folder = tempfile::tempdir().unwrap();
    let comm = alone();
    let mesh = line(&comm);
    let mut tp = cut(&mesh, perceptron(5, 3), Some(1));
    let mut opt = AdamW::new(&mut tp).build().unwrap();
    let norms = train(&mut tp, &mut opt, 5);
    assert!(norms.iter().all(|&norm| norm > 0.5));
    let expected = gathered(&tp, false);
    ranks(2, |comm| {
        let mesh = line(&comm);
        let mut tp = cut(&mesh, perceptron(5, 3), Some(1));
        let mut opt = AdamW::new(&mut tp).build().unwrap();
        near(&train(&mut tp, &mut opt, 3), &norms[..3], "norms");
        let saver = Saver::at(&comm, folder.path()).open().unwrap();
        saver.save(3, &State::new().with("model", &tp).with("optim", &opt)).unwrap();
    });
    let checkpoint = Checkpoint::open(folder.path()).unwrap();
    let tensors = checkpoint.tensors().unwrap();
    for name in ["model.fc2.weight", "optim.state.fc2.weight.exp_avg"] {
        assert!(tensors.iter().any(|tensor| tensor.name == name && tensor.shape == [FEATURES, 5]), "{name}");
    }
    for world in [1, 3] {
        ranks(world, |comm| {
            let mesh = line(&comm);
            let mut tp = cut(&mesh, described(5), Some(1));
            assert!((0..5).all(|i| tp.slice_as::<f64>(i).unwrap().iter().all(|&value| value == 0.0)));
            let mut opt = AdamW::new(&mut tp).build().unwrap();
            let mut state = State::new().with("model", &tp).with("optim", &opt);
            Checkpoint::open(folder.path()).unwrap().load(&mut state, &LoadOptions::new()).unwrap();
            assert_eq!(opt.steps().unwrap(), 3);
            near(&train(&mut tp, &mut opt, 2), &norms[3..], "norms");
            for (found, expected) in gathered(&tp, false).iter().zip(&expected) {
                near(found, expected, &format!("{world} ranks"));
            }
        });
    }
}

#[test]
fn every_optimizer_and_a_scaler_step_over_slices() {
    ranks(2, |comm| {
        let mesh = line(&comm);
        let rank = comm.rank().unwrap();
        let model = params!["w" => (vec![1.0f32; 3], [3]), "ids" => (vec![7i64, 8], [2])];
        let mut tp = TensorParallel::builder(&mesh, model).plan([("w", Style::Column)]).build().unwrap();
        let mut sgd = Sgd::new(&mut tp).lr(0.5).build().unwrap();
        let mut adam = Adam::new(&mut tp).build().unwrap();
        let mut scaler = GradScaler::builder().init_scale(2.0).build().unwrap();
        tp.grad_mut(0).unwrap().fill(if rank == 1 { f32::INFINITY } else { 2.0 });
        assert!(!scaler.step(&mut sgd).unwrap()); // on both ranks
        tp.grad_mut(0).unwrap().fill(2.0);
        scaler.update().unwrap();
        assert!(scaler.step(&mut sgd).unwrap());
        assert_eq!(tp.slice(0).unwrap()[0], 0.0); // the scale is 1 by now
        adam.step().unwrap();
        assert!(tp.slice(0).unwrap()[0] < 0.0);
        assert_eq!(tp.slice_as::<i64>(1).unwrap()[..], [7, 8]);
        let error = tp.grad(1).unwrap_err();
        assert!(error.code() == Code::InvalidState && error.message().contains("\"ids\" is i64"), "{error}");
    });
}

#[test]
fn parameters_are_as_registered() {
    ranks(3, |comm| {
        let (mesh, rank) = (line(&comm), comm.rank().unwrap());
        let tp = cut(&mesh, perceptron(5, 3), None);
        assert_eq!((tp.len(), tp.is_empty(), tp.index("fc2.bias"), tp.index("fc3")), (5, false, Some(4), None));
        let names: Vec<_> = tp.names().collect();
        assert_eq!(names, ["norm.weight", "fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"]);
        assert_eq!((tp.name(1), tp.name(5), tp.shape(1)), (Some("fc1.weight"), None, Some(&[5, FEATURES][..])));
        let cuts: Vec<_> = (0..6).map(|i| tp.cut(i)).collect();
        assert_eq!(cuts, [None, Some(0), Some(0), Some(1), None, None]);
        assert_eq!(tp.part(5), [0..2, 2..4, 4..5][rank]);
        assert_eq!(tp.part(2), [0..1, 1..2, 2..2][rank]);
        assert_eq!(tp.slice_shape(3), Some(&[FEATURES, tp.part(5).len()][..]));
        let held = tp.layout(1).unwrap().regions(2).unwrap();
        assert_eq!(held, [Region { offsets: vec![4, 0], sizes: vec![1, FEATURES] }]);
        assert_eq!(tp.layout(5).unwrap_err().code(), Code::InvalidArgument);
        assert_eq!(tp.slice(5).unwrap_err().code(), Code::InvalidArgument);
        let error = tp.slice(1).unwrap_err();
        assert!(error.code() == Code::InvalidArgument && error.message().contains("f64"), "{error}");
        assert_eq!(tp.grad(1).unwrap_err().code(), Code::InvalidArgument);
        assert!(tp.grad_as::<f64>(1).unwrap().iter().all(|&grad| grad == 0.0));
        assert!(format!("{tp:?}").contains("fc1.weight"));
    });
}

#[test]
fn each_rank_may_cut_its_own_values_and_joined_weights_as_a_layout_says() {
    ranks(2, |comm| {
        let (mesh, rank) = (line(&comm), comm.rank().unwrap());
        // q, k and v of 2 heads each: a rank has one head of each.
        let head = |i: usize| Region { offsets: vec![i, 0], sizes: vec![1, 2] };
        let layout = Layout::from_regions(&[6, 2], &[vec![head(0), head(2), head(4)], vec![head(1), head(3), head(5)]]);
        let qkv: Vec<_> = (0..12).map(|i| i as f32 + 100.0 * rank as f32).collect();
        let layout = layout.unwrap();
        let of = |sync| {
            let model = params!["qkv.weight" => (qkv.clone(), [6, 2]), "norm" => (vec![rank as f32; 4], [4])];
            TensorParallel::builder(&mesh, model)
                .plan([("qkv.weight", Style::Layout(&layout)), ("norm", Style::Shard(0))])
                .sync_values(sync)
                .build()
                .unwrap()
        };
        let begin = 2.0 * rank as f32;
        let expected = [0.0, 1.0, 4.0, 5.0, 8.0, 9.0].map(|i| i + begin);
        assert_eq!(of(true).slice(0).unwrap()[..], expected);
        assert_eq!(of(false).slice(0).unwrap()[..], expected.map(|x| x + 100.0 * rank as f32));
        assert_eq!(
            (of(true).slice(1).unwrap().to_vec(), of(false).slice(1).unwrap().to_vec()),
            (vec![0.0; 2], vec![rank as f32; 2])
        );
        assert_eq!(of(true).layout(0).unwrap().regions(1).unwrap(), layout.regions(1).unwrap());
    });
}

#[test]
fn bad_plans_are_refused_on_all_ranks() {
    let refused = |mesh: &Mesh, plan: &[(&str, Style)], why: &[&str]| {
        let error = TensorParallel::builder(mesh, perceptron(5, 3)).plan(plan.iter().copied()).build().unwrap_err();
        assert_eq!(error.code(), Code::InvalidArgument, "{error}");
        why.iter().for_each(|why| assert!(error.message().contains(why), "{error}"));
    };
    ranks(2, |comm| {
        let mesh = line(&comm);
        refused(&mesh, &[("fc9", Style::Row)], &["matches no parameter", "\"fc9\"", "\"fc1.weight\""]);
        refused(&mesh, &[("fc1", Style::Column), ("fc1.bias", Style::Replicate)], &["\"fc1.bias\" by \"fc1\" and"]);
        refused(&mesh, &[("fc1.bias", Style::Vocabulary)], &["cannot be cut", "the style needs 2"]);
        refused(&mesh, &[("fc1", Style::Shard(1))], &["\"fc1.bias\"", "no dimension 1"]);
        let whole = Region { offsets: vec![0], sizes: vec![5] };
        let layout = Layout::from_regions(&[5], &[vec![whole.clone()], vec![whole]]).unwrap();
        refused(&mesh, &[("fc1", Style::Layout(&layout))], &["\"fc1.weight\"", "its layout"]);
        refused(&mesh, &[("fc1\0", Style::Row)], &["zero byte"]);
        let mine = if comm.rank().unwrap() == 0 { "fc1" } else { "fc9" }; // wrong on rank 1 alone
        let named = if mine == "fc1" { "rank 1" } else { "\"fc9\"" };
        refused(&mesh, &[(mine, Style::Column)], &[named, "matches no parameter"]);
        let one = if comm.rank().unwrap() == 0 { Style::Column } else { Style::Replicate };
        let error = TensorParallel::builder(&mesh, perceptron(5, 3)).plan([("fc1", one)]).build().unwrap_err();
        assert!(error.code() == Code::Mismatch && error.message().contains("fc1.weight"), "{error}");
        comm.barrier().unwrap(); // as good as before
        let error = TensorParallel::builder(&mesh, perceptron(5, 3)).dim("dp").build().unwrap_err();
        assert_eq!(error.code(), Code::NotFound);
        let square = Mesh::new(&comm, &[("dp", 1), ("tp", 2)]).unwrap();
        refused(&square, &[], &["choose one of [\"dp\", \"tp\"]"]);
        let tensor = Tensor::zeros(DType::F64, [2]).unwrap();
        let held = tensor.view_mut::<f64>().unwrap();
        let error = TensorParallel::builder(&mesh, params!["w" => &tensor]).build().unwrap_err();
        assert_eq!(error.code(), Code::InvalidState);
        drop(held);
        TensorParallel::builder(&mesh, params!["w" => &tensor]).build().unwrap();
        assert_eq!(TensorParallel::builder(&mesh, Params::new()).build().unwrap_err().code(), Code::InvalidArgument);
    });
}

fn refused<T: Element>(
    tp: &TensorParallel,
    input: &[T],
    output: usize,
    shape: &[usize],
    dim: Option<usize>,
    why: &str,
) {
    let error = tp.enter(input, &mut vec![input[0]; output], shape, dim).unwrap_err();
    assert!(error.code() == Code::InvalidArgument && error.message().contains(why), "{error}");
}

#[test]
fn bad_activations_are_refused() {
    ranks(2, |comm| {
        let mesh = line(&comm);
        let tp = TensorParallel::builder(&mesh, params!["w" => (vec![0.0f64], [1])]).build().unwrap();
        refused(&tp, &[0.0f64; 5], 6, &[2, 3], None, "input has 5 elements; [2, 3] has 6");
        refused(&tp, &[0.0f64; 6], 5, &[2, 3], None, "output has 5 elements");
        refused(&tp, &[0.0f64; 6], 6, &[2, 3], Some(2), "dim is 2; an activation of shape [2, 3] has 2 dimensions");
        refused(&tp, &[0.0f64; 6], 6, &[2, 3], Some(1), "this rank's part of [2, 3] along dimension 1");
        refused(&tp, &[0.0f64; 6], 6, &[usize::MAX, 3], None, "exceeds the address space");
        refused(&tp, &[0.0f64; 1], 1, &[1; 9], None, "dimensions");
        let (mut y, bias) = (vec![0.0f64; 6], [1.0f64; 2]);
        let error = tp.leave_in_place(&mut y, &[2, 3], Some(&bias)).unwrap_err();
        assert!(error.code() == Code::InvalidArgument && error.message().contains("the bias"), "{error}");
        let mut flags = [tessera::Bool::from(true)];
        assert_eq!(tp.enter_backward_in_place(&mut flags).unwrap_err().code(), Code::Unsupported);
        let error = tp.split(&y, &mut [0.0; 6], &[2, 3], 0).unwrap_err();
        assert!(error.code() == Code::InvalidArgument && error.message().contains("output has 6"), "{error}");
    });
}

#[test]
fn steps_without_the_sum_of_the_sequences_gradients_are_refused() {
    ranks(2, |comm| {
        let mesh = line(&comm);
        let mut tp = TensorParallel::builder(&mesh, params!["norm.weight" => (vec![1.0f32; 2], [2])])
            .plan([("norm", Style::Sequence)])
            .build()
            .unwrap();
        let mut sgd = Sgd::new(&mut tp).lr(1.0).build().unwrap();
        tp.grad_mut(0).unwrap().fill(0.25);
        let error = sgd.step().unwrap_err();
        assert!(error.code() == Code::InvalidState && error.message().contains("\"norm.weight\""), "{error}");
        tp.sum_grads().unwrap();
        assert_eq!(tp.grad(0).unwrap()[..], [0.5; 2]);
        sgd.step().unwrap();
        assert_eq!(tp.slice(0).unwrap()[..], [0.5; 2]);
        assert_eq!(sgd.step().unwrap_err().code(), Code::InvalidState);
        tp.zero_grad().unwrap();
        assert_eq!(tp.grad(0).unwrap()[..], [0.0; 2]);
    });
}

#[test]
fn nothing_is_changed_or_read_under_a_view() {
    let folder = tempfile::tempdir().unwrap();
    let comm = alone();
    let mesh = line(&comm);
    let mut tp = TensorParallel::builder(&mesh, params!["tok.weight" => (vec![1.0f32; 6], [3, 2])])
        .plan([("tok", Style::Vocabulary)])
        .build()
        .unwrap();
    let mut opt = Sgd::new(&mut tp).build().unwrap();
    let refused = |result: Result<()>, what: &str| {
        let error = result.unwrap_err();
        assert!(error.code() == Code::InvalidState && error.message().contains(what), "{error}");
    };
    let mut rows = [0.0f32; 2];
    {
        let _slice = tp.slice(0).unwrap();
        refused(opt.step(), "tok.weight");
        tp.embed(0, &[1i64], &mut rows, &[1, 2], None).unwrap();
        assert_eq!(tp.slice_mut(0).unwrap_err().code(), Code::InvalidState);
    }
    {
        let _slice = tp.slice_mut(0).unwrap();
        refused(tp.embed(0, &[1i64], &mut rows, &[1, 2], None), "tok.weight");
        assert_eq!(tp.slice(0).unwrap_err().code(), Code::InvalidState);
    }
    {
        let _grad = tp.grad(0).unwrap();
        refused(tp.embed_backward(0, &[1i64], &rows, &[1, 2], None), "gradient of tok.weight");
        refused(opt.zero_grad(), "gradient of tok.weight");
        opt.step().unwrap(); // reads it
    }
    let saver = Saver::at(&comm, folder.path()).open().unwrap();
    let mut state = State::new().with("model", &tp).with("optim", &opt);
    {
        let _slice = tp.slice(0).unwrap();
        saver.save(1, &state).unwrap();
        refused(saver.resume(&mut state).map(drop), "tok.weight");
    }
    drop((tp, opt)); // the state keeps the slices
    assert_eq!(saver.resume(&mut state).unwrap(), 1);
}

fn until(called: &AtomicBool) {
    let begun = Instant::now();
    while !called.load(Ordering::SeqCst) {
        assert!(begun.elapsed() < deadline(), "the callback was never called");
        std::thread::yield_now();
    }
}

#[test]
fn callbacks_of_a_call_that_waits_for_the_background_cannot_call_again() {
    let called = AtomicBool::new(false);
    ranks(2, |comm| {
        let mesh = line(&comm);
        let tp = TensorParallel::builder(&mesh, params!["tok.weight" => (vec![1.0f32; 6], [3, 2])]).build().unwrap();
        let mut data = [1.0f32; 2];
        if comm.rank().unwrap() == 1 {
            until(&called);
            tp.enter_backward_in_place(&mut [1.0f32; 2000]).unwrap();
            tp.enter_backward_in_place(&mut data).unwrap();
            return;
        }
        drop(tp.enter_backward_in_place_async(vec![1.0f32; 2000]).unwrap());
        let callback = || {
            if !called.load(Ordering::SeqCst) {
                let mut rows = [0.0f32; 2];
                let error = tp.embed(0, &[1i64], &mut rows, &[1, 2], None).unwrap_err();
                assert_eq!(error.code(), Code::InvalidState, "{error}");
                let logits = [0.0f32; 2];
                let error = tp.cross_entropy(&CrossEntropy::new(3), &logits, &[1i64], &mut [0.0f32], None).unwrap_err();
                assert_eq!(error.code(), Code::InvalidState, "{error}");
                called.store(true, Ordering::SeqCst);
            }
            false
        };
        tessera::with_interrupt(callback, || tp.enter_backward_in_place(&mut data)).unwrap();
        assert_eq!(data, [2.0; 2]);
    });
}

#[test]
fn callbacks_get_nothing_that_a_call_uses_and_cannot_call_again() {
    let called = AtomicBool::new(false);
    ranks(2, |comm| {
        let mesh = line(&comm);
        let mut tp = TensorParallel::builder(&mesh, params!["tok.weight" => (vec![1.0f32; 6], [3, 2])])
            .plan([("tok", Style::Sequence)])
            .build()
            .unwrap();
        let opt = Sgd::new(&mut tp).build().unwrap();
        let state = State::new().with("model", &tp);
        let mut rows = [0.0f32; 2];
        if comm.rank().unwrap() == 1 {
            until(&called);
            tp.embed(0, &[1i64], &mut rows, &[1, 2], None).unwrap();
            comm.barrier().unwrap();
            return;
        }
        let mut inside = Some(|| {
            assert_eq!(tp.slice(0).unwrap().len(), 6);
            assert_eq!(tp.slice_mut(0).unwrap_err().code(), Code::InvalidState);
            let mut other = [0.0f32; 2];
            assert_eq!(tp.embed(0, &[1i64], &mut other, &[1, 2], None).unwrap_err().code(), Code::InvalidState);
            assert_eq!(tp.enter_backward_in_place(&mut other).unwrap_err().code(), Code::InvalidState);
            assert_eq!(tp.enter_backward_in_place_async(vec![0.0f32]).unwrap_err().code(), Code::InvalidState);
            called.store(true, Ordering::SeqCst);
        });
        let callback = || {
            if let Some(inside) = inside.take() {
                inside();
            }
            false
        };
        tessera::with_interrupt(callback, || tp.embed(0, &[1i64], &mut rows, &[1, 2], None)).unwrap();
        assert_eq!(rows, [1.0; 2]);
        comm.barrier().unwrap();
        drop((opt, state));
    });
}
