//! What a saver keeps, does while it is busy, tells of its progress, and when the ranks stop together.

mod common;

use std::fs;
use std::panic::{self, AssertUnwindSafe};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{mpsc, Arc, Mutex};

use common::{deadline, ranks};
use tessera::{
    params, AdamW, Checkpoint, Code, LoadOptions, Local, Phase, Progress, Saver, State, Tensor, Verify, WhenBusy,
};

fn steps(root: &Path) -> Vec<u64> {
    let saves = fs::read_dir(root).unwrap().map(|entry| entry.unwrap().path());
    let names = saves.filter(|path| path.join("manifest.json").exists());
    let mut steps: Vec<u64> =
        names.map(|path| path.to_str().unwrap().rsplit("step-").next().unwrap()[..8].parse().unwrap()).collect();
    steps.sort_unstable();
    steps
}

fn tensor(value: f32) -> Tensor {
    Tensor::new(vec![value; 3], [3]).unwrap()
}

/// A progress callback that holds the first save in the background, what says that it does, and what lets it go on.
fn gate() -> (impl Fn(Progress) + Send + Sync, mpsc::Receiver<()>, mpsc::Sender<()>) {
    let (reached, is_reached) = mpsc::channel();
    let (open, is_open) = mpsc::channel();
    let first = Mutex::new(Some((reached, is_open)));
    let hold = move |told: Progress| {
        if told.phase != Phase::Write {
            return;
        }
        let taken = first.lock().unwrap().take();
        if let Some((reached, is_open)) = taken {
            reached.send(()).unwrap();
            is_open.recv_timeout(deadline()).unwrap();
        }
    };
    (hold, is_reached, open)
}

#[test]
fn what_stays_is_the_union_of_the_newest_the_best_and_every_nth() {
    let folder = tempfile::tempdir().unwrap();
    let saver = Saver::alone(folder.path()).keep_latest(1).keep_best(1).best_metric("loss").keep_every(4);
    let saver = saver.open().unwrap();
    let weight = tensor(7.0);
    let mut state = State::new().with("weight", &weight);
    for (step, loss) in (1..).zip([0.5, 0.1, 0.4, 0.9, 0.8, 0.7]) {
        state.set_metric("loss", loss).unwrap();
        saver.save(step, &state).unwrap();
    }
    assert_eq!(steps(folder.path()), [2, 4, 6]);
    assert_eq!(Checkpoint::open(folder.path().join("best")).unwrap().step().unwrap(), 2);
}

#[test]
fn higher_may_be_better_and_what_is_open_stays() {
    let folder = tempfile::tempdir().unwrap();
    let saver = Saver::alone(folder.path()).keep_latest(1).best_metric("accuracy").best_is_higher(true).open().unwrap();
    let weight = tensor(7.0);
    let mut state = State::new().with("weight", &weight);
    let mut save = |step, accuracy| {
        state.set_metric("accuracy", accuracy).unwrap();
        saver.save(step, &state).unwrap();
    };
    save(1, 0.3);
    let first = Checkpoint::open(folder.path()).unwrap();
    save(2, 0.9);
    save(3, 0.5);
    assert_eq!(steps(folder.path()), [1, 2, 3]);
    assert_eq!(first.read("weight").unwrap().to_vec::<f32>().unwrap(), [7.0; 3]);
    drop(first);
    assert_eq!(Checkpoint::open(folder.path().join("best")).unwrap().step().unwrap(), 2);
    save(4, 0.6);
    assert_eq!(steps(folder.path()), [2, 4]);
}

#[test]
fn options_that_cannot_be_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let saver = || Saver::alone(folder.path());
    for (builder, word) in [
        (saver().keep_best(2), "best_metric"),
        (saver().keep_every(5), "keep_latest"),
        (saver().keep_every(u64::MAX).keep_latest(1), "keep_every"),
        (saver().staging_bytes(1), "staging_bytes is 1"),
        (saver().write_bytes_per_s(u64::MAX), "write_bytes_per_s"),
    ] {
        let error = builder.open().unwrap_err();
        assert_eq!(error.code(), Code::InvalidArgument);
        assert!(error.to_string().contains(word), "{error}");
    }
}

