//! Saving, resuming and reading checkpoints.

mod common;

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::mpsc;

use common::{block_on, deadline, ranks};
use tessera::{
    params, AdamW, Bool, Checkpoint, Code, Comm, DType, Ddp, ExportOptions, Layout, LoadOptions, LoadReport, Local,
    Optimizer, Phase, Placement, Region, Sampler, Saver, State, Tensor, Value, Verify,
};

struct Trainer<'c> {
    ddp: Ddp<'c>,
    opt: Optimizer<'c>,
    data: Sampler,
}

impl<'c> Trainer<'c> {
    fn new(comm: &'c Comm) -> Self {
        let weights = params!["fc.weight" => (vec![0.5f32; 64 * 8], [64, 8]), "fc.bias" => (vec![0.0f32; 64], [64])];
        let mut ddp = Ddp::new(comm, weights).unwrap();
        let opt = AdamW::new(&mut ddp).lr(0.01).build().unwrap();
        let data = Sampler::new(comm, 100).seed(1).build().unwrap();
        Trainer { ddp, opt, data }
    }

    /// The gradient of each parameter is the mean index of the batch, averaged over the ranks.
    fn step(&mut self) {
        let batch = self.data.batch(4).unwrap();
        let mean = batch.iter().sum::<usize>() as f32 / batch.len() as f32;
        (0..self.ddp.len()).for_each(|i| self.ddp.grad_mut(i).unwrap().fill(mean - 50.0));
        self.ddp.ready_all().unwrap();
        self.ddp.wait().unwrap();
        self.opt.step().unwrap();
    }

    fn state(&self) -> State<'c> {
        State::new().with("model", &self.ddp).with("optim", &self.opt).with("data", &self.data)
    }

    fn weights(&self) -> Vec<f32> {
        self.ddp.param(0).unwrap().to_vec()
    }
}

#[test]
fn training_goes_on_as_if_it_had_never_stopped() {
    let folder = tempfile::tempdir().unwrap();
    let through = ranks(2, |comm| {
        let mut trainer = Trainer::new(&comm);
        (0..10).for_each(|_| trainer.step());
        trainer.weights()
    });
    ranks(2, |comm| {
        let mut trainer = Trainer::new(&comm);
        let mut state = trainer.state();
        let saver = Saver::at(&comm, folder.path()).keep_latest(1).timeout(deadline()).open().unwrap();
        assert_eq!(saver.resume(&mut state).unwrap(), 0);
        (0..4).for_each(|_| trainer.step());
        saver.save(4, &state).unwrap();
        trainer.step();
        state.set_metric("loss", 0.25).unwrap();
        saver.save(5, &state).unwrap();
    });
    let kept: Vec<_> = checkpoints(folder.path());
    assert_eq!(kept.len(), 1, "{kept:?}");
    let resumed = ranks(2, |comm| {
        let mut trainer = Trainer::new(&comm);
        let mut state = trainer.state();
        let saver = Saver::at(&comm, folder.path()).open().unwrap();
        assert_eq!((saver.resume(&mut state).unwrap(), trainer.opt.steps().unwrap()), (5, 5));
        (0..5).for_each(|_| trainer.step());
        trainer.weights()
    });
    assert_eq!(resumed, through);
}

#[test]
fn another_number_of_ranks_resumes_in_mid_epoch() {
    let folder = tempfile::tempdir().unwrap();
    let mut seen: Vec<usize> = ranks(2, |comm| {
        let mut trainer = Trainer::new(&comm);
        let taken: Vec<_> = (0..5).flat_map(|_| trainer.data.batch(4).unwrap()).collect();
        Saver::at(&comm, folder.path()).open().unwrap().save(5, &trainer.state()).unwrap();
        taken
    })
    .concat();
    seen.extend(
        ranks(3, |comm| {
            let mut trainer = Trainer::new(&comm);
            let saver = Saver::at(&comm, folder.path()).open().unwrap();
            assert_eq!(saver.resume(&mut trainer.state()).unwrap(), 5);
            (0..5).flat_map(|_| trainer.data.batch(4).unwrap()).collect::<Vec<_>>()
        })
        .concat(),
    );
    seen.sort_unstable();
    assert_eq!(seen, (0..100).collect::<Vec<_>>());
}

#[test]
fn one_rank_saves_and_all_load_after_a_barrier() {
    let folder = tempfile::tempdir().unwrap();
    ranks(3, |comm| {
        let mut trainer = Trainer::new(&comm);
        trainer.step();
        let saved = trainer.weights();
        if comm.rank().unwrap() == 0 {
            Saver::alone(folder.path()).open().unwrap().save(1, &trainer.state()).unwrap();
        }
        comm.barrier().unwrap();
        trainer.step();
        assert_ne!(trainer.weights(), saved);
        let checkpoint = Checkpoint::open(folder.path()).unwrap();
        checkpoint.load(&mut trainer.state(), &LoadOptions::new()).unwrap();
        assert_eq!(trainer.weights(), saved);
    });
}

