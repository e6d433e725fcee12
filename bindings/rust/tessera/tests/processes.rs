//! Ranks as processes, and what happens when one ends. Without the usual harness: this program is also the ranks that it
//! starts (`TESSERA_TEST_RANK` says as what), and what counts may come after `main` has returned.

mod common;

use std::env;
use std::io::Read;
use std::panic;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, Output, Stdio};
use std::time::{Duration, Instant};

use common::{deadline, patience};
use tessera::{Checkpoint, Code, Comm, CommOptions, DType, ReduceOp, Saver, State, Store, StoreOptions, Tensor};

const ROLE: &str = "TESSERA_TEST_RANK";
const FOLDER: &str = "TESSERA_TEST_FOLDER";

fn main() -> ExitCode {
    match env::var(ROLE).as_deref() {
        Ok("saves") => saves(),
        Ok("exits") => exits(),
        Ok("fills_the_disk") => fills_the_disk(),
        Ok("reduces") => reduces(),
        Ok("fails") => fails(),
        Ok("is_stopped") => is_stopped(),
        Ok("dies") => dies(),
        Ok("returns_an_error") => exit_of(tessera::record(returns_an_error)),
        Ok("returns_our_error") => exit_of(tessera::record(returns_our_error)),
        Ok("panics") => exit_of(tessera::record(panics)),
        Ok("recovers") => exit_of(tessera::record(recovers)),
        Ok("finalizes_twice") => exit_of(finalizes_twice()),
        Ok("opens_nothing") => exit_of(tessera::record(opens_nothing)),
        _ => tests(),
    }
}

fn tests() -> ExitCode {
    let tests: [(&str, fn()); 9] = [
        ("a_save_in_flight_survives_the_end_of_main", a_save_in_flight_survives_the_end_of_main),
        ("a_save_in_flight_survives_an_exit_without_drops", a_save_in_flight_survives_an_exit_without_drops),
        ("a_full_disk_leaves_the_former_checkpoint", a_full_disk_leaves_the_former_checkpoint),
        ("a_killed_rank_is_named_within_seconds", a_killed_rank_is_named_within_seconds),
        ("ranks_of_the_launcher_reduce", ranks_of_the_launcher_reduce),
        ("an_error_reaches_the_launchers_summary", an_error_reaches_the_launchers_summary),
        ("a_recorded_program_tells_how_it_failed", a_recorded_program_tells_how_it_failed),
        ("a_recorded_program_keeps_its_exit_code_and_message", a_recorded_program_keeps_its_exit_code_and_message),
        ("a_rank_learns_that_it_shall_stop", a_rank_learns_that_it_shall_stop),
    ];
    let filter = env::args().skip(1).find(|argument| !argument.starts_with('-')).unwrap_or_default();
    let (mut passed, mut failed) = (0, 0);
    for (name, test) in tests.into_iter().filter(|(name, _)| name.contains(&filter)) {
        let outcome = panic::catch_unwind(test);
        println!("test {name} ... {}", if outcome.is_ok() { "ok" } else { "FAILED" });
        *if outcome.is_ok() { &mut passed } else { &mut failed } += 1;
    }
    let verdict = if failed == 0 { "ok" } else { "FAILED" };
    println!("\ntest result: {verdict}. {passed} passed; {failed} failed; 0 ignored");
    ExitCode::from(u8::from(failed > 0))
}

fn as_rank(role: &str) -> Command {
    let mut command = Command::new(env::current_exe().unwrap());
    command.env(ROLE, role);
    command
}

// A program that returns from `main` while its last checkpoint is being written does not lose it.

fn a_save_in_flight_survives_the_end_of_main() {
    let folder = tempfile::tempdir().unwrap();
    for round in 0..5 {
        let root = folder.path().join(round.to_string());
        assert!(as_rank("saves").env(FOLDER, &root).status().unwrap().success());
        assert_eq!(Checkpoint::open(&root).unwrap().step().unwrap(), 9);
    }
}

fn saves() -> ExitCode {
    let big = Tensor::zeros(DType::F32, [4 << 20]).unwrap();
    let saver = Saver::alone(env::var(FOLDER).unwrap()).open().unwrap();
    saver.save_async(9, &State::new().with("big", &big)).unwrap();
    ExitCode::SUCCESS
}

// The limit on the size of a file stands for the disk: writes beyond it are refused by the system.

fn a_full_disk_leaves_the_former_checkpoint() {
    let folder = tempfile::tempdir().unwrap();
    let mut limited = Command::new("bash");
    limited.args(["-c", "trap '' XFSZ && ulimit -f 2048 && exec \"$0\""]).arg(env::current_exe().unwrap());
    let output = limited.env(ROLE, "fills_the_disk").env(FOLDER, folder.path()).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(Checkpoint::open(folder.path()).unwrap().step().unwrap(), 3);
}

