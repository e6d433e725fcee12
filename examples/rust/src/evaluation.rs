//! How well all ranks together recognise held-out digits, by the library's metrics. The trainer with candle's network takes
//! this file, too.

use tessera::{Comm, Metric, MetricKind, MetricTask, Result, Sampler, Tensor};

use crate::contract::{Sample, CLASSES};

/// Ranks without samples take part: of those that have the same samples, one counts them.
pub struct Evaluation<'a> {
    /// This rank's.
    pub samples: Vec<&'a Sample>,
    valid: Vec<u8>, // 0: fills up the last step and is another rank's
}

impl<'a> Evaluation<'a> {
    /// The samples are distributed over `others`.
    pub fn new(others: &Comm, held_out: &'a [Sample]) -> Result<Self> {
        let mut data = Sampler::new(others, held_out.len()).shuffle(false).build()?;
        let samples = data.batch(held_out.len())?.into_iter().map(|i| &held_out[i]).collect();
        Ok(Evaluation { samples, valid: data.valid()? })
    }

    /// The accuracy over the ranks of `comm`, and all that the log tells. `None`: another rank counts this one's samples.
    pub fn compute(self, comm: &Comm, logits: Option<Vec<Vec<f32>>>) -> Result<(f64, String)> {
        let of_each_digit = |kind| Metric::new(kind).task(MetricTask::Multiclass).classes(CLASSES as u64).build();
        let mut confusion = Metric::new(MetricKind::ConfusionMatrix).classes(CLASSES as u64).build()?;
        let (mut roc, mut auroc) = (of_each_digit(MetricKind::RocCurve)?, of_each_digit(MetricKind::Auroc)?);
        if let Some(logits) = logits {
            let n = logits.len();
            let predictions = Tensor::new(logits.iter().map(|logits| likeliest(logits)).collect(), [n])?;
            let labels = Tensor::new(self.samples.iter().map(|(_, label)| *label as i64).collect(), [n])?;
            let (scores, valid) = (Tensor::new(logits.concat(), [n, CLASSES])?, Tensor::new(self.valid, [n])?);
            confusion.update_with(&predictions, Some(&labels), None, Some(&valid))?;
            roc.update_with(&scores, Some(&labels), None, Some(&valid))?;
            auroc.update_with(&scores, Some(&labels), None, Some(&valid))?;
        }
        confusion.compute(Some(comm))?; // of all ranks' samples, and the same on every rank
        roc.compute(Some(comm))?;
        let area = auroc.compute(Some(comm))?;

        let matrix = confusion.counts("matrix")?;
        let right: i64 = matrix.iter().step_by(CLASSES + 1).sum();
        let accuracy = right as f64 / matrix.iter().sum::<i64>() as f64;
        let mut facts = format!(r#""accuracy":{accuracy:.6},"auroc":{area:.6},"matrix":{matrix:?}"#).replace(' ', "");
        for name in (0..CLASSES).flat_map(|digit| [format!("fpr.{digit}"), format!("tpr.{digit}")]) {
            let rates: Vec<_> = roc.array(&name)?.iter().map(|rate| format!("{rate:.6}")).collect();
            facts += &format!(r#","{name}":[{}]"#, rates.join(","));
        }
        Ok((accuracy, facts))
    }
}

/// Of equal ones the first.
fn likeliest(logits: &[f32]) -> i64 {
    (1..CLASSES).fold(0, |best, digit| if logits[digit] > logits[best] { digit } else { best }) as i64
}