/// Two names of the same memory.
#[test]
fn tied_tensors_are_saved_once_load_apart_and_are_tied_again() {
    let is_tied = r#""aliases":{"head.weight":"embed.weight"}"#;
    let filled = |value: f32| Tensor::new(vec![value; 1000], [1000]).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let open = || Checkpoint::open(folder.path()).unwrap();
    let shared = filled(1.5);
    let mut tied = State::new().with("embed.weight", &shared).with("head.weight", &shared);
    let saver = Saver::alone(folder.path()).open().unwrap();
    saver.save(1, &tied).unwrap();
    let first = open();
    assert!(first.manifest().unwrap().contains(is_tied));
    let names: Vec<_> = first.tensors().unwrap().into_iter().map(|tensor| tensor.name).collect();
    assert_eq!(names, ["embed.weight", "head.weight"]);
    let once = data_bytes(&first);

    let (embed, head) = (filled(0.0), filled(0.0));
    let mut apart = State::new().with("embed.weight", &embed).with("head.weight", &head);
    first.load(&mut apart, &LoadOptions::new()).unwrap();
    assert_eq!(embed.to_vec::<f32>().unwrap(), [1.5; 1000]);
    assert_eq!(head.to_vec::<f32>().unwrap(), [1.5; 1000]);
    head.view_mut::<f32>().unwrap().fill(2.5);
    saver.save(2, &apart).unwrap();
    let both = open();
    assert_eq!(data_bytes(&both), once + 4 * 1000);
    assert_eq!(both.read("head.weight").unwrap().to_vec::<f32>().unwrap(), [2.5; 1000]);
    assert_eq!(both.read("embed.weight").unwrap().to_vec::<f32>().unwrap(), [1.5; 1000]);

    shared.view_mut::<f32>().unwrap().fill(0.0);
    first.load(&mut tied, &LoadOptions::new()).unwrap();
    assert_eq!(shared.to_vec::<f32>().unwrap(), [1.5; 1000]);
    saver.save(3, &tied).unwrap();
    let again = open();
    assert!(again.manifest().unwrap().contains(is_tied));
    assert_eq!(data_bytes(&again), once);
}

/// Of its rank files.
fn data_bytes(checkpoint: &Checkpoint) -> u64 {
    let files = fs::read_dir(checkpoint.path().unwrap()).unwrap().map(|entry| entry.unwrap());
    let data = files.filter(|file| file.path().extension().is_some_and(|end| end == "safetensors"));
    data.map(|file| file.metadata().unwrap().len()).sum()
}

#[test]
fn the_copy_is_saved_while_training_goes_on() {
    let folder = tempfile::tempdir().unwrap();
    ranks(2, |comm| {
        let mut trainer = Trainer::new(&comm);
        let saver = Saver::at(&comm, folder.path()).open().unwrap();
        let before = trainer.weights();
        let mut save = saver.save_async(1, &trainer.state()).unwrap();
        trainer.step();
        let (sender, receiver) = mpsc::channel();
        save.on_done(move |result| sender.send(result).unwrap());
        assert!(save.wait_for(deadline()).unwrap() && save.is_done().unwrap());
        assert_eq!(receiver.recv_timeout(deadline()).unwrap(), Ok(()));
        block_on(save).unwrap(); // no runtime
        block_on(saver.save_async(2, &trainer.state()).unwrap()).unwrap();
        saver.save_async(3, &trainer.state()).unwrap().wait().unwrap();
        drop(saver.save_async(4, &trainer.state()).unwrap()); // goes on
        saver.wait().unwrap();
        comm.barrier().unwrap();
        assert_eq!(Checkpoint::open(folder.path()).unwrap().step().unwrap(), 4);
        let first = checkpoints(folder.path()).into_iter().next().unwrap();
        let weights = Checkpoint::open(first).unwrap().read("model.fc.weight").unwrap();
        assert_eq!(weights.to_vec::<f32>().unwrap(), before);
    });
}

#[test]
fn a_dropped_saver_does_not_wait_for_its_save_which_is_finished() {
    let folder = tempfile::tempdir().unwrap();
    let big = Tensor::new(vec![1.0f32; 4 << 20], [4 << 20]).unwrap();
    let state = State::new().with("big", &big);
    // A save may be over before the drop begins; then it tells nothing and is tried again.
    let went_on = (1..=50).any(|step| {
        let saver = Saver::alone(folder.path().join(step.to_string())).open().unwrap();
        let mut save = saver.save_async(step, &state).unwrap();
        drop(saver);
        let went_on = !save.is_done().unwrap();
        assert!(save.wait_for(deadline()).unwrap());
        save.wait().unwrap();
        assert_eq!(Checkpoint::open(folder.path().join(step.to_string())).unwrap().step().unwrap(), step);
        went_on
    });
    assert!(went_on, "every save was over when the drop returned");
}

