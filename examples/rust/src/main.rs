//! The digits trainer in Rust: see ../README.md for what it shares with those in C, Python and Java.

mod contract;

use std::time::{Duration, Instant};
use std::{collections::HashMap, process::exit, thread::sleep};

use contract::{initial, log, parse_options, read_data, show_bar, Sample, CLASSES, HIDDEN, PIXELS};
use tessera::{params, AdamW, Comm, Ddp, Result, Sampler, Saver, State};

/// `weight · input + bias`; each row of `weight` makes one output.
fn linear(weight: &[f32], bias: &[f32], input: &[f32]) -> Vec<f32> {
    let rows = weight.chunks_exact(input.len()).zip(bias);
    rows.map(|(row, bias)| bias + row.iter().zip(input).map(|(w, x)| w * x).sum::<f32>()).collect()
}

/// Hidden activations and logits of one image.
fn forward(ddp: &Ddp, image: &[f32; PIXELS]) -> Result<(Vec<f32>, Vec<f32>)> {
    let hidden: Vec<_> = linear(&ddp.param(0)?, &ddp.param(1)?, image).into_iter().map(|h| h.max(0.0)).collect();
    let logits = linear(&ddp.param(2)?, &ddp.param(3)?, &hidden);
    Ok((hidden, logits))
}

/// Writes the gradients of one linear layer, whose weight and bias are parameters `index` and `index + 1`. Each sample
/// gives the loss's gradient by the layer's outputs, and its inputs.
fn backward<'a>(ddp: &Ddp, index: usize, samples: impl Iterator<Item = (&'a [f32], &'a [f32])>) -> Result<()> {
    let (mut weight, mut bias) = (ddp.grad_mut(index)?, ddp.grad_mut(index + 1)?);
    weight.fill(0.0);
    bias.fill(0.0);
    for (outputs, inputs) in samples {
        for ((row, bias), output) in weight.chunks_exact_mut(inputs.len()).zip(bias.iter_mut()).zip(outputs) {
            *bias += output;
            row.iter_mut().zip(inputs).for_each(|(w, input)| *w += output * input);
        }
    }
    drop((weight, bias)); // from `ready` until `wait` they are the library's
    ddp.ready(index)?;
    ddp.ready(index + 1)
}

/// The batch's mean loss; its gradients are being averaged over the ranks.
fn forward_backward(ddp: &Ddp, batch: &[&Sample]) -> Result<f32> {
    let (mut loss, mut layers) = (0.0, Vec::with_capacity(batch.len()));
    for (image, label) in batch {
        let (hidden, mut outputs) = forward(ddp, image)?;
        let largest = outputs.iter().copied().fold(f32::MIN, f32::max);
        outputs.iter_mut().for_each(|logit| *logit = (*logit - largest).exp());
        let sum: f32 = outputs.iter().sum();
        loss -= (outputs[*label] / sum).ln() / batch.len() as f32;
        outputs.iter_mut().for_each(|p| *p /= sum * batch.len() as f32);
        outputs[*label] -= 1.0 / batch.len() as f32;
        layers.push((hidden, outputs));
    }
    backward(ddp, 2, layers.iter().map(|(hidden, outputs)| (&outputs[..], &hidden[..])))?;
    let fc2 = ddp.param(2)?;
    let inner = layers.iter().map(|(hidden, outputs)| {
        let by_hidden = |j: usize| (0..CLASSES).map(|k| outputs[k] * fc2[k * HIDDEN + j]).sum();
        (0..HIDDEN).map(|j| if hidden[j] > 0.0 { by_hidden(j) } else { 0.0 }).collect()
    });
    let inner: Vec<Vec<f32>> = inner.collect();
    backward(ddp, 0, inner.iter().zip(batch).map(|(inner, (image, _))| (&inner[..], &image[..])))?;
    Ok(loss)
}

fn accuracy(ddp: &Ddp, samples: &[Sample]) -> Result<f64> {
    let mut right = 0;
    for (image, label) in samples {
        let (_, logits) = forward(ddp, image)?;
        right += usize::from((0..CLASSES).all(|i| logits[i] <= logits[*label]));
    }
    Ok(right as f64 / samples.len() as f64)
}

fn train(texts: &HashMap<&str, String>, [steps, save_every, batch, seed, pace, progress]: [u64; 6]) -> Result<()> {
    let (train, held_out) = read_data(&texts["--data"]);
    let comm = Comm::from_env()?;
    let (rank, world) = (comm.rank()?, comm.world_size()?);
    let say = |text: String| (rank == 0).then(|| println!("{text}"));
    let (log_file, mut random) = (&texts["--log"], seed);
    let record = |step, name, value| (!log_file.is_empty()).then(|| log(log_file, rank, world, step, name, value));
    let params = params![
        "fc1.weight" => (initial(&mut random, HIDDEN * PIXELS, PIXELS), [HIDDEN, PIXELS]),
        "fc1.bias" => (initial(&mut random, HIDDEN, PIXELS), [HIDDEN]),
        "fc2.weight" => (initial(&mut random, CLASSES * HIDDEN, HIDDEN), [CLASSES, HIDDEN]),
        "fc2.bias" => (initial(&mut random, CLASSES, HIDDEN), [CLASSES]),
    ];
    let mut ddp = Ddp::new(&comm, params)?; // every rank now has rank 0's values
    let mut opt = AdamW::new(&mut ddp).lr(0.003).build()?;
    let mut data = Sampler::new(&comm, train.len()).seed(seed).build()?;
    let mut state = State::new().with("model", &ddp).with("optim", &opt).with("data", &data);
    let saver = Saver::at(&comm, &texts["--checkpoints"]).keep_latest(3).format(&texts["--format"]);
    let saver = if progress > 0 && rank == 0 { saver.progress(show_bar) } else { saver }.open()?;
    let start = saver.resume(&mut state)?;
    let from = if start == 0 { "from the beginning".to_owned() } else { format!("resumed after step {start}") };
    say(format!("digits: {world} ranks, {from}"));
    (start >= steps).then(|| say(format!("digits: nothing left to do: --steps is {steps}")));

    for step in start + 1..=steps {
        let began = Instant::now();
        let batch: Vec<_> = data.batch(batch as usize)?.into_iter().map(|i| &train[i]).collect();
        let loss = forward_backward(&ddp, &batch)?;
        ddp.wait()?; // the gradients are the average of all ranks now
        opt.step()?;
        if step % 10 == 0 || step == steps {
            say(format!("step {step}/{steps} loss {loss:.4}"));
            record(step, "loss", loss.into());
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
    let accuracy = accuracy(&ddp, &held_out)?;
    say(format!("held-out accuracy {accuracy:.4}"));
    record(start.max(steps), "accuracy", accuracy);
    comm.finalize()
}

fn main() {
    let (texts, numbers) = parse_options(&[]);
    if let Err(error) = train(&texts, numbers) {
        eprintln!("digits: {error}");
        let _ = tessera::record_error(&error.to_string(), Some(&format!("{error:?}")));
        exit(1);
    }
}
