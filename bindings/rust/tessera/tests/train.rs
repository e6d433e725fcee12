//! Data parallelism, optimizers and the sampler.

mod common;

use common::{alone, ranks};
use tessera::{
    params, Adam, AdamW, Code, Comm, DType, Ddp, DdpOptions, Local, Optimizer, ReduceOp, Sampler, Sgd, Tensor,
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
    }
    model.grad_mut(0).unwrap().fill(0.5);
    opt.step().unwrap();
    assert_eq!(model.param(0).unwrap()[..], [0.5; 4]);
    opt.zero_grad().unwrap();
    assert_eq!(model.grad(0).unwrap()[..], [0.0; 4]);
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
    let adam = step(&|m| Adam::new(m).lr(0.1).beta1(0.8).beta2(0.99).eps(1e-6).weight_decay(0.1).build().unwrap(), 1);
    close(
        adam,
        std::array::from_fn(|i| {
            let g = gradient[i] + 0.1 * start[i];
            start[i] - 0.1 * g / (g.abs() + 1e-6)
        }),
    );
    let adamw = step(&|m| AdamW::new(m).lr(0.1).beta1(0.8).beta2(0.99).eps(1e-6).weight_decay(0.1).build().unwrap(), 1);
    close(
        adamw,
        std::array::from_fn(|i| start[i] * (1.0 - 0.1 * 0.1) - 0.1 * gradient[i] / (gradient[i].abs() + 1e-6)),
    );
}

#[test]
fn settings_are_checked_and_defaults_are_the_librarys() {
    let mut model = Local::new(params!["w" => (vec![1.0f32], [1])]).unwrap();
    assert_eq!(AdamW::new(&mut model).build().unwrap().lr().unwrap(), 0.001);
    for bad in [f64::NAN, -1.0, f64::INFINITY] {
        assert_eq!(Adam::new(&mut model).lr(bad).build().unwrap_err().code(), Code::InvalidArgument);
    }
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