#[test]
fn a_busy_saver_can_refuse() {
    let folder = tempfile::tempdir().unwrap();
    let (hold, reached, open) = gate();
    let saver = Saver::alone(folder.path()).when_busy(WhenBusy::Refuse).progress(hold).open().unwrap();
    let weight = tensor(7.0);
    let state = State::new().with("weight", &weight);
    let save = saver.save_async(1, &state).unwrap();
    reached.recv_timeout(deadline()).unwrap();
    assert_eq!(saver.save_async(2, &state).unwrap_err().code(), Code::NotReady);
    open.send(()).unwrap();
    save.wait().unwrap();
    saver.wait().unwrap();
    saver.save_async(3, &state).unwrap().wait().unwrap();
    assert_eq!(steps(folder.path()), [1, 3]);
}

#[test]
fn a_newer_save_can_replace_the_one_that_waits() {
    let folder = tempfile::tempdir().unwrap();
    let (hold, reached, open) = gate();
    let saver = Saver::alone(folder.path()).when_busy(WhenBusy::Replace).progress(hold).open().unwrap();
    let weight = tensor(7.0);
    let state = State::new().with("weight", &weight);
    let first = saver.save_async(1, &state).unwrap();
    reached.recv_timeout(deadline()).unwrap();
    let second = saver.save_async(2, &state).unwrap();
    let third = saver.save_async(3, &state).unwrap();
    assert_eq!(second.wait().unwrap_err().code(), Code::Aborted);
    open.send(()).unwrap();
    first.wait().unwrap();
    third.wait().unwrap();
    assert_eq!(steps(folder.path()), [1, 3]);
}

#[test]
fn a_state_larger_than_the_staging_memory_goes_through_it_as_a_ring() {
    let folder = tempfile::tempdir().unwrap();
    let values: Vec<f32> = (0..6 << 20).map(|i| i as f32).collect(); // 24 MiB
    let weight = Tensor::new(values.clone(), [6 << 20]).unwrap();
    let mut state = State::new().with("weight", &weight);
    let saver = Saver::alone(folder.path()).staging_bytes(8 << 20).write_bytes_per_s(1 << 30).low_priority(true);
    let saver = saver.open().unwrap();
    let save = saver.save_async(1, &state).unwrap();
    weight.view_mut::<f32>().unwrap().fill(-1.0); // the copy is made
    save.wait().unwrap();
    saver.trim().unwrap();
    assert_eq!(saver.resume(&mut state).unwrap(), 1);
    assert!(weight.to_vec::<f32>().unwrap() == values);
}

/// The nice value of the calling thread: the 19th field of its state, the 17th behind its name.
fn niceness() -> i32 {
    let stat = fs::read_to_string("/proc/thread-self/stat").unwrap();
    stat.rsplit_once(") ").unwrap().1.split(' ').nth(16).unwrap().parse().unwrap()
}

#[test]
fn low_priority_is_that_of_the_threads_that_write() {
    for low in [false, true] {
        let folder = tempfile::tempdir().unwrap();
        let told = Arc::new(Mutex::new(Vec::new()));
        let tell = told.clone();
        let saver = Saver::alone(folder.path()).low_priority(low).progress(move |progress: Progress| {
            if progress.phase == Phase::Write {
                tell.lock().unwrap().push(niceness());
            }
        });
        let saver = saver.open().unwrap();
        let weight = tensor(7.0);
        saver.save_async(1, &State::new().with("weight", &weight)).unwrap().wait().unwrap();
        let mut told = std::mem::take(&mut *told.lock().unwrap());
        told.dedup();
        assert_eq!(told, [if low { niceness().max(10) } else { niceness() }]);
    }
}

