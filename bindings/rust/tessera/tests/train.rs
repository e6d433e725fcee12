//! Data parallelism, optimizers and the sampler.

mod common;

use common::{alone, deadline, ranks};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::Arc;
use std::time::Instant;

use tessera::{
    params, Adagrad, Adam, AdamW, Code, Comm, DType, Ddp, DdpHook, DdpJoin, DdpOptions, Lamb, Lion, Local, Optimizer,
    ReduceOp, Sampler, Saver, Sgd, State, Tensor,
};

fn two_layers(fill: f32) -> tessera::Params {
    params!["module.fc.weight" => (vec![fill; 12], [3, 4]), "fc.bias" => (vec![fill; 3], vec![3])]
}

#[test]
fn every_rank_begins_with_rank_0s_values_and_ends_with_the_average() {
    ranks(3, |comm| {
        let rank = comm.rank().unwrap() as f32;
        let mut ddp = Ddp::new(&comm, two_layers(rank + 5.0)).unwrap();
        assert_eq!((ddp.len(), ddp.name(0), ddp.index("fc.bias")), (2, Some("fc.weight"), Some(1)));
        assert_eq!(ddp.param(0).unwrap()[..], [5.0; 12]);
        for step in 1..4 {
            ddp.grad_mut(1).unwrap().fill(rank * step as f32);
            ddp.ready(1).unwrap();
            ddp.grad_mut(0).unwrap().fill(rank);
            ddp.ready_all().unwrap();
            ddp.wait().unwrap();
            assert_eq!(ddp.grad(0).unwrap()[..], [1.0; 12]);
            assert_eq!(ddp.grad(1).unwrap()[..], [step as f32; 3]);
        }
        ddp.zero_grad().unwrap();
        assert_eq!(ddp.grad(0).unwrap()[..], [0.0; 12]);
    });
}

#[test]
fn options_sum_instead_and_cut_buckets() {
    ranks(2, |comm| {
        let options = DdpOptions::new().op(ReduceOp::Sum).bucket_bytes(16).first_bucket_bytes(4);
        let mut ddp = Ddp::with_options(&comm, two_layers(0.0), &options).unwrap();
        (0..2).for_each(|i| ddp.grad_mut(i).unwrap().fill(1.5));
        ddp.ready_all().unwrap();
        ddp.wait().unwrap();
        assert_eq!(ddp.grad(0).unwrap()[..], [3.0; 12]);
    });
}

#[test]
fn other_floating_point_types_train_too() {
    ranks(2, |comm| {
        let weights = params!["a" => (vec![1.0f64; 4], [4]), "b" => (vec![half::bf16::ONE; 4], [2, 2])];
        let mut ddp = Ddp::new(&comm, weights).unwrap();
        assert_eq!(ddp.param(0).unwrap_err().code(), Code::InvalidArgument, "it is no f32");
        ddp.grad_mut_as::<f64>(0).unwrap().fill(2.0);
        ddp.grad_mut_as::<half::bf16>(1).unwrap().fill(half::bf16::from_f32(4.0));
        ddp.ready_all().unwrap();
        ddp.wait().unwrap();
        assert_eq!(ddp.grad_as::<f64>(0).unwrap()[..], [2.0; 4]);
        assert_eq!(ddp.grad_as::<half::bf16>(1).unwrap()[3].to_f32(), 4.0);
        assert_eq!(ddp.param_as::<f64>(0).unwrap()[..], [1.0; 4]);
        assert_eq!(ddp.tensor(1).unwrap().dtype(), DType::BF16);
        ddp.param_mut_as::<f64>(0).unwrap()[0] = 3.0;
    });
}

#[test]
fn ranks_with_other_parameters_are_a_mismatch() {
    let errors = ranks(2, |comm| {
        let name = if comm.rank().unwrap() == 0 { "fc.weight" } else { "fc.wait" };
        Ddp::new(&comm, params![name => (vec![0.0f32; 4], [4])]).unwrap_err()
    });
    assert!(errors.iter().all(|error| error.code() == Code::Mismatch), "{errors:?}");
    assert!(errors.iter().any(|e| e.message().contains("fc.weight") && e.message().contains("fc.wait")), "{errors:?}");
}

#[test]
fn wrong_parameters_are_refused() {
    let comm = alone();
    let code = |params| Ddp::new(&comm, params).unwrap_err().code();
    let error = Ddp::new(&comm, params!["w" => (vec![0.0f32; 5], [2, 3])]).unwrap_err();
    assert_eq!(error.code(), Code::InvalidArgument);
    assert!(error.message().contains('w') && error.message().contains("6 elements"), "{error}");
    assert_eq!(code(params![]), Code::InvalidArgument);
    assert_eq!(code(params!["w" => (vec![0i32; 4], [4])]), Code::InvalidArgument);
    assert_eq!(code(params!["w" => (vec![0.0f32], [1]), "w" => (vec![0.0f32], [1])]), Code::InvalidArgument);
    assert_eq!(code(params!["w\0" => (vec![0.0f32], [1])]), Code::InvalidArgument);
    assert_eq!(code(params!["w" => (vec![0.0f32], vec![1; 9])]), Code::InvalidArgument);
    let huge = Tensor::new(Vec::<f32>::new(), [usize::MAX, 2]).unwrap_err();
    assert_eq!(huge.code(), Code::InvalidArgument);
}