fn fills_the_disk() -> ExitCode {
    let root = env::var(FOLDER).unwrap();
    let saver = Saver::alone(&root).open().unwrap();
    let small = Tensor::new(vec![1.0f32; 10], [10]).unwrap();
    saver.save(1, &State::new().with("w", &small)).unwrap();
    let big = State::new().with("w", &Tensor::zeros(DType::F32, [4 << 20]).unwrap());
    let at_once = saver.save(2, &big).unwrap_err();
    saver.save_async(2, &big).unwrap();
    let in_the_background = saver.wait().unwrap_err();
    for error in [at_once, in_the_background] {
        assert_eq!(error.code(), Code::Io, "{error:?}");
        assert!(error.message().contains(&root), "names the path: {error}");
    }
    let zeros = Tensor::zeros(DType::F32, [10]).unwrap();
    assert_eq!(saver.resume(&mut State::new().with("w", &zeros)).unwrap(), 1);
    assert_eq!(zeros.to_vec::<f32>().unwrap(), [1.0; 10]);
    saver.save(3, &State::new().with("w", &zeros)).unwrap();
    ExitCode::SUCCESS
}

// A rank that dies is named by the others long before any deadline.

fn joined(rank: usize) -> (Store, Comm) {
    let options = StoreOptions::new().token("5a".repeat(32)).timeout(deadline());
    let store = Store::open(&format!("file://{}", env::var(FOLDER).unwrap()), &options).unwrap();
    let comm = Comm::create(&store, rank, 2, &CommOptions::new().timeout(10 * deadline())).unwrap();
    (store, comm)
}

fn a_killed_rank_is_named_within_seconds() {
    let folder = tempfile::tempdir().unwrap();
    env::set_var(FOLDER, folder.path()); // no other thread runs here
    let mut peer = as_rank("dies").spawn().unwrap();
    let (_store, comm) = joined(0);
    let mut work = comm.all_reduce_async(vec![1.0f32; 1000], ReduceOp::Sum).unwrap();
    peer.kill().unwrap(); // SIGKILL
    peer.wait().unwrap();
    let died = Instant::now();
    let error = work.wait_for(deadline()).unwrap_err();
    assert_eq!((error.code(), error.peer()), (Code::PeerLost, Some(1)), "{error:?}");
    assert!(died.elapsed() < patience(Duration::from_secs(3)), "noticed after {:?}", died.elapsed());
    assert_eq!(comm.barrier().unwrap_err().code(), Code::Aborted);
}

fn dies() -> ExitCode {
    let (_store, comm) = joined(1);
    let error = comm.recv(&mut [0u8], 0, 0); // nobody sends
    panic!("not killed: {error:?}");
}

// Under `tessera run`.

/// `tessera run` as it was installed, or as `./dev build` put it into this repository.
fn a_save_in_flight_survives_an_exit_without_drops() {
    let folder = tempfile::tempdir().unwrap();
    let rank = as_rank("exits").env(FOLDER, folder.path()).output().unwrap();
    assert!(rank.status.success() && rank.stderr.is_empty(), "{}", String::from_utf8_lossy(&rank.stderr));
    assert_eq!(Checkpoint::open(folder.path()).unwrap().step().unwrap(), 9);
}

fn exits() -> ExitCode {
    let big = Tensor::zeros(DType::F32, [4 << 20]).unwrap();
    let saver = Saver::alone(env::var(FOLDER).unwrap()).write_bytes_per_s(32 << 20).open().unwrap(); // half a second
    saver.save_async(9, &State::new().with("big", &big)).unwrap();
    std::process::exit(0)
}

fn launcher() -> Command {
    let repository = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../build/prefix");
    let prefixes = env::var_os("TESSERA_PREFIX").map(PathBuf::from).into_iter().chain([repository]);
    let mut places: Vec<_> = prefixes.flat_map(|prefix| [prefix.join("bin"), prefix]).collect();
    places.extend(env::split_paths(&env::var_os("PATH").unwrap_or_default()));
    let file = places.iter().map(|place| place.join("tessera")).find(|file| file.is_file());
    let mut command = Command::new(file.unwrap_or_else(|| panic!("no command `tessera` in any of {places:?}")));
    command.arg("run");
    command
}

fn run(ranks: &str, role: &str, folder: &Path) -> Output {
    let program = env::current_exe().unwrap();
    launcher().args(["-n", ranks]).arg(program).env(ROLE, role).env(FOLDER, folder).output().unwrap()
}

fn ranks_of_the_launcher_reduce() {
    let output = run("3", "reduces", Path::new("."));
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success(), "{text}");
    assert_eq!(text.lines().filter(|line| line.ends_with("of 3: 6")).count(), 3, "{text}");
}

fn reduces() -> ExitCode {
    let comm = Comm::from_env().unwrap();
    let mut data = [comm.rank().unwrap() + 1].map(|x| x as i64);
    comm.all_reduce(&mut data, ReduceOp::Sum).unwrap();
    println!("{} of {}: {}", comm.rank().unwrap(), comm.world_size().unwrap(), data[0]);
    comm.finalize().unwrap();
    ExitCode::SUCCESS
}

fn an_error_reaches_the_launchers_summary() {
    let output = run("2", "fails", Path::new("."));
    let text = String::from_utf8(output.stderr).unwrap();
    assert!(!output.status.success());
    assert!(text.contains("the data set is empty"), "{text}");
}

