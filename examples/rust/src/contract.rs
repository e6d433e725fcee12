//! What the digits trainers in Rust share: the command line, the data, the initial values and the log that
//! ../../README.md tells of. The one with candle's network (../../rust-candle) takes this file, too.

use std::time::SystemTime;
use std::{collections::HashMap, fs, io::Write, process::exit};

use tessera::{Phase, Progress};

pub const PIXELS: usize = 64;
pub const HIDDEN: usize = 128;
pub const CLASSES: usize = 10;
pub type Sample = ([f32; PIXELS], usize);

/// What a user got wrong, on one line; exit code 2.
pub fn usage(what: String) -> ! {
    eprintln!("digits: {what}; see examples/README.md");
    exit(2)
}

/// The command line, `--name VALUE` pairs over their defaults, of which a trainer may have `more`; then its numbers: steps,
/// save-every, batch, seed, pace, progress.
pub fn parse_options(more: &[(&'static str, &'static str)]) -> (HashMap<&'static str, String>, [u64; 6]) {
    let [data, checkpoints] = [("--data", "examples/data/digits.csv"), ("--checkpoints", "checkpoints")];
    let words = [data, checkpoints, ("--log", ""), ("--format", "tessera")];
    let [steps, batch, pace] = [("--steps", "600"), ("--batch", "32"), ("--pace", "0")];
    let numbers = [steps, ("--save-every", "50"), batch, ("--seed", "7"), pace, ("--progress", "0")];
    let mut texts: HashMap<_, _> =
        words.iter().chain(more).chain(&numbers).map(|(k, v)| (*k, (*v).to_owned())).collect();
    let mut arguments = std::env::args().skip(1);
    while let Some(name) = arguments.next() {
        let value = texts.get_mut(name.as_str()).unwrap_or_else(|| usage(format!("there is no option {name}")));
        *value = arguments.next().unwrap_or_else(|| usage(format!("{name} needs a value")));
    }
    let numbers = numbers.map(|(name, _)| {
        let (text, least) = (&texts[name], u64::from(name == "--steps" || name == "--batch"));
        let plain = text.len() <= 9 && text.bytes().all(|b| b.is_ascii_digit());
        let number = text.parse().ok().filter(|number| plain && *number >= least);
        number.unwrap_or_else(|| usage(format!("{name} cannot be \"{text}\": a number from {least} to 999999999")))
    });
    (texts, numbers)
}

/// The training set and the rows that are held out.
pub fn read_data(path: &str) -> (Vec<Sample>, Vec<Sample>) {
    let hint = "start in the clone's root or name the file by --data";
    let text = fs::read_to_string(path).unwrap_or_else(|error| usage(format!("cannot read {path} ({error}): {hint}")));
    let (mut train, mut held_out) = (Vec::new(), Vec::new());
    for (row, line) in text.lines().chain(std::iter::repeat("")).take(1797).enumerate() {
        let numbers: Vec<u8> = line.split(',').map_while(|number| number.trim().parse().ok()).collect();
        if numbers.len() != PIXELS + 1 || usize::from(numbers[PIXELS]) >= CLASSES {
            usage(format!("{path} is not the digits: row {} is not 64 pixels and a label", row + 1));
        }
        let sample = (std::array::from_fn(|i| f32::from(numbers[i]) / 16.0), usize::from(numbers[PIXELS]));
        if row < 1782 && row % 6 == 5 { &mut held_out } else { &mut train }.push(sample);
    }
    (train, held_out)
}

/// The next values of SplitMix64, uniform within 1/√fan_in of zero.
pub fn initial(state: &mut u64, count: usize, fan_in: usize) -> Vec<f32> {
    let mut draw = || {
        *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = *state;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) >> 40) as f64 / f64::from(1u32 << 24)
    };
    (0..count).map(|_| ((2.0 * draw() - 1.0) / (fan_in as f64).sqrt()) as f32).collect()
}

/// Appends one line of JSON, with one write: ranks may share the file.
pub fn log(path: &str, rank: usize, world: usize, step: u64, facts: &str) {
    let time = SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default().as_secs_f64();
    let values = format!(r#""rank":{rank},"world":{world},"step":{step},{facts},"lang":"rust""#);
    let line = format!("{{\"time\":{time:.3},{values}}}\n");
    let file = fs::OpenOptions::new().create(true).append(true).open(path);
    if let Err(error) = file.and_then(|mut file| file.write_all(line.as_bytes())) {
        eprintln!("digits: cannot write {path}: {error}");
    }
}

/// A bar on standard error: how far a save or a load is. Saves in the background call it on another thread.
pub fn show_bar(Progress { phase, done, total, .. }: Progress) {
    let what = if phase == Phase::Read { "loading" } else { "saving" };
    if total > 0 && matches!(phase, Phase::Read | Phase::Write) {
        let (bar, end) = ("#".repeat((20 * done / total) as usize), if done == total { "\n" } else { "" });
        eprint!("\r{what} [{bar:20}]{end}");
    }
}
