//! The digits trainer in Rust: see ../README.md for what it shares with those in C, Python and Java.

use std::fs::{self, OpenOptions};
use std::io::Write;
use std::process::ExitCode;
use std::thread::sleep;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use tessera::{params, AdamW, Comm, Ddp, ReduceOp, Result, Sampler, Saver, State};

const PIXELS: usize = 64;
const HIDDEN: usize = 128;
const CLASSES: usize = 10;

struct Options {
    data: String,
    checkpoints: String,
    steps: u64,
    save_every: u64,
    batch: usize,
    seed: u64,
    log: Option<String>,
    pace: Duration,
}

impl Options {
    fn parse(mut arguments: impl Iterator<Item = String>) -> Result<Self, String> {
        let mut options = Options {
            data: "examples/data/digits.csv".to_owned(),
            checkpoints: "checkpoints".to_owned(),
            steps: 600,
            save_every: 50,
            batch: 32,
            seed: 7,
            log: None,
            pace: Duration::ZERO,
        };
        while let Some(name) = arguments.next() {
            let value = arguments.next().ok_or_else(|| format!("{name} needs a value"))?;
            let number = || value.parse::<u64>().map_err(|_| format!("{name} needs a number, not {value:?}"));
            match name.as_str() {
                "--data" => options.data = value,
                "--checkpoints" => options.checkpoints = value,
                "--steps" => options.steps = number()?,
                "--save-every" => options.save_every = number()?,
                "--batch" => options.batch = number()?.max(1) as usize,
                "--seed" => options.seed = number()?,
                "--log" => options.log = Some(value),
                "--pace" => options.pace = Duration::from_millis(number()?),
                _ => return Err(format!("unknown option {name}")),
            }
        }
        Ok(options)
    }
}

type Sample = ([f32; PIXELS], usize);

/// The training set and the rows that are held out.
fn read_data(path: &str) -> Result<(Vec<Sample>, Vec<Sample>), String> {
    let text = fs::read_to_string(path).map_err(|error| format!("cannot read {path}: {error}"))?;
    let (mut train, mut held_out) = (Vec::new(), Vec::new());
    for (row, line) in text.lines().enumerate() {
        let wrong = || format!("{path}:{}: expected 64 pixels and a label", row + 1);
        let numbers = line.split(',').map(|n| n.trim().parse::<u8>()).collect::<Result<Vec<_>, _>>();
        let (label, pixels) = numbers.as_ref().ok().and_then(|n| n.split_last()).ok_or_else(wrong)?;
        if pixels.len() != PIXELS || usize::from(*label) >= CLASSES {
            return Err(wrong());
        }
        let mut image = [0.0; PIXELS];
        image.iter_mut().zip(pixels).for_each(|(pixel, &n)| *pixel = f32::from(n) / 16.0);
        let set = if row < 1782 && row % 6 == 5 { &mut held_out } else { &mut train };
        set.push((image, usize::from(*label)));
    }
    Ok((train, held_out))
}

/// The next values of SplitMix64, uniform in ±1/√fan_in.
fn initial(state: &mut u64, count: usize, fan_in: usize) -> Vec<f32> {
    let mut draw = || {
        *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = *state;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    };
    let uniform = |draw: u64| (draw >> 40) as f64 / f64::from(1u32 << 24);
    (0..count).map(|_| ((2.0 * uniform(draw()) - 1.0) / (fan_in as f64).sqrt()) as f32).collect()
}

/// `bias + weight · input`, each row of `weight` being one output.
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

/// Adds the gradient of one linear layer for one sample: `outputs` is the loss's gradient by its outputs.
fn accumulate(weight: &mut [f32], bias: &mut [f32], outputs: &[f32], inputs: &[f32]) {
    for ((row, bias), output) in weight.chunks_exact_mut(inputs.len()).zip(bias).zip(outputs) {
        *bias += output;
        row.iter_mut().zip(inputs).for_each(|(w, input)| *w += output * input);
    }
}

/// Writes all gradients, says them ready as soon as they are, and returns the batch's mean loss.
fn forward_backward(ddp: &Ddp, batch: &[&Sample]) -> Result<f32> {
    let mut loss = 0.0;
    let mut kept = Vec::with_capacity(batch.len());
    for (image, label) in batch {
        let (hidden, mut outputs) = forward(ddp, image)?;
        let largest = outputs.iter().copied().fold(f32::MIN, f32::max);
        outputs.iter_mut().for_each(|logit| *logit = (*logit - largest).exp());
        let sum: f32 = outputs.iter().sum();
        loss -= (outputs[*label] / sum).ln() / batch.len() as f32;
        outputs.iter_mut().for_each(|p| *p /= sum * batch.len() as f32);
        outputs[*label] -= 1.0 / batch.len() as f32;
        kept.push((hidden, outputs));
    }
    {
        let (mut weight, mut bias) = (ddp.grad_mut(2)?, ddp.grad_mut(3)?);
        weight.fill(0.0);
        bias.fill(0.0);
        kept.iter().for_each(|(hidden, outputs)| accumulate(&mut weight, &mut bias, outputs, hidden));
    }
    ddp.ready(2)?;
    ddp.ready(3)?; // fc2 is averaged over the ranks while fc1 is computed
    {
        let (mut weight, mut bias) = (ddp.grad_mut(0)?, ddp.grad_mut(1)?);
        weight.fill(0.0);
        bias.fill(0.0);
        let fc2 = ddp.param(2)?;
        for ((image, _), (hidden, outputs)) in batch.iter().zip(&kept) {
            let mut inner = vec![0.0; HIDDEN];
            for (row, output) in fc2.chunks_exact(HIDDEN).zip(outputs) {
                inner.iter_mut().zip(row).for_each(|(g, w)| *g += output * w);
            }
            inner.iter_mut().zip(hidden).filter(|(_, h)| **h <= 0.0).for_each(|(g, _)| *g = 0.0);
            accumulate(&mut weight, &mut bias, &inner, image);
        }
    }
    ddp.ready(0)?;
    ddp.ready(1)?;
    Ok(loss)
}

