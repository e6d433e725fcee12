//! The digits trainer with a network and the autograd of candle, beside ../../rust, which does without. Tessera averages
//! the gradients; the optimizer is Tessera's AdamW or, with `--optimizer candle`, candle's SGD.

#[path = "../../rust/src/contract.rs"]
mod contract;
#[path = "../../rust/src/evaluation.rs"]
mod evaluation;

use std::time::{Duration, Instant};
use std::{collections::HashMap, error::Error, process::exit, thread::sleep};

use candle_core::backprop::GradStore;
use candle_core::{Device, Tensor, Var};
use candle_nn::{loss::cross_entropy, Linear, Module, Optimizer, SGD};
use contract::{initial, log, parse_options, read_data, show_bar, usage, Sample, CLASSES, HIDDEN, PIXELS};
use evaluation::Evaluation;
use tessera::{AdamW, Comm, Ddp, Params, Sampler, Saver, State};

type Result<T> = std::result::Result<T, Box<dyn Error>>;

const NAMES: [&str; 4] = ["fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"];

struct Network {
    vars: [Var; 4],
    fc1: Linear,
    fc2: Linear,
}

impl Network {
    fn new(mut seed: u64) -> Result<Self> {
        let mut var = |shape: &[usize], fan_in| {
            Var::from_vec(initial(&mut seed, shape.iter().product(), fan_in), shape, &Device::Cpu)
        };
        let (weight1, bias1) = (var(&[HIDDEN, PIXELS], PIXELS)?, var(&[HIDDEN], PIXELS)?);
        let (weight2, bias2) = (var(&[CLASSES, HIDDEN], HIDDEN)?, var(&[CLASSES], HIDDEN)?);
        let linear = |weight: &Var, bias: &Var| Linear::new(weight.as_tensor().clone(), Some(bias.as_tensor().clone()));
        let (fc1, fc2) = (linear(&weight1, &bias1), linear(&weight2, &bias2));
        Ok(Network { vars: [weight1, bias1, weight2, bias2], fc1, fc2 })
    }

    /// The parameters, to be registered with DDP, which keeps its own memory of them.
    fn params(&self) -> Result<Params> {
        NAMES
            .iter()
            .zip(&self.vars)
            .try_fold(Params::new(), |params, (name, var)| Ok(params.with(*name, (values(var)?, var.dims().to_vec()))))
    }

    fn logits(&self, samples: &[&Sample]) -> candle_core::Result<Tensor> {
        let pixels: Vec<f32> = samples.iter().flat_map(|(image, _)| *image).collect();
        let images = Tensor::from_vec(pixels, (samples.len(), PIXELS), &Device::Cpu)?;
        self.fc2.forward(&self.fc1.forward(&images)?.relu()?)
    }

    /// The batch's mean loss and its gradients.
    fn forward_backward(&self, batch: &[&Sample]) -> Result<(f32, GradStore)> {
        let labels: Vec<u32> = batch.iter().map(|(_, label)| *label as u32).collect();
        let loss = cross_entropy(&self.logits(batch)?, &Tensor::new(labels, &Device::Cpu)?)?;
        Ok((loss.to_scalar()?, loss.backward()?))
    }

    /// DDP's parameters become the network's.
    fn take(&self, ddp: &Ddp) -> Result<()> {
        for (i, var) in self.vars.iter().enumerate() {
            var.set(&like(var, &ddp.param(i)?)?)?;
        }
        Ok(())
    }

    /// The network's parameters become DDP's, which the checkpoints have.
    fn give(&self, ddp: &Ddp) -> Result<()> {
        for (i, var) in self.vars.iter().enumerate() {
            ddp.param_mut(i)?.copy_from_slice(&values(var)?);
        }
        Ok(())
    }
}

fn values(tensor: &Tensor) -> candle_core::Result<Vec<f32>> {
    tensor.flatten_all()?.to_vec1()
}

/// A tensor of the variable's shape.
fn like(var: &Var, values: &[f32]) -> candle_core::Result<Tensor> {
    Tensor::from_slice(values, var.shape(), &Device::Cpu)
}

