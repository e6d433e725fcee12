//! Sums the ranks' numbers: `cargo run --example all_reduce`, or `tessera run -n 4 target/debug/examples/all_reduce`.

use tessera::{Comm, ReduceOp};

fn main() -> tessera::Result<()> {
    let comm = Comm::from_env()?;
    let (rank, world) = (comm.rank()?, comm.world_size()?);
    let mut numbers = vec![rank as f32 + 1.0; 1 << 20];
    comm.all_reduce(&mut numbers, ReduceOp::Sum)?;
    println!("rank {rank} of {world} over {}: {} times {}", comm.transport()?, numbers.len(), numbers[0]);
    comm.finalize()
}
