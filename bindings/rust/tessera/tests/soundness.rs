//! What safe code may try: callbacks that come back into the library, panics that panic, objects forgotten or dropped at
//! the wrong moment, sizes that cannot be. Each ends with an error or goes well; none with undefined behaviour.

mod common;

use std::mem;
use std::panic;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{mpsc, Arc};
use std::time::Instant;

use common::{alone, deadline, ranks, serve};
use tessera::{params, Code, Comm, DType, Ddp, ReduceOp, Sampler, Saver, Sgd, State, Store, Tensor};

/// Runs `wait` on rank 0, and `inside` once in an interrupt callback of it; rank 1 runs `arrive` after that.
fn inside_of<R>(comm: &Comm, called: &AtomicBool, wait: impl FnOnce() -> R, inside: impl FnOnce()) -> R {
    assert_eq!(comm.rank().unwrap(), 0);
    let mut inside = Some(inside);
    tessera::with_interrupt(
        || {
            if let Some(inside) = inside.take() {
                inside();
                called.store(true, Ordering::SeqCst);
            }
            false
        },
        wait,
    )
}

fn until(called: &AtomicBool) {
    let begun = Instant::now();
    while !called.load(Ordering::SeqCst) {
        assert!(begun.elapsed() < deadline(), "the callback was never called");
        std::thread::yield_now();
    }
}

#[test]
fn a_load_gives_its_callbacks_no_view_of_what_it_writes() {
    let (folder, called) = (tempfile::tempdir().unwrap(), AtomicBool::new(false));
    ranks(2, |comm| {
        let tensor = Tensor::new(vec![1.0f32; 8], [8]).unwrap();
        let twice = State::new().with("a", &tensor).with("b", &tensor); // one memory under two names
        let saver = Saver::open(&comm, folder.path()).unwrap();
        saver.save(1, &twice).unwrap();
        let mut state = twice;
        if comm.rank().unwrap() == 1 {
            until(&called);
            saver.resume(&mut state).unwrap();
            return;
        }
        let step = inside_of(
            &comm,
            &called,
            || saver.resume(&mut state),
            || {
                assert_eq!(tensor.view::<f32>().unwrap_err().code(), Code::InvalidState);
                assert_eq!(tensor.bytes_mut().unwrap_err().code(), Code::InvalidState);
            },
        );
        assert_eq!(step.unwrap(), 1);
        tensor.view_mut::<f32>().unwrap().fill(2.0); // ours again
    });
}

#[test]
fn a_gradient_that_ready_refuses_has_one_owner() {
    let called = AtomicBool::new(false);
    let options = tessera::DdpOptions::new().bucket_bytes(4).first_bucket_bytes(4); // a bucket for each parameter
    ranks(2, |comm| {
        let model = params!["a" => (vec![0.0f32; 1000], [1000]), "b" => (vec![0.0f32; 1000], [1000])];
        let mut ddp = Ddp::with_options(&comm, model, &options).unwrap();
        let mine = if comm.rank().unwrap() == 0 { 1.0 } else { 3.0 };
        if comm.rank().unwrap() == 1 {
            until(&called);
            comm.barrier().unwrap();
        } else {
            let refused = || {
                assert_eq!(ddp.ready(1).unwrap_err().code(), Code::InvalidState); // the first bucket's
                assert_eq!(ddp.ready_all().unwrap_err().code(), Code::InvalidState);
            };
            inside_of(&comm, &called, || comm.barrier().unwrap(), refused);
        }
        ddp.grad_mut(0).unwrap().fill(mine);
        {
            let mut view = ddp.grad_mut(1).unwrap(); // ours: nothing reduces it
            view.fill(mine);
            ddp.ready(0).unwrap();
            assert!(view.iter().all(|&g| g == mine));
        }
        ddp.ready(1).unwrap(); // said once
        ddp.wait().unwrap();
        for index in 0..2 {
            assert!(ddp.grad(index).unwrap().iter().all(|&g| g == 2.0));
        }
    });
}

