//! Objects of the program's in a state.

mod common;

use std::cell::{Cell, RefCell};
use std::io;
use std::rc::Rc;
use std::thread;

use common::{alone, deadline, ranks};
use tessera::{
    CallbackResult, Checkpoint, Code, LoadOptions, Native, Sampler, Saver, State, StateDict, Stateful, Tensor, Value,
};

type Hook<'a> = Box<dyn Fn() -> CallbackResult<()> + 'a>;

/// Values; each method does something else before, if it is said.
struct Loader<'a> {
    values: StateDict,
    on_collect: Hook<'a>,
    on_check: Hook<'a>,
    on_load: Hook<'a>,
    _dropped: Counted,
}

/// Counts its drops.
#[derive(Default)]
struct Counted(Rc<Cell<usize>>);

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.set(self.0.get() + 1);
    }
}

impl Stateful for Loader<'_> {
    fn state_dict(&self) -> CallbackResult<StateDict> {
        (self.on_collect)()?;
        Ok(self.values.clone())
    }
    fn check_state_dict(&self, _values: &StateDict) -> CallbackResult<()> {
        (self.on_check)()
    }
    fn load_state_dict(&mut self, values: StateDict) -> CallbackResult<()> {
        (self.on_load)()?;
        self.values = values;
        Ok(())
    }
}

fn nothing<'a>() -> Hook<'a> {
    Box::new(|| Ok(()))
}

fn of<const N: usize>(values: [(&str, Value); N]) -> StateDict {
    values.into_iter().map(|(name, value)| (name.to_owned(), value)).collect()
}

fn loader<'a, const N: usize>(values: [(&str, Value); N]) -> Rc<RefCell<Loader<'a>>> {
    let (on_collect, on_check, on_load) = (nothing(), nothing(), nothing());
    Rc::new(RefCell::new(Loader { values: of(values), on_collect, on_check, on_load, _dropped: Counted::default() }))
}

#[test]
fn values_of_every_kind_are_collected_at_a_save_and_come_back_at_a_load() {
    let folder = tempfile::tempdir().unwrap();
    let values = [
        ("epoch", Value::Int(3)),
        ("rate", Value::Double(f64::INFINITY)),
        ("note", "größe".into()),
        ("nothing", Value::Null),
        (
            "nested",
            Value::Map(vec![("on".into(), true.into()), ("list".into(), Value::List(vec![1i64.into(), "two".into()]))]),
        ),
        ("bytes", vec![0u8, 255].into()),
    ];
    let object = loader(values.clone());
    let mut state = State::new().with("loader", &object);
    let saver = Saver::alone(folder.path()).open().unwrap();
    saver.save(1, &state).unwrap();
    object.borrow_mut().values.values_mut().for_each(|value| *value = "changed".into());
    assert_eq!(saver.resume(&mut state).unwrap(), 1);
    assert_eq!(object.borrow().values, of(values));
    assert_eq!(state.get("loader.note").unwrap(), "größe".into());
    assert_eq!(state.get_int("loader.epoch").unwrap(), 3);
}

#[test]
fn a_save_in_the_background_collects_on_this_thread_before_it_returns() {
    let folder = tempfile::tempdir().unwrap();
    let object = loader([("epoch", Value::Int(3))]);
    let this = thread::current().id();
    object.borrow_mut().on_collect = Box::new(move || {
        assert_eq!(thread::current().id(), this);
        Ok(())
    });
    let mut state = State::new().with("loader", &object);
    let saver = Saver::alone(folder.path()).open().unwrap();
    let save = saver.save_async(1, &state).unwrap();
    object.borrow_mut().values = of([("epoch", Value::Int(4))]);
    save.wait().unwrap();
    saver.resume(&mut state).unwrap();
    assert_eq!(object.borrow().values, of([("epoch", Value::Int(3))]));
}

