//! The digits trainer in Rust: see ../README.md for what it shares with those in C, Python and Java.

mod contract;
mod evaluation;
mod pipelined;

use std::time::{Duration, Instant};
use std::{collections::HashMap, process::exit, thread::sleep};

use contract::{initial, log, parse_options, read_data, show_bar, usage, Sample, CLASSES, HIDDEN, PIXELS};
use evaluation::Evaluation;
use pipelined::{pipeline_mesh, same_mesh, stages_of, Pipelined};
use tessera::{units, AdamW, Comm, Ddp, DdpOptions, Fsdp, FsdpOptions, Mesh, Params, Result, Sampler, Saver, State};
use tessera::{Style, Tensor, TensorParallel};

const NAMES: [&str; 4] = ["fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"];
type Slices<'a> = Option<&'a TensorParallel<'a>>; // None: not tensor-parallel

/// `weight · input + bias`; each row of `weight` makes one output.
fn linear(weight: &[f32], bias: &[f32], input: &[f32]) -> Vec<f32> {
    let rows = weight.chunks_exact(input.len()).zip(bias);
    rows.map(|(row, bias)| bias + row.iter().zip(input).map(|(w, x)| w * x).sum::<f32>()).collect()
}

/// The model, or a slice of it, over the ranks: all of it on each, its rows, or some of its stages. A layer's weight and bias are parameters
/// `2 layer` and `2 layer + 1`.
enum Model<'c> {
    Parallel(Ddp<'c>),
    Sharded(Fsdp<'c>),
    Pipelined(Pipelined<'c>), // which has a step of its own
}

impl Model<'_> {
    /// `pass` gets the layer's weight and bias.
    fn forward<T>(&self, layer: usize, pass: impl FnOnce(&[f32], &[f32]) -> T) -> Result<T> {
        let i = 2 * layer;
        match self {
            Model::Parallel(ddp) => Ok(pass(&ddp.param(i)?, &ddp.param(i + 1)?)),
            Model::Sharded(fsdp) => {
                let whole = fsdp.forward(layer)?; // until `done`
                let result = pass(whole.param(i)?, whole.param(i + 1)?);
                whole.done()?;
                Ok(result)
            }
            Model::Pipelined(_) => unreachable!(),
        }
    }

    /// `pass` gets the weight, and where the gradients of weight and bias are to be written.
    fn backward<T>(&self, layer: usize, pass: impl FnOnce(&[f32], &mut [f32], &mut [f32]) -> T) -> Result<T> {
        let i = 2 * layer;
        match self {
            Model::Parallel(ddp) => {
                let result = pass(&ddp.param(i)?, &mut ddp.grad_mut(i)?, &mut ddp.grad_mut(i + 1)?);
                ddp.ready(i)?; // from here until `wait` they are the library's
                ddp.ready(i + 1)?;
                Ok(result)
            }
            Model::Sharded(fsdp) => {
                let whole = fsdp.backward(layer)?;
                let result = pass(whole.param(i)?, &mut whole.grad_mut(i)?, &mut whole.grad_mut(i + 1)?);
                whole.ready()?;
                Ok(result)
            }
            Model::Pipelined(_) => unreachable!(),
        }
    }

    /// Then the gradients are the average of all ranks.
    fn wait(&mut self) -> Result<()> {
        match self {
            Model::Parallel(ddp) => ddp.wait(),
            Model::Sharded(fsdp) => fsdp.wait(),
            Model::Pipelined(pipelined) => pipelined.ddp.wait(),
        }
    }
}

fn hidden_layer(model: &Model, images: &[&Sample]) -> Result<Vec<Vec<f32>>> {
    model.forward(0, |weight, bias| {
        let linear = |image| linear(weight, bias, image).into_iter().map(|h| h.max(0.0)).collect();
        images.iter().map(|(image, _)| linear(image)).collect()
    })
}

fn logits(model: &Model, tp: Slices, hidden: &[Vec<f32>]) -> Result<Vec<Vec<f32>>> {
    model.forward(1, |weight, bias| {
        let Some(tp) = tp else { return Ok(hidden.iter().map(|hidden| linear(weight, bias, hidden)).collect()) };
        let mut parts: Vec<_> = hidden.iter().flat_map(|hidden| linear(weight, &[0.0; CLASSES], hidden)).collect();
        tp.leave_in_place(&mut parts, &[hidden.len(), CLASSES], Some(bias))?; // their sum over the ranks, and the bias
        Ok(parts.chunks_exact(CLASSES).map(<[f32]>::to_vec).collect())
    })?
}

/// Writes the gradients of one linear layer. Each sample gives the loss's gradient by the layer's outputs, and its inputs.
fn gradients<'a>(weight: &mut [f32], bias: &mut [f32], samples: impl Iterator<Item = (&'a [f32], &'a [f32])>) {
    weight.fill(0.0);
    bias.fill(0.0);
    for (outputs, inputs) in samples {
        for ((row, bias), output) in weight.chunks_exact_mut(inputs.len()).zip(bias.iter_mut()).zip(outputs) {
            *bias += output;
            row.iter_mut().zip(inputs).for_each(|(w, input)| *w += output * input);
        }
    }
}