#[test]
fn values_come_back_as_what_they_were() {
    let folder = tempfile::tempdir().unwrap();
    let map = Value::Map(vec![
        ("~".into(), Value::Tuple(vec![Value::Null, f64::NEG_INFINITY.into()])),
        (3i64.into(), true.into()),
    ]);
    let mut state = State::new();
    state.set("count", 42i64).unwrap();
    state.set("rate", 0.1).unwrap();
    state.set("nan", f64::NAN).unwrap();
    state.set("name", "trial \u{1f600}").unwrap();
    state.set("rng", vec![0u8, 1, 255]).unwrap();
    state.set("huge", Value::BigInt("123456789012345678901234567890".into())).unwrap();
    state.set("map", map.clone()).unwrap();
    let saver = Saver::alone(folder.path()).writer("rust", "test").open().unwrap();
    saver.save(7, &state).unwrap();

    let mut loaded = State::default();
    for name in ["count", "rate", "nan", "name", "rng", "huge", "map"] {
        loaded.set(name, Value::Null).unwrap();
    }
    assert_eq!(saver.resume(&mut loaded).unwrap(), 7);
    assert_eq!(loaded.get_int("count").unwrap(), 42);
    assert_eq!((loaded.get_double("rate").unwrap(), loaded.get_double("nan").unwrap().is_nan()), (0.1, true));
    assert_eq!(loaded.get("count").unwrap(), Value::Int(42));
    assert_eq!(loaded.get("rate").unwrap(), Value::Double(0.1));
    assert_eq!(loaded.get("name").unwrap(), "trial \u{1f600}".into());
    assert_eq!(loaded.get("rng").unwrap(), vec![0u8, 1, 255].into());
    assert_eq!(loaded.get("huge").unwrap(), Value::BigInt("123456789012345678901234567890".into()));
    assert_eq!(loaded.get("map").unwrap(), map);
    assert_eq!(loaded.get("none").unwrap_err().code(), Code::NotFound);
    assert_eq!(loaded.get_int("name").unwrap_err().code(), Code::InvalidArgument);
    assert_eq!(loaded.get_double("name").unwrap_err().code(), Code::InvalidArgument);
    let manifest = Checkpoint::open(folder.path()).unwrap().manifest().unwrap();
    assert!(manifest.contains("\"rust\""), "{manifest}");
}

#[test]
fn values_nest_64_deep_and_no_deeper() {
    let nested = |depth| (0..depth).fold(Value::Int(1), |value, _| Value::Tuple(vec![value]));
    let mut state = State::new();
    state.set("deep", nested(64)).unwrap();
    assert_eq!(state.get("deep").unwrap(), nested(64));
    for depth in [65, 10_000] {
        assert_eq!(state.set("deep", nested(depth)).unwrap_err().code(), Code::InvalidArgument);
    }
}

#[test]
fn a_checkpoint_tells_and_gives_what_it_holds() {
    let folder = tempfile::tempdir().unwrap();
    let flags = Tensor::new(vec![Bool::from(true), false.into()], [2]).unwrap();
    let shorts = Tensor::new(vec![-5i16, 300], [2, 1]).unwrap();
    let scalar = Tensor::new(vec![2.5f64], []).unwrap();
    let empty = Tensor::new(Vec::<f32>::new(), [0, 4]).unwrap();
    let state =
        State::new().with("flags", &flags).with("shorts", &shorts).with("scalar", &scalar).with("empty", &empty);
    Saver::alone(folder.path()).open().unwrap().save(3, &state).unwrap();

    let checkpoint = Checkpoint::open(folder.path().join("latest")).unwrap();
    assert_eq!(checkpoint.step().unwrap(), 3);
    assert!(checkpoint.path().unwrap().starts_with(fs::canonicalize(folder.path()).unwrap()));
    let told: Vec<_> = checkpoint.tensors().unwrap().into_iter().map(|t| (t.name, t.dtype, t.shape)).collect();
    let expected = [
        ("empty", DType::F32, vec![0, 4]),
        ("flags", DType::Bool, vec![2]),
        ("scalar", DType::F64, vec![]),
        ("shorts", DType::I16, vec![2, 1]),
    ];
    assert_eq!(told, expected.map(|(name, dtype, shape)| (name.to_owned(), dtype, shape)));
    assert_eq!(checkpoint.read("flags").unwrap().to_vec::<Bool>().unwrap(), [true.into(), false.into()]);
    assert_eq!(checkpoint.read("shorts").unwrap().to_vec::<i16>().unwrap(), [-5, 300]);
    assert_eq!(checkpoint.read("scalar").unwrap().to_vec::<f64>().unwrap(), [2.5]);
    assert!(checkpoint.read("empty").unwrap().is_empty());
    checkpoint.verify(Verify::Headers).unwrap();
    checkpoint.verify(Verify::Full).unwrap();

    assert_eq!(checkpoint.read("nothing").unwrap_err().code(), Code::NotFound);
    let wrong = Tensor::zeros(DType::F32, [2]).unwrap();
    assert_eq!(checkpoint.read_into("flags", &wrong).unwrap_err().code(), Code::Mismatch);
    let view = shorts.view::<i16>().unwrap();
    assert_eq!(checkpoint.read_into("shorts", &shorts).unwrap_err().code(), Code::InvalidState);
    drop(view);
    checkpoint.read_into("shorts", &shorts).unwrap();
}

