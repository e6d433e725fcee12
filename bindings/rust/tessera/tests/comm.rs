//! Communicators and collectives, ranks as threads.

mod common;

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{mpsc, Arc};
use std::thread;
use std::time::{Duration, Instant};

use common::{alone, block_on, deadline, options, ranks, ranks_with, serve};
use tessera::{
    params, units, Code, Comm, CommOptions, Creation, Ddp, DdpOptions, Element, Engine, Fsdp, FsdpOptions, Mesh,
    Params, Pipeline, ReduceOp, Saver, Store, Style, TensorParallel, Work,
};

fn assert_send<T: Send>() {}
fn assert_sync<T: Sync>() {}

#[test]
fn handles_may_go_where_the_c_api_lets_them() {
    assert_send::<Comm>();
    assert_send::<tessera::AbortHandle>();
    assert_sync::<tessera::AbortHandle>();
    assert_sync::<Store>();
    assert_sync::<tessera::Checkpoint>();
    assert_send::<tessera::Saver>();
    assert_send::<tessera::Sampler>();
    assert_send::<Work<Vec<f32>>>();
    assert_sync::<tessera::Error>();
}

#[test]
fn all_reduce_gives_every_rank_every_operation() {
    for (op, expected) in
        [(ReduceOp::Sum, 6.0), (ReduceOp::Avg, 2.0), (ReduceOp::Min, 1.0), (ReduceOp::Max, 3.0), (ReduceOp::Prod, 6.0)]
    {
        ranks(3, |comm| {
            let mut data = vec![comm.rank().unwrap() as f64 + 1.0; 1000];
            comm.all_reduce(&mut data, op).unwrap();
            assert_eq!(data, vec![expected; 1000], "{op:?}");
        });
    }
}

fn sum_of<T: Element + PartialEq + std::fmt::Debug>(one: T, three: T) {
    ranks(3, |comm| {
        let mut data = vec![one; 17];
        comm.all_reduce(&mut data, ReduceOp::Sum).unwrap();
        assert_eq!(data, vec![three; 17]);
    });
}

#[test]
fn all_reduce_takes_every_number() {
    sum_of(1f32, 3.0);
    sum_of(1f64, 3.0);
    sum_of(1i8, 3);
    sum_of(1u8, 3);
    sum_of(1i32, 3);
    sum_of(1i64, 3);
    sum_of(half::f16::from_f32(1.0), half::f16::from_f32(3.0));
    sum_of(half::bf16::from_f32(1.0), half::bf16::from_f32(3.0));
}

#[test]
fn types_without_arithmetic_are_unsupported() {
    let refused = ranks(2, |comm| comm.all_reduce(&mut [1i16; 4], ReduceOp::Sum).unwrap_err().code());
    assert_eq!(refused, [Code::Unsupported; 2]);
}

#[test]
fn several_slices_are_one_operation() {
    ranks(2, |comm| {
        let (mut a, mut b) = (vec![1.0f32; 10], vec![2.0f32; 3]);
        comm.all_reduce_many(&mut [&mut a, &mut b], ReduceOp::Sum).unwrap();
        assert_eq!((a[9], b[2]), (2.0, 4.0));
        if comm.rank().unwrap() == 1 {
            a.fill(7.0);
        }
        comm.broadcast_many(&mut [&mut a, &mut b], 1).unwrap();
        assert_eq!((a[0], b[0]), (7.0, 4.0));
    });
}