/// The sample's loss; makes of its logits the gradient of the loss times `scale`.
fn loss_of(logits: &mut [f32], label: usize, scale: f32) -> f32 {
    let largest = logits.iter().copied().fold(f32::MIN, f32::max);
    logits.iter_mut().for_each(|logit| *logit = (*logit - largest).exp());
    let sum: f32 = logits.iter().sum();
    let loss = -(logits[label] / sum).ln();
    logits.iter_mut().for_each(|p| *p *= scale / sum);
    logits[label] -= scale;
    loss
}

/// The batch's mean loss; its gradients are being averaged over the ranks.
fn forward_backward(model: &mut Model, tp: Slices, batch: &[&Sample]) -> Result<f32> {
    if let Model::Pipelined(pipelined) = model {
        return Ok(pipelined.step(tp, batch)? as f32);
    }
    let hidden = hidden_layer(model, batch)?;
    let mut outputs = logits(model, tp, &hidden)?;
    let mut loss = 0.0;
    for (outputs, (_, label)) in outputs.iter_mut().zip(batch) {
        loss += loss_of(outputs, *label, 1.0 / batch.len() as f32) / batch.len() as f32;
    }
    let inner: Vec<Vec<f32>> = model.backward(1, |fc2, weight, bias| {
        gradients(weight, bias, outputs.iter().zip(&hidden).map(|(outputs, hidden)| (&outputs[..], &hidden[..])));
        let inner = outputs.iter().zip(&hidden).map(|(outputs, hidden)| {
            let by_hidden = |j: usize| (0..CLASSES).map(|k| outputs[k] * fc2[k * hidden.len() + j]).sum();
            (0..hidden.len()).map(|j| if hidden[j] > 0.0 { by_hidden(j) } else { 0.0 }).collect()
        });
        inner.collect()
    })?;
    model.backward(0, |_, weight, bias| {
        gradients(weight, bias, inner.iter().zip(batch).map(|(inner, (image, _))| (&inner[..], &image[..])));
    })?;
    Ok(loss)
}

/// The logits; `None` on ranks of a pipeline that do not have its last stage.
fn recognise(model: &mut Model, tp: Slices, samples: &[&Sample]) -> Result<Option<Vec<Vec<f32>>>> {
    match model {
        Model::Pipelined(pipelined) => pipelined.logits(tp, samples),
        _ => logits(model, tp, &hidden_layer(model, samples)?).map(Some),
    }
}

/// Of groups that share a model ("tp"); ranks with the same slices have other samples ("dp").
fn mesh_of(comm: &Comm, parallel: &str) -> Result<Option<Mesh>> {
    if !parallel.ends_with("tp") {
        return Ok(None);
    }
    let world = comm.world_size()?;
    let ranks = if parallel == "tp" { world } else { 2 };
    if world % ranks != 0 {
        usage(format!("--parallel {parallel} needs an even number of ranks, not {world}"));
    }
    Mesh::new(comm, &[("dp", world / ranks), ("tp", ranks)]).map(Some)
}