/// By four of its versions, with tests/golden/torch_dcp/make.py: read whole, and loaded as either of two ranks would.
#[test]
fn what_pytorch_wrote_is_loaded() {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../tests/golden/torch_dcp");
    let found = fs::read_dir(golden).unwrap().map(|entry| entry.unwrap());
    let versions = found.filter(|entry| entry.file_name().to_string_lossy().starts_with("2."));
    let versions: Vec<_> = versions.map(|entry| entry.path()).collect();
    assert!(versions.len() >= 4, "{versions:?}");
    let counted = |numbers: std::ops::Range<u8>| numbers.map(f32::from).collect::<Vec<_>>();
    for path in versions.iter().flat_map(|version| ["dcp", "save.pt"].map(|name| version.join(name))) {
        let checkpoint = Checkpoint::open(&path).unwrap();
        let read = |name| checkpoint.read(name).map(|tensor| tensor.to_vec::<f32>().unwrap());
        assert_eq!(read("model.rows").unwrap(), counted(0..35), "{path:?}");
        match read("model.columns") {
            Ok(columns) => assert_eq!(columns, counted(0..15), "{path:?}"),
            Err(error) => assert!(error.code() == Code::NotFound && path.ends_with("save.pt"), "{path:?}: {error}"),
        }
        checkpoint.verify(Verify::Full).unwrap();
        let layout = Layout::new(&[7, 5], &[2], &[Placement::Shard(0)]).unwrap();
        for (rank, expected) in [counted(0..20), counted(20..35)].iter().enumerate() {
            let rows = Tensor::zeros(DType::F32, [expected.len() / 5, 5]).unwrap();
            let scalar = Tensor::zeros(DType::I64, []).unwrap();
            let mut state = State::new().with("model.scalar", &scalar);
            state.add_sharded("model.rows", &layout, DType::F32, std::slice::from_ref(&rows), rank).unwrap();
            state.set("step", 0i64).unwrap();
            state.set("note", Value::Null).unwrap();
            checkpoint.load(&mut state, &LoadOptions::new().allow_unexpected(true)).unwrap();
            assert_eq!(&rows.to_vec::<f32>().unwrap(), expected, "{path:?}");
            assert_eq!(scalar.to_vec::<i64>().unwrap(), [-3]);
            assert_eq!((state.get_int("step").unwrap(), state.get("note").unwrap()), (7, "größer".into()));
        }
    }
}

#[test]
fn a_checkpoint_is_exported_by_one_process_or_by_all_ranks() {
    let folder = tempfile::tempdir().unwrap();
    let whole: Vec<u16> = (0..60).collect();
    let table = Tensor::new(whole.clone(), [12, 5]).unwrap();
    let root = folder.path().join("root");
    Saver::alone(&root).open().unwrap().save(3, &State::new().with("model.table", &table)).unwrap();
    let read = |path: &Path| Checkpoint::open(path).unwrap().read("table").unwrap().to_vec::<u16>().unwrap();

    let alone = folder.path().join("alone");
    let checkpoint = Checkpoint::open(&root).unwrap();
    let options = ExportOptions::new().under("model.").max_file_bytes(40);
    let mut last = None;
    checkpoint.export_with_progress(&alone, None, &options, |told| last = Some(told)).unwrap();
    let last = last.expect("progress is told");
    assert_eq!((last.phase, last.done), (Phase::Write, last.total));
    assert_eq!(read(&alone), whole);
    assert_eq!(read(&alone.join("model.safetensors")), whole);
    let again = checkpoint.export(&alone, None, &ExportOptions::new());
    assert_eq!(again.unwrap_err().code(), Code::InvalidArgument, "it exists");

    for format in ["torch_dcp", "torch_save"] {
        let together = folder.path().join(format);
        ranks(2, |comm| {
            let options = ExportOptions::new().under("model.").format(format).timeout(deadline());
            Checkpoint::open(&root).unwrap().export(&together, Some(&comm), &options).unwrap();
        });
        assert_eq!(read(&together), whole);
    }
    assert_eq!(read(&folder.path().join("torch_save/model.pt")), whole);
}

#[test]
fn a_model_without_ranks_is_saved_as_one_with() {
    let folder = tempfile::tempdir().unwrap();
    let weights = |fill| params!["fc.weight" => (vec![fill; 512], [64, 8]), "fc.bias" => (vec![fill; 64], [64])];
    let model = Local::new(weights(1.5f32)).unwrap();
    Saver::alone(folder.path()).open().unwrap().save(1, &State::new().with("model", &model)).unwrap();
    ranks(2, |comm| {
        let ddp = Ddp::new(&comm, weights(0.0)).unwrap();
        assert_eq!(
            Saver::open(&comm, folder.path()).unwrap().resume(&mut State::new().with("model", &ddp)).unwrap(),
            1
        );
        assert_eq!(ddp.param(1).unwrap()[..], [1.5; 64]);
    });
}