#[test]
fn a_gradient_that_is_ready_is_out_of_reach_until_wait() {
    ranks(2, |comm| {
        let mut ddp = Ddp::new(&comm, two_layers(1.0)).unwrap();
        let mut opt = AdamW::new(&mut ddp).build().unwrap();
        {
            let _view = ddp.grad_mut(0).unwrap();
            let error = ddp.ready(0).unwrap_err();
            assert_eq!(error.code(), Code::InvalidState);
            assert!(error.message().contains("fc.weight"), "{error}");
            assert_eq!(ddp.ready_all().unwrap_err().code(), Code::InvalidState);
            assert_eq!(ddp.grad(0).unwrap_err().code(), Code::InvalidState, "one mutable view at a time");
        }
        ddp.ready(0).unwrap();
        assert_eq!(ddp.grad(0).unwrap_err().code(), Code::InvalidState);
        assert_eq!(ddp.grad_mut(0).unwrap_err().code(), Code::InvalidState);
        let twice = ddp.ready(0).unwrap_err();
        assert!(twice.code() == Code::InvalidState && twice.message().contains("fc.weight"), "{twice:?}");
        assert_eq!(opt.step().unwrap_err().code(), Code::InvalidState);
        assert_eq!(ddp.zero_grad().unwrap_err().code(), Code::InvalidState);
        let early = ddp.wait().unwrap_err();
        assert!(early.code() == Code::InvalidState && early.message().contains("fc.bias"), "{early:?}");
        ddp.ready(1).unwrap();
        ddp.wait().unwrap();
        opt.step().unwrap();
        let again = opt.step().unwrap_err();
        assert!(
            again.code() == Code::InvalidState && again.message().contains("no gradients were reduced"),
            "{again:?}"
        );
        ddp.ready_all().unwrap();
        assert_eq!(ddp.ready_all().unwrap_err().code(), Code::InvalidState, "twice");
        ddp.wait().unwrap();
        opt.step().unwrap();
        assert_eq!(ddp.ready(9).unwrap_err().code(), Code::InvalidArgument);
        assert_eq!(ddp.param(9).unwrap_err().code(), Code::InvalidArgument);
        assert_eq!((ddp.name(9), ddp.tensor(9).unwrap_err().code()), (None, Code::InvalidArgument));
    });
}

#[test]
fn a_step_under_a_living_view_is_refused() {
    let mut model = Local::new(params!["w" => (vec![1.0f32; 4], [4])]).unwrap();
    let mut opt = Sgd::new(&mut model).lr(1.0).build().unwrap();
    {
        let view = model.param(0).unwrap();
        let also = model.param(0).unwrap();
        let error = opt.step().unwrap_err();
        assert!(error.code() == Code::InvalidState && error.message().starts_with("w: "), "{error:?}");
        assert_eq!(view[..], also[..]);
        assert_eq!(model.param_mut(0).unwrap_err().code(), Code::InvalidState);
        let _grad = model.grad_mut(0).unwrap();
        assert_eq!(opt.zero_grad().unwrap_err().code(), Code::InvalidState);
        assert_eq!(opt.clip_grad_norm(1.0, 2.0).unwrap_err().code(), Code::InvalidState);
        assert_eq!(opt.clip_grad_value(1.0).unwrap_err().code(), Code::InvalidState);
    }
    model.grad_mut(0).unwrap().fill(0.5);
    opt.step().unwrap();
    assert_eq!(model.param(0).unwrap()[..], [0.5; 4]);
    opt.zero_grad().unwrap();
    assert_eq!(model.grad(0).unwrap()[..], [0.0; 4]);
}

/// p, and the norm of [2, -6, 3].
const NORMS: [(f64, f64); 4] = [(1.0, 11.0), (2.0, 7.0), (3.0, 6.307_993_549_448_67), (f64::INFINITY, 6.0)];