fn train(texts: &HashMap<&str, String>, [steps, save_every, batch, seed, pace, progress]: [u64; 6]) -> Result<()> {
    let (train, held_out) = read_data(&texts["--data"]);
    let comm = Comm::from_env()?;
    let (rank, world) = (comm.rank()?, comm.world_size()?);
    let say = |text: String| (rank == 0).then(|| println!("{text}"));
    let (log_file, mut random) = (&texts["--log"], seed);
    let record = |step, facts: &str| (!log_file.is_empty()).then(|| log(log_file, rank, world, step, facts));
    let mut values = |count, fan_in| initial(&mut random, count, fan_in);
    let mut params = vec![
        Tensor::new(values(HIDDEN * PIXELS, PIXELS), [HIDDEN, PIXELS])?,
        Tensor::new(values(HIDDEN, PIXELS), [HIDDEN])?,
        Tensor::new(values(CLASSES * HIDDEN, HIDDEN), [CLASSES, HIDDEN])?,
        Tensor::new(values(CLASSES, HIDDEN), [CLASSES])?,
    ];
    let named = |params: &[Tensor], which: &[usize]| {
        which.iter().fold(Params::new(), |named, &i| named.with(NAMES[i], params[i].clone()))
    };
    let parallel = &*texts["--parallel"];
    let pipelines = pipeline_mesh(&comm, parallel)?;
    let mesh = match &pipelines {
        Some(pipelines) => Some(same_mesh(pipelines, parallel)?),
        None => mesh_of(&comm, parallel)?,
    };
    let own = pipelines.as_ref().map_or(Ok(vec![0, 1, 2, 3]), stages_of)?;
    let (mut tp, mut others) = (None, &comm); // those with other samples
    if let Some(mesh) = &mesh {
        others = mesh.comm("dp")?;
        if parallel != "pp" {
            let plan = [("fc1", Style::Column), ("fc2", Style::Row)];
            let slices = TensorParallel::builder(mesh, named(&params, &own)).dim("tp").plan(plan).build()?;
            own.iter().enumerate().try_for_each(|(i, &of)| slices.slice_tensor(i).map(|slice| params[of] = slice))?;
            tp = Some(slices);
        }
    }
    let mut model = if parallel.starts_with("fsdp") {
        let units = units!["fc1" => named(&params, &[0, 1]), "fc2" => named(&params, &[2, 3])];
        Model::Sharded(match &tp {
            Some(tp) => Fsdp::over_slices(others, tp, units, &FsdpOptions::new())?,
            None => Fsdp::new(others, units)?, // every rank now has its rows of rank 0's values
        })
    } else {
        let ddp = match &tp {
            Some(tp) => Ddp::over_slices(others, tp, &DdpOptions::new())?,
            None => Ddp::new(others, named(&params, &own))?, // or all of them
        };
        match &pipelines {
            Some(pipelines) => Model::Pipelined(Pipelined::new(pipelines, ddp)?),
            None => Model::Parallel(ddp),
        }
    };
    let (mut opt, state) = match &mut model {
        Model::Parallel(ddp) | Model::Pipelined(Pipelined { ddp, .. }) => {
            (AdamW::new(ddp).lr(0.003).build()?, State::new().with("model", ddp))
        }
        Model::Sharded(fsdp) => (AdamW::new(fsdp).lr(0.003).build()?, State::new().with("model", fsdp)),
    };
    let mut data = Sampler::new(others, train.len()).seed(seed).build()?;
    let mut state = state.with("optim", &opt).with("data", &data);
    let saver = Saver::at(&comm, &texts["--checkpoints"]).keep_latest(3).format(&texts["--format"]);
    let saver = if progress > 0 && rank == 0 { saver.progress(show_bar) } else { saver }.open()?;
    if pipelines.is_some() {
        state.join(&comm)?; // each rank has some of the parameters
    }
    let start = saver.resume(&mut state)?;
    let from = if start == 0 { "from the beginning".to_owned() } else { format!("resumed after step {start}") };
    say(format!("digits: {world} ranks, {from}"));
    (start >= steps).then(|| say(format!("digits: nothing left to do: --steps is {steps}")));

    for step in start + 1..=steps {
        let began = Instant::now();
        let batch: Vec<_> = data.batch(batch as usize)?.into_iter().map(|i| &train[i]).collect();
        let loss = forward_backward(&mut model, tp.as_ref(), &batch)?;
        model.wait()?;
        opt.step()?;
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
            return comm.finalize();
        }
        sleep(Duration::from_millis(pace).saturating_sub(began.elapsed()));
    }
    saver.wait()?;
    let evaluation = Evaluation::new(others, &held_out)?;
    let logits = recognise(&mut model, tp.as_ref(), &evaluation.samples)?;
    let counts = mesh.as_ref().map_or(Ok(0), |mesh| mesh.coordinate("tp"))? == 0; // its ranks have the same samples
    let (accuracy, facts) = evaluation.compute(&comm, logits.filter(|_| counts))?;
    say(format!("held-out accuracy {accuracy:.4}"));
    record(start.max(steps), &facts);
    comm.finalize()
}

fn main() {
    let (texts, numbers) = parse_options(&[("--parallel", "ddp")]);
    if !matches!(&*texts["--parallel"], "ddp" | "fsdp" | "tp" | "dp+tp" | "fsdp+tp" | "pp" | "dp+tp+pp") {
        usage(format!(
            "--parallel cannot be \"{}\": ddp, fsdp, tp, dp+tp, fsdp+tp, pp or dp+tp+pp",
            texts["--parallel"]
        ));
    }
    if let Err(error) = train(&texts, numbers) {
        eprintln!("digits: {error}");
        let _ = tessera::record_error(&error.to_string(), Some(&format!("{error:?}")));
        exit(1);
    }
}
