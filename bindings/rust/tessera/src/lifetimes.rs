//! What the compiler has to refuse. Each block that must not compile follows one that does and differs in one line.
//!
//! A model, its optimizer and a state are gone before the communicator that they use:
//!
//! ```
//! use tessera::{params, Comm, Ddp, Sgd, State};
//! fn main() -> tessera::Result<()> {
//!     let comm = Comm::from_env()?;
//!     let mut ddp = Ddp::new(&comm, params!["w" => (vec![0.0f32], [1])])?;
//!     let opt = Sgd::new(&mut ddp).build()?;
//!     let state = State::new().with("model", &ddp).with("optim", &opt);
//!     drop(state);
//!     drop(opt);
//!     drop(ddp);
//!     drop(comm);
//!     Ok(())
//! }
//! ```
//!
//! ```compile_fail,E0505
//! use tessera::{params, Comm, Ddp};
//! fn main() -> tessera::Result<()> {
//!     let comm = Comm::from_env()?;
//!     let ddp = Ddp::new(&comm, params!["w" => (vec![0.0f32], [1])])?;
//!     drop(comm);
//!     Ok(())
//! }
//! ```
//!
//! ```compile_fail,E0505
//! use tessera::{params, Comm, Ddp, Sgd};
//! fn main() -> tessera::Result<()> {
//!     let comm = Comm::from_env()?;
//!     let mut ddp = Ddp::new(&comm, params!["w" => (vec![0.0f32], [1])])?;
//!     let opt = Sgd::new(&mut ddp).build()?;
//!     drop(ddp);
//!     drop(comm);
//!     Ok(())
//! }
//! ```
//!
//! ```compile_fail,E0505
//! use tessera::{params, Comm, Ddp, Sgd};
//! fn main() -> tessera::Result<()> {
//!     let comm = Comm::from_env()?;
//!     let mut ddp = Ddp::new(&comm, params!["w" => (vec![0.0f32], [1])])?;
//!     let builder = Sgd::new(&mut ddp);
//!     drop(ddp);
//!     drop(comm);
//!     Ok(())
//! }
//! ```
//!
//! ```compile_fail,E0505
//! use tessera::{params, Comm, Ddp, State};
//! fn main() -> tessera::Result<()> {
//!     let comm = Comm::from_env()?;
//!     let ddp = Ddp::new(&comm, params!["w" => (vec![0.0f32], [1])])?;
//!     let state = State::new().with("model", &ddp);
//!     drop(ddp);
//!     drop(comm);
//!     Ok(())
//! }
//! ```
//!
//! Nor what an object of the program's in a state borrows:
//!
//! ```compile_fail,E0597
//! use std::{cell::RefCell, rc::Rc};
//! use tessera::{CallbackResult, State, StateDict, Stateful};
//! struct Counter<'a>(&'a i64);
//! impl Stateful for Counter<'_> {
//!     fn state_dict(&self) -> CallbackResult<StateDict> {
//!         Ok(StateDict::from([("count".to_owned(), (*self.0).into())]))
//!     }
//!     fn load_state_dict(&mut self, _: StateDict) -> CallbackResult<()> {
//!         Ok(())
//!     }
//! }
//! fn main() -> tessera::Result<()> {
//!     let mut state = State::new();
//!     {
//!         let count = 3;
//!         state.add("counter", &Rc::new(RefCell::new(Counter(&count))))?;
//!     }
//!     assert_eq!(state.get_int("counter.count")?, 3);
//!     Ok(())
//! }
//! ```
//!
//! Nor is the communicator moved to another thread meanwhile, although it may be before:
//!
//! ```
//! use tessera::{params, Comm, Ddp};
//! fn main() -> tessera::Result<()> {
//!     let comm = Comm::from_env()?;
//!     drop(Ddp::new(&comm, params!["w" => (vec![0.0f32], [1])])?);
//!     std::thread::spawn(move || comm.barrier()).join().unwrap()
//! }
//! ```
//!
//! ```compile_fail,E0505
//! use tessera::{params, Comm, Ddp};
//! fn main() -> tessera::Result<()> {
//!     let comm = Comm::from_env()?;
//!     let ddp = Ddp::new(&comm, params!["w" => (vec![0.0f32], [1])])?;
//!     std::thread::spawn(move || comm.barrier()).join().unwrap()
//! }
//! ```
//!
//! Two threads do not share a communicator; one may abort what waits in another:
//!
//! ```
//! fn main() -> tessera::Result<()> {
//!     let comm = tessera::Comm::from_env()?;
//!     let handle = comm.abort_handle();
//!     std::thread::scope(|scope| scope.spawn(|| handle.abort("enough")).join().unwrap())
//! }
//! ```
//!
//! ```compile_fail,E0277
//! fn main() -> tessera::Result<()> {
//!     let comm = tessera::Comm::from_env()?;
//!     std::thread::scope(|scope| scope.spawn(|| comm.abort("enough")).join().unwrap())
//! }
//! ```
//!
//! Work owns its buffers; it cannot borrow them:
//!
//! ```
//! use tessera::{Comm, ReduceOp};
//! fn main() -> tessera::Result<()> {
//!     let data = vec![1.0f32; 4];
//!     Comm::from_env()?.all_reduce_async(data, ReduceOp::Sum)?.wait().map(drop)
//! }
//! ```
//!
//! ```compile_fail,E0277
//! use tessera::{Comm, ReduceOp};
//! fn main() -> tessera::Result<()> {
//!     let mut data = vec![1.0f32; 4];
//!     Comm::from_env()?.all_reduce_async(&mut data[..], ReduceOp::Sum)?.wait().map(drop)
//! }
//! ```
//!
//! A callback that outlives the call owns what it uses:
//!
//! ```
//! fn main() -> tessera::Result<()> {
//!     let count = std::sync::Arc::new(std::sync::Mutex::new(0));
//!     tessera::Comm::from_env()?.barrier_async()?.on_done(move |_| *count.lock().unwrap() += 1);
//!     Ok(())
//! }
//! ```
//!
//! ```compile_fail,E0597
//! fn main() -> tessera::Result<()> {
//!     let count = std::sync::Mutex::new(0);
//!     tessera::Comm::from_env()?.barrier_async()?.on_done(|_| *count.lock().unwrap() += 1);
//!     Ok(())
//! }
//! ```
//!
//! Views end before what they look into, and before the backward that reduces it:
//!
//! ```
//! use tessera::{params, Comm, Ddp};
//! fn main() -> tessera::Result<()> {
//!     let comm = Comm::from_env()?;
//!     let mut ddp = Ddp::new(&comm, params!["w" => (vec![0.0f32], [1])])?;
//!     let view = ddp.grad(0)?;
//!     drop(view);
//!     ddp.ready_all()?;
//!     ddp.wait()
//! }
//! ```
//!
//! ```compile_fail,E0502
//! use tessera::{params, Comm, Ddp};
//! fn main() -> tessera::Result<()> {
//!     let comm = Comm::from_env()?;
//!     let mut ddp = Ddp::new(&comm, params!["w" => (vec![0.0f32], [1])])?;
//!     let view = ddp.grad(0)?;
//!     ddp.ready_all()?;
//!     ddp.wait()
//! }
//! ```
//!
//! ```compile_fail,E0505
//! use tessera::Tensor;
//! fn main() -> tessera::Result<()> {
//!     let tensor = Tensor::new(vec![1.0f32], [1])?;
//!     let view = tensor.view::<f32>()?;
//!     drop(tensor);
//!     assert_eq!(view[0], 1.0);
//!     Ok(())
//! }
//! ```
//!
//! Tensors, which count their views without a lock, stay on their thread:
//!
//! ```compile_fail,E0277
//! let tensor = tessera::Tensor::new(vec![1.0f32], [1]).unwrap();
//! std::thread::spawn(move || tensor.len());
//! ```
