//! Learning-rate schedules: their values, the optimizers that they set, checkpoints, and what is refused.

mod common;

use common::alone;
use tessera::{params, Code, Local, LrDecay, LrSchedule, LrWarmup, Result, Saver, Sgd, State};

fn model() -> Local {
    Local::new(params!["w" => (vec![1.0f32; 2], [2])]).unwrap()
}

fn close(found: f64, wanted: f64) {
    assert!((found - wanted).abs() <= 1e-12, "{found} is not {wanted}");
}

#[test]
fn every_kind_has_its_values() {
    let rate = |schedule: Result<LrSchedule>, step, wanted| close(schedule.unwrap().lr_at(step, 1.0).unwrap(), wanted);
    rate(LrSchedule::constant(0.5, 4), 3, 0.5);
    rate(LrSchedule::linear(0.0, 1.0, 4), 1, 0.25);
    rate(LrSchedule::step_decay(2, 0.5), 5, 0.25);
    rate(LrSchedule::multi_step_decay(&[2, 4], 0.5), 4, 0.25);
    rate(LrSchedule::exponential(0.5), 3, 0.125);
    rate(LrSchedule::polynomial(4, 2.0), 2, 0.25);
    rate(LrSchedule::cosine(4, 0.5), 2, 0.75);
    rate(LrSchedule::cosine_restarts(2, 2, 0.5), 4, 0.75);
    rate(LrSchedule::inverse_sqrt(4), 15, 0.5);
    rate(LrSchedule::wsd(2, 2, 4, LrDecay::Linear, 0.5), 6, 0.75);
    rate(LrSchedule::wsd(2, 2, 4, LrDecay::Cosine, 0.5), 6, 0.75);
    rate(LrSchedule::wsd(2, 2, 4, LrDecay::Sqrt, 0.5), 5, 0.75);
    rate(LrSchedule::warmup().warmup_type(LrWarmup::Linear).warmup_num_steps(4).build(), 2, 0.25);
    rate(LrSchedule::warmup().warmup_num_steps(3).warmup_max_lr(0.5).total_num_steps(5).build(), 5, 0.25);
    rate(LrSchedule::warmup_cosine().total_num_steps(8).warmup_num_steps(4).cos_min_ratio(0.5).build(), 6, 0.75);
    rate(LrSchedule::one_cycle().cycle_min_lr(0.25).cycle_max_lr(0.75).cycle_first_step_size(2).build(), 1, 0.5);
    rate(LrSchedule::range_test(0.5, 4, 2.0, true), 7, 1.5);
    let parts = [LrSchedule::constant(0.5, 9).unwrap(), LrSchedule::exponential(0.5).unwrap()];
    rate(LrSchedule::chained(&parts), 2, 0.125);
    rate(LrSchedule::sequential(&parts, &[4]), 6, 0.25);
}

#[test]
fn an_optimizer_is_set() {
    let mut model = model();
    let mut schedule = LrSchedule::exponential(0.5).unwrap();
    {
        let mut opt = Sgd::new(&mut model).lr(0.5).build().unwrap();
        schedule.attach(&mut opt).unwrap();
        assert_eq!(opt.lr().unwrap(), 0.5);
        schedule.step().unwrap();
        assert_eq!(opt.lr().unwrap(), 0.25);
        schedule.set_steps(3).unwrap();
        assert_eq!(opt.lr().unwrap(), 0.0625);
        assert_eq!(schedule.attach(&mut opt).unwrap_err().code(), Code::InvalidState);
    }
    schedule.step().unwrap();
    assert_eq!(schedule.steps().unwrap(), 4);
    assert_eq!(format!("{schedule:?}"), "LrSchedule { steps: Some(4) }");
}

#[test]
fn momentum_is_set_where_there_is_one() {
    let cycle = LrSchedule::one_cycle().cycle_min_lr(0.1).cycle_max_lr(0.5).cycle_first_step_size(4);
    let mut cycle = cycle.build().unwrap();
    close(cycle.momentum_at(4).unwrap().unwrap(), 0.8);
    assert_eq!(LrSchedule::exponential(0.5).unwrap().momentum_at(4).unwrap(), None);
    let mut model = model();
    cycle.attach(&mut Sgd::new(&mut model).momentum(0.9).build().unwrap()).unwrap();
    let error = cycle.attach(&mut Sgd::new(&mut model).build().unwrap()).unwrap_err();
    assert!(error.code() == Code::InvalidArgument && error.message().contains("has no momentum"), "{error}");
}

