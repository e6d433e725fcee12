//! The digits trainer in Rust: see ../README.md for what it shares with those in C, Python and Java.

use std::collections::HashMap;
use std::fs::{self, OpenOptions};
use std::io::Write;
use std::process::ExitCode;
use std::thread::sleep;
use std::time::{Duration, Instant, SystemTime};

use tessera::{params, AdamW, Comm, Ddp, ReduceOp, Result, Sampler, Saver, State};

const PIXELS: usize = 64;
const HIDDEN: usize = 128;
const CLASSES: usize = 10;

/// The command line: `--name VALUE` pairs over their defaults.
struct Options(HashMap<&'static str, String>);

impl Options {
    fn parse() -> Result<Self, String> {
        let texts = [("--data", "examples/data/digits.csv"), ("--checkpoints", "checkpoints"), ("--log", "")];
        let numbers = [("--steps", "600"), ("--save-every", "50"), ("--batch", "32"), ("--seed", "7"), ("--pace", "0")];
        let mut values: HashMap<_, _> = texts.iter().chain(&numbers).map(|(k, v)| (*k, (*v).to_owned())).collect();
        let mut arguments = std::env::args().skip(1);
        while let Some(name) = arguments.next() {
            let value = values.get_mut(name.as_str()).ok_or_else(|| format!("unknown option {name}"))?;
            *value = arguments.next().ok_or_else(|| format!("{name} needs a value"))?;
            if numbers.iter().any(|(number, _)| *number == name) && value.parse::<u64>().is_err() {
                return Err(format!("{name} needs a number, not {value:?}"));
            }
        }
        Ok(Options(values))
    }

    fn number(&self, name: &str) -> u64 {
        self.0[name].parse().unwrap_or_default() // checked above
    }
}

type Sample = ([f32; PIXELS], usize);

/// The training set and the rows that are held out.
fn read_data(path: &str) -> Result<(Vec<Sample>, Vec<Sample>), String> {
    let text = fs::read_to_string(path).map_err(|error| format!("cannot read {path}: {error}"))?;
    let (mut train, mut held_out) = (Vec::new(), Vec::new());
    for (row, line) in text.lines().enumerate() {
        let numbers: Vec<u8> = line.split(',').map_while(|number| number.trim().parse().ok()).collect();
        if numbers.len() != PIXELS + 1 || usize::from(numbers[PIXELS]) >= CLASSES {
            return Err(format!("{path}:{}: expected 64 pixels and a label", row + 1));
        }
        let sample = (std::array::from_fn(|i| f32::from(numbers[i]) / 16.0), usize::from(numbers[PIXELS]));
        if row < 1782 && row % 6 == 5 {
            held_out.push(sample)
        } else {
            train.push(sample)
        }
    }
    Ok((train, held_out))
}

/// The next values of SplitMix64, uniform within 1/√fan_in of zero.
fn initial(state: &mut u64, count: usize, fan_in: usize) -> Vec<f32> {
    let mut draw = || {
        *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = *state;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) >> 40) as f64 / f64::from(1u32 << 24)
    };
    (0..count).map(|_| ((2.0 * draw() - 1.0) / (fan_in as f64).sqrt()) as f32).collect()
}

/// `weight · input + bias`; each row of `weight` makes one output.
fn linear(weight: &[f32], bias: &[f32], input: &[f32]) -> Vec<f32> {
    let rows = weight.chunks_exact(input.len()).zip(bias);
    rows.map(|(row, bias)| bias + row.iter().zip(input).map(|(w, x)| w * x).sum::<f32>()).collect()
}

/// Hidden activations and logits of one image.
fn forward(ddp: &Ddp, image: &[f32; PIXELS]) -> Result<(Vec<f32>, Vec<f32>)> {
    let mut hidden = linear(&ddp.param(0)?, &ddp.param(1)?, image);
    hidden.iter_mut().for_each(|h| *h = h.max(0.0));
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
    let mut loss = 0.0;
    let mut layers = Vec::with_capacity(batch.len());
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
    let inner: Vec<Vec<f32>> = layers
        .iter()
        .map(|(hidden, outputs)| {
            let by_input = |j: usize| (0..CLASSES).map(|k| outputs[k] * fc2[k * HIDDEN + j]).sum();
            (0..HIDDEN).map(|j| if hidden[j] > 0.0 { by_input(j) } else { 0.0 }).collect()
        })
        .collect();
    backward(ddp, 0, inner.iter().zip(batch).map(|(inner, (image, _))| (&inner[..], &image[..])))?;
    Ok(loss)
}