#[test]
fn gradients_are_bounded_before_the_step() {
    let mut model = Local::new(params!["w" => (vec![0.0f32; 2], [2]), "b" => (vec![0.0f64; 1], [1])]).unwrap();
    let mut opt = Sgd::new(&mut model).lr(1.0).build().unwrap();
    let fill = |model: &Local, w: [f32; 2]| {
        model.grad_mut(0).unwrap().copy_from_slice(&w);
        model.grad_mut_as::<f64>(1).unwrap()[0] = 3.0;
    };
    for (p, norm) in NORMS {
        fill(&model, [2.0, -6.0]);
        assert!((opt.clip_grad_norm(norm + 1.0, p).unwrap() - norm).abs() < 1e-9, "p {p}");
        assert_eq!(model.grad(0).unwrap()[..], [2.0, -6.0], "below it nothing is changed");
        assert!((opt.clip_grad_norm(0.5, p).unwrap() - norm).abs() < 1e-9, "p {p}");
        assert!((f64::from(model.grad(0).unwrap()[1]) + 6.0 * 0.5 / norm).abs() < 1e-6);
        assert!((model.grad_as::<f64>(1).unwrap()[0] - 3.0 * 0.5 / norm).abs() < 1e-6);
        for bad in [f32::NAN, f32::INFINITY] {
            fill(&model, [bad, -6.0]);
            assert_eq!(opt.clip_grad_norm(0.5, p).unwrap(), f64::INFINITY);
            assert_eq!((model.grad(0).unwrap()[1], model.grad_as::<f64>(1).unwrap()[0]), (-6.0, 3.0));
        }
    }
    fill(&model, [f32::NAN, -6.0]);
    opt.clip_grad_value(2.5).unwrap();
    assert!(model.grad(0).unwrap()[0].is_nan());
    assert_eq!((model.grad(0).unwrap()[1], model.grad_as::<f64>(1).unwrap()[0]), (-2.5, 2.5));
    fill(&model, [2.0, -6.0]);
    for (max_norm, p, said) in [
        (-1.0, 2.0, "max_norm"),
        (f64::NAN, 2.0, "max_norm"),
        (f64::INFINITY, 2.0, "max_norm"),
        (1.0, 0.5, "p is 0.5"),
        (1.0, f64::NAN, "p is nan"),
        (1.0, f64::NEG_INFINITY, "p is -inf"),
    ] {
        let error = opt.clip_grad_norm(max_norm, p).unwrap_err();
        assert!(error.code() == Code::InvalidArgument && error.message().contains(said), "{said}: {error}");
    }
    for most in [-1.0, f64::NAN, f64::INFINITY] {
        assert_eq!(opt.clip_grad_value(most).unwrap_err().code(), Code::InvalidArgument);
    }
    assert_eq!(model.grad(0).unwrap()[..], [2.0, -6.0]);
    opt.clip_grad_norm(0.0, 2.0).unwrap();
    opt.step().unwrap();
    assert_eq!(model.param(0).unwrap()[..], [0.0, 0.0], "nothing is left of the gradients");
}

#[test]
fn averaged_gradients_are_bounded_on_each_rank_alike() {
    ranks(2, |comm| {
        let rank = comm.rank().unwrap();
        let mut ddp = Ddp::new(&comm, params!["w" => (vec![0.0f32; 3], [3])]).unwrap();
        let mut opt = Sgd::new(&mut ddp).build().unwrap();
        for (p, norm) in NORMS {
            // [2, -6, 3] on average
            ddp.grad_mut(0).unwrap().copy_from_slice(&[[0.0, -12.0, 6.0], [4.0, 0.0, 0.0]][rank]);
            ddp.ready_all().unwrap();
            let reduced = opt.clip_grad_norm(1.0, p).unwrap_err();
            assert!(reduced.code() == Code::InvalidState && reduced.message().contains("reduced"), "{reduced}");
            ddp.wait().unwrap();
            if rank == 0 {
                assert!((opt.clip_grad_norm(1.5, p).unwrap() - norm).abs() < 1e-9, "p {p}, without the other rank");
                assert!((f64::from(ddp.grad(0).unwrap()[0]) - 2.0 * 1.5 / norm).abs() < 1e-6);
                opt.clip_grad_value(0.25).unwrap();
                assert_eq!(ddp.grad(0).unwrap()[1], -0.25);
            }
        }
    });
}