fn every_collective(comm: &Comm) {
    let (rank, n) = (comm.rank().unwrap(), comm.world_size().unwrap());
    let own = [rank as i32 * 10, rank as i32 * 10 + 1];
    let all: Vec<i32> = (0..n).flat_map(|r| [r as i32 * 10, r as i32 * 10 + 1]).collect();

    let mut gathered = vec![-1; 2 * n];
    comm.all_gather(&own, &mut gathered).unwrap();
    assert_eq!(gathered, all);

    let mut part = [-1; 2];
    comm.reduce_scatter(&all, &mut part, ReduceOp::Sum).unwrap();
    assert_eq!(part, own.map(|x| x * n as i32));

    let mut exchanged = vec![-1; 2 * n];
    let outgoing: Vec<i32> = (0..2 * n).map(|i| (rank * 100 + i) as i32).collect();
    comm.all_to_all(&outgoing, &mut exchanged).unwrap();
    let incoming: Vec<i32> =
        (0..n).flat_map(|r| [r * 100 + 2 * rank, r * 100 + 2 * rank + 1]).map(|x| x as i32).collect();
    assert_eq!(exchanged, incoming);

    let mut lengths: Vec<Vec<i32>> = (0..n).map(|r| vec![-1; r + 1]).collect();
    let mut outputs: Vec<&mut [i32]> = lengths.iter_mut().map(Vec::as_mut_slice).collect();
    comm.all_gather_v(&vec![rank as i32; rank + 1], &mut outputs).unwrap();
    assert_eq!(lengths, (0..n).map(|r| vec![r as i32; r + 1]).collect::<Vec<_>>());

    let root = n - 1;
    let mut data = if rank == root { [5i64, 6] } else { [0, 0] };
    comm.broadcast(&mut data, root).unwrap();
    assert_eq!(data, [5, 6]);

    let (mut sum, mut whole) = ([0; 2], vec![0; 2 * n]);
    let is_root = rank == root;
    comm.reduce(&own, is_root.then_some(&mut sum[..]), ReduceOp::Max, root).unwrap();
    comm.gather(&own, is_root.then_some(&mut whole[..]), root).unwrap();
    if is_root {
        assert_eq!(sum, [root as i32 * 10, root as i32 * 10 + 1]);
        assert_eq!(whole, all);
    }
    comm.scatter(is_root.then_some(&all[..]), &mut part, root).unwrap();
    assert_eq!(part, own);

    let (next, previous) = ((rank + 1) % n, (rank + n - 1) % n);
    let mut received = [0; 2];
    let sent = comm.send_async(own.to_vec(), next, 3).unwrap();
    comm.recv(&mut received, previous, 3).unwrap();
    assert_eq!(sent.wait().unwrap(), own);
    assert_eq!(received, [previous as i32 * 10, previous as i32 * 10 + 1]);
    if rank == 0 {
        comm.send(&own, 1, 4).unwrap();
    } else if rank == 1 {
        comm.recv(&mut received, 0, 4).unwrap();
        assert_eq!(received, [0, 1]);
    }
    comm.barrier().unwrap();
}

#[test]
fn every_collective_works_over_shm() {
    ranks_with(3, &CommOptions::new().backend("shm").timeout(deadline()), |comm| {
        assert_eq!(comm.transport().unwrap(), "shm");
        every_collective(&comm);
        comm.finalize().unwrap();
    });
}

#[test]
fn every_collective_works_over_gloo() {
    ranks_with(3, &CommOptions::new().backend("gloo").timeout(deadline()), |comm| {
        assert_eq!(comm.transport().unwrap(), "gloo");
        every_collective(&comm);
        comm.finalize().unwrap();
    });
}

#[test]
fn empty_slices_are_reduced_to_nothing() {
    ranks(2, |comm| comm.all_reduce::<f32>(&mut [], ReduceOp::Sum).unwrap());
}

#[test]
fn one_rank_is_a_group_too() {
    let comm = alone();
    let mut data = [4.0f32];
    comm.all_reduce(&mut data, ReduceOp::Avg).unwrap();
    assert_eq!((data, comm.transport().unwrap().as_str()), ([4.0], "self"));
}

#[test]
fn asynchronous_operations_give_their_buffers_back_in_order() {
    ranks(2, |comm| {
        let rank = comm.rank().unwrap() as f32;
        let first = comm.all_reduce_async(vec![rank + 1.0; 10_000], ReduceOp::Sum).unwrap();
        let second = comm.broadcast_async(vec![rank; 4].into_boxed_slice(), 1).unwrap();
        let mut third = comm.all_gather_async(vec![rank], vec![0.0; 2]).unwrap();
        let fourth = comm.reduce_scatter_async(vec![rank; 2], vec![9.0], ReduceOp::Sum).unwrap();
        let fifth = comm.all_to_all_async(vec![rank, rank + 10.0], vec![0.0; 2]).unwrap();
        let sixth = comm.barrier_async().unwrap();
        sixth.wait().unwrap();
        assert!(third.is_done().unwrap() && third.error().unwrap().is_none());
        assert!(third.wait_for(Duration::ZERO).unwrap());
        assert_eq!(first.wait().unwrap(), vec![3.0; 10_000]);
        assert_eq!(second.wait().unwrap()[..], [1.0; 4]);
        assert_eq!(block_on(third).unwrap().1, [0.0, 1.0]);
        assert_eq!(block_on(fourth).unwrap().1, [1.0]);
        assert_eq!(fifth.wait().unwrap().1, [rank * 10.0, 1.0 + rank * 10.0]);
    });
}