#[test]
fn loads_are_strict_unless_told_otherwise() {
    let folder = tempfile::tempdir().unwrap();
    let (a, b) = (Tensor::new(vec![1.0f32; 4], [4]).unwrap(), Tensor::new(vec![2.0f32; 4], [2, 2]).unwrap());
    Saver::alone(folder.path()).open().unwrap().save(1, &State::new().with("a", &a).with("b", &b)).unwrap();
    let checkpoint = Checkpoint::open(folder.path()).unwrap();

    let (wide, extra) = (Tensor::zeros(DType::F64, [4]).unwrap(), Tensor::zeros(DType::F32, [1]).unwrap());
    let mut state = State::new().with("a", &wide).with("extra", &extra);
    let error = checkpoint.load(&mut state, &LoadOptions::new()).unwrap_err();
    assert_eq!(error.code(), Code::Mismatch);
    for name in ["a", "b", "extra"] {
        assert!(format!("{error:?}").contains(name), "all differences are listed: {error:?}");
    }
    assert_eq!(wide.to_vec::<f64>().unwrap(), [0.0; 4], "nothing was loaded");
    let lax = LoadOptions::new().allow_cast(true).allow_missing(true).allow_unexpected(true).verify(false);
    let report = checkpoint.load(&mut state, &lax).unwrap();
    assert_eq!(wide.to_vec::<f64>().unwrap(), [1.0; 4]);
    assert_eq!((report.missing, report.unexpected), (vec!["extra".to_owned()], vec!["b".to_owned()]));
    let [cast] = &report.cast[..] else { panic!("{:?}", report.cast) };
    assert_eq!((cast.name.as_str(), cast.saved, cast.here, report.verified), ("a", DType::F32, DType::F64, false));

    let view = wide.view::<f64>().unwrap();
    assert_eq!(checkpoint.load(&mut state, &lax).unwrap_err().code(), Code::InvalidState);
    drop(view);
    let mut misshapen = State::new().with("a", &a).with("b", &Tensor::zeros(DType::F32, [4]).unwrap());
    assert_eq!(checkpoint.load(&mut misshapen, &lax).unwrap_err().code(), Code::Mismatch);
}

fn value(row: usize, column: usize) -> i32 {
    (row * 10 + column) as i32
}

/// A piece of a tensor of these values.
fn piece(region: &Region) -> Tensor {
    let rows = region.offsets[0]..region.offsets[0] + region.sizes[0];
    let cells = rows.flat_map(|r| (region.offsets[1]..region.offsets[1] + region.sizes[1]).map(move |c| value(r, c)));
    Tensor::new(cells.collect::<Vec<_>>(), &region.sizes).unwrap()
}

#[test]
fn names_are_chosen_and_renamed() {
    let folder = tempfile::tempdir().unwrap();
    let (a, b) = (Tensor::new(vec![1.0f32; 4], [4]).unwrap(), Tensor::new(vec![2.0f32; 4], [4]).unwrap());
    Saver::alone(folder.path()).open().unwrap().save(1, &State::new().with("model.a", &a).with("b", &b)).unwrap();
    let checkpoint = Checkpoint::open(folder.path()).unwrap();
    let zeros = || Tensor::zeros(DType::F32, [4]).unwrap();
    let (first, second, third) = (zeros(), zeros(), zeros());
    let mut state = State::new().with("a", &first).with("top.b", &second).with("new", &third);
    let renamed = LoadOptions::new().rename("b", "top.b").rename("model.", "").rename("", "never.");
    let report = checkpoint.load(&mut state, &renamed.clone().only(&["?", "top.*"])).unwrap();
    assert_eq!((first.to_vec::<f32>().unwrap(), second.to_vec::<f32>().unwrap()), (vec![1.0; 4], vec![2.0; 4]));
    assert_eq!((&report.left_alone[..], report.verified), (&["new".to_owned()][..], true));
    assert!(report.missing.is_empty() && report.unexpected.is_empty() && report.cast.is_empty());

    let refused = |options: &LoadOptions<'_>, code: Code, told: &str| {
        let mut state = State::new().with("model.a", &a).with("b", &b);
        let error = checkpoint.load(&mut state, options).unwrap_err();
        assert_eq!(error.code(), code, "{error:?}");
        assert!(format!("{error:?}").contains(told), "{error:?}");
    };
    refused(&LoadOptions::new().only(&["b", "nope.*"]), Code::Mismatch, "no name of the state matches 'nope.*'");
    refused(&LoadOptions::new().only(&[]), Code::InvalidArgument, "only has no pattern");
    refused(&LoadOptions::new().only(&["a\0"]), Code::InvalidArgument, "zero byte");
    refused(&LoadOptions::new().rename("b", "model.a"), Code::InvalidArgument, "would both be named 'model.a'");
    refused(&LoadOptions::new().rename("model.", "b"), Code::InvalidArgument, "the rule 'model.' -> 'b'");
    refused(&LoadOptions::new().rename("b", "\0"), Code::InvalidArgument, "zero byte");
}

