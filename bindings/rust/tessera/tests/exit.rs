//! A program that ends while its last checkpoint is still being written does not lose it. Without the test harness, since
//! what counts is what happens after `main` has returned.

use std::process::Command;

use tessera::{Checkpoint, DType, Saver, State, Tensor};

fn main() {
    const ROOT: &str = "TESSERA_TEST_EXIT_ROOT";
    if let Some(root) = std::env::var_os(ROOT) {
        let big = Tensor::zeros(DType::F32, [4 << 20]).unwrap();
        let saver = Saver::alone(root).open().unwrap();
        saver.save_async(9, &State::new().with("big", &big)).unwrap();
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    for round in 0..5 {
        let root = folder.path().join(round.to_string());
        let program = std::env::current_exe().unwrap();
        assert!(Command::new(program).env(ROOT, &root).status().unwrap().success());
        assert_eq!(Checkpoint::open(&root).unwrap().step().unwrap(), 9);
    }
    println!("test a_save_in_flight_survives_the_end_of_main ... ok");
}