#[test]
fn errors_and_panics_become_the_error_of_the_save() {
    let folder = tempfile::tempdir().unwrap();
    let object = loader([("epoch", Value::Int(3))]);
    let state = State::new().with("loader", &object);
    let saver = Saver::alone(folder.path()).open().unwrap();
    let fails = |hook: Hook<'static>, code: Code, what: &str| {
        object.borrow_mut().on_collect = hook;
        let error = saver.save(1, &state).unwrap_err();
        assert_eq!(error.code(), code);
        assert!(error.to_string().contains(&format!("collecting the values of 'loader' failed: {what}")), "{error}");
        error
    };
    let error = fails(Box::new(|| Err("the queue is gone".into())), Code::User, "the queue is gone");
    assert_eq!(error.native(), Some(Native::User(-1)));
    fails(Box::new(|| Err(io::Error::from(io::ErrorKind::TimedOut).into())), Code::Timeout, "timed out");
    let nan = || State::new().get_int("x").map(drop).map_err(Into::into);
    fails(Box::new(nan), Code::NotFound, "the state has no value 'x'");
    fails(Box::new(|| panic!("out of data (expected in this test)")), Code::User, "it panicked: out of data");
    object.borrow_mut().on_collect = nothing();
    object.borrow_mut().values = of([("big", Value::BigInt("12x".into()))]);
    assert_eq!(saver.save(1, &state).unwrap_err().code(), Code::InvalidArgument);
    object.borrow_mut().values = of([("nul\0", Value::Null)]);
    assert_eq!(saver.save(1, &state).unwrap_err().code(), Code::InvalidArgument);
    object.borrow_mut().values = of([("epoch", Value::Int(3))]);
    saver.save(1, &state).unwrap();
}

#[test]
fn a_check_that_refuses_leaves_all_as_it_was() {
    let folder = tempfile::tempdir().unwrap();
    let weights = Tensor::new(vec![1.0f32, 2.0], [2]).unwrap();
    let object = loader([("epoch", Value::Int(3))]);
    let mut state = State::new().with("w", &weights).with("loader", &object);
    let saver = Saver::alone(folder.path()).open().unwrap();
    saver.save(1, &state).unwrap();
    weights.view_mut::<f32>().unwrap().fill(7.0);
    object.borrow_mut().values = of([("epoch", Value::Int(9))]);
    object.borrow_mut().on_check = Box::new(|| Err("epoch 3 is too early".into()));
    let error = saver.resume(&mut state).unwrap_err();
    assert!(
        error.to_string().contains("'loader' refused the values of the checkpoint: epoch 3 is too early"),
        "{error}"
    );
    assert_eq!(weights.view::<f32>().unwrap()[..], [7.0, 7.0]);
    assert_eq!(object.borrow().values, of([("epoch", Value::Int(9))]));
    object.borrow_mut().on_check = nothing();
    object.borrow_mut().on_load = Box::new(|| panic!("no room (expected in this test)"));
    let error = saver.resume(&mut state).unwrap_err();
    assert!(error.to_string().contains("'loader' could not take the values of the checkpoint: it panicked"), "{error}");
}

#[test]
fn what_a_load_allows_to_be_missing_stays() {
    let folder = tempfile::tempdir().unwrap();
    let object = loader([("epoch", Value::Int(3))]);
    let mut state = State::new().with("loader", &object);
    Saver::alone(folder.path()).open().unwrap().save(1, &state).unwrap();
    object.borrow_mut().values = of([("epoch", Value::Int(4)), ("new", Value::Int(5))]);
    let checkpoint = Checkpoint::open(folder.path()).unwrap();
    let error = checkpoint.load(&mut state, &LoadOptions::new()).unwrap_err();
    assert_eq!(error.code(), Code::Mismatch);
    assert!(error.to_string().contains("'loader.new' is missing"), "{error}");
    checkpoint.load(&mut state, &LoadOptions::new().allow_missing(true)).unwrap();
    assert_eq!(object.borrow().values, of([("epoch", Value::Int(3)), ("new", Value::Int(5))]));
}

