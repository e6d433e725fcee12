//! Random numbers: every part of a tensor has the bits of the whole.

use tessera::{random, Bool, Code, Fsdp, Layout, Placement, Region};

mod common;

#[test]
fn parts_have_the_bits_of_the_full_tensor() {
    let mut full = vec![0.0f64; 35];
    random::uniform(&mut full, 7, u64::MAX, -1.0, 1.0, None).unwrap();
    let columns = Layout::new(&[7, 5], &[2], &[Placement::Shard(1)]).unwrap();
    for (rank, width) in [(0, 3), (1, 2)] {
        let mut part = vec![0.0f64; 7 * width];
        random::uniform(&mut part, 7, u64::MAX, -1.0, 1.0, Some((&columns, rank))).unwrap();
        for (i, value) in part.iter().enumerate() {
            assert_eq!(*value, full[i / width * 5 + 3 * rank + i % width]);
        }
    }
    let boxes = [vec![], vec![Region { offsets: vec![2, 1], sizes: vec![1, 4] }]];
    let layout = Layout::from_regions(&[7, 5], &boxes).unwrap();
    let mut part = [0.0f64; 4];
    random::uniform(&mut part, 7, u64::MAX, -1.0, 1.0, Some((&layout, 1))).unwrap();
    assert_eq!(part, full[11..15]);
    random::uniform::<f64>(&mut [], 7, 0, -1.0, 1.0, Some((&layout, 0))).unwrap();
}

#[test]
fn shards_are_initialised_in_one_call() {
    let mut full = vec![0.0f32; 15];
    random::normal(&mut full, 7, 0, 0.0, 0.02, None).unwrap();
    common::ranks(2, |comm| {
        let rank = comm.rank().unwrap();
        let units = tessera::units!["u" => tessera::params!["w" => (vec![1.0f32; 15], [5, 3])]];
        let mut fsdp = Fsdp::new(&comm, units).unwrap();
        let layout = fsdp.layout(0).unwrap();
        random::normal(&mut fsdp.shard_mut(0).unwrap(), 7, 0, 0.0, 0.02, Some((&layout, rank))).unwrap();
        assert_eq!(fsdp.shard(0).unwrap()[..], full[if rank == 0 { 0..9 } else { 9..15 }]);
    });
}

#[test]
fn masks_have_any_type() {
    let mut numbers = vec![0.0f64; 1000];
    random::uniform(&mut numbers, 1, 2, 0.0, 1.0, None).unwrap();
    let (mut flags, mut bytes) = (vec![Bool::from(false); 1000], vec![7u8; 1000]);
    random::bernoulli(&mut flags, 1, 2, 0.9, None).unwrap();
    random::bernoulli(&mut bytes, 1, 2, 0.9, None).unwrap();
    for ((number, flag), byte) in numbers.iter().zip(flags).zip(bytes) {
        assert_eq!((bool::from(flag), byte), (*number < 0.9, u8::from(*number < 0.9)));
    }
}

#[test]
fn bad_input_is_refused() {
    let mut out = [5.0f32; 4];
    let layout = Layout::new(&[6], &[2], &[Placement::Shard(0)]).unwrap();
    for error in [
        random::uniform(&mut out, 0, 0, 1.0, 0.0, None),
        random::normal(&mut out, 0, 0, f64::NAN, 1.0, None),
        random::bernoulli(&mut out, 0, 0, 1.5, None),
        random::uniform(&mut [0i32; 4], 0, 0, 0.0, 1.0, None),
        random::uniform(&mut out, 0, 0, 0.0, 1.0, Some((&layout, 2))),
    ] {
        assert_eq!(error.unwrap_err().code(), Code::InvalidArgument);
    }
    let error = random::uniform(&mut out, 0, 0, 0.0, 1.0, Some((&layout, 1))).unwrap_err();
    assert!(error.message().contains("output needs shape [3]"), "{error}");
    assert_eq!(out, [5.0; 4]);
}