#[test]
fn sharded_tensors_are_saved_by_some_ranks_and_loaded_by_others() {
    let folder = tempfile::tempdir().unwrap();
    ranks(3, |comm| {
        let rank = comm.rank().unwrap();
        let layout = Layout::new(&[7, 3], &[3], &[Placement::Shard(0)]).unwrap();
        let pieces: Vec<_> = layout.regions(rank).unwrap().iter().map(piece).collect();
        let mut state = State::new();
        state.add_sharded("w", &layout, DType::I32, &pieces, rank).unwrap();
        Saver::at(&comm, folder.path()).open().unwrap().save(1, &state).unwrap();
    });
    ranks(2, |comm| {
        let rank = comm.rank().unwrap();
        let whole = Region { offsets: vec![0, 0], sizes: vec![7, 1] };
        let rest = Region { offsets: vec![0, 1], sizes: vec![7, 2] };
        let layout = Layout::from_regions(&[7, 3], &[vec![whole], vec![rest]]).unwrap();
        let pieces: Vec<_> =
            layout.regions(rank).unwrap().iter().map(|r| Tensor::zeros(DType::I32, &r.sizes).unwrap()).collect();
        let mut state = State::new();
        state.add_sharded("w", &layout, DType::I32, &pieces, rank).unwrap();
        assert_eq!(Saver::at(&comm, folder.path()).open().unwrap().resume(&mut state).unwrap(), 1);
        let expected = piece(&layout.regions(rank).unwrap()[0]);
        assert_eq!(pieces[0].to_vec::<i32>().unwrap(), expected.to_vec::<i32>().unwrap());
    });
    let all = Checkpoint::open(folder.path()).unwrap().read("w").unwrap().to_vec::<i32>().unwrap();
    assert_eq!(all, (0..7).flat_map(|r| (0..3).map(move |c| value(r, c))).collect::<Vec<_>>());
}

#[test]
fn a_shard_without_rows_may_be_given_as_an_empty_tensor() {
    let folder = tempfile::tempdir().unwrap();
    ranks(3, |comm| {
        let rank = comm.rank().unwrap();
        let layout = Layout::new(&[2, 3], &[3], &[Placement::Shard(0)]).unwrap();
        let own = if rank < 2 {
            piece(&layout.regions(rank).unwrap()[0])
        } else {
            Tensor::zeros(DType::I32, [0, 3]).unwrap()
        };
        let mut state = State::new();
        state.add_sharded("w", &layout, DType::I32, std::slice::from_ref(&own), rank).unwrap();
        Saver::at(&comm, folder.path()).open().unwrap().save(1, &state).unwrap();
    });
    let all = Checkpoint::open(folder.path()).unwrap().read("w").unwrap().to_vec::<i32>().unwrap();
    assert_eq!(all, (0..2).flat_map(|r| (0..3).map(move |c| value(r, c))).collect::<Vec<_>>());
}

#[test]
fn ranks_gather_what_each_holds() {
    let held = |rank: usize| match rank {
        0 => vec![Region { offsets: vec![6, 0], sizes: vec![1, 3] }, Region { offsets: vec![0, 0], sizes: vec![2, 3] }],
        1 => vec![],
        _ => vec![Region { offsets: vec![2, 0], sizes: vec![4, 3] }],
    };
    let folder = tempfile::tempdir().unwrap();
    ranks(3, |comm| {
        let rank = comm.rank().unwrap();
        let layout = Layout::gather(&comm, &[7, 3], &held(rank)).unwrap();
        for other in 0..3 {
            assert_eq!(layout.regions(other).unwrap(), held(other));
        }
        let pieces: Vec<_> = held(rank).iter().map(piece).collect();
        let mut state = State::new();
        state.add_sharded("w", &layout, DType::I32, &pieces, rank).unwrap();
        Saver::at(&comm, folder.path()).open().unwrap().save(1, &state).unwrap();

        let code = |result: tessera::Result<Layout>| result.unwrap_err().code();
        let outside = [Region { offsets: vec![6 + rank], sizes: vec![1] }];
        let error = Layout::gather(&comm, &[7], &outside).unwrap_err();
        assert_eq!(error.code(), Code::InvalidArgument);
        assert!(error.to_string().contains("rank 1: the box with offsets [7]"), "{error}");
        assert_eq!(code(Layout::gather(&comm, &[7 + rank], &[])), Code::Mismatch);
        assert_eq!(code(Layout::gather(&comm, &[7, 3], &outside)), Code::InvalidArgument);
    });
    let all = Checkpoint::open(folder.path()).unwrap().read("w").unwrap().to_vec::<i32>().unwrap();
    assert_eq!(all, (0..7).flat_map(|r| (0..3).map(move |c| value(r, c))).collect::<Vec<_>>());
}

#[test]
fn layouts_and_pieces_that_do_not_fit_are_refused() {
    let code = |result: tessera::Result<Layout>| result.unwrap_err().code();
    assert_eq!(code(Layout::new(&[4], &[2], &[])), Code::InvalidArgument);
    assert_eq!(code(Layout::new(&[4], &[2], &[Placement::Shard(1)])), Code::InvalidArgument);
    assert_eq!(code(Layout::new(&[4; 9], &[2], &[Placement::Replicate])), Code::InvalidArgument);
    let outside = Region { offsets: vec![3], sizes: vec![2] };
    assert_eq!(code(Layout::from_regions(&[4], &[vec![outside]])), Code::InvalidArgument);
    let flat = Region { offsets: vec![3], sizes: vec![1] };
    assert_eq!(code(Layout::from_regions(&[4, 4], &[vec![flat]])), Code::InvalidArgument);
    let layout = Layout::new(&[4], &[2], &[Placement::Shard(0)]).unwrap();
    assert_eq!(layout.regions(2).unwrap_err().code(), Code::InvalidArgument);
    let mut state = State::new();
    let code = |result: tessera::Result<()>| result.unwrap_err().code();
    assert_eq!(code(state.add_sharded("w", &layout, DType::F32, &[], 0)), Code::InvalidArgument);
    let long = Tensor::zeros(DType::F32, [3]).unwrap();
    assert_eq!(code(state.add_sharded("w", &layout, DType::F32, &[long], 0)), Code::InvalidArgument);
}

