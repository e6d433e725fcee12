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
//! A plan's buffers stay where they are, whatever is written into them:
//!
//! ```
//! use tessera::{Collective, Comm, ReduceOp};
//! fn main() -> tessera::Result<()> {
//!     let comm = Comm::from_env()?;
//!     let mut plan = comm.prepare(Collective::AllReduce, vec![], vec![vec![1.0f32; 4]], ReduceOp::Sum, 0)?;
//!     plan.outputs()?[0].copy_from_slice(&[2.0; 4]);
//!     plan.run()
//! }
//! ```
//!
//! ```compile_fail,E0308
//! use tessera::{Collective, Comm, ReduceOp};
//! fn main() -> tessera::Result<()> {
//!     let comm = Comm::from_env()?;
//!     let mut plan = comm.prepare(Collective::AllReduce, vec![], vec![vec![1.0f32; 4]], ReduceOp::Sum, 0)?;
//!     plan.outputs()?[0] = vec![2.0; 4];
//!     plan.run()
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
//! ```compile_fail,E0373
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
//! Whole parameters end with their guard, and a unit's gradients with its backward; steps end, and shards are written,
//! while no guard is alive:
//!
//! ```
//! use tessera::{params, units, Comm, Fsdp};
//! fn main() -> tessera::Result<()> {
//!     let comm = Comm::from_env()?;
//!     let mut fsdp = Fsdp::new(&comm, units!["u" => params!["w" => (vec![0.0f32], [1])]])?;
//!     let layer = fsdp.forward(0)?;
//!     let w = layer.param(0)?;
//!     assert_eq!(w[0], 0.0);
//!     layer.done()?;
//!     let layer = fsdp.backward(0)?;
//!     let mut grad = layer.grad_mut(0)?;
//!     grad[0] = 1.0;
//!     drop(grad);
//!     layer.ready()?;
//!     fsdp.wait()?;
//!     fsdp.shard_mut(0)?[0] = 1.0;
//!     Ok(())
//! }
//! ```
//!
//! ```compile_fail,E0505
//! use tessera::{params, units, Comm, Fsdp};
//! fn main() -> tessera::Result<()> {
//!     let comm = Comm::from_env()?;
//!     let mut fsdp = Fsdp::new(&comm, units!["u" => params!["w" => (vec![0.0f32], [1])]])?;
//!     let layer = fsdp.forward(0)?;
//!     let w = layer.param(0)?;
//!     layer.done()?;
//!     assert_eq!(w[0], 0.0);
//!     fsdp.wait()
//! }
//! ```
//!
//! ```compile_fail,E0505
//! use tessera::{params, units, Comm, Fsdp};
//! fn main() -> tessera::Result<()> {
//!     let comm = Comm::from_env()?;
//!     let mut fsdp = Fsdp::new(&comm, units!["u" => params!["w" => (vec![0.0f32], [1])]])?;
//!     let layer = fsdp.backward(0)?;
//!     let mut grad = layer.grad_mut(0)?;
//!     layer.ready()?;
//!     grad[0] = 1.0;
//!     fsdp.wait()
//! }
//! ```
//!
//! Nor does an operation in the background read or write them; at once it may:
//!
//! ```
//! use tessera::{params, units, Comm, Fsdp, ReduceOp};
//! fn main() -> tessera::Result<()> {
//!     let comm = Comm::from_env()?;
//!     let mut fsdp = Fsdp::new(&comm, units!["u" => params!["w" => (vec![0.0f32], [1])]])?;
//!     let layer = fsdp.backward(0)?;
//!     comm.all_gather(layer.param(0)?, &mut [0.0f32])?;
//!     comm.all_reduce(&mut layer.grad_mut(0)?, ReduceOp::Sum)?;
//!     layer.unused(0)?;
//!     layer.ready()?;
//!     fsdp.wait()
//! }
//! ```
//!
//! ```compile_fail,E0277
//! use tessera::{params, units, Comm, Fsdp};
//! fn main() -> tessera::Result<()> {
//!     let comm = Comm::from_env()?;
//!     let mut fsdp = Fsdp::new(&comm, units!["u" => params!["w" => (vec![0.0f32], [1])]])?;
//!     let layer = fsdp.backward(0)?;
//!     comm.all_gather_async(layer.param(0)?, vec![0.0f32])?;
//!     layer.unused(0)?;
//!     layer.ready()?;
//!     fsdp.wait()
//! }
//! ```
//!
//! ```compile_fail,E0277
//! use tessera::{params, units, Comm, Fsdp, ReduceOp};
//! fn main() -> tessera::Result<()> {
//!     let comm = Comm::from_env()?;
//!     let mut fsdp = Fsdp::new(&comm, units!["u" => params!["w" => (vec![0.0f32], [1])]])?;
//!     let layer = fsdp.backward(0)?;
//!     comm.all_reduce_async(layer.grad_mut(0)?, ReduceOp::Sum)?;
//!     layer.unused(0)?;
//!     layer.ready()?;
//!     fsdp.wait()
//! }
//! ```
//!
//! Whole parameters are read only:
//!
//! ```compile_fail,E0594
//! use tessera::{params, units, Comm, Fsdp};
//! fn main() -> tessera::Result<()> {
//!     let comm = Comm::from_env()?;
//!     let mut fsdp = Fsdp::new(&comm, units!["u" => params!["w" => (vec![0.0f32], [1])]])?;
//!     let layer = fsdp.forward(0)?;
//!     let w = layer.param(0)?;
//!     w[0] = 1.0;
//!     layer.done()?;
//!     fsdp.wait()
//! }
//! ```
//!
//! A step neither ends nor is given up under a guard, nor are shards written:
//!
//! ```compile_fail,E0502
//! use tessera::{params, units, Comm, Fsdp};
//! fn main() -> tessera::Result<()> {
//!     let comm = Comm::from_env()?;
//!     let mut fsdp = Fsdp::new(&comm, units!["u" => params!["w" => (vec![0.0f32], [1])]])?;
//!     let layer = fsdp.backward(0)?;
//!     fsdp.wait()?;
//!     layer.ready()?;
//!     fsdp.wait()
//! }
//! ```
//!
//! ```compile_fail,E0502
//! use tessera::{params, units, Comm, Fsdp};
//! fn main() -> tessera::Result<()> {
//!     let comm = Comm::from_env()?;
//!     let mut fsdp = Fsdp::new(&comm, units!["u" => params!["w" => (vec![0.0f32], [1])]])?;
//!     let layer = fsdp.forward(0)?;
//!     fsdp.abandon()?;
//!     layer.done()
//! }
//! ```
//!
//! ```compile_fail,E0502
//! use tessera::{params, units, Comm, Fsdp};
//! fn main() -> tessera::Result<()> {
//!     let comm = Comm::from_env()?;
//!     let mut fsdp = Fsdp::new(&comm, units!["u" => params!["w" => (vec![0.0f32], [1])]])?;
//!     let layer = fsdp.forward(0)?;
//!     fsdp.shard_mut(0)?[0] = 1.0;
//!     layer.done()?;
//!     fsdp.wait()
//! }
//! ```
//!
//! ```compile_fail,E0502
//! use tessera::{params, units, Comm, Fsdp};
//! fn main() -> tessera::Result<()> {
//!     let comm = Comm::from_env()?;
//!     let mut fsdp = Fsdp::new(&comm, units!["u" => params!["w" => (vec![0.0f32], [1])]])?;
//!     let mut shard = fsdp.shard_mut(0)?;
//!     let layer = fsdp.forward(0)?;
//!     shard[0] = 1.0;
//!     layer.done()
//! }
//! ```
//!
//! ```compile_fail,E0505
//! use tessera::{params, units, Comm, Fsdp};
//! fn main() -> tessera::Result<()> {
//!     let comm = Comm::from_env()?;
//!     let mut fsdp = Fsdp::new(&comm, units!["u" => params!["w" => (vec![0.0f32], [1])]])?;
//!     let layer = fsdp.forward(0)?;
//!     drop(fsdp);
//!     layer.done()
//! }
//! ```
//!
//! ```compile_fail,E0505
//! use tessera::{params, units, Comm, Fsdp};
//! fn main() -> tessera::Result<()> {
//!     let comm = Comm::from_env()?;
//!     let mut fsdp = Fsdp::new(&comm, units!["u" => params!["w" => (vec![0.0f32], [1])]])?;
//!     drop(comm);
//!     fsdp.wait()
//! }
//! ```
//!
//! ```compile_fail,E0505
//! use tessera::{params, units, Comm, Fsdp, Sgd};
//! fn main() -> tessera::Result<()> {
//!     let comm = Comm::from_env()?;
//!     let mut fsdp = Fsdp::new(&comm, units!["u" => params!["w" => (vec![0.0f32], [1])]])?;
//!     let opt = Sgd::new(&mut fsdp).build()?;
//!     drop(fsdp);
//!     drop(comm);
//!     Ok(())
//! }
//! ```
//!
//! ```compile_fail,E0505
//! use tessera::{params, units, Comm, Fsdp, State};
//! fn main() -> tessera::Result<()> {
//!     let comm = Comm::from_env()?;
//!     let mut fsdp = Fsdp::new(&comm, units!["u" => params!["w" => (vec![0.0f32], [1])]])?;
//!     let state = State::new().with("model", &fsdp);
//!     drop(fsdp);
//!     drop(comm);
//!     Ok(())
//! }
//! ```
//!
//! A tensor-parallel model and its optimizer are gone before the mesh, and the views of its gradients before their sum:
//!
//! ```
//! use tessera::{params, Comm, Mesh, Sgd, TensorParallel};
//! fn main() -> tessera::Result<()> {
//!     let mesh = Mesh::new(&Comm::from_env()?, &[("tp", 1)])?;
//!     let mut tp = TensorParallel::builder(&mesh, params!["w" => (vec![0.0f32], [1])]).build()?;
//!     let opt = Sgd::new(&mut tp).build()?;
//!     let grad = tp.grad(0)?;
//!     drop(grad);
//!     tp.sum_grads()?;
//!     drop(opt);
//!     drop(tp);
//!     drop(mesh);
//!     Ok(())
//! }
//! ```
//!
//! ```compile_fail,E0505
//! use tessera::{params, Comm, Mesh, TensorParallel};
//! fn main() -> tessera::Result<()> {
//!     let mesh = Mesh::new(&Comm::from_env()?, &[("tp", 1)])?;
//!     let tp = TensorParallel::builder(&mesh, params!["w" => (vec![0.0f32], [1])]).build()?;
//!     drop(mesh);
//!     Ok(())
//! }
//! ```
//!
//! ```compile_fail,E0505
//! use tessera::{params, Comm, Mesh, Sgd, TensorParallel};
//! fn main() -> tessera::Result<()> {
//!     let mesh = Mesh::new(&Comm::from_env()?, &[("tp", 1)])?;
//!     let mut tp = TensorParallel::builder(&mesh, params!["w" => (vec![0.0f32], [1])]).build()?;
//!     let opt = Sgd::new(&mut tp).build()?;
//!     drop(tp);
//!     drop(mesh);
//!     Ok(())
//! }
//! ```
//!
//! ```compile_fail,E0502
//! use tessera::{params, Comm, Mesh, TensorParallel};
//! fn main() -> tessera::Result<()> {
//!     let mesh = Mesh::new(&Comm::from_env()?, &[("tp", 1)])?;
//!     let mut tp = TensorParallel::builder(&mesh, params!["w" => (vec![0.0f32], [1])]).build()?;
//!     let grad = tp.grad(0)?;
//!     tp.sum_grads()?;
//!     assert_eq!(grad[0], 0.0);
//!     Ok(())
//! }
//! ```
//!
//! ```compile_fail,E0505
//! use tessera::{params, Comm, Mesh, TensorParallel};
//! fn main() -> tessera::Result<()> {
//!     let mesh = Mesh::new(&Comm::from_env()?, &[("tp", 1)])?;
//!     let tp = TensorParallel::builder(&mesh, params!["w" => (vec![0.0f32], [1])]).build()?;
//!     let slice = tp.slice(0)?;
//!     drop(tp);
//!     assert_eq!(slice[0], 0.0);
//!     Ok(())
//! }
//! ```
//!
//! Nor does the mesh move to another thread meanwhile, and the settings of a loss borrow the weights of its classes:
//!
//! ```compile_fail,E0505
//! use tessera::{params, Comm, Mesh, TensorParallel};
//! fn main() -> tessera::Result<()> {
//!     let mesh = Mesh::new(&Comm::from_env()?, &[("tp", 1)])?;
//!     let tp = TensorParallel::builder(&mesh, params!["w" => (vec![0.0f32], [1])]).build()?;
//!     std::thread::spawn(move || drop(mesh)).join().unwrap();
//!     Ok(())
//! }
//! ```
//!
//! ```
//! let weights = vec![1.0f32; 3];
//! let loss = tessera::CrossEntropy::new(3).class_weights(&weights);
//! let _other = loss.clone();
//! drop(weights);
//! ```
//!
//! ```compile_fail,E0505
//! let weights = vec![1.0f32; 3];
//! let loss = tessera::CrossEntropy::new(3).class_weights(&weights);
//! drop(weights);
//! let _other = loss.clone();
//! ```
//!
//! An engine, its optimizer and its states are gone before the communicator; parameters and gradients end with their guard,
//! and a gradient before it is ready; passes and steps end, and settings change, while no guard is alive:
//!
//! ```
//! use tessera::{params, Comm, Engine, State};
//! const CONFIG: &str = r#"{"train_batch_size": 1, "optimizer": {"type": "SGD"}}"#;
//! fn main() -> tessera::Result<()> {
//!     let comm = Comm::from_env()?;
//!     let mut engine = Engine::new(&comm, [("u", params!["w" => (vec![0.0f32], [1])])], CONFIG)?;
//!     let layer = engine.forward(0)?;
//!     let w = layer.param(0)?;
//!     assert_eq!(w[0], 0.0);
//!     drop(w);
//!     layer.done()?;
//!     let mut layer = engine.backward(0)?;
//!     let mut grad = layer.grad_mut(0)?;
//!     grad[0] = 1.0;
//!     drop(grad);
//!     layer.ready_param(0)?;
//!     drop(layer);
//!     engine.backward_done()?;
//!     engine.step()?;
//!     let opt = engine.optimizer()?;
//!     let state = State::new().with("engine", &engine);
//!     drop(state);
//!     drop(opt);
//!     drop(engine);
//!     drop(comm);
//!     Ok(())
//! }
//! ```
//!
//! ```compile_fail,E0505
//! use tessera::{params, Comm, Engine};
//! const CONFIG: &str = r#"{"train_batch_size": 1, "optimizer": {"type": "SGD"}}"#;
//! fn main() -> tessera::Result<()> {
//!     let comm = Comm::from_env()?;
//!     let mut engine = Engine::new(&comm, [("u", params!["w" => (vec![0.0f32], [1])])], CONFIG)?;
//!     drop(comm);
//!     engine.step().map(drop)
//! }
//! ```
//!
//! ```compile_fail,E0505
//! use tessera::{params, Comm, Engine};
//! const CONFIG: &str = r#"{"train_batch_size": 1, "optimizer": {"type": "SGD"}}"#;
//! fn main() -> tessera::Result<()> {
//!     let comm = Comm::from_env()?;
//!     let mut engine = Engine::new(&comm, [("u", params!["w" => (vec![0.0f32], [1])])], CONFIG)?;
//!     let opt = engine.optimizer()?;
//!     drop(engine);
//!     drop(comm);
//!     opt.steps().map(drop)
//! }
//! ```
//!
//! ```compile_fail,E0505
//! use tessera::{params, Comm, Engine, State};
//! const CONFIG: &str = r#"{"train_batch_size": 1, "optimizer": {"type": "SGD"}}"#;
//! fn main() -> tessera::Result<()> {
//!     let comm = Comm::from_env()?;
//!     let mut engine = Engine::new(&comm, [("u", params!["w" => (vec![0.0f32], [1])])], CONFIG)?;
//!     let state = State::new().with("engine", &engine);
//!     drop(engine);
//!     drop(comm);
//!     Ok(())
//! }
//! ```
//!
//! ```compile_fail,E0505
//! use tessera::{params, Comm, Engine};
//! const CONFIG: &str = r#"{"train_batch_size": 1, "optimizer": {"type": "SGD"}}"#;
//! fn main() -> tessera::Result<()> {
//!     let comm = Comm::from_env()?;
//!     let mut engine = Engine::new(&comm, [("u", params!["w" => (vec![0.0f32], [1])])], CONFIG)?;
//!     let layer = engine.forward(0)?;
//!     let w = layer.param(0)?;
//!     layer.done()?;
//!     assert_eq!(w[0], 0.0);
//!     Ok(())
//! }
//! ```
//!
//! ```compile_fail,E0594
//! use tessera::{params, Comm, Engine};
//! const CONFIG: &str = r#"{"train_batch_size": 1, "optimizer": {"type": "SGD"}}"#;
//! fn main() -> tessera::Result<()> {
//!     let comm = Comm::from_env()?;
//!     let mut engine = Engine::new(&comm, [("u", params!["w" => (vec![0.0f32], [1])])], CONFIG)?;
//!     let layer = engine.forward(0)?;
//!     let mut w = layer.param(0)?;
//!     w[0] = 1.0;
//!     drop(w);
//!     layer.done()
//! }
//! ```
//!
//! ```compile_fail,E0505
//! use tessera::{params, Comm, Engine};
//! const CONFIG: &str = r#"{"train_batch_size": 1, "optimizer": {"type": "SGD"}}"#;
//! fn main() -> tessera::Result<()> {
//!     let comm = Comm::from_env()?;
//!     let mut engine = Engine::new(&comm, [("u", params!["w" => (vec![0.0f32], [1])])], CONFIG)?;
//!     let layer = engine.backward(0)?;
//!     let mut grad = layer.grad_mut(0)?;
//!     layer.ready()?;
//!     grad[0] = 1.0;
//!     Ok(())
//! }
//! ```
//!
//! ```compile_fail,E0502
//! use tessera::{params, Comm, Engine};
//! const CONFIG: &str = r#"{"train_batch_size": 1, "optimizer": {"type": "SGD"}}"#;
//! fn main() -> tessera::Result<()> {
//!     let comm = Comm::from_env()?;
//!     let mut engine = Engine::new(&comm, [("u", params!["w" => (vec![0.0f32], [1])])], CONFIG)?;
//!     let mut layer = engine.backward(0)?;
//!     let mut grad = layer.grad_mut(0)?;
//!     layer.ready_param(0)?;
//!     grad[0] = 1.0;
//!     Ok(())
//! }
//! ```
//!
//! ```compile_fail,E0502
//! use tessera::{params, Comm, Engine};
//! const CONFIG: &str = r#"{"train_batch_size": 1, "optimizer": {"type": "SGD"}}"#;
//! fn main() -> tessera::Result<()> {
//!     let comm = Comm::from_env()?;
//!     let mut engine = Engine::new(&comm, [("u", params!["w" => (vec![0.0f32], [1])])], CONFIG)?;
//!     let layer = engine.backward(0)?;
//!     engine.backward_done()?;
//!     layer.ready()
//! }
//! ```
//!
//! ```compile_fail,E0502
//! use tessera::{params, Comm, Engine};
//! const CONFIG: &str = r#"{"train_batch_size": 1, "optimizer": {"type": "SGD"}}"#;
//! fn main() -> tessera::Result<()> {
//!     let comm = Comm::from_env()?;
//!     let mut engine = Engine::new(&comm, [("u", params!["w" => (vec![0.0f32], [1])])], CONFIG)?;
//!     let layer = engine.forward(0)?;
//!     engine.step()?;
//!     layer.done()
//! }
//! ```
//!
//! ```compile_fail,E0505
//! use tessera::{params, Comm, Engine};
//! const CONFIG: &str = r#"{"train_batch_size": 1, "optimizer": {"type": "SGD"}}"#;
//! fn main() -> tessera::Result<()> {
//!     let comm = Comm::from_env()?;
//!     let mut engine = Engine::new(&comm, [("u", params!["w" => (vec![0.0f32], [1])])], CONFIG)?;
//!     let layer = engine.forward(0)?;
//!     drop(engine);
//!     layer.done()
//! }
//! ```
//!
//! ```compile_fail,E0277
//! use tessera::{params, Comm, Engine};
//! const CONFIG: &str = r#"{"train_batch_size": 1, "optimizer": {"type": "SGD"}}"#;
//! fn main() -> tessera::Result<()> {
//!     let comm = Comm::from_env()?;
//!     let mut engine = Engine::new(&comm, [("u", params!["w" => (vec![0.0f32], [1])])], CONFIG)?;
//!     std::thread::scope(|scope| scope.spawn(|| engine.step()).join().unwrap()).map(drop)
//! }
//! ```
//!
//! What a pipeline lends to a stage stays in the call:
//!
//! ```
//! use tessera::{CallbackResult, Comm, Pipeline, StageCall, Stages};
//! struct Stage(Vec<f32>);
//! impl Stages for Stage {
//!     fn forward(&mut self, call: &StageCall<'_>) -> CallbackResult<()> {
//!         let y = call.output::<f32>([1])?;
//!         self.0 = y.to_vec();
//!         Ok(())
//!     }
//! }
//! fn main() -> tessera::Result<()> {
//!     let comm = Comm::from_env()?;
//!     let mut pipe = Pipeline::builder(&comm, &[0]).microbatches(1).build()?;
//!     let mut stage = Stage(Vec::new());
//!     pipe.eval(&mut stage, &[], &[])?;
//!     Ok(())
//! }
//! ```
//!
//! ```compile_fail
//! use tessera::{CallbackResult, Comm, Pipeline, StageCall, Stages};
//! struct Stage(Vec<&'static f32>);
//! impl Stages for Stage {
//!     fn forward(&mut self, call: &StageCall<'_>) -> CallbackResult<()> {
//!         let y = call.output::<f32>([1])?;
//!         self.0.push(&y[0]);
//!         Ok(())
//!     }
//! }
//! fn main() -> tessera::Result<()> {
//!     let comm = Comm::from_env()?;
//!     let mut pipe = Pipeline::builder(&comm, &[0]).microbatches(1).build()?;
//!     let mut stage = Stage(Vec::new());
//!     pipe.eval(&mut stage, &[], &[])?;
//!     Ok(())
//! }
//! ```
//!
//! ```compile_fail,E0277
//! use tessera::{CallbackResult, Comm, Pipeline, StageCall, Stages};
//! struct Stage(Vec<f32>);
//! impl Stages for Stage {
//!     fn forward(&mut self, call: &StageCall<'_>) -> CallbackResult<()> {
//!         std::thread::scope(|scope| scope.spawn(|| call.loss(1.0)).join().unwrap())?;
//!         Ok(())
//!     }
//! }
//! fn main() -> tessera::Result<()> {
//!     let comm = Comm::from_env()?;
//!     let mut pipe = Pipeline::builder(&comm, &[0]).microbatches(1).build()?;
//!     let mut stage = Stage(Vec::new());
//!     pipe.eval(&mut stage, &[], &[])?;
//!     Ok(())
//! }
//! ```
//!
//! The pipeline is not entered again from a stage, nor outlives its communicator:
//!
//! ```compile_fail,E0499
//! use tessera::{CallbackResult, Comm, Pipeline, StageCall, Stages};
//! struct Stage<'p, 'c>(&'p mut Pipeline<'c>);
//! impl Stages for Stage<'_, '_> {
//!     fn forward(&mut self, call: &StageCall<'_>) -> CallbackResult<()> {
//!         self.0.microbatches();
//!         call.loss(1.0)?;
//!         Ok(())
//!     }
//! }
//! fn main() -> tessera::Result<()> {
//!     let comm = Comm::from_env()?;
//!     let mut pipe = Pipeline::builder(&comm, &[0]).microbatches(1).build()?;
//!     pipe.eval(&mut Stage(&mut pipe), &[], &[])?;
//!     Ok(())
//! }
//! ```
//!
//! ```compile_fail,E0505
//! use tessera::{Comm, Pipeline};
//! fn main() -> tessera::Result<()> {
//!     let comm = Comm::from_env()?;
//!     let pipe = Pipeline::builder(&comm, &[0]).microbatches(1).build()?;
//!     drop(comm);
//!     Ok(())
//! }
//! ```
//!
//! A shard of FSDP is a part of a parameter; no other model takes it for a whole one:
//!
//! ```
//! use tessera::{params, units, Comm, Fsdp, Params};
//! fn main() -> tessera::Result<()> {
//!     let comm = Comm::from_env()?;
//!     let fsdp = Fsdp::new(&comm, units!["u" => params!["w" => (vec![0.0f32], [1])]])?;
//!     let shard = fsdp.shard(0)?;
//!     Params::new().with("w", (shard.to_vec(), [1]));
//!     Ok(())
//! }
//! ```
//!
//! ```compile_fail,E0277
//! use tessera::{params, units, Comm, Fsdp, Params};
//! fn main() -> tessera::Result<()> {
//!     let comm = Comm::from_env()?;
//!     let fsdp = Fsdp::new(&comm, units!["u" => params!["w" => (vec![0.0f32], [1])]])?;
//!     let shard = fsdp.shard(0)?;
//!     Params::new().with("w", shard);
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