#[test]
fn what_an_optimizer_owns_is_copied_before_its_next_step_changes_it() {
    let folder = tempfile::tempdir().unwrap();
    let (hold, reached, open) = gate();
    let mut model = Local::new(params!["w" => (vec![1.0f32; 1 << 20], [1 << 20])]).unwrap();
    let mut opt = AdamW::new(&mut model).build().unwrap();
    let state = State::new().with("model", &model).with("optim", &opt);
    // SAFETY: the optimizer alone writes the parameters.
    let saver = unsafe { Saver::alone(folder.path()).copy_on_demand(true) };
    let saver = saver.when_busy(WhenBusy::Replace).progress(hold).open().unwrap();
    saver.save_async(1, &state).unwrap();
    reached.recv_timeout(deadline()).unwrap();
    model.grad_mut(0).unwrap().fill(1.0);
    opt.step().unwrap();
    let expected = model.param(0).unwrap().to_vec();
    saver.save_async(2, &state).unwrap(); // waits for the first one, so that nothing of it is copied in the background
    opt.step().unwrap();
    assert!(model.param(0).unwrap().to_vec() != expected);
    open.send(()).unwrap();
    saver.wait().unwrap();
    let checkpoint = Checkpoint::open(folder.path()).unwrap();
    assert_eq!(checkpoint.step().unwrap(), 2);
    assert!(checkpoint.read("model.w").unwrap().to_vec::<f32>().unwrap() == expected);
}

#[test]
fn what_is_written_after_the_first_fence_is_not_saved() {
    let folder = tempfile::tempdir().unwrap();
    let (hold, _reached, open) = gate(); // holds the save before its first byte
    let mut model = Local::new(params!["w" => (vec![1.0f32; 1 << 20], [1 << 20])]).unwrap();
    let opt = AdamW::new(&mut model).build().unwrap();
    let state = State::new().with("model", &model).with("optim", &opt);
    // SAFETY: nobody writes the parameters until all is staged.
    let saver = unsafe { Saver::alone(folder.path()).copy_on_demand(true) };
    let saver = saver.progress(hold).open().unwrap();
    let mut save = saver.save_async(1, &state).unwrap();
    assert!(save.staged().wait_for(deadline()).unwrap());
    assert!(!save.is_done().unwrap());
    model.param_mut(0).unwrap().fill(-1.0);
    open.send(()).unwrap();
    save.wait().unwrap();
    let saved = Checkpoint::open(folder.path()).unwrap().read("model.w").unwrap().to_vec::<f32>().unwrap();
    assert!(saved.iter().all(|&x| x == 1.0));
}

/// The phases of what was told, in order; each has to go from nothing to all.
fn phases(told: &Mutex<Vec<Progress>>) -> Vec<Phase> {
    let told = std::mem::take(&mut *told.lock().unwrap());
    let of_phases: Vec<&[Progress]> = told.chunk_by(|a, b| a.phase == b.phase).collect();
    for of_phase in &of_phases {
        let total = of_phase[0].total;
        assert_eq!(total == 0, of_phase[0].phase == Phase::Commit);
        assert!(of_phase[0].done == 0 && of_phase[of_phase.len() - 1].done == total);
        assert!(of_phase.windows(2).all(|two| two[0].done <= two[1].done && two[1].total == total));
    }
    of_phases.iter().map(|of_phase| of_phase[0].phase).collect()
}

#[test]
fn progress_is_told_from_nothing_to_all_in_each_phase() {
    let folder = tempfile::tempdir().unwrap();
    let told = Arc::new(Mutex::new(Vec::new()));
    let kept = Arc::clone(&told);
    let saver = Saver::alone(folder.path()).progress(move |now| kept.lock().unwrap().push(now)).open().unwrap();
    let weight = tensor(7.0);
    let mut state = State::new().with("weight", &weight);
    saver.save(1, &state).unwrap();
    assert_eq!(phases(&told), [Phase::Write, Phase::Commit]);
    saver.save_async(2, &state).unwrap();
    saver.wait().unwrap();
    assert_eq!(phases(&told), [Phase::Stage, Phase::Write, Phase::Commit]);
    assert_eq!(saver.resume(&mut state).unwrap(), 2);
    assert_eq!(phases(&told), [Phase::Read]);
    let checkpoint = Checkpoint::open(folder.path()).unwrap();
    let mut note = |now| told.lock().unwrap().push(now);
    checkpoint.load_with_progress(&mut state, &LoadOptions::new(), &mut note).unwrap();
    assert_eq!(phases(&told), [Phase::Read]);
    checkpoint.verify_with_progress(Verify::Full, &mut note).unwrap();
    assert_eq!(phases(&told), [Phase::Verify]);
    drop(saver);
    assert_eq!(Arc::strong_count(&told), 1, "the callback was freed");
}