#[test]
fn a_future_is_woken_when_the_peer_comes() {
    let (go, wait) = mpsc::channel();
    let wait = std::sync::Mutex::new(wait);
    ranks(2, |comm| {
        if comm.rank().unwrap() == 0 {
            let mut received = comm.recv_async(vec![0u8; 3], 1, 0).unwrap();
            assert!(!received.wait_for(Duration::from_millis(1)).unwrap());
            assert_eq!(received.error().unwrap_err().code(), Code::NotReady);
            go.send(()).unwrap();
            assert_eq!(block_on(received).unwrap(), b"abc");
        } else {
            wait.lock().unwrap().recv_timeout(deadline()).unwrap();
            comm.send(b"abc", 0, 0).unwrap();
        }
    });
}

#[test]
fn dropped_work_goes_on_and_frees_its_buffers_at_the_end() {
    struct Counted(Vec<f32>, Arc<AtomicUsize>);
    impl Drop for Counted {
        fn drop(&mut self) {
            self.1.fetch_add(1, Ordering::SeqCst);
        }
    }
    impl std::ops::Deref for Counted {
        type Target = [f32];
        fn deref(&self) -> &[f32] {
            &self.0
        }
    }
    impl std::ops::DerefMut for Counted {
        fn deref_mut(&mut self) -> &mut [f32] {
            &mut self.0
        }
    }
    // SAFETY: as for Vec.
    unsafe impl tessera::OwnedSlice for Counted {
        type Element = f32;
    }
    let freed = Arc::new(AtomicUsize::new(0));
    ranks(2, |comm| {
        if comm.rank().unwrap() == 0 {
            drop(comm.recv_async(Counted(vec![0.0; 1000], Arc::clone(&freed)), 1, 0).unwrap());
            assert_eq!(freed.load(Ordering::SeqCst), 0, "freed while the library may write to it");
            comm.barrier().unwrap();
            let until = Instant::now() + deadline();
            while freed.load(Ordering::SeqCst) == 0 && Instant::now() < until {
                thread::yield_now();
            }
            assert_eq!(freed.load(Ordering::SeqCst), 1);
        } else {
            comm.send(&[1.0f32; 1000], 0, 0).unwrap();
            comm.barrier().unwrap();
        }
    });
}

#[test]
fn dropped_work_frees_shared_buffers_too() {
    ranks(2, |comm| {
        for _ in 0..20 {
            drop(comm.all_reduce_async(comm.buffer::<f32>(1000).unwrap(), ReduceOp::Sum).unwrap());
        }
        comm.barrier().unwrap();
    });
}

#[test]
fn work_outlives_its_communicator() {
    ranks(2, |comm| {
        let mut work = if comm.rank().unwrap() == 0 {
            comm.recv_async(vec![0.0f32; 10], 1, 0).unwrap()
        } else {
            comm.all_reduce_async(vec![0.0f32; 10], ReduceOp::Sum).unwrap()
        };
        drop(comm);
        assert!(work.wait_for(deadline()).is_err());
        assert!(work.wait().is_err());
    });
}

#[test]
fn callbacks_run_once_and_their_panics_stay_inside() {
    ranks(2, |comm| {
        let (sender, receiver) = mpsc::channel();
        let mut work = comm.all_reduce_async(vec![1i32; 8], ReduceOp::Sum).unwrap();
        work.on_done(move |result| sender.send(result).unwrap());
        assert_eq!(receiver.recv_timeout(deadline()).unwrap(), Ok(()));
        assert_eq!(work.wait().unwrap(), [2; 8]);

        let mut late = comm.barrier_async().unwrap();
        assert!(late.wait_for(deadline()).unwrap());
        late.on_done(|_| panic!("a callback that panics (expected in this test)"));
        comm.barrier().unwrap();
    });
}