fn fails() -> ExitCode {
    let comm = Comm::from_env().unwrap();
    if comm.rank().unwrap() == 1 {
        tessera::record_error("the data set is empty", None).unwrap();
        return ExitCode::from(3);
    }
    let _ = comm.barrier(); // never complete
    ExitCode::from(4)
}

fn a_recorded_program_tells_how_it_failed() {
    for (role, told) in [
        ("returns_an_error", &["invalid digit found in string", "ParseIntError"][..]),
        ("returns_our_error", &["INVALID_ARGUMENT", "root", "7"]),
        ("panics", &["panicked at", "processes.rs:", "the loss is NaN"]),
        ("recovers", &["after a panic that was caught"]),
    ] {
        let output = run("2", role, Path::new("."));
        let text = String::from_utf8(output.stderr).unwrap();
        let summary = &text[text.find("the job failed").unwrap_or_else(|| panic!("{role}: {text}"))..];
        assert!(!output.status.success(), "{role}: {text}");
        // It ended with exit code 1, or was ended before it came to that.
        assert!(summary.starts_with("the job failed: rank 1 "), "{role}: {text}");
        told.iter().for_each(|part| assert!(summary.contains(part), "{role}: no {part:?} in {text}"));
    }
}

fn exit_of<E: std::fmt::Debug>(outcome: Result<(), E>) -> ExitCode {
    std::process::Termination::report(outcome)
}

fn fail_on_rank_1<E>(fail: impl FnOnce(&Comm) -> Result<(), E>) -> Result<(), E> {
    let comm = Comm::from_env().unwrap();
    match comm.rank().unwrap() {
        _ if comm.world_size().unwrap() == 1 => fail(&comm),
        1 => fail(&comm),
        _ => {
            let _ = comm.barrier(); // never complete
            Ok(())
        }
    }
}

fn returns_an_error() -> Result<(), Box<dyn std::error::Error>> {
    fail_on_rank_1(|_| Ok("x".parse::<u8>().map(drop)?))
}

fn returns_our_error() -> tessera::Result<()> {
    fail_on_rank_1(|comm| comm.broadcast(&mut [0f32], 7))
}

fn finalizes_twice() -> tessera::Result<()> {
    let comm = Comm::from_env()?;
    comm.finalize()?;
    comm.finalize()
}

fn opens_nothing() -> tessera::Result<()> {
    Checkpoint::open("no/such/checkpoint").map(drop)
}

fn panics() -> tessera::Result<()> {
    fail_on_rank_1(|_| panic!("the loss is NaN"))
}

fn recovers() -> Result<(), String> {
    fail_on_rank_1(|_| {
        let _ = panic::catch_unwind(|| panic!("caught by the program"));
        Err("after a panic that was caught".to_owned())
    })
}

fn a_recorded_program_keeps_its_exit_code_and_message() {
    for (role, code, told) in [
        ("returns_our_error", 1, "Error: INVALID_ARGUMENT"),
        ("panics", 101, "the loss is NaN"),
        ("finalizes_twice", 1, "is already finalized"), // told without `record`
        ("opens_nothing", 1, "Error: NOT_FOUND"),       // before it joins
        ("reduces", 0, ""),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("error.json");
        let rank = as_rank(role).env("TESSERA_ERROR_FILE", &file).output().unwrap();
        let text = String::from_utf8(rank.stderr).unwrap();
        assert_eq!(rank.status.code(), Some(code), "{role}: {text}");
        assert!(text.contains(told), "{role}: {text}");
        assert_eq!(file.exists(), code != 0, "{role}");
    }
}

fn a_rank_learns_that_it_shall_stop() {
    let folder = tempfile::tempdir().unwrap();
    let mut command = launcher();
    command.args(["-n", "1"]).arg(env::current_exe().unwrap()).env(ROLE, "is_stopped").env(FOLDER, folder.path());
    let mut agent = command.stdout(Stdio::piped()).spawn().unwrap();
    until(&mut agent, || folder.path().join("started").exists());
    assert!(Command::new("kill").args(["-TERM", &agent.id().to_string()]).status().unwrap().success());
    let mut text = String::new();
    agent.stdout.take().unwrap().read_to_string(&mut text).unwrap();
    agent.wait().unwrap();
    assert!(text.contains("stopping as asked"), "{text}");
}

fn is_stopped() -> ExitCode {
    let comm = Comm::from_env().unwrap();
    std::fs::write(Path::new(&env::var(FOLDER).unwrap()).join("started"), "").unwrap();
    let begun = Instant::now();
    while !tessera::preempt_requested() {
        assert!(begun.elapsed() < deadline(), "never asked to stop");
        comm.barrier().unwrap();
        std::thread::yield_now();
    }
    println!("stopping as asked");
    comm.finalize().unwrap();
    ExitCode::SUCCESS
}

fn until(process: &mut Child, mut condition: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !condition() {
        assert!(begun.elapsed() < deadline() && process.try_wait().unwrap().is_none());
        std::thread::yield_now();
    }
}