#[test]
fn a_save_gives_its_callbacks_views_to_read_alone() {
    let (folder, called) = (tempfile::tempdir().unwrap(), AtomicBool::new(false));
    ranks(2, |comm| {
        let tensor = Tensor::new(vec![1.0f32; 8], [8]).unwrap();
        let state = State::new().with("a", &tensor);
        let saver = Saver::open(&comm, folder.path()).unwrap();
        if comm.rank().unwrap() == 1 {
            until(&called);
            saver.save(1, &state).unwrap();
            return;
        }
        let inside = || {
            assert_eq!(tensor.view::<f32>().unwrap()[7], 1.0);
            assert_eq!(tensor.view_mut::<f32>().unwrap_err().code(), Code::InvalidState);
        };
        inside_of(&comm, &called, || saver.save(1, &state), inside).unwrap();
        tensor.view_mut::<f32>().unwrap().fill(2.0);
    });
}

#[test]
fn registering_a_model_gives_its_callbacks_no_view_of_the_parameters() {
    let called = AtomicBool::new(false);
    ranks(2, |comm| {
        let tensor = Tensor::new(vec![comm.rank().unwrap() as f32; 8], [8]).unwrap();
        if comm.rank().unwrap() == 1 {
            until(&called);
            let _ddp = Ddp::new(&comm, params!["w" => &tensor]).unwrap();
            assert_eq!(tensor.view::<f32>().unwrap()[..], [0.0; 8]);
            return;
        }
        let inside = || assert_eq!(tensor.view::<f32>().unwrap_err().code(), Code::InvalidState);
        drop(inside_of(&comm, &called, || Ddp::new(&comm, params!["w" => &tensor]), inside).unwrap());
        tensor.view_mut::<f32>().unwrap().fill(2.0);
    });
}

#[test]
fn a_call_in_the_callback_of_another_is_refused_and_the_other_goes_on() {
    let (folder, called) = (tempfile::tempdir().unwrap(), AtomicBool::new(false));
    let again = AtomicBool::new(false);
    ranks(2, |comm| {
        let saver = Saver::open(&comm, folder.path()).unwrap();
        if comm.rank().unwrap() == 1 {
            until(&called);
            comm.barrier().unwrap();
            until(&again);
            drop(saver.save_async(1, &State::new()).unwrap());
            saver.wait().unwrap();
            return;
        }
        let barrier = || assert_eq!(comm.barrier().unwrap_err().code(), Code::InvalidState);
        inside_of(&comm, &called, || comm.barrier(), barrier).unwrap();
        let wait = || assert_eq!(saver.wait().unwrap_err().code(), Code::InvalidState);
        let save = || saver.save_async(1, &State::new()).and_then(|_| saver.wait());
        inside_of(&comm, &again, save, wait).unwrap();
    });
}

/// A panic whose payload panics when it is dropped.
fn panic_twice() -> ! {
    struct Bomb;
    impl Drop for Bomb {
        fn drop(&mut self) {
            panic!("dropping a payload (expected in this test)");
        }
    }
    panic::panic_any(Bomb)
}

#[test]
fn panics_that_panic_again_stay_inside_their_callbacks() {
    let (sender, receiver) = mpsc::channel();
    ranks(2, |comm| {
        let sender = sender.clone();
        let mut work = comm.all_reduce_async(vec![1.0f32; 4], ReduceOp::Sum).unwrap();
        work.on_done(move |_| {
            sender.send(()).unwrap();
            panic_twice()
        });
        comm.barrier().unwrap();
        assert_eq!(work.wait().unwrap(), [2.0; 4]);
    });
    receiver.recv_timeout(deadline()).unwrap();

    let folder = tempfile::tempdir().unwrap();
    let store = Store::open(&format!("file://{}", folder.path().display()), &common::options()).unwrap();
    let never = || store.wait("never", Some(deadline())).unwrap_err().code();
    let body = || tessera::with_interrupt(|| panic_twice(), || assert_eq!([never(), never()], [Code::Interrupted; 2]));
    let first = panic::catch_unwind(panic::AssertUnwindSafe(body)).unwrap_err();
    mem::forget(first);
}

/// Makes the library log: a server refuses a connection.
fn log_a_line() {
    let (_server, uri) = serve();
    Store::open(&uri, &common::options().epoch(7)).unwrap_err();
}

#[test]
fn the_logs_callback_may_panic_and_replace_itself() {
    let (sender, receiver) = mpsc::channel();
    let told = sender.clone();
    tessera::set_log_callback(move |_, _| {
        told.send("panics".to_owned()).unwrap();
        panic_twice()
    })
    .unwrap();
    log_a_line();
    assert_eq!(receiver.recv_timeout(deadline()).unwrap(), "panics");

    let captured = Arc::new(String::from("still there"));
    tessera::set_log_callback(move |_, _| {
        tessera::reset_log_callback().unwrap();
        sender.send(captured.to_string()).unwrap();
    })
    .unwrap();
    log_a_line();
    assert_eq!(receiver.recv_timeout(deadline()).unwrap(), "still there");
}