#[test]
fn shared_buffers_are_slices_that_collectives_take() {
    ranks(3, |comm| {
        let mut buffer = comm.buffer::<f32>(5000).unwrap();
        assert_eq!((buffer.len(), buffer[4999], buffer.as_ptr() as usize % 4096), (5000, 0.0, 0));
        buffer.fill(2.0);
        comm.all_reduce(&mut buffer, ReduceOp::Sum).unwrap();
        assert_eq!(buffer[..], [6.0; 5000]);
        let mut buffer = comm.all_reduce_async(buffer, ReduceOp::Avg).unwrap().wait().unwrap();
        assert_eq!(buffer[4999], 6.0);
        buffer[0] = 1.0;
        drop(comm);
        assert_eq!(buffer[..2], [1.0, 6.0]); // still ours
    });
}

#[test]
fn buffers_of_different_lengths_are_a_mismatch() {
    let codes = ranks(2, |comm| comm.buffer::<u8>(100 + comm.rank().unwrap() * 5000).unwrap_err().code());
    assert!(codes.contains(&Code::Mismatch), "{codes:?}");
}

#[test]
fn groups_and_meshes_divide_the_ranks() {
    ranks(4, |comm| {
        let rank = comm.rank().unwrap();
        let pair = comm.split(Some(rank % 2), 10 - rank).unwrap().unwrap();
        assert_eq!((pair.world_size().unwrap(), pair.rank().unwrap()), (2, usize::from(rank < 2)));
        let one = comm.split_with((rank == 3).then_some(0), 0, &CommOptions::new().name("one").timeout(deadline()));
        assert_eq!(one.unwrap().is_some(), rank == 3);

        let mesh = Mesh::new(&comm, &[("dp", 2), ("tp", 2)]).unwrap();
        assert_eq!((mesh.ndim().unwrap(), mesh.size("tp").unwrap()), (2, 2));
        assert_eq!((mesh.coordinate("dp").unwrap(), mesh.coordinate("tp").unwrap()), (rank / 2, rank % 2));
        let mut data = [rank as i32];
        mesh.comm("tp").unwrap().all_reduce(&mut data, ReduceOp::Sum).unwrap();
        assert_eq!(data[0], if rank < 2 { 1 } else { 5 });
        let error = mesh.comm("pp").unwrap_err();
        assert_eq!(error.code(), Code::NotFound);
        assert!(error.message().contains("dp, tp"), "{error}");
        assert_eq!(mesh.size("pp").unwrap_err().code(), Code::NotFound);

        let part = mesh.slice(&["tp"]).unwrap();
        assert_eq!((part.names(), part.comm("tp").unwrap().world_size().unwrap()), (vec!["tp"], 2));
        assert_eq!(part.comm("dp").unwrap_err().code(), Code::NotFound);
        assert_eq!(mesh.slice(&["tp", "dp"]).unwrap_err().code(), Code::InvalidArgument);
        let flat = mesh.flatten(&comm, None).unwrap();
        assert_eq!((flat.size("dp_tp").unwrap(), flat.coordinate("dp_tp").unwrap()), (4, rank));
        let named = part.flatten(&comm, Some("model")).unwrap();
        drop((mesh, flat));
        named.comm("model").unwrap().barrier().unwrap();
    });
}

#[test]
fn a_mesh_of_another_size_is_refused() {
    ranks(2, |comm| {
        let error = Mesh::new(&comm, &[("dp", 2), ("tp", 3)]).unwrap_err();
        assert_eq!(error.code(), Code::InvalidArgument);
        assert!(error.message().contains("(dp 2, tp 3) needs 6 ranks, but the communicator has 2"), "{error}");
    });
}

#[test]
fn counts_that_differ_name_the_rank_and_overwrite_nothing() {
    let errors = ranks(3, |comm| {
        let mut data = vec![1.0f32; if comm.rank().unwrap() == 2 { 11 } else { 10 }];
        let error = comm.all_reduce(&mut data, ReduceOp::Sum).unwrap_err();
        assert!(data.iter().all(|&x| x == 1.0));
        error
    });
    for error in &errors {
        let first = std::iter::successors(Some(error as &dyn std::error::Error), |e| e.source()).last().unwrap();
        assert!(matches!(error.code(), Code::Mismatch | Code::Aborted), "{error:?}");
        assert!(first.to_string().contains("11") && first.to_string().contains("10"), "{error:?}");
    }
    assert!(
        errors.iter().any(|error| error.code() == Code::Mismatch && error.message().contains("rank 2")),
        "{errors:?}"
    );
    assert!(errors.iter().any(|error| error.operation() == Some("all_reduce") && error.sequence().is_some()));
}