/// Every gradient becomes the average over the ranks, in DDP's views.
fn average(network: &Network, grads: &GradStore, ddp: &mut Ddp) -> Result<()> {
    for (i, var) in network.vars.iter().enumerate().rev() {
        let grad = grads.get(var).ok_or_else(|| format!("the loss does not depend on {}", NAMES[i]))?;
        ddp.grad_mut(i)?.copy_from_slice(&values(grad)?);
        ddp.ready(i)?;
    }
    Ok(ddp.wait()?)
}

fn train(texts: &HashMap<&str, String>, [steps, save_every, batch, seed, pace, progress]: [u64; 6]) -> Result<()> {
    let (train, held_out) = read_data(&texts["--data"]);
    let comm = Comm::from_env()?;
    let (rank, world) = (comm.rank()?, comm.world_size()?);
    let say = |text: String| (rank == 0).then(|| println!("{text}"));
    let log_file = &texts["--log"];
    let record = |step, facts: &str| (!log_file.is_empty()).then(|| log(log_file, rank, world, step, facts));
    let network = Network::new(seed)?;
    let mut ddp = Ddp::new(&comm, network.params()?)?; // rank 0's values, once `take` has brought them
    let mut data = Sampler::new(&comm, train.len()).seed(seed).build()?;
    let mut state = State::new().with("model", &ddp).with("data", &data);
    let mut ours = if texts["--optimizer"] == "tessera" {
        let opt = AdamW::new(&mut ddp).lr(0.003).build()?;
        state.add("optim", &opt)?;
        Some(opt)
    } else {
        None
    };
    let mut theirs = SGD::new(network.vars.to_vec(), 0.1)?; // it has no state of its own
    let saver = Saver::at(&comm, &texts["--checkpoints"]).keep_latest(3).format(&texts["--format"]);
    let saver = if progress > 0 && rank == 0 { saver.progress(show_bar) } else { saver }.open()?;
    let start = saver.resume(&mut state)?;
    network.take(&ddp)?;
    let from = if start == 0 { "from the beginning".to_owned() } else { format!("resumed after step {start}") };
    say(format!("digits: {world} ranks, {from}"));
    (start >= steps).then(|| say(format!("digits: nothing left to do: --steps is {steps}")));

    for step in start + 1..=steps {
        let began = Instant::now();
        let batch: Vec<_> = data.batch(batch as usize)?.into_iter().map(|i| &train[i]).collect();
        let (loss, mut grads) = network.forward_backward(&batch)?;
        average(&network, &grads, &mut ddp)?;
        if let Some(opt) = &mut ours {
            opt.step()?;
            network.take(&ddp)?;
        } else {
            for (i, var) in network.vars.iter().enumerate() {
                grads.insert(var, like(var, &ddp.grad(i)?)?);
            }
            theirs.step(&grads)?;
            network.give(&ddp)?;
        }
        if step % 10 == 0 || step == steps {
            say(format!("step {step}/{steps} loss {loss:.4}"));
            record(step, &format!(r#""loss":{loss:.6}"#));
        }
        let stop = saver.should_stop(step, false)?; // the same answer on all ranks
        if stop || (save_every > 0 && step % save_every == 0) {
            state.set_metric("loss", loss.into())?;
            saver.save_async(step, &state)?;
        }
        if stop {
            saver.wait()?;
            say(format!("digits: stopped after step {step}"));
            return Ok(comm.finalize()?);
        }
        sleep(Duration::from_millis(pace).saturating_sub(began.elapsed()));
    }
    saver.wait()?;
    let evaluation = Evaluation::new(&comm, &held_out)?;
    let logits = network.logits(&evaluation.samples)?.to_vec2()?;
    let (accuracy, facts) = evaluation.compute(&comm, Some(logits))?;
    say(format!("held-out accuracy {accuracy:.4}"));
    record(start.max(steps), &facts);
    Ok(comm.finalize()?)
}

fn main() {
    let (texts, numbers) = parse_options(&[("--optimizer", "tessera")]);
    if !["tessera", "candle"].contains(&texts["--optimizer"].as_str()) {
        usage(format!("--optimizer cannot be \"{}\": tessera or candle", texts["--optimizer"]));
    }
    if let Err(error) = train(&texts, numbers) {
        eprintln!("digits: {error}");
        let _ = tessera::record_error(&error.to_string(), Some(&format!("{error:?}")));
        exit(1);
    }
}