/// One step of each by its textbook formula, in f64.
#[test]
fn optimizers_do_what_their_papers_say() {
    let gradient = [0.5f64, -2.0, 0.0];
    let start = [1.0f64, -1.0, 3.0];
    let step = |build: &dyn Fn(&mut Local) -> Optimizer<'static>, times: usize| {
        let mut model = Local::new(params!["w" => (start.to_vec(), [3])]).unwrap();
        let mut opt = build(&mut model);
        for _ in 0..times {
            model.grad_mut_as::<f64>(0).unwrap().copy_from_slice(&gradient);
            opt.step().unwrap();
        }
        assert_eq!(opt.steps().unwrap(), times as u64);
        model.tensor(0).unwrap().to_vec::<f64>().unwrap()
    };
    let close = |found: Vec<f64>, expected: [f64; 3]| {
        assert!(found.iter().zip(expected).all(|(a, b)| (a - b).abs() < 1e-12), "{found:?} {expected:?}");
    };
    let sgd = step(&|m| Sgd::new(m).lr(0.1).momentum(0.9).weight_decay(0.01).nesterov(true).build().unwrap(), 1);
    close(
        sgd,
        std::array::from_fn(|i| {
            let g = gradient[i] + 0.01 * start[i];
            start[i] - 0.1 * (g + 0.9 * g)
        }),
    );
    let damped = step(&|m| Sgd::new(m).lr(0.1).momentum(0.5).dampening(0.25).build().unwrap(), 2);
    close(
        damped,
        std::array::from_fn(|i| start[i] - 0.1 * gradient[i] - 0.1 * (0.5 * gradient[i] + 0.75 * gradient[i])),
    );
    let adam = step(&|m| Adam::new(m).lr(0.1).betas(0.8, 0.99).eps(1e-6).weight_decay(0.1).build().unwrap(), 1);
    close(
        adam,
        std::array::from_fn(|i| {
            let g = gradient[i] + 0.1 * start[i];
            start[i] - 0.1 * g / (g.abs() + 1e-6)
        }),
    );
    let adamw = step(&|m| AdamW::new(m).lr(0.1).betas(0.8, 0.99).eps(1e-6).weight_decay(0.1).build().unwrap(), 1);
    close(
        adamw,
        std::array::from_fn(|i| start[i] * (1.0 - 0.1 * 0.1) - 0.1 * gradient[i] / (gradient[i].abs() + 1e-6)),
    );
    let adagrad = step(
        &|m| {
            let rates = Adagrad::new(m).lr(0.1).lr_decay(0.5).weight_decay(0.0);
            rates.initial_accumulator_value(0.25).eps(1e-6).build().unwrap()
        },
        2,
    );
    close(
        adagrad,
        std::array::from_fn(|i| {
            let g = gradient[i];
            let moved = |n: f64| g / ((0.25 + n * g * g).sqrt() + 1e-6);
            start[i] - 0.1 * moved(1.0) - 0.1 / 1.5 * moved(2.0)
        }),
    );
    let lamb = step(
        &|m| {
            let rates = Lamb::new(m).lr(0.1).betas(0.0, 0.0).eps(1e-6).weight_decay(0.1);
            rates.bias_correction(false).max_coeff(1.5).min_coeff(0.5).build().unwrap()
        },
        1,
    );
    let norm = |of: &[f64]| of.iter().map(|x| x * x).sum::<f64>().sqrt();
    let directions: [f64; 3] = std::array::from_fn(|i| gradient[i] / (gradient[i].abs() + 1e-6) + 0.1 * start[i]);
    let ratio = (norm(&start) / norm(&directions)).clamp(0.5, 1.5);
    close(lamb, std::array::from_fn(|i| start[i] - 0.1 * ratio * directions[i]));
    let lion = step(&|m| Lion::new(m).lr(0.1).betas(0.5, 0.75).weight_decay(0.1).build().unwrap(), 2);
    let sign = |g: f64| if g == 0.0 { 0.0 } else { g.signum() };
    close(lion, std::array::from_fn(|i| (start[i] * 0.99 - 0.1 * sign(gradient[i])) * 0.99 - 0.1 * sign(gradient[i])));
}

#[test]
fn settings_are_checked_and_defaults_are_the_librarys() {
    let mut model = Local::new(params!["w" => (vec![1.0f32], [1])]).unwrap();
    assert_eq!(AdamW::new(&mut model).build().unwrap().lr().unwrap(), 0.001);
    for bad in [f64::NAN, -1.0, f64::INFINITY] {
        assert_eq!(Adam::new(&mut model).lr(bad).build().unwrap_err().code(), Code::InvalidArgument);
    }
    assert_eq!(Adagrad::new(&mut model).build().unwrap().lr().unwrap(), 0.01);
    assert_eq!(Lamb::new(&mut model).build().unwrap().lr().unwrap(), 0.001);
    assert_eq!(Lamb::new(&mut model).min_coeff(11.0).build().unwrap_err().code(), Code::InvalidArgument);
    assert_eq!(Lion::new(&mut model).build().unwrap().lr().unwrap(), 0.0001);
    assert_eq!(Lion::new(&mut model).beta2(1.0).build().unwrap_err().code(), Code::InvalidArgument);
    assert_eq!(Adagrad::new(&mut model).lr_decay(-1.0).build().unwrap_err().code(), Code::InvalidArgument);
    assert_eq!(Sgd::new(&mut model).nesterov(true).build().unwrap_err().code(), Code::InvalidArgument);
    let mut opt = Adam::new(&mut model).build().unwrap();
    opt.set_lr(0.25).unwrap();
    assert_eq!((opt.lr().unwrap(), opt.set_lr(f64::NAN).unwrap_err().code()), (0.25, Code::InvalidArgument));
    let mut integers = Local::new(params!["n" => (vec![1i64], [1])]).unwrap();
    assert_eq!(Sgd::new(&mut integers).build().unwrap_err().code(), Code::InvalidArgument);
}