#[test]
fn what_the_call_cannot_take_is_refused_without_breaking_the_communicator() {
    ranks(2, |comm| {
        let mut data = [1.0f32; 4];
        assert_eq!(comm.broadcast(&mut data, 7).unwrap_err().code(), Code::InvalidArgument);
        assert_eq!(comm.broadcast(&mut data, usize::MAX).unwrap_err().code(), Code::InvalidArgument);
        assert_eq!(comm.all_gather(&[1.0f32; 4], &mut data).unwrap_err().code(), Code::InvalidArgument);
        assert_eq!(comm.all_gather_v(&[1.0f32], &mut [&mut data]).unwrap_err().code(), Code::InvalidArgument);
        assert_eq!(comm.send(&data, comm.rank().unwrap(), 0).unwrap_err().code(), Code::InvalidArgument);
        let rank = comm.rank().unwrap();
        if rank == 0 {
            assert_eq!(comm.gather(&data, None, 0).unwrap_err().code(), Code::InvalidArgument);
        }
        assert!(comm.error().unwrap().is_none());
        comm.all_reduce(&mut data, ReduceOp::Sum).unwrap();
        assert_eq!(data, [2.0; 4]);
    });
}

#[test]
fn nothing_follows_finalize() {
    ranks(2, |comm| {
        comm.finalize().unwrap();
        assert_eq!(comm.barrier().unwrap_err().code(), Code::InvalidState);
        assert_eq!(comm.all_reduce_async(vec![1.0f32], ReduceOp::Sum).unwrap_err().code(), Code::InvalidState);
    });
}

#[test]
fn any_thread_can_abort() {
    let begun = Instant::now();
    let errors = ranks(3, |comm| {
        let rank = comm.rank().unwrap();
        if rank == 2 {
            let handle = comm.abort_handle();
            thread::spawn(move || handle.abort("the watchdog barked").unwrap()).join().unwrap();
        }
        let error = comm.barrier().unwrap_err();
        assert_eq!(comm.barrier().unwrap_err().code(), Code::Aborted, "poisoned for good");
        assert!(comm.error().unwrap().is_some());
        comm.abort("again").unwrap(); // idempotent
        error
    });
    for error in errors {
        assert_eq!(error.code(), Code::Aborted);
        assert!(format!("{error:?}").contains("the watchdog barked"), "{error:?}");
    }
    assert!(begun.elapsed() < deadline());
}

#[test]
fn aborting_what_is_gone_does_nothing() {
    let comm = alone();
    let handle = comm.abort_handle();
    drop(comm);
    handle.abort("too late").unwrap();
}

#[test]
fn a_late_rank_is_named_at_the_deadline() {
    let settings = CommOptions::new().timeout(Duration::from_millis(300));
    let (done, wait) = mpsc::channel();
    let wait = std::sync::Mutex::new(wait);
    ranks_with(2, &settings, |comm| {
        if comm.rank().unwrap() == 0 {
            let error = comm.barrier().unwrap_err();
            assert_eq!((error.code(), error.peer()), (Code::Timeout, Some(1)), "{error:?}");
            assert!(error.message().contains("rank 1"), "{error}");
            done.send(()).unwrap();
        } else {
            wait.lock().unwrap().recv_timeout(deadline()).unwrap(); // never enters
        }
    });
}

#[test]
fn an_operation_keeps_the_deadline_that_it_was_issued_under() {
    let (done, wait) = mpsc::channel();
    let wait = std::sync::Mutex::new(wait);
    ranks(2, |comm| {
        comm.barrier().unwrap();
        if comm.rank().unwrap() == 0 {
            let usual = comm.timeout().unwrap();
            comm.set_timeout(Duration::from_millis(250)).unwrap();
            let work = comm.barrier_async().unwrap();
            comm.set_timeout(usual).unwrap();
            let error = work.wait().unwrap_err();
            assert_eq!((error.code(), error.peer()), (Code::Timeout, Some(1)), "{error:?}");
            assert!(error.message().contains("timed out after 0.25 s"), "{error}");
            done.send(()).unwrap();
        } else {
            wait.lock().unwrap().recv_timeout(deadline()).unwrap(); // never enters
        }
    });
}

