//! Whole trainings: ranks with a share of the batch equal one rank with all of it, however the gradients are reduced.

mod common;

use common::ranks;
use tessera::{params, Comm, DType, Ddp, DdpHook, DdpOptions, ReduceOp, Sgd};

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

/// The hidden activations, and the prediction's error.
fn forward(ddp: &Ddp, (input, target): &Sample) -> ([f32; HIDDEN], f32) {
    let (w1, b1, w2) = (ddp.param(0).unwrap(), ddp.param(1).unwrap(), ddp.param(2).unwrap());
    let hidden = std::array::from_fn(|j| {
        let row = &w1[j * INPUTS..(j + 1) * INPUTS];
        (b1[j] + row.iter().zip(input).map(|(w, x)| w * x).sum::<f32>()).tanh()
    });
    (hidden, hidden.iter().zip(&w2[..]).map(|(h, w)| h * w).sum::<f32>() - target)
}

/// Adds the gradients of the mean over `share` samples, for some of them.
fn backward<'a>(ddp: &Ddp, samples: impl Iterator<Item = &'a Sample>, share: f32) {
    let w2 = ddp.param(2).unwrap();
    let (mut g1, mut gb) = (ddp.grad_mut(0).unwrap(), ddp.grad_mut(1).unwrap());
    let mut g2 = ddp.grad_mut(2).unwrap();
    for sample in samples {
        let (hidden, error) = forward(ddp, sample);
        let d = 2.0 * error / share;
        for j in 0..HIDDEN {
            let inner = d * w2[j] * (1.0 - hidden[j] * hidden[j]);
            g2[j] += d * hidden[j];
            gb[j] += inner;
            g1[j * INPUTS..(j + 1) * INPUTS].iter_mut().zip(&sample.0).for_each(|(g, x)| *g += inner * x);
        }
    }
}

/// How a training reduces its gradients.
struct Way {
    options: DdpOptions,
    /// Parts of a rank's share of the batch, of which the last one synchronises.
    micro_steps: usize,
    /// Backward reduces nothing; the trainer averages what it left.
    by_hand: bool,
    /// The optimizer steps within `wait`.
    in_backward: bool,
    near: f64,
    /// Whether the bits are those of the plain way; if not told, perhaps.
    bits_of_plain: Option<bool>,
}

/// With a parameter a bucket.
fn small_buckets() -> DdpOptions {
    DdpOptions::new().bucket_bytes(64).first_bucket_bytes(64)
}

fn plain() -> Way {
    Way {
        options: small_buckets(),
        micro_steps: 1,
        by_hand: false,
        in_backward: false,
        near: 1e-4,
        bits_of_plain: None,
    }
}

/// The loss of all samples after each step, and the parameters at the end.
fn train(comm: &Comm, way: &Way) -> (Vec<f64>, Vec<f32>) {
    let mut random = 5;
    let samples: Vec<Sample> =
        (0..SAMPLES).map(|_| (std::array::from_fn(|_| uniform(&mut random)), uniform(&mut random))).collect();
    let mut initial = |count| (0..count).map(|_| uniform(&mut random) / 2.0).collect::<Vec<_>>();
    let params = params![
        "w1" => (initial(HIDDEN * INPUTS), [HIDDEN, INPUTS]),
        "b1" => (initial(HIDDEN), [HIDDEN]),
        "w2" => (initial(HIDDEN), [HIDDEN]),
    ];
    let (rank, world) = (comm.rank().unwrap(), comm.world_size().unwrap());
    let mut ddp = Ddp::with_options(comm, params, &way.options).unwrap();
    let mut sgd = Sgd::new(&mut ddp).lr(0.05).momentum(0.9).build().unwrap();
    let mut losses = Vec::new();
    for _ in 0..STEPS {
        ddp.zero_grad().unwrap();
        for micro in 0..way.micro_steps {
            ddp.set_sync(micro + 1 == way.micro_steps).unwrap();
            let part = samples.iter().skip(rank + world * micro).step_by(world * way.micro_steps);
            backward(&ddp, part, SAMPLES as f32 / world as f32);
            (0..3).rev().for_each(|i| ddp.ready(i).unwrap());
            ddp.wait().unwrap();
        }
        for i in (0..3).filter(|_| way.by_hand) {
            comm.all_reduce(&mut ddp.grad_mut(i).unwrap(), ReduceOp::Avg).unwrap();
        }
        if !way.in_backward {
            sgd.step().unwrap();
        }
        let squares = samples.iter().map(|sample| f64::from(forward(&ddp, sample).1).powi(2));
        losses.push(squares.sum::<f64>() / SAMPLES as f64);
    }
    (losses, (0..3).flat_map(|i| ddp.param(i).unwrap().to_vec()).collect())
}

fn expect_world_size_does_not_matter(way: &Way) {
    let (alone, _) = ranks(1, |comm| train(&comm, &plain())).remove(0);
    assert!(alone[STEPS - 1] < 0.8 * alone[0], "it learns something");
    for world in [2, 3] {
        let together = ranks(world, |comm| train(&comm, way));
        for (step, (loss, expected)) in together[0].0.iter().zip(&alone).enumerate() {
            assert!(
                (loss - expected).abs() <= way.near * expected,
                "{world} ranks, step {step}: {loss}, not {expected}"
            );
        }
        assert!(together.iter().all(|rank| *rank == together[0]), "ranks ended with different bits");
        assert!(ranks(world, |comm| train(&comm, way)) == together, "a second run gave other bits");
        if let Some(same) = way.bits_of_plain {
            assert_eq!(
                ranks(world, |comm| train(&comm, &plain())) == together,
                same,
                "{world} ranks: the plain way's bits"
            );
        }
    }
}

#[test]
fn ranks_with_a_share_of_the_batch_equal_one_rank_with_all_of_it() {
    expect_world_size_does_not_matter(&plain());
}

#[test]
fn gradients_added_up_in_micro_steps_equal_one_rank_with_all_of_it() {
    expect_world_size_does_not_matter(&Way { micro_steps: 2, ..plain() });
}

#[test]
fn gradients_averaged_by_hand_equal_one_rank_with_all_of_it() {
    let options = small_buckets().hook(DdpHook::Noop);
    expect_world_size_does_not_matter(&Way { options, by_hand: true, ..plain() });
}

#[test]
fn gradients_reduced_in_bf16_come_close_to_one_rank_with_all_of_it() {
    let options = small_buckets().reduce_dtype(DType::BF16);
    expect_world_size_does_not_matter(&Way { options, near: 2e-2, bits_of_plain: Some(false), ..plain() });
}

#[test]
fn one_copy_a_host_gives_the_bits_of_a_copy_a_rank() {
    let options = small_buckets().share_params(true);
    expect_world_size_does_not_matter(&Way { options, in_backward: true, bits_of_plain: Some(true), ..plain() });
}
