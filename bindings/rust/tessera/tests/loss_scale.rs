//! DeepSpeed's loss scale: its values, checkpoints, and what is refused.

mod common;

use std::cell::RefCell;
use std::fmt::Debug;
use std::rc::Rc;

use common::alone;
use tessera::{Code, Engine, LossScale, Result, Saver, State, StateDict, Stateful, Value};

#[test]
fn it_shrinks_and_grows() {
    let mut scale = LossScale::builder().initial(8.0).window(2).hysteresis(2).minimum(2.0).build().unwrap();
    assert_eq!([true; 3].map(|overflow| scale.update(overflow).unwrap()), [8.0, 4.0, 2.0]);
    let error = scale.update(true).unwrap_err();
    assert!(error.code() == Code::InvalidState && error.message().contains("at its minimum 2"), "{error:?}");
    assert_eq!([false; 4].map(|overflow| scale.update(overflow).unwrap()), [2.0, 2.0, 4.0, 4.0]);
    assert_eq!(scale.value().unwrap(), 4.0);
    assert_eq!(format!("{scale:?}"), "LossScale { value: Some(4.0) }");
    let mut fixed = LossScale::builder().fixed(128.0).build().unwrap();
    assert_eq!((fixed.update(true).unwrap(), fixed.value().unwrap()), (128.0, 128.0));
    let mut patient = LossScale::builder().initial(8.0).restores_every_step(true).build().unwrap();
    assert_eq!([true, false, true].map(|overflow| patient.update(overflow).unwrap()), [8.0; 3]);
}

#[test]
fn it_takes_what_a_configuration_resolves_to() {
    let config = r#"{"train_batch_size": 1, "fp16": {"enabled": true, "initial_scale_power": 5}}"#;
    let resolved = Engine::resolve(config, 1).unwrap();
    let fp16 = |key| resolved.get("fp16").and_then(|fp16| fp16.get(key));
    let Some(Value::Double(initial)) = fp16("initial_scale") else { panic!("{resolved:?}") };
    let Some(&Value::Int(window)) = fp16("loss_scale_window") else { panic!("{resolved:?}") };
    let scale = LossScale::builder().initial(*initial).window(window as u64).build().unwrap();
    assert_eq!(scale.value().unwrap(), 32.0);
}

#[test]
fn it_is_saved_and_loaded_with_a_state() {
    let (comm, folder) = (alone(), tempfile::tempdir().unwrap());
    let saver = Saver::at(&comm, folder.path()).open().unwrap();
    let made = |initial| LossScale::builder().initial(initial).window(2).hysteresis(2).build().unwrap();
    let scale = Rc::new(RefCell::new(made(8.0)));
    for overflow in [true, true, false, false] {
        scale.borrow_mut().update(overflow).unwrap();
    }
    let state = scale.borrow().state_dict().unwrap();
    let of = |name| state.get(name).cloned().unwrap();
    assert_eq!((of("scale"), of("iteration")), (4.0.into(), 4.into()));
    assert_eq!((of("last_overflow"), of("hysteresis")), (1.into(), 1.into()));
    saver.save(4, &State::new().with("scale", &scale)).unwrap();

    let other = Rc::new(RefCell::new(made(1024.0)));
    saver.resume(&mut State::new().with("scale", &other)).unwrap();
    for overflow in [false, false, true, true, false] {
        assert_eq!(other.borrow_mut().update(overflow).unwrap(), scale.borrow_mut().update(overflow).unwrap());
    }
    assert_eq!(other.borrow().state_dict().unwrap(), scale.borrow().state_dict().unwrap());
    let mut fixed = LossScale::builder().fixed(2.0).build().unwrap();
    fixed.load_state_dict(state).unwrap();
    assert_eq!(fixed.value().unwrap(), 2.0);
}

#[test]
fn bad_settings_and_states_are_refused() {
    fn refused<T: Debug>(result: Result<T>, said: &str) {
        let error = result.expect_err(said);
        assert!(error.code() == Code::InvalidArgument && error.message().contains(said), "{error:?}, not {said}");
    }
    refused(LossScale::builder().initial(0.0).build(), "the initial scale is 0");
    refused(LossScale::builder().fixed(f64::NAN).build(), "loss_scale is nan");
    refused(LossScale::builder().window(0).build(), "loss_scale_window is 0");
    refused(LossScale::builder().window(u64::MAX).build(), "window is 18446744073709551615");
    refused(LossScale::builder().hysteresis(0).build(), "hysteresis is 0");
    refused(LossScale::builder().minimum(-1.0).build(), "min_loss_scale is -1");

    let mut scale = LossScale::builder().build().unwrap();
    let before = scale.state_dict().unwrap();
    let with = |name: &str, value: Value| {
        let mut state = before.clone();
        state.insert(name.to_owned(), value);
        state
    };
    for (state, said) in [
        (StateDict::new(), "the state of a loss scale lacks \"scale\""),
        (with("scale", (-1).into()), "the saved loss scale is -1"),
        (with("scale", "high".into()), "the saved \"scale\" of a loss scale is Str(\"high\"), not a number"),
        (with("iteration", Value::BigInt("99999999999999999999".into())), "not an integer of 64 bits"),
        (with("last_overflow", 7.into()), "last overflow"),
        (with("hysteresis", 0.into()), "hysteresis is 0"),
    ] {
        for result in [scale.check_state_dict(&state), scale.load_state_dict(state)] {
            let error = *result.expect_err(said).downcast::<tessera::Error>().unwrap();
            refused::<()>(Err(error), said);
        }
    }
    assert_eq!(scale.state_dict().unwrap(), before);
}