#[test]
fn an_optimizer_keeps_the_model_it_updates() {
    let comm = alone();
    let mut opt = {
        let mut ddp = Ddp::new(&comm, two_layers(1.0)).unwrap();
        ddp.ready_all().unwrap();
        ddp.wait().unwrap();
        Adam::new(&mut ddp).build().unwrap()
    };
    opt.step().unwrap();
    opt.zero_grad().unwrap();
}

fn epoch_of(comm: &Comm, length: usize, seed: u64) -> Vec<usize> {
    let mut sampler = Sampler::new(comm, length).seed(seed).build().unwrap();
    let mut seen = Vec::new();
    while sampler.epoch().unwrap() == 0 {
        seen.extend(sampler.batch(4).unwrap());
        if sampler.consumed().unwrap() == length as u64 {
            break;
        }
    }
    seen
}

#[test]
fn an_epoch_gives_every_sample_once_to_one_rank() {
    for (n, length) in [(1, 20), (2, 20), (4, 20)] {
        let mut all: Vec<usize> = ranks(n, |comm| epoch_of(&comm, length, 3)).concat();
        all.sort_unstable();
        assert_eq!(all, (0..length).collect::<Vec<_>>());
    }
}

#[test]
fn a_sampler_keeps_its_promises() {
    let comm = alone();
    let mut plain = Sampler::new(&comm, 5).shuffle(false).drop_last(true).build().unwrap();
    assert_eq!(plain.batch(3).unwrap(), [0, 1, 2]);
    assert_eq!((plain.epoch().unwrap(), plain.consumed().unwrap()), (0, 3));
    plain.set_epoch(4).unwrap();
    assert_eq!((plain.epoch().unwrap(), plain.consumed().unwrap()), (4, 0));
    assert_eq!(plain.batch(0).unwrap_err().code(), Code::InvalidArgument);
    assert_eq!(plain.set_epoch(u64::MAX).unwrap_err().code(), Code::InvalidArgument);
    assert_eq!(Sampler::new(&comm, 0).build().unwrap_err().code(), Code::InvalidArgument);
    let same = |seed| epoch_of(&comm, 100, seed);
    assert_eq!(same(1), same(1));
    assert_ne!(same(1), same(2));
    let there = std::thread::spawn(move || plain.batch(2).unwrap()).join().unwrap();
    assert_eq!(there, [0, 1]);
}

#[test]
fn steps_without_synchronisation_add_up() {
    ranks(2, |comm| {
        let rank = comm.rank().unwrap() as f32;
        let mut ddp = Ddp::new(&comm, two_layers(0.0)).unwrap();
        ddp.set_sync(false).unwrap();
        for _ in 0..3 {
            ddp.grad_mut(0).unwrap().iter_mut().for_each(|g| *g += rank);
            ddp.ready(0).unwrap();
            ddp.wait().unwrap();
        }
        assert_eq!(ddp.grad(0).unwrap()[..], [3.0 * rank; 12]);
        ddp.set_sync(true).unwrap();
        ddp.ready_all().unwrap();
        assert_eq!(ddp.set_sync(false).unwrap_err().code(), Code::InvalidState);
        ddp.wait().unwrap();
        assert_eq!(ddp.grad(0).unwrap()[..], [1.5; 12]);
    });
}

#[test]
fn unused_parameters_are_found_and_static_graphs_kept() {
    ranks(2, |comm| {
        let first = comm.rank().unwrap() == 0;
        let mut ddp = Ddp::with_options(&comm, two_layers(0.0), &DdpOptions::new().find_unused(true)).unwrap();
        ddp.grad_mut(1).unwrap().fill(7.0);
        if first {
            ddp.grad_mut(0).unwrap().fill(2.0);
            ddp.ready(0).unwrap();
        }
        {
            let _view = ddp.grad(1).unwrap();
        }
        ddp.wait().unwrap();
        assert_eq!((ddp.used(0).unwrap(), ddp.used(1).unwrap()), (true, false));
        assert_eq!((ddp.grad(0).unwrap()[0], ddp.grad(1).unwrap()[0]), (1.0, 7.0));
        assert_eq!(ddp.used(2).unwrap_err().code(), Code::InvalidArgument);

        let mut fixed = Ddp::with_options(&comm, two_layers(0.0), &DdpOptions::new().static_graph(true)).unwrap();
        fixed.ready(0).unwrap();
        fixed.wait().unwrap();
        let error = fixed.ready(1).unwrap_err();
        assert!(error.message().contains("but not in the first step"), "{error}");
    });
}