#[test]
fn a_panic_of_a_callback_comes_back_and_the_call_has_done_its_work() {
    for phase in [Phase::Stage, Phase::Write, Phase::Commit, Phase::Read, Phase::Verify] {
        let folder = tempfile::tempdir().unwrap();
        let panicked = Arc::new(AtomicBool::new(false));
        let callback = |panicked: Arc<AtomicBool>| {
            move |told: Progress| {
                if told.phase == phase && !panicked.swap(true, Ordering::SeqCst) {
                    panic::panic_any(phase);
                }
            }
        };
        let weight = tensor(7.0);
        let payload = panic::catch_unwind(AssertUnwindSafe(|| {
            let mut state = State::new().with("weight", &weight);
            let saver = Saver::alone(folder.path()).progress(callback(Arc::clone(&panicked))).open().unwrap();
            let mut saved = panic::catch_unwind(AssertUnwindSafe(|| saver.save_async(1, &state).map(drop)));
            if saved.is_ok() {
                saved = panic::catch_unwind(AssertUnwindSafe(|| saver.wait()));
            }
            saver.wait().unwrap(); // it is told once
            if let Err(payload) = saved {
                panic::resume_unwind(payload);
            }
            weight.view_mut::<f32>().unwrap().fill(-1.0);
            let checkpoint = Checkpoint::open(folder.path()).unwrap();
            let mut watch = callback(Arc::clone(&panicked));
            checkpoint.load_with_progress(&mut state, &LoadOptions::new(), &mut watch).unwrap();
            checkpoint.verify_with_progress(Verify::Full, &mut watch).unwrap();
        }))
        .unwrap_err();
        assert_eq!(payload.downcast_ref(), Some(&phase));
        assert_eq!(steps(folder.path()), [1]);
        assert_eq!(weight.to_vec::<f32>().unwrap(), [7.0; 3]);
    }
}

#[test]
fn what_the_library_says_comes_before_a_panic_of_a_callback() {
    let folder = tempfile::tempdir().unwrap();
    let weight = tensor(7.0);
    Saver::alone(folder.path()).open().unwrap().save(1, &State::new().with("weight", &weight)).unwrap();
    let checkpoint = Checkpoint::open(folder.path()).unwrap();
    let file = fs::read_dir(checkpoint.path().unwrap())
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .find(|path| path.extension().is_some_and(|ending| ending == "safetensors"))
        .unwrap();
    let mut bytes = fs::read(&file).unwrap();
    bytes.push(0);
    fs::write(&file, bytes).unwrap();
    let error = checkpoint.verify_with_progress(Verify::Full, |_| panic!("expected in this test")).unwrap_err();
    assert_eq!(error.code(), Code::Corrupt);
}

#[test]
fn ranks_that_hold_others_are_told_where_it_is_asked_for() {
    let folder = tempfile::tempdir().unwrap();
    ranks(2, |comm| {
        let saver = Saver::at(&comm, folder.path()).check_replicas(true).open().unwrap();
        let weight = tensor(comm.rank().unwrap() as f32);
        let error = saver.save(1, &State::new().with("w", &weight)).unwrap_err();
        assert_eq!(error.code(), Code::Mismatch);
        assert!(error.to_string().contains("tensor 'w' differs"), "{error}");
        assert!(error.to_string().contains("rank 1 differs from rank 0"), "{error}");
        saver.save(1, &State::new().with("w", &tensor(1.0))).unwrap();
    });
}

#[test]
fn all_ranks_stop_at_the_same_step_when_one_is_told() {
    let folder = tempfile::tempdir().unwrap();
    let stops = ranks(3, |comm| {
        let saver = Saver::open(&comm, folder.path()).unwrap();
        let told = |step| step == 3 && comm.rank().unwrap() == 1;
        (1..6).map(|step| saver.should_stop(step, told(step)).unwrap()).collect::<Vec<_>>()
    });
    assert_eq!(stops, vec![vec![false, false, true, true, true]; 3]);
}

#[test]
fn ranks_that_ask_at_different_steps_are_told_so() {
    let folder = tempfile::tempdir().unwrap();
    ranks(2, |comm| {
        let saver = Saver::open(&comm, folder.path()).unwrap();
        let error = saver.should_stop(5 + comm.rank().unwrap() as u64, false).unwrap_err();
        assert_eq!(error.code(), Code::Mismatch);
        assert!(error.to_string().contains("5 to 6"), "{error}");
    });
}
