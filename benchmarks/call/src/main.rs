//! What a call takes through the Rust binding: call.cc, in Rust.

use std::time::Instant;

use tessera::{Collective, Comm, ReduceOp};

const CALLS: u32 = 200_000;

fn main() -> tessera::Result<()> {
    let comm = Comm::from_env()?;
    let mut values = [0.0f32; 2];
    let mut plan = comm.prepare(Collective::AllReduce, vec![], vec![vec![0.0f32; 2]], ReduceOp::Sum, 0)?;
    let (mut planned, mut plain) = (f64::MAX, f64::MAX);
    for _ in 0..15 {
        planned = planned.min(nanoseconds(|| plan.run())?);
        plain = plain.min(nanoseconds(|| comm.all_reduce(&mut values, ReduceOp::Sum))?);
    }
    println!("{{\"plan\": {planned:.2}, \"all_reduce\": {plain:.2}}}");
    drop(plan);
    comm.finalize()
}

fn nanoseconds(mut call: impl FnMut() -> tessera::Result<()>) -> tessera::Result<f64> {
    let begin = Instant::now();
    for _ in 0..CALLS {
        call()?;
    }
    Ok(begin.elapsed().as_nanos() as f64 / f64::from(CALLS))
}
