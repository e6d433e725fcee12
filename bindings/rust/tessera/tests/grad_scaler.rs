//! Dynamic scaling of losses: steps made or left out, alike on every rank, and the scale that follows.

mod common;

use common::{alone, ranks};
use tessera::{
    params, units, AdamW, Code, DType, Fsdp, GradScaler, GradScalerBuilder, Local, Saver, Sgd, State, Tensor,
};

fn model() -> Local {
    Local::new(params!["w" => (vec![1.0f32; 2], [2])]).unwrap()
}

#[test]
fn steps_are_made_or_left_out_and_the_scale_follows() {
    let mut model = model();
    let mut opt = Sgd::new(&mut model).lr(1.0).build().unwrap();
    let mut scaler = GradScaler::builder()
        .init_scale(8.0)
        .growth_factor(4.0)
        .backoff_factor(0.25)
        .growth_interval(2)
        .build()
        .unwrap();
    let mut value = 1.0;
    for (grad, scale) in [(0.25f32, 8.0), (0.25, 32.0), (f32::INFINITY, 8.0), (0.25, 8.0), (f32::NAN, 2.0)] {
        model.grad_mut(0).unwrap()[0] = grad * scaler.scale().unwrap() as f32;
        assert_eq!(scaler.step(&mut opt).unwrap(), grad.is_finite());
        scaler.update().unwrap();
        value -= if grad.is_finite() { grad } else { 0.0 };
        assert_eq!(model.param(0).unwrap()[0], value);
        assert_eq!(scaler.scale().unwrap(), scale);
    }
    assert_eq!(opt.steps().unwrap(), 3);
    assert_eq!(format!("{scaler:?}"), "GradScaler { scale: Some(2.0) }");
}

#[test]
fn gradients_may_be_bounded_before_the_step() {
    let mut model = model();
    let mut opt = Sgd::new(&mut model).lr(1.0).build().unwrap();
    let mut scaler = GradScaler::builder().init_scale(4.0).build().unwrap();
    model.grad_mut(0).unwrap().copy_from_slice(&[12.0, 16.0]);
    scaler.unscale(&mut opt).unwrap();
    assert_eq!(opt.clip_grad_norm(1.0, 2.0).unwrap(), 5.0);
    assert!(scaler.step(&mut opt).unwrap());
    assert!((model.param(0).unwrap()[0] - 0.4).abs() < 1e-5);
}

#[test]
fn over_a_sharded_model_all_ranks_decide_alike() {
    ranks(3, |comm| {
        let mut fsdp = Fsdp::new(&comm, units!["u" => params!["w" => (vec![1.0f32; 6], [6])]]).unwrap();
        let mut opt = AdamW::new(&mut fsdp).build().unwrap();
        let mut scaler = GradScaler::builder().init_scale(4.0).growth_interval(1).build().unwrap();
        for last in [f32::INFINITY, 2.0] {
            let guard = fsdp.backward(0).unwrap();
            guard.grad_mut(0).unwrap().fill(4.0);
            guard.grad_mut(0).unwrap()[5] = last; // which rank 2 has
            guard.ready().unwrap();
            fsdp.wait().unwrap();
            assert_eq!(scaler.step(&mut opt).unwrap(), last.is_finite());
            scaler.update().unwrap();
        }
        assert_eq!((scaler.scale().unwrap(), opt.steps().unwrap()), (4.0, 1));
        assert!(fsdp.shard(0).unwrap().iter().all(|&value| value < 1.0));
    });
}

#[test]
fn it_is_saved_and_loaded_with_a_state() {
    let (comm, folder) = (alone(), tempfile::tempdir().unwrap());
    let mut model = model();
    let mut opt = Sgd::new(&mut model).build().unwrap();
    let mut scaler = GradScaler::builder().init_scale(32.0).growth_interval(2).build().unwrap();
    scaler.step(&mut opt).unwrap();
    scaler.update().unwrap();
    let saver = Saver::at(&comm, folder.path()).open().unwrap();
    saver.save(1, &State::new().with("scaler", &scaler).with("w", &Tensor::zeros(DType::F32, [1]).unwrap())).unwrap();
    drop(scaler);
    let mut other = GradScaler::builder().build().unwrap();
    let mut state = State::new().with("scaler", &other).with("w", &Tensor::zeros(DType::F32, [1]).unwrap());
    assert_eq!(saver.resume(&mut state).unwrap(), 1);
    assert_eq!(other.scale().unwrap(), 32.0);
    other.step(&mut opt).unwrap();
    other.update().unwrap();
    assert_eq!(other.scale().unwrap(), 64.0, "the second step of two");
}

#[test]
fn bad_settings_and_orders_are_refused() {
    let refused = |builder: GradScalerBuilder, said: &str| {
        let error = builder.build().unwrap_err();
        assert!(error.code() == Code::InvalidArgument && error.message().contains(said), "{error}");
    };
    refused(GradScaler::builder().init_scale(0.0), "init_scale is 0");
    refused(GradScaler::builder().growth_factor(1.0), "growth_factor is 1");
    refused(GradScaler::builder().backoff_factor(f64::NAN), "backoff_factor is nan");
    refused(GradScaler::builder().growth_interval(-1), "growth_interval is -1");
    let mut model = model();
    let mut opt = Sgd::new(&mut model).build().unwrap();
    let mut scaler = GradScaler::builder().build().unwrap();
    assert_eq!(scaler.update().unwrap_err().code(), Code::InvalidState);
    {
        let _grad = model.grad(0).unwrap();
        assert_eq!(scaler.unscale(&mut opt).unwrap_err().code(), Code::InvalidState, "a view is alive");
        assert_eq!(scaler.step(&mut opt).unwrap_err().code(), Code::InvalidState);
    }
    {
        let _param = model.param(0).unwrap();
        assert_eq!(scaler.step(&mut opt).unwrap_err().code(), Code::InvalidState);
    }
    scaler.unscale(&mut opt).unwrap();
    let error = scaler.unscale(&mut opt).unwrap_err();
    assert!(error.code() == Code::InvalidState && error.message().contains("already unscaled"), "{error}");
    scaler.step(&mut opt).unwrap();
    let error = scaler.step(&mut opt).unwrap_err();
    assert!(error.code() == Code::InvalidState && error.message().contains("call update() first"), "{error}");
}