#[test]
fn a_states_first_error_comes_from_its_first_use() {
    let tensor = Tensor::zeros(DType::F32, [1]).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let saver = Saver::alone(folder.path()).open().unwrap();
    for name in ["", "zero\0byte", &"n".repeat(2000)] {
        let state = State::new().with(name, &tensor);
        assert_eq!(saver.save(1, &state).unwrap_err().code(), Code::InvalidArgument, "{name:?}");
    }
    let mut twice = State::new().with("a", &tensor).with("a", &tensor);
    assert_eq!(saver.resume(&mut twice).unwrap_err().code(), Code::InvalidArgument);
    assert!(format!("{twice:?}").contains("InvalidArgument") || format!("{twice:?}").contains("INVALID_ARGUMENT"));
    let mut state = State::new();
    state.add("a", &tensor).unwrap();
    assert_eq!(state.add("a", &tensor).unwrap_err().code(), Code::InvalidArgument);
    saver.save(1, &state).unwrap(); // the refused add changed nothing
    assert!(checkpoints(folder.path()).len() == 1);
}

#[test]
fn a_save_under_a_mutable_view_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let tensor = Tensor::zeros(DType::F32, [1]).unwrap();
    let state = State::new().with("a", &tensor);
    let saver = Saver::alone(folder.path()).open().unwrap();
    let reading = tensor.view::<f32>().unwrap();
    saver.save(1, &state).unwrap(); // readers do not disturb
    drop(reading);
    let _writing = tensor.view_mut::<f32>().unwrap();
    assert_eq!(saver.save(2, &state).unwrap_err().code(), Code::InvalidState);
    assert_eq!(saver.save_async(2, &state).unwrap_err().code(), Code::InvalidState);
    assert_eq!(saver.save(u64::MAX, &State::new()).unwrap_err().code(), Code::InvalidArgument);
}

#[test]
fn ranks_with_other_states_are_a_mismatch() {
    let folder = tempfile::tempdir().unwrap();
    let errors = ranks(2, |comm| {
        let tensor = Tensor::zeros(DType::F32, [2 + comm.rank().unwrap()]).unwrap();
        let saver = Saver::at(&comm, folder.path()).timeout(deadline()).open().unwrap();
        saver.save(1, &State::new().with("w", &tensor)).unwrap_err()
    });
    assert!(errors.iter().all(|error| error.code() == Code::Mismatch), "{errors:?}");
    assert!(checkpoints(folder.path()).is_empty());
}

#[test]
fn two_jobs_do_not_save_under_one_root() {
    let folder = tempfile::tempdir().unwrap();
    let first = Saver::alone(folder.path()).open().unwrap();
    let error = Saver::alone(folder.path()).open().unwrap_err();
    assert_eq!(error.code(), Code::InvalidState);
    assert!(error.message().contains(&std::process::id().to_string()), "names the process: {error}");
    drop(first);
    Saver::alone(folder.path()).open().unwrap();
}

#[test]
fn a_root_that_cannot_be_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("file");
    fs::write(&file, "").unwrap();
    let error = Saver::alone(file.join("root")).open().unwrap_err();
    assert_eq!(error.code(), Code::Io, "{error:?}");
    assert!(matches!(error.native(), Some(tessera::Native::Errno(_))));
}

/// Saves once and returns root and the checkpoint's folder.
fn saved() -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let tensor = Tensor::new((0..1000).map(|x| x as f32).collect(), [1000]).unwrap();
    Saver::alone(folder.path()).open().unwrap().save(1, &State::new().with("w", &tensor)).unwrap();
    let path = checkpoints(folder.path()).remove(0);
    (folder, path)
}

fn load(path: &Path) -> tessera::Result<LoadReport> {
    let mut state = State::new().with("w", &Tensor::zeros(DType::F32, [1000]).unwrap());
    Checkpoint::open(path)?.load(&mut state, &LoadOptions::new())
}

fn rank_file(path: &Path) -> PathBuf {
    path.join("rank-00000.safetensors")
}

#[test]
fn a_flipped_bit_is_found() {
    let (_root, path) = saved();
    load(&path).unwrap();
    let mut bytes = fs::read(rank_file(&path)).unwrap();
    let last = bytes.len() - 7;
    bytes[last] ^= 4;
    fs::write(rank_file(&path), bytes).unwrap();
    let checkpoint = Checkpoint::open(&path).unwrap();
    for error in
        [load(&path).unwrap_err(), checkpoint.read("w").unwrap_err(), checkpoint.verify(Verify::Full).unwrap_err()]
    {
        assert_eq!(error.code(), Code::Corrupt);
        assert!(format!("{error:?}").contains("rank-00000.safetensors"), "names the file: {error:?}");
    }
    checkpoint.verify(Verify::Headers).unwrap();
}