#[test]
fn it_is_saved_and_loaded_with_a_state() {
    let (comm, folder) = (alone(), tempfile::tempdir().unwrap());
    let saver = Saver::at(&comm, folder.path()).open().unwrap();
    let (mut first, mut second) = (model(), model());
    let mut opt = Sgd::new(&mut first).lr(0.4).build().unwrap();
    let mut schedule = LrSchedule::cosine(20, 0.01).unwrap();
    schedule.attach(&mut opt).unwrap();
    schedule.set_steps(3).unwrap();
    saver.save(3, &State::new().with("optim", &opt).with("schedule", &schedule)).unwrap();

    let mut resumed = Sgd::new(&mut second).lr(0.1).build().unwrap();
    let mut other = LrSchedule::cosine(20, 0.01).unwrap();
    let mut into = State::new().with("optim", &resumed).with("schedule", &other);
    let error = saver.resume(&mut into).unwrap_err();
    assert!(error.code() == Code::Mismatch && error.message().contains("attach the same optimizers"), "{error}");
    other.attach(&mut resumed).unwrap();
    assert_eq!(saver.resume(&mut into).unwrap(), 3);
    for _ in 0..20 {
        assert_eq!(resumed.lr().unwrap(), opt.lr().unwrap(), "the same bits");
        schedule.step().unwrap();
        other.step().unwrap();
    }
    assert_eq!(other.steps().unwrap(), 23);

    let longer = LrSchedule::cosine(21, 0.01).unwrap();
    let mut refused = State::new().with("optim", &resumed).with("schedule", &longer);
    let error = saver.resume(&mut refused).unwrap_err();
    let said = "schedule cosine(total_steps=20, min_lr=0.01), but this one is";
    assert!(error.code() == Code::Mismatch && error.message().contains(said), "{error}");
    assert_eq!(longer.steps().unwrap(), 0);
}

#[test]
fn bad_arguments_are_refused() {
    fn refused<T: std::fmt::Debug>(result: Result<T>, said: &str) {
        let error = result.unwrap_err();
        assert!(error.code() == Code::InvalidArgument && error.message().contains(said), "{error}");
    }
    let mut growing = LrSchedule::exponential(10.0).unwrap();
    refused(LrSchedule::constant(-1.0, 1), "factor is -1");
    refused(LrSchedule::linear(0.0, f64::NAN, 1), "end_factor is nan");
    refused(LrSchedule::cosine(0, 0.0), "total_steps is 0");
    refused(LrSchedule::cosine(u64::MAX, 0.0), "total_steps is 18446744073709551615; it must be at most");
    refused(LrSchedule::multi_step_decay(&[], 0.5), "the number of milestones is 0");
    refused(LrSchedule::multi_step_decay(&[3, 2], 0.5), "milestone 1 is 2");
    refused(LrSchedule::multi_step_decay(&[u64::MAX], 0.5), "a milestone is");
    refused(LrSchedule::wsd(i64::MAX as u64, 1, 1, LrDecay::Linear, 0.0), "have no sum");
    refused(LrSchedule::warmup().warmup_num_steps(0).build(), "warmup_num_steps is 0");
    refused(LrSchedule::warmup_cosine().build(), "total_num_steps is not given");
    refused(LrSchedule::one_cycle().build(), "cycle_max_lr is not given");
    refused(LrSchedule::range_test(1.0, 0, 1.0, false), "step_size is 0");
    refused(LrSchedule::chained([]), "the number of schedules is 0");
    let many = LrSchedule::chained(std::iter::repeat(&growing).take(1000)).unwrap();
    refused(LrSchedule::chained([&many]), "more than 1000");
    refused(LrSchedule::sequential([&growing], &[5]), "do not separate");
    refused(growing.lr_at(u64::MAX, 1.0), "step is");
    refused(growing.lr_at(1, f64::NAN), "base_lr is nan");
    refused(growing.lr_at(400, 1.0), "would be inf");
    refused(growing.momentum_at(u64::MAX), "step is");
    refused(growing.set_steps(u64::MAX), "steps is");
}