#[test]
fn a_completion_callback_may_be_the_last_owner() {
    let folder = tempfile::tempdir().unwrap();
    let done = ranks(2, |comm| {
        let (sender, receiver) = mpsc::channel();
        let saver = Saver::open(&comm, folder.path()).unwrap();
        let mut save = saver.save_async(1, &State::new()).unwrap();
        let saved = sender.clone();
        save.on_done(move |_| {
            drop(saver);
            saved.send(()).unwrap();
        });
        receiver.recv_timeout(deadline()).unwrap();
        comm.barrier().unwrap();
        let mut work = comm.barrier_async().unwrap();
        work.on_done(move |_| {
            drop(comm);
            sender.send(()).unwrap();
        });
        receiver.recv_timeout(deadline())
    });
    assert_eq!(done, [Ok(()); 2]);
}

#[test]
fn what_is_forgotten_in_flight_is_neither_freed_nor_used() {
    ranks(2, |comm| {
        let mut ddp = Ddp::new(&comm, params!["w" => (vec![1.0f32; 4096], [4096])]).unwrap();
        let opt = Sgd::new(&mut ddp).build().unwrap();
        ddp.ready_all().unwrap();
        mem::forget(comm.all_reduce_async(vec![1.0f32; 4096], ReduceOp::Sum).unwrap());
        mem::forget(opt);
        mem::forget(ddp);
        comm.barrier().unwrap();
    });
    let tensor = Tensor::new(vec![1.0f32], [1]).unwrap();
    mem::forget(tensor.view::<f32>().unwrap());
    assert_eq!(tensor.view_mut::<f32>().unwrap_err().code(), Code::InvalidState);
    assert_eq!(tensor.view::<f32>().unwrap()[0], 1.0);
}

#[test]
fn nothing_is_a_size_too() {
    ranks(2, |comm| {
        let empty = || (Vec::<f32>::new(), [0, 7]);
        let mut ddp = Ddp::new(&comm, params!["none" => empty(), "one" => (vec![1.0f64], [])]).unwrap();
        let mut opt = Sgd::new(&mut ddp).lr(1.0).build().unwrap();
        assert_eq!((ddp.grad(0).unwrap().len(), ddp.param_mut(0).unwrap().len()), (0, 0));
        ddp.grad_mut_as::<f64>(1).unwrap()[0] = 0.5;
        ddp.ready_all().unwrap();
        ddp.wait().unwrap();
        opt.step().unwrap();
        assert_eq!(ddp.param_as::<f64>(1).unwrap()[..], [0.5]);
        let work = comm.all_reduce_async(Vec::<f32>::new().into_boxed_slice(), ReduceOp::Sum).unwrap();
        assert!(work.wait().unwrap().is_empty());
        let buffer = comm.buffer::<f32>(0).unwrap();
        assert!(comm.all_reduce_async(buffer, ReduceOp::Sum).unwrap().wait().unwrap().is_empty());
    });
}

#[test]
fn sizes_beyond_memory_are_errors() {
    let comm = alone();
    assert_eq!(Tensor::zeros(DType::F32, [1 << 50]).unwrap_err().code(), Code::NoMemory);
    assert_eq!(Tensor::zeros(DType::F32, [usize::MAX / 4]).unwrap_err().code(), Code::NoMemory);
    assert_eq!(Tensor::zeros(DType::F32, [usize::MAX]).unwrap_err().code(), Code::InvalidArgument);
    assert_eq!(comm.buffer::<f32>(usize::MAX).unwrap_err().code(), Code::InvalidArgument);
    for len in [1 << 50, usize::MAX >> 3, usize::MAX >> 2] {
        let code = comm.buffer::<f32>(len).unwrap_err().code();
        assert!(matches!(code, Code::NoMemory | Code::InvalidArgument), "{len}: {code}");
    }
    let mut sampler = Sampler::new(&comm, 10).shuffle(false).build().unwrap();
    assert_eq!(sampler.batch(usize::MAX).unwrap(), (0..10).collect::<Vec<_>>());
    comm.barrier().unwrap(); // as good as before
}