#[test]
fn what_is_sent_and_in_which_buckets_is_an_option() {
    ranks(2, |comm| {
        let rank = comm.rank().unwrap() as f32;
        let options = DdpOptions::new()
            .bucket_bytes(1)
            .first_bucket_bytes(1)
            .reduce_dtype(DType::BF16)
            .pre_divide(2.0)
            .rebuild_buckets(true);
        let mut ddp = Ddp::with_options(&comm, two_layers(0.0), &options).unwrap();
        for _ in 0..2 {
            ddp.grad_mut(0).unwrap().fill(rank);
            ddp.ready(0).unwrap();
            ddp.ready(1).unwrap();
            ddp.wait().unwrap();
            assert_eq!(ddp.grad(0).unwrap()[..], [0.5; 12]);
        }
        let stats = ddp.stats().unwrap();
        assert_eq!((stats.len(), stats[0].params, stats[0].size_bytes), (2, 1, 64));
        assert!(stats[0].ready <= stats[0].start && stats[0].start <= stats[0].end && stats[0].exposed <= stats[0].end);

        let options = DdpOptions::new().hook(DdpHook::Noop);
        let mut own = Ddp::with_options(&comm, two_layers(0.0), &options).unwrap();
        own.grad_mut(0).unwrap().fill(rank);
        own.ready_all().unwrap();
        own.wait().unwrap();
        assert_eq!(own.grad(0).unwrap()[0], rank);

        let options = DdpOptions::new().hook(DdpHook::PowerSgd).powersgd_rank(1).powersgd_start_step(0);
        let matrix = params!["m" => (vec![0.0f32; 600], [20, 30])];
        let mut low = Ddp::with_options(&comm, matrix, &options).unwrap();
        low.grad_mut(0).unwrap().fill(rank);
        low.ready_all().unwrap();
        low.wait().unwrap();
        assert!(low.grad(0).unwrap().iter().all(|g| (g - 0.5).abs() < 1e-5));
    });
}

/// Two models in one step, the gradients of one between those of the other, both in flight at once.
fn train_two(comms: [&Comm; 2], second_first: bool) {
    let rank = comms[0].rank().unwrap();
    let options = DdpOptions::new().bucket_bytes(1).first_bucket_bytes(1);
    let mut models = [(comms[0], 10.0), (comms[1], 20.0)]
        .map(|(comm, fill)| Ddp::with_options(comm, two_layers(fill), &options).unwrap());
    let mut optimizers = models.each_mut().map(|model| Sgd::new(model).lr(0.5).build().unwrap());
    for step in 1..=3 {
        for (m, i) in [(0, 0), (1, 1), (0, 1), (1, 0)] {
            models[m].grad_mut(i).unwrap().fill((100 * m + 10 * step + i + rank) as f32);
            models[m].ready(i).unwrap();
        }
        for m in if second_first { [1, 0] } else { [0, 1] } {
            models[m].wait().unwrap();
            optimizers[m].step().unwrap();
        }
        for (m, i) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
            let average = (100 * m + 10 * step + i + 1) as f32;
            assert!(models[m].grad(i).unwrap().iter().all(|g| *g == average), "model {m}, parameter {i}, step {step}");
        }
    }
    for (model, (weight, bias)) in models.iter().zip([(10.0 - 31.5, 10.0 - 33.0), (20.0 - 181.5, 20.0 - 183.0)]) {
        assert_eq!(model.param(0).unwrap()[..], [weight; 12]);
        assert_eq!(model.param(1).unwrap()[..], [bias; 3]);
    }
}

#[test]
fn two_models_train_in_one_process() {
    ranks(3, |comm| {
        let rank = comm.rank().unwrap();
        train_two([&comm, &comm], false);
        let [one, two] = [(); 2].map(|()| comm.split(Some(0), rank).unwrap().unwrap());
        train_two([&one, &two], rank == 1); // who is waited for first is each rank's own
    });
}

#[test]
fn bad_options_are_refused() {
    let comm = alone();
    for options in [
        DdpOptions::new().pre_divide(0.0),
        DdpOptions::new().reduce_dtype(DType::I32),
        DdpOptions::new().powersgd_rank(0),
        DdpOptions::new().powersgd_start_step(usize::MAX),
    ] {
        assert_eq!(Ddp::with_options(&comm, two_layers(0.0), &options).unwrap_err().code(), Code::InvalidArgument);
    }
}

#[test]
fn a_hook_reduces_and_is_freed() {
    ranks(2, |comm| {
        let rank = comm.rank().unwrap() as f32;
        let calls = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&calls);
        let mut ddp = Ddp::new(&comm, two_layers(0.0)).unwrap();
        ddp.set_hook(move |bucket| {
            counted.fetch_add(1, Ordering::Relaxed);
            assert_eq!((bucket.index(), bucket.params()), (0, &[1, 0][..]));
            assert!(bucket.grads_mut::<f64>().is_err());
            let mut sums = Vec::new();
            for grad in bucket.grads_mut::<f32>()? {
                sums.push(grad.to_vec());
            }
            for sum in &mut sums {
                bucket.comm().all_reduce(sum, ReduceOp::Max)?;
            }
            assert_eq!(bucket.comm().barrier_async().err().map(|e| e.code()), Some(Code::InvalidState));
            for (grad, sum) in bucket.grads_mut::<f32>()?.into_iter().zip(&sums) {
                grad.copy_from_slice(sum);
            }
            Ok(())
        })
        .unwrap();
        ddp.grad_mut(0).unwrap().fill(rank);
        ddp.ready_all().unwrap();
        ddp.wait().unwrap();
        assert_eq!(ddp.grad(0).unwrap()[..], [1.0; 12]);
        ddp.reset_hook().unwrap();
        assert_eq!((calls.load(Ordering::Relaxed), Arc::strong_count(&calls)), (1, 1));
        ddp.grad_mut(0).unwrap().fill(rank);
        ddp.ready_all().unwrap();
        ddp.wait().unwrap();
        assert_eq!(ddp.grad(0).unwrap()[..], [0.5; 12]);
    });
}