#[test]
fn a_rank_that_never_joins_is_a_timeout() {
    let (_server, uri) = serve();
    let store = Store::open(&uri, &options()).unwrap();
    let error = Comm::create(&store, 0, 2, &CommOptions::new().timeout(Duration::from_millis(300))).unwrap_err();
    assert_eq!(error.code(), Code::Timeout, "{error:?}");
    assert!(error.message().contains('1'), "names the rank: {error}");
}

#[test]
fn a_rank_beyond_the_world_is_refused() {
    let (_server, uri) = serve();
    let store = Store::open(&uri, &options()).unwrap();
    for (rank, world) in [(2, 2), (0, 0), (0, 5000), (usize::MAX, 2)] {
        let error = Comm::create(&store, rank, world, &CommOptions::new()).unwrap_err();
        assert_eq!(error.code(), Code::InvalidArgument, "{rank} of {world}: {error}");
    }
    let error = Comm::create(&store, 0, 1, &CommOptions::new().backend("carrier pigeon")).unwrap_err();
    assert_eq!(error.code(), Code::InvalidArgument, "{error:?}");
    assert!(error.message().contains("carrier pigeon"), "{error}");
    let error = Comm::create(&store, 0, 1, &CommOptions::new().name("a\0b")).unwrap_err();
    assert_eq!(error.code(), Code::InvalidArgument);
}

#[test]
fn a_backend_for_gpus_is_unsupported_without_a_driver() {
    for backend in ["nccl", "cuda:nccl", "cpu:gloo,cuda:nccl"] {
        let error = Comm::from_env_with(&CommOptions::new().backend(backend)).unwrap_err();
        assert_eq!(error.code(), Code::Unsupported, "{error:?}");
        assert!(error.message().contains("there is no NVIDIA driver"), "{error}");
    }
}

#[test]
fn a_waiting_call_can_be_interrupted() {
    let (done, wait) = mpsc::channel();
    let wait = std::sync::Mutex::new(wait);
    ranks(2, |comm| {
        if comm.rank().unwrap() == 0 {
            let mut asked = 0;
            let error = tessera::with_interrupt(
                || {
                    asked += 1;
                    asked > 2
                },
                || comm.recv(&mut [0u8], 1, 0),
            );
            assert_eq!(error.unwrap_err().code(), Code::Interrupted);
            done.send(()).unwrap();
        } else {
            wait.lock().unwrap().recv_timeout(deadline()).unwrap();
        }
    });
}

#[test]
fn a_panic_in_the_interrupt_callback_comes_out_behind_the_call() {
    let (done, wait) = mpsc::channel();
    let wait = std::sync::Mutex::new(wait);
    ranks(2, |comm| {
        if comm.rank().unwrap() == 0 {
            let caught = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                tessera::with_interrupt(|| panic!("expected in this test"), || comm.recv(&mut [0u8], 1, 0))
            }));
            assert_eq!(*caught.unwrap_err().downcast_ref::<&str>().unwrap(), "expected in this test");
            done.send(()).unwrap();
        } else {
            wait.lock().unwrap().recv_timeout(deadline()).unwrap();
        }
    });
}

#[test]
fn one_rank_has_a_turn_while_the_others_wait() {
    let results = ranks(3, |comm| {
        let made = comm.turn(1, deadline(), |turn| {
            turn.progress(1, 2)?;
            turn.progress(2, 2)?;
            Ok::<_, tessera::Error>(7)
        });
        comm.barrier().unwrap();
        made.unwrap()
    });
    assert_eq!(results, [None, Some(7), None]);
}

#[test]
fn a_turn_that_fails_fails_everywhere() {
    let errors = ranks(2, |comm| {
        let failed = comm.turn(0, deadline(), |turn| turn.progress(2, 1));
        comm.barrier().unwrap();
        failed.unwrap_err()
    });
    assert_eq!(errors[0].code(), Code::InvalidArgument);
    assert_eq!(errors[1].code(), Code::User);
    assert!(errors[1].message().contains("rank 0 failed in its turn"), "{}", errors[1]);
    let alone = alone();
    let refused = alone.turn(1, deadline(), |_| Ok::<_, tessera::Error>(())).unwrap_err();
    assert_eq!(refused.code(), Code::InvalidArgument);
}