fn accuracy(ddp: &Ddp, samples: &[Sample]) -> Result<f64> {
    let mut right = 0;
    for (image, label) in samples {
        let (_, logits) = forward(ddp, image)?;
        let guess = (0..CLASSES).fold(0, |best, i| if logits[i] > logits[best] { i } else { best });
        right += usize::from(guess == *label);
    }
    Ok(right as f64 / samples.len() as f64)
}

/// One line of JSON, with one write.
fn append(options: &Options, rank: usize, world: usize, step: u64, name: &str, value: f64) {
    let Some(path) = &options.log else { return };
    let time = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64();
    let line = format!(
        "{{\"time\":{time:.3},\"rank\":{rank},\"world\":{world},\"step\":{step},\"{name}\":{value:.6},\"lang\":\"rust\"}}\n"
    );
    let written = OpenOptions::new()
        .create(true)
        .append(true)
        .open(path)
        .and_then(|mut f| f.write_all(line.as_bytes()));
    if let Err(error) = written {
        eprintln!("cannot write {path}: {error}");
    }
}

fn train(options: &Options, train: &[Sample], held_out: &[Sample]) -> Result<()> {
    let comm = Comm::from_env()?;
    let (rank, world) = (comm.rank()?, comm.world_size()?);
    let draws = &mut options.seed.clone();
    let mut ddp = Ddp::new(
        &comm,
        params![
            "fc1.weight" => (initial(draws, HIDDEN * PIXELS, PIXELS), [HIDDEN, PIXELS]),
            "fc1.bias" => (initial(draws, HIDDEN, PIXELS), [HIDDEN]),
            "fc2.weight" => (initial(draws, CLASSES * HIDDEN, HIDDEN), [CLASSES, HIDDEN]),
            "fc2.bias" => (initial(draws, CLASSES, HIDDEN), [CLASSES]),
        ],
    )?;
    let mut opt = AdamW::new(&mut ddp).lr(0.003).build()?;
    let mut data = Sampler::new(&comm, train.len()).seed(options.seed).build()?;
    let mut state = State::new().with("model", &ddp).with("optim", &opt).with("data", &data);
    let saver = Saver::at(&comm, &options.checkpoints).keep_latest(3).open()?;
    let start = saver.resume(&mut state)?;
    if rank == 0 && start == 0 {
        println!("digits: {world} ranks, from the beginning");
    } else if rank == 0 {
        println!("digits: {world} ranks, resumed after step {start}");
    }

    for done in start + 1..=options.steps {
        let began = Instant::now();
        let batch: Vec<_> = data.batch(options.batch)?.into_iter().map(|i| &train[i]).collect();
        let loss = forward_backward(&ddp, &batch)?;
        ddp.wait()?;
        opt.step()?;
        if done % 10 == 0 || done == options.steps {
            append(options, rank, world, done, "loss", loss.into());
            if rank == 0 {
                println!("step {done}/{} loss {loss:.4}", options.steps);
            }
        }
        let save_now = options.save_every > 0 && done % options.save_every == 0;
        if save_now {
            state.set_metric("loss", loss.into())?;
            saver.save_async(done, &state)?;
        }
        let mut stop = [i32::from(tessera::preempt_requested())];
        comm.all_reduce(&mut stop, ReduceOp::Max)?; // all ranks leave the loop at the same step
        if stop[0] != 0 {
            if !save_now {
                state.set_metric("loss", loss.into())?;
                saver.save(done, &state)?;
            }
            saver.wait()?;
            if rank == 0 {
                println!("digits: stopped after step {done}");
            }
            return comm.finalize();
        }
        sleep(options.pace.saturating_sub(began.elapsed()));
    }
    saver.wait()?;
    let accuracy = accuracy(&ddp, held_out)?;
    append(options, rank, world, options.steps, "accuracy", accuracy);
    if rank == 0 {
        println!("held-out accuracy {accuracy:.4}");
    }
    comm.finalize()
}

fn main() -> ExitCode {
    let prepared =
        Options::parse(std::env::args().skip(1)).and_then(|o| read_data(&o.data).map(|data| (o, data)));
    let (options, (train_set, held_out)) = match prepared {
        Ok(prepared) => prepared,
        Err(message) => {
            eprintln!("digits_rs: {message}");
            return ExitCode::from(2);
        }
    };
    match train(&options, &train_set, &held_out) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("digits_rs: {error}");
            let _ = tessera::record_error(&error.to_string(), Some(&format!("{error:?}")));
            ExitCode::FAILURE
        }
    }
}