#[test]
fn a_truncated_file_is_found() {
    let (_root, path) = saved();
    let bytes = fs::read(rank_file(&path)).unwrap();
    for length in [bytes.len() - 1, bytes.len() / 2, 100, 7, 0] {
        fs::write(rank_file(&path), &bytes[..length]).unwrap();
        assert_eq!(load(&path).unwrap_err().code(), Code::Corrupt, "{length} bytes");
    }
}

#[test]
fn a_missing_file_is_found() {
    let (_root, path) = saved();
    fs::remove_file(rank_file(&path)).unwrap();
    let error = load(&path).unwrap_err();
    assert!(matches!(error.code(), Code::Corrupt | Code::Io | Code::NotFound), "{error:?}");
    assert!(format!("{error:?}").contains("rank-00000.safetensors"), "{error:?}");
}

#[test]
fn a_file_too_many_is_told_by_verify_and_not_read() {
    let (_root, path) = saved();
    fs::copy(rank_file(&path), path.join("rank-00007.safetensors")).unwrap();
    load(&path).unwrap();
    let error = Checkpoint::open(&path).unwrap().verify(Verify::Full).unwrap_err();
    assert_eq!(error.code(), Code::Corrupt);
    assert!(format!("{error:?}").contains("rank-00007.safetensors"), "{error:?}");
}

#[test]
fn without_a_manifest_there_is_no_checkpoint() {
    let (root, path) = saved();
    let manifest = path.join("manifest.json");
    let text = fs::read_to_string(&manifest).unwrap();
    fs::write(&manifest, text.replace("\"w\"", "\"v\"")).unwrap();
    assert_eq!(Checkpoint::open(&path).unwrap_err().code(), Code::Corrupt, "an edited manifest");
    fs::write(&manifest, &text[..text.len() / 2]).unwrap();
    assert_eq!(Checkpoint::open(&path).unwrap_err().code(), Code::Corrupt, "half a manifest");
    fs::remove_file(&manifest).unwrap();
    assert_eq!(Checkpoint::open(&path).unwrap_err().code(), Code::NotFound);
    let saver = Saver::alone(root.path()).open().unwrap();
    let mut state = State::new().with("w", &Tensor::zeros(DType::F32, [1000]).unwrap());
    let lost = saver.resume(&mut state).unwrap_err();
    assert_eq!(lost.code(), Code::Corrupt, "latest names what is gone: no silent start from the beginning");
    fs::remove_file(root.path().join("latest")).unwrap();
    assert_eq!(saver.resume(&mut state).unwrap(), 0);
    assert_eq!(Checkpoint::open(root.path().join("nowhere")).unwrap_err().code(), Code::NotFound);
    assert_eq!(Checkpoint::open("zero\0byte").unwrap_err().code(), Code::InvalidArgument);
}

#[test]
fn a_checkpoint_is_read_by_many_threads() {
    let (_root, path) = saved();
    let checkpoint = Checkpoint::open(&path).unwrap();
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| assert_eq!(checkpoint.read("w").unwrap().view::<f32>().unwrap()[999], 999.0));
        }
    });
}

#[test]
fn arrays_and_safetensors_come_and_go() {
    let array = ndarray::arr2(&[[1.0f32, 2.0], [3.0, 4.0], [5.0, 6.0]]);
    let model = tessera::Local::new(params!["w" => array.clone(), "t" => array.clone().reversed_axes()]).unwrap();
    assert_eq!(model.param(0).unwrap().as_array(&[3, 2]).unwrap(), array.clone().into_dyn());
    assert_eq!(model.tensor(1).unwrap().to_array::<f32>().unwrap(), array.t().into_dyn());
    let tail = array.clone().slice_move(ndarray::s![1.., ..]);
    assert_eq!(tessera::IntoTensor::into_tensor(tail).unwrap().to_vec::<f32>().unwrap(), [3.0, 4.0, 5.0, 6.0]);
    model.param_mut(0).unwrap().as_array_mut(&[3, 2]).unwrap()[[2, 1]] = 9.0;
    assert_eq!(model.param(0).unwrap()[5], 9.0);
    assert_eq!(model.param(0).unwrap().as_array(&[7]).unwrap_err().code(), Code::InvalidArgument);

    let (root, path) = saved();
    let bytes = fs::read(rank_file(&path)).unwrap();
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap(); // a rank file is plain safetensors
    let tensor = Tensor::try_from(&file.tensor("w").unwrap()).unwrap();
    assert_eq!(tensor.view::<f32>().unwrap()[7], 7.0);
    let (dtype, shape, data) = tensor.to_safetensors().unwrap();
    let view = safetensors::tensor::TensorView::new(dtype, shape, &data).unwrap();
    let written = safetensors::serialize([("w", view)], &None).unwrap();
    assert_eq!(safetensors::SafeTensors::deserialize(&written).unwrap().tensor("w").unwrap().data(), data);
    drop(root);
}

/// The folders under `root` that hold a manifest, by step.
fn checkpoints(root: &Path) -> Vec<PathBuf> {
    let mut paths: Vec<_> = fs::read_dir(root)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.join("manifest.json").exists())
        .collect();
    paths.sort();
    paths
}