#[test]
fn a_turn_has_the_communicator_to_itself() {
    let alone = alone();
    let inside = alone.turn(0, deadline(), |_| {
        let inner = alone.turn(0, deadline(), |_| Ok::<_, tessera::Error>(())).unwrap_err();
        Ok::<_, tessera::Error>([inner, alone.barrier().unwrap_err()])
    });
    let [inner, used] = inside.unwrap().unwrap();
    assert_eq!((inner.code(), used.code()), (Code::InvalidState, Code::InvalidState));
    assert!(inner.message().contains("begins inside the turn of rank 0"), "{inner}");
    alone.barrier().unwrap();
}

/// Arguments that one rank refuses are refused on all; nobody waits.
#[test]
fn what_one_rank_refuses_is_refused_on_all() {
    let config = r#"{"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD"}}"#;
    ranks(3, |comm| {
        let bad = comm.rank().unwrap() == 1;
        let given = || Params::new().with(if bad { "w\0" } else { "w" }, (vec![0f32; 4], [4]));
        let mesh = Mesh::new(&comm, &[("tp", 3)]).unwrap();
        let tp = TensorParallel::builder(&mesh, given()).plan([("w", Style::Column)]).build();
        let errors = [
            Ddp::new(&comm, given()).err(),
            Fsdp::new(&comm, units!["u" => given()]).err(),
            Engine::new(&comm, [("u", given())], config).err(),
            tp.err(),
            Mesh::new(&comm, &[(if bad { "d\0" } else { "dp" }, 3)]).err(),
            comm.split(Some(if bad { usize::MAX } else { 0 }), 0).err(),
        ];
        for (i, error) in errors.into_iter().enumerate() {
            let error = error.unwrap_or_else(|| panic!("creation {i} was not refused"));
            assert_eq!(error.code(), Code::InvalidArgument, "creation {i}: {error}");
            assert_eq!(error.peer() == Some(1), !bad, "creation {i}: {error}");
        }
        if bad {
            let error = comm.refuse(Creation::Model, Code::NotFound, "no file\0here");
            assert_eq!((error.code(), error.message()), (Code::NotFound, "no file here"));
        } else {
            let error = Ddp::new(&comm, params!["w" => (vec![0f32; 4], [4])]).err().unwrap();
            assert_eq!((error.code(), error.message()), (Code::NotFound, "rank 1: no file here"));
        }
        comm.barrier().unwrap();
    });
}

/// So are options that cannot be given to C. A creation that C itself refuses is not refused twice.
#[test]
fn options_that_one_rank_refuses_are_refused_on_all() {
    let folder = tempfile::tempdir().unwrap();
    ranks(2, |comm| {
        let rank = comm.rank().unwrap();
        let bad = rank == 1;
        let (text, count) = (if bad { "a\0" } else { "a" }, if bad { usize::MAX } else { 1 });
        let given = || params!["w" => (vec![0f32; 4], [4])];
        let saver = || Saver::at(&comm, folder.path());
        let pipeline = || Pipeline::builder(&comm, &[rank]);
        let csv = if bad { pipeline().schedule_csv("0F0\0") } else { pipeline().microbatches(2) };
        let errors = [
            saver().writer(text, "1").open().err(),
            saver().writer("rust", text).open().err(),
            saver().format(if bad { "tessera\0" } else { "tessera" }).open().err(),
            saver().keep_latest(count).open().err(),
            Saver::open(&comm, folder.path().join(text)).err(),
            pipeline().microbatches(if bad { usize::MAX } else { 2 }).build().err(),
            csv.build().err(),
            Ddp::with_options(&comm, given(), &DdpOptions::new().powersgd_rank(count)).err(),
            Fsdp::with_options(&comm, units!["u" => given()], &FsdpOptions::new().shard_ranks(count)).err(),
            comm.split_with(Some(0), 0, &CommOptions::new().name(text)).err(),
        ];
        for (i, error) in errors.into_iter().enumerate() {
            let error = error.unwrap_or_else(|| panic!("creation {i} was not refused"));
            assert_eq!(error.code(), Code::InvalidArgument, "creation {i}: {error}");
            assert_eq!(error.peer() == Some(1), !bad, "creation {i}: {error}");
        }
        let unknown = saver().format(if bad { "unknown" } else { "tessera" }).open().unwrap_err();
        assert_eq!((unknown.code(), unknown.peer() == Some(1)), (Code::InvalidArgument, !bad), "{unknown}");
        comm.barrier().unwrap(); // which a second refusal would meet
        Ddp::new(&comm, given()).unwrap();
    });
}