#[test]
fn a_hooks_error_comes_back_from_wait() {
    ranks(2, |comm| {
        let first = comm.rank().unwrap() == 0;
        let mut ddp = Ddp::new(&comm, two_layers(0.0)).unwrap();
        ddp.set_hook(move |bucket| {
            if first {
                return Err("the hook lost its way".into());
            }
            Ok(bucket.comm().barrier()?)
        })
        .unwrap();
        let error = ddp.ready_all().and_then(|()| ddp.wait()).unwrap_err();
        if first {
            assert_eq!(error.code(), Code::User);
            assert!(error.message().ends_with("returned 1: the hook lost its way"), "{error}");
        } else {
            assert_eq!(error.code(), Code::Aborted, "of the hook's own barrier");
        }
    });
}

#[test]
fn a_hooks_panic_goes_on_in_wait() {
    let comm = alone();
    let mut ddp = Ddp::new(&comm, two_layers(0.0)).unwrap();
    ddp.set_hook(|_| panic!("expected in this test")).unwrap();
    ddp.ready_all().unwrap();
    let panic = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| ddp.wait())).unwrap_err();
    assert_eq!(panic.downcast_ref::<&str>(), Some(&"expected in this test"));
}

#[test]
fn an_optimizer_steps_in_backward() {
    ranks(2, |comm| {
        let rank = comm.rank().unwrap() as f32;
        let mut ddp = Ddp::new(&comm, two_layers(1.0)).unwrap();
        let mut opt = Sgd::new(&mut ddp).lr(0.5).build().unwrap();
        let mut other = Ddp::new(&comm, two_layers(1.0)).unwrap();
        assert_eq!(other.step_in_backward(&mut opt).unwrap_err().code(), Code::InvalidArgument);
        ddp.step_in_backward(&mut opt).unwrap();
        ddp.grad_mut(0).unwrap().fill(rank);
        ddp.ready(0).unwrap();
        assert_eq!(ddp.param(0).unwrap_err().code(), Code::InvalidState, "it may be updated at any time");
        assert_eq!(ddp.param(1).unwrap()[..], [1.0; 3], "its gradient is not ready yet");
        {
            let _view = ddp.param(1).unwrap();
            assert_eq!(ddp.ready(1).unwrap_err().code(), Code::InvalidState);
        }
        ddp.ready_all().unwrap();
        ddp.wait().unwrap();
        assert_eq!(ddp.param(0).unwrap()[..], [0.75; 12]);
        assert_eq!((opt.steps().unwrap(), opt.step().unwrap_err().code()), (1, Code::InvalidState));
        for bounded in [opt.clip_grad_norm(1.0, 2.0).map(drop), opt.clip_grad_value(1.0)] {
            let error = bounded.unwrap_err();
            assert!(error.code() == Code::InvalidState && error.message().contains("in the backward pass"), "{error}");
        }
        ddp.ready(0).unwrap();
        drop(opt); // in the middle of a step
        ddp.ready_all().unwrap();
        ddp.wait().unwrap();
    });
}

#[test]
fn the_ranks_of_a_host_share_the_parameters() {
    let folder = tempfile::tempdir().unwrap();
    ranks(2, |comm| {
        let rank = comm.rank().unwrap();
        let options = DdpOptions::new().share_params(true);
        let mut ddp = Ddp::with_options(&comm, two_layers(rank as f32), &options).unwrap();
        assert_eq!(ddp.ready_all().unwrap_err().code(), Code::InvalidState, "no optimizer yet");
        assert_eq!(ddp.wait().unwrap_err().code(), Code::InvalidState);
        let opt = Sgd::new(&mut ddp).lr(0.5).build().unwrap();
        assert_eq!(ddp.param_mut(0).unwrap_err().code(), Code::InvalidState, "other ranks may read it");
        assert_eq!(ddp.tensor(0).unwrap_err().code(), Code::InvalidState, "it ends with the model");
        for i in 0..ddp.len() {
            ddp.grad_mut(i).unwrap().fill(rank as f32);
        }
        {
            let _view = ddp.param(0).unwrap();
            assert_eq!(ddp.ready_all().unwrap_err().code(), Code::InvalidState, "a view is alive");
        }
        ddp.ready_all().unwrap();
        assert_eq!(ddp.param(0).unwrap_err().code(), Code::InvalidState, "it is being updated");
        ddp.wait().unwrap();
        assert!(ddp.param(0).unwrap().iter().all(|&w| w == -0.25), "from rank 0's zeros");
        assert_eq!((opt.steps().unwrap(), ddp.shared_step().unwrap()), (1, 1));
        assert_eq!(Ddp::new(&comm, two_layers(0.0)).unwrap().shared_step().unwrap_err().code(), Code::InvalidState);
        let saver = Saver::open(&comm, folder.path()).unwrap();
        let mut state = State::new().with("model", &ddp).with("optim", &opt);
        saver.save(1, &state).unwrap();
        for i in 0..ddp.len() {
            ddp.grad_mut(i).unwrap().fill(2.0);
        }
        ddp.ready_all().unwrap();
        ddp.wait().unwrap();
        assert!(ddp.param(1).unwrap().iter().all(|&w| w == -1.25));
        assert_eq!(saver.resume(&mut state).unwrap(), 1);
        assert!(ddp.param(0).unwrap().iter().chain(&ddp.param(1).unwrap()[..]).all(|&w| w == -0.25), "as saved");
        assert_eq!((opt.steps().unwrap(), ddp.shared_step().unwrap()), (1, 2));
    });
}