fn accuracy(ddp: &Ddp, samples: &[Sample]) -> Result<f64> {
    let mut right = 0;
    for (image, label) in samples {
        let (_, logits) = forward(ddp, image)?;
        let guess = (1..CLASSES).fold(0, |best, i| if logits[i] > logits[best] { i } else { best });
        right += usize::from(guess == *label);
    }
    Ok(right as f64 / samples.len() as f64)
}

/// Appends one line of JSON, with one write.
fn log(path: &str, comm: &Comm, step: u64, name: &str, value: f64) -> Result<()> {
    let (rank, world) = (comm.rank()?, comm.world_size()?);
    let time = SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default().as_secs_f64();
    let values = format!(r#""rank":{rank},"world":{world},"step":{step},"{name}":{value:.6},"lang":"rust""#);
    let line = format!("{{\"time\":{time:.3},{values}}}\n");
    let file = OpenOptions::new().create(true).append(true).open(path);
    if let Err(error) = file.and_then(|mut file| file.write_all(line.as_bytes())) {
        eprintln!("digits_rs: cannot write {path}: {error}");
    }
    Ok(())
}

fn train(options: &Options, train: &[Sample], held_out: &[Sample]) -> Result<()> {
    let comm = Comm::from_env()?;
    let rank = comm.rank()?;
    let say = |text: String| (rank == 0).then(|| println!("{text}"));
    let log_file = &options.0["--log"];
    let record = |step, name, value| if log_file.is_empty() { Ok(()) } else { log(log_file, &comm, step, name, value) };
    let seed = &mut options.number("--seed");
    let mut ddp = Ddp::new(
        &comm,
        params![
            "fc1.weight" => (initial(seed, HIDDEN * PIXELS, PIXELS), [HIDDEN, PIXELS]),
            "fc1.bias" => (initial(seed, HIDDEN, PIXELS), [HIDDEN]),
            "fc2.weight" => (initial(seed, CLASSES * HIDDEN, HIDDEN), [CLASSES, HIDDEN]),
            "fc2.bias" => (initial(seed, CLASSES, HIDDEN), [CLASSES]),
        ],
    )?;
    let mut opt = AdamW::new(&mut ddp).lr(0.003).build()?;
    let mut data = Sampler::new(&comm, train.len()).seed(options.number("--seed")).build()?;
    let mut state = State::new().with("model", &ddp).with("optim", &opt).with("data", &data);
    let saver = Saver::at(&comm, &options.0["--checkpoints"]).keep_latest(3).open()?;
    let (steps, save_every) = (options.number("--steps"), options.number("--save-every"));
    let start = saver.resume(&mut state)?;
    let from = if start == 0 { "from the beginning".to_owned() } else { format!("resumed after step {start}") };
    say(format!("digits: {} ranks, {from}", comm.world_size()?));

    for step in start + 1..=steps {
        let began = Instant::now();
        let batch: Vec<_> = data.batch(options.number("--batch") as usize)?.into_iter().map(|i| &train[i]).collect();
        let loss = forward_backward(&ddp, &batch)?;
        ddp.wait()?;
        opt.step()?;
        if step % 10 == 0 || step == steps {
            say(format!("step {step}/{} loss {loss:.4}", steps));
            record(step, "loss", loss.into())?;
        }
        let mut stop = [i32::from(tessera::preempt_requested())];
        comm.all_reduce(&mut stop, ReduceOp::Max)?; // all ranks stop after the same step
        if stop[0] != 0 || (save_every > 0 && step % save_every == 0) {
            state.set_metric("loss", loss.into())?;
            saver.save_async(step, &state)?;
        }
        if stop[0] != 0 {
            saver.wait()?;
            say(format!("digits: stopped after step {step}"));
            return comm.finalize();
        }
        sleep(Duration::from_millis(options.number("--pace")).saturating_sub(began.elapsed()));
    }
    saver.wait()?;
    let accuracy = accuracy(&ddp, held_out)?;
    say(format!("held-out accuracy {accuracy:.4}"));
    record(steps, "accuracy", accuracy)?;
    comm.finalize()
}

fn main() -> ExitCode {
    let prepared = Options::parse().and_then(|options| read_data(&options.0["--data"]).map(|data| (options, data)));
    match prepared.map(|(options, (samples, held_out))| train(&options, &samples, &held_out)) {
        Ok(Ok(())) => ExitCode::SUCCESS,
        Ok(Err(error)) => {
            eprintln!("digits_rs: {error}");
            let _ = tessera::record_error(&error.to_string(), Some(&format!("{error:?}")));
            ExitCode::from(1)
        }
        Err(message) => {
            eprintln!("digits_rs: {message}");
            ExitCode::from(2)
        }
    }
}