#[test]
fn what_the_state_uses_is_invalid_state_meanwhile() {
    let folder = tempfile::tempdir().unwrap();
    let saver = Rc::new(Saver::alone(folder.path()).open().unwrap());
    let sampler = Rc::new(Sampler::new(&alone(), 10).build().unwrap());
    let state = Rc::new(RefCell::new(State::new()));
    let codes = Rc::new(RefCell::new(Vec::new()));
    let object = loader([("epoch", Value::Int(3))]);
    object.borrow_mut().on_collect = Box::new({
        let (saver, sampler, state, codes) = (saver.clone(), sampler.clone(), state.clone(), codes.clone());
        move || {
            let state = state.borrow();
            codes.borrow_mut().extend([
                state.get_int("loader.epoch").unwrap_err().code(),
                saver.save(2, &state).unwrap_err().code(),
                saver.wait().unwrap_err().code(),
                sampler.epoch().unwrap_err().code(), // locked by the save: this must not wait for itself
            ]);
            Ok(())
        }
    });
    state.borrow_mut().add("data", &*sampler).unwrap();
    state.borrow_mut().add("loader", &object).unwrap();
    saver.save(1, &state.borrow()).unwrap();
    assert_eq!(*codes.borrow(), [Code::InvalidState; 4]);
    assert_eq!(sampler.epoch().unwrap(), 0);
    object.borrow_mut().on_collect = nothing(); // of the circle, which would never be freed, the object lets go
}

#[test]
fn an_object_that_is_borrowed_is_invalid_state() {
    let folder = tempfile::tempdir().unwrap();
    let object = loader([("epoch", Value::Int(3))]);
    let mut state = State::new().with("loader", &object);
    let saver = Saver::alone(folder.path()).open().unwrap();
    let error = {
        let _held = object.borrow_mut();
        saver.save(1, &state).unwrap_err()
    };
    assert_eq!(error.code(), Code::InvalidState);
    assert!(error.to_string().contains("borrowed elsewhere"), "{error}");
    saver.save(1, &state).unwrap();
    let held = object.borrow();
    assert_eq!(saver.resume(&mut state).unwrap_err().code(), Code::InvalidState);
    drop(held);
    saver.resume(&mut state).unwrap();
}

#[test]
fn it_lives_as_long_as_the_state_and_is_dropped_once() {
    let object = loader([("epoch", Value::Int(3))]);
    let drops = Rc::clone(&object.borrow()._dropped.0);
    let mut state = State::new().with("loader", &object);
    let second = state.add("loader", &object).unwrap_err(); // what is refused is let go of
    assert_eq!(second.code(), Code::InvalidArgument);
    assert!(state.add("", &object).is_err());
    assert!(state.add("loader.inner", &object).is_err());
    assert_eq!(Rc::strong_count(&object), 2);
    drop(object);
    assert_eq!(drops.get(), 0);
    assert_eq!(state.get_int("loader.epoch").unwrap(), 3);
    assert_eq!(state.set("loader.other", 1).unwrap_err().code(), Code::InvalidArgument);
    drop(state);
    assert_eq!(drops.get(), 1);
}

#[test]
fn the_failure_of_one_rank_is_the_same_error_on_all() {
    let folder = tempfile::tempdir().unwrap();
    ranks(2, |comm| {
        let object = loader([("epoch", Value::Int(3))]);
        let mut state = State::new().with("loader", &object);
        let saver = Saver::at(&comm, folder.path()).timeout(deadline()).open().unwrap();
        let fails = comm.rank().unwrap() == 1;
        let hook = move || -> Hook<'static> {
            Box::new(move || if fails { Err(io::Error::other("the queue is gone").into()) } else { Ok(()) })
        };
        object.borrow_mut().on_collect = hook();
        let error = saver.save(1, &state).unwrap_err();
        assert_eq!((error.code(), error.rank()), (Code::Io, Some(1)));
        assert!(error.to_string().starts_with("rank 1: collecting the values of 'loader' failed"), "{error}");
        object.borrow_mut().on_collect = nothing();
        saver.save(1, &state).unwrap();
        object.borrow_mut().on_check = hook();
        object.borrow_mut().values = of([("epoch", Value::Int(9))]);
        let error = saver.resume(&mut state).unwrap_err();
        assert!(error.to_string().starts_with("rank 1: 'loader' refused the values"), "{error}");
        assert_eq!(object.borrow().values, of([("epoch", Value::Int(9))]));
    });
}