#[test]
fn a_step_that_fails_between_buckets_leaves_a_torn_copy() {
    let failed = AtomicUsize::new(0);
    ranks(2, |comm| {
        let second = comm.rank().unwrap() == 1;
        let options = DdpOptions::new().share_params(true).bucket_bytes(8).first_bucket_bytes(8);
        let mut ddp = Ddp::with_options(&comm, two_layers(0.0), &options).unwrap();
        let _opt = Sgd::new(&mut ddp).lr(0.5).build().unwrap();
        ddp.set_hook(move |bucket| {
            if second && bucket.index() == 1 {
                return Err("the hook lost its way".into());
            }
            Ok(bucket.comm().barrier()?)
        })
        .unwrap();
        ddp.ready_all().and_then(|()| ddp.wait()).unwrap_err();
        failed.fetch_add(1, Ordering::Relaxed);
        let end = Instant::now() + deadline();
        while failed.load(Ordering::Relaxed) < 2 {
            assert!(Instant::now() < end, "the other rank's step goes on");
            std::thread::yield_now();
        }
        let torn = ddp.shared_step().unwrap_err();
        assert_eq!(torn.code(), Code::Corrupt);
        assert!(torn.message().contains("the slice of local rank 0 is between step 0 and step 1"), "{torn}");
    });
}

#[test]
fn buffers_come_from_rank_0_and_ranks_join() {
    ranks(2, |comm| {
        let rank = comm.rank().unwrap();
        let options = DdpOptions::new().join(DdpJoin::DivideByActive);
        let mut ddp = Ddp::with_options(&comm, two_layers(0.0), &options).unwrap();
        assert_eq!(ddp.broadcast_buffers().unwrap_err().code(), Code::InvalidState);
        let batches = Tensor::new(vec![rank as i64 + 5], [1]).unwrap();
        ddp.register_buffers(params!["batches" => &batches]).unwrap();
        assert_eq!(batches.view::<i64>().unwrap()[..], [5]);
        for step in 0..1 + 2 * rank as i64 {
            batches.view_mut::<i64>().unwrap()[0] = 10 * step + rank as i64;
            ddp.broadcast_buffers().unwrap();
            ddp.grad_mut(0).unwrap().fill(rank as f32 + 1.0);
            ddp.ready_all().unwrap();
            ddp.wait().unwrap();
            assert_eq!(ddp.grad(0).unwrap()[0], if step == 0 { 1.5 } else { 2.0 });
        }
        {
            let weight = ddp.tensor(0).unwrap();
            let _view = weight.view::<f32>().unwrap();
            assert_eq!(ddp.join(true).unwrap_err().code(), Code::InvalidState);
        }
        ddp.join(true).unwrap();
        assert_eq!(batches.view::<i64>().unwrap()[..], [21], "of rank 1, which made most steps");
        assert_eq!(Ddp::new(&comm, two_layers(0.0)).unwrap().join(true).unwrap_err().code(), Code::InvalidState);
    });
}

#[test]
fn ranks_that_joined_count_as_zeros_where_sums_are_divided_by_the_world() {
    ranks(3, |comm| {
        let rank = comm.rank().unwrap();
        let options = DdpOptions::new().join(DdpJoin::DivideByWorld);
        let mut ddp = Ddp::with_options(&comm, two_layers(0.0), &options).unwrap();
        for mean in [6.0, 5.0, 3.0].into_iter().take(rank + 1) {
            ddp.grad_mut(0).unwrap().fill(3.0 * (rank as f32 + 1.0)); // of 3, 6 and 9; without 3; without 6
            ddp.ready_all().unwrap();
            ddp.wait().unwrap();
            assert_eq!(ddp.grad(0).unwrap()[..], [mean; 12]);
        }
        ddp.join(false).unwrap();
    });
}
