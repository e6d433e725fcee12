//! Metrics: every rank has the value of one, padding is left out, and bad input is refused by name.

mod common;

use common::{alone, ranks};
use tessera::{
    Bool, Checkpoint, Code, LoadOptions, Metric, MetricAverage, MetricKind, MetricNormalize, MetricTask, Sampler,
    Saver, State, Tensor,
};

const SCORES: [f32; 4] = [0.1, 0.4, 0.35, 0.8];
const LABELS: [i64; 4] = [0, 0, 1, 1];

fn tensor<T: tessera::Element>(values: &[T]) -> Tensor {
    Tensor::new(values.to_vec(), [values.len()]).unwrap()
}

#[test]
fn a_curve_has_arrays() {
    let mut roc = Metric::new(MetricKind::RocCurve).build().unwrap();
    roc.update(&tensor(&SCORES), Some(&tensor(&LABELS))).unwrap();
    assert!(roc.compute(None).unwrap().is_nan());
    assert_eq!(roc.array("fpr").unwrap(), [0.0, 0.0, 0.5, 0.5, 1.0]);
    assert_eq!(roc.array("tpr").unwrap(), [0.0, 0.5, 0.5, 1.0, 1.0]);
    assert_eq!(roc.array("thresholds").unwrap()[0], f64::INFINITY);
    assert_eq!(roc.array("matrix").unwrap_err().code(), Code::NotFound);
    let wrong = roc.counts("fpr").unwrap_err();
    assert_eq!(
        (wrong.code(), wrong.message()),
        (Code::InvalidArgument, "the array \"fpr\" has numbers; call array(\"fpr\")")
    );
    roc.reset().unwrap();
    assert_eq!(roc.array("fpr").unwrap_err().code(), Code::NotFound);
    assert_eq!((roc.kind(), format!("{roc:?}")), (MetricKind::RocCurve, "Metric { kind: RocCurve, .. }".to_owned()));
}

#[test]
fn options_and_counts() {
    let matrix = || Metric::new(MetricKind::ConfusionMatrix).classes(3);
    let (mut one, mut other) = (matrix().build().unwrap(), matrix().normalize(MetricNormalize::None).build().unwrap());
    one.update(&tensor(&[0i64, 2, 2]), Some(&tensor(&[0i64, 2, 1]))).unwrap();
    other.update(&tensor(&[1u8]), Some(&tensor(&[0i32]))).unwrap();
    one.merge(&other).unwrap();
    one.compute(None).unwrap();
    assert_eq!(one.counts("matrix").unwrap(), [1, 1, 0, 0, 0, 1, 0, 0, 1]);
    let recall = Metric::new(MetricKind::Recall).task(MetricTask::Multiclass).average(MetricAverage::None);
    let mut recall = recall.classes(3).zero_division(1.0).build().unwrap();
    let weights = tensor(&[1.0f64, 3.0]);
    recall.update_with(&tensor(&[0i64, 1]), Some(&tensor(&[0i64, 0])), Some(&weights), None).unwrap();
    recall.compute(None).unwrap();
    assert_eq!(recall.array("values").unwrap(), [0.25, 1.0, 1.0]);
    assert_eq!(recall.merge(&one).unwrap_err().code(), Code::InvalidArgument);
    let mut mean = Metric::new(MetricKind::Mean).build().unwrap();
    let valid = tensor(&[Bool::from(true), Bool::from(false)]);
    mean.update_with(&tensor(&[3.0f32, f32::NAN]), None, None, Some(&valid)).unwrap();
    assert_eq!(mean.compute(Some(&alone())).unwrap(), 3.0);
}

#[test]
fn ranks_have_the_value_of_one_and_padding_is_left_out() {
    let folder = tempfile::tempdir().unwrap();
    ranks(3, |comm| {
        let mut sampler = Sampler::new(&comm, 4).build().unwrap();
        let mut metric = Metric::new(MetricKind::Auroc).build().unwrap();
        assert!(sampler.valid().unwrap().is_empty());
        while sampler.epoch().unwrap() == 0 {
            let batch = sampler.batch(1).unwrap();
            let scores: Vec<_> = batch.iter().map(|&i| SCORES[i]).collect();
            let labels: Vec<_> = batch.iter().map(|&i| LABELS[i]).collect();
            let valid = tensor(&sampler.valid().unwrap());
            metric.update_with(&tensor(&scores), Some(&tensor(&labels)), None, Some(&valid)).unwrap();
        }
        assert_eq!(metric.compute(Some(&comm)).unwrap(), 0.75);
        metric.gather(&comm).unwrap();
        assert_eq!(metric.compute(Some(&comm)).unwrap(), 0.75);
        let state = State::new().with("auroc", &metric.on(&comm));
        Saver::at(&comm, folder.path()).open().unwrap().save(1, &state).unwrap();
    });
    ranks(2, |comm| {
        let mut metric = Metric::new(MetricKind::Auroc).build().unwrap();
        let mut state = State::new().with("auroc", &metric.on(&comm));
        Checkpoint::open(folder.path()).unwrap().load(&mut state, &LoadOptions::new()).unwrap();
        assert_eq!(metric.compute(Some(&comm)).unwrap(), 0.75);
    });
}

#[test]
fn bad_input_is_refused_and_named() {
    let refused = |error: tessera::Error, what: &str| {
        assert_eq!(error.code(), Code::InvalidArgument);
        assert!(error.message().contains(what), "{}", error.message());
    };
    refused(Metric::new(MetricKind::Auroc).beta(2.0).build().unwrap_err(), "auroc has no option beta");
    refused(Metric::new(MetricKind::ConfusionMatrix).classes(100_000).build().unwrap_err(), "more than the limit");
    ranks(2, |comm| {
        let mut metric = Metric::new(MetricKind::Auroc).build().unwrap();
        metric.update(&tensor(&SCORES), Some(&tensor(&LABELS))).unwrap();
        if comm.rank().unwrap() == 1 {
            for (scores, labels, what) in [
                (vec![0.5f32, 0.5], vec![0i64, 2], "targets[1] is 2; labels must be 0 to 1"),
                (vec![0.5, 0.5], vec![0], "2 and 1 samples"),
                (vec![0.5, f32::NAN], vec![0, 1], "predictions[1] is nan"),
            ] {
                refused(metric.update(&tensor(&scores), Some(&tensor(&labels))).unwrap_err(), what);
            }
        }
        refused(metric.compute(Some(&comm)).unwrap_err(), "rank 1: predictions[1] is nan");
        assert_eq!(metric.compute(Some(&comm)).unwrap(), 0.75);
    });
}
