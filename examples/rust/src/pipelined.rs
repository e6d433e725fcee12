//! The digits network as a pipeline: four stages with one parameter each, on four ranks or on two. A rank of two has the
//! weights or the biases. Further ranks are replicas of the pipeline with other samples, or share each stage's parameter.

use tessera::{CallbackResult, Comm, Ddp, Mesh, Pipeline, PipelineSchedule, Result, StageCall, Stages, Tensor};

use crate::contract::{usage, Sample, CLASSES, PIXELS};
use crate::{loss_of, Slices};

const STAGES: usize = 4;
const MICROBATCHES: usize = 4;

/// The ranks of a pipeline ("pp"), and those that have the same stages ("same").
pub fn pipeline_mesh(comm: &Comm, parallel: &str) -> Result<Option<Mesh>> {
    if !parallel.ends_with("pp") {
        return Ok(None);
    }
    let world = comm.world_size()?;
    let (multiple, name) = if parallel == "pp" { (2, "an even number of") } else { (4, "a multiple of 4") };
    if world % multiple != 0 {
        usage(format!("--parallel {parallel} needs {name} ranks, not {world}"));
    }
    let ranks = if parallel == "pp" && world % STAGES == 0 { STAGES } else { 2 };
    Mesh::new(comm, &[("pp", ranks), ("same", world / ranks)]).map(Some)
}

/// Of those with the same stages: who shares a parameter ("tp"); ranks with the same slice have other samples ("dp").
pub fn same_mesh(pipelines: &Mesh, parallel: &str) -> Result<Mesh> {
    let (same, ranks) = (pipelines.comm("same")?, if parallel == "pp" { 1 } else { 2 });
    Mesh::new(same, &[("dp", same.world_size()? / ranks), ("tp", ranks)])
}

/// The stages of this rank, which are also the numbers of their parameters.
pub fn stages_of(pipelines: &Mesh) -> Result<Vec<usize>> {
    let line = pipelines.comm("pp")?;
    Ok((line.rank()?..STAGES).step_by(line.world_size()?).collect())
}

pub struct Pipelined<'c> {
    pub ddp: Ddp<'c>,
    pipe: Pipeline<'c>,
    ranks: usize,
}

impl<'c> Pipelined<'c> {
    pub fn new(pipelines: &'c Mesh, ddp: Ddp<'c>) -> Result<Self> {
        let line = pipelines.comm("pp")?;
        let ranks = line.world_size()?;
        let schedule = if ranks == STAGES { PipelineSchedule::OneFOneB } else { PipelineSchedule::Interleaved1F1B };
        let pipe = Pipeline::builder(line, &stages_of(pipelines)?).schedule(schedule);
        Ok(Pipelined { ddp, pipe: pipe.microbatches(MICROBATCHES).build()?, ranks })
    }

    /// The mean loss; its gradients are being averaged over the replicas.
    pub fn step(&mut self, tp: Slices, samples: &[&Sample]) -> Result<f64> {
        for parameter in 0..STAGES / self.ranks {
            self.ddp.grad_mut(parameter)?.fill(0.0);
        }
        Ok(self.run(tp, samples, true)?.0)
    }

    /// On the ranks of the last stage.
    pub fn logits(&mut self, tp: Slices, samples: &[&Sample]) -> Result<Option<Vec<Vec<f32>>>> {
        let (_, logits) = self.run(tp, samples, false)?;
        Ok((!logits.is_empty()).then_some(logits))
    }

    /// The mean loss over the samples, or the logits that the last stage has in an evaluation.
    fn run(&mut self, tp: Slices, samples: &[&Sample], train: bool) -> Result<(f64, Vec<Vec<f32>>)> {
        let images: Vec<f32> = samples.iter().flat_map(|(image, _)| *image).collect();
        let labels: Vec<i64> = samples.iter().map(|(_, label)| *label as i64).collect();
        let rows = samples.len();
        let (batch, targets) = ([Tensor::new(images, [rows, PIXELS])?], [Tensor::new(labels, [rows])?]);
        let mut layers = Layers { ddp: &self.ddp, tp, ranks: self.ranks, logits: Vec::new() };
        let values = match train {
            true => self.pipe.step(&mut layers, &batch, &targets)?,
            false => self.pipe.eval(&mut layers, &batch, &targets)?,
        };
        let rows_of = |i| rows / MICROBATCHES + usize::from(i < rows % MICROBATCHES);
        let loss = values.iter().enumerate().map(|(i, value)| value * rows_of(i) as f64 / rows as f64).sum();
        Ok((loss, layers.logits))
    }
}

/// What the library calls back.
struct Layers<'a, 'c> {
    ddp: &'a Ddp<'c>,
    tp: Slices<'a>,
    ranks: usize,
    logits: Vec<Vec<f32>>, // of an evaluation
}

impl Stages for Layers<'_, '_> {
    fn forward(&mut self, call: &StageCall<'_>) -> CallbackResult<()> {
        let (input, stage) = (&call.inputs()[0], call.stage());
        let (rows, columns) = (input.shape()[0], input.shape()[1]);
        let (x, param) = (input.view::<f32>()?, self.ddp.param(stage / self.ranks)?);
        let width = [param.len() / columns, columns, CLASSES, CLASSES][stage];
        let y = call.output::<f32>([rows, width])?;
        for (x, y) in x.chunks_exact(columns).zip(y.chunks_exact_mut(width)) {
            for (j, y) in y.iter_mut().enumerate() {
                *y = match stage {
                    0 | 2 => param[j * columns..].iter().zip(x).map(|(w, x)| w * x).sum(),
                    1 => (x[j] + param[j]).max(0.0),
                    _ => x[j] + param[j],
                };
            }
        }
        match self.tp {
            Some(tp) if stage == 2 => tp.leave_in_place(y, &[rows, CLASSES], None)?, // the sum of all ranks' parts
            _ if stage == 3 && call.is_training() => loss(call, y)?,
            _ if stage == 3 => self.logits.extend(y.chunks_exact(CLASSES).map(<[f32]>::to_vec)),
            _ => {}
        }
        Ok(())
    }

    fn backward(&mut self, call: &StageCall<'_>) -> CallbackResult<()> {
        let (stage, parameter) = (call.stage(), call.stage() / self.ranks);
        let output = if stage == 3 { &call.outputs()[0] } else { &call.output_grads()[0] };
        let (columns, width) = (call.inputs()[0].shape()[1], output.shape()[1]);
        let (x, y, dy) = (call.inputs()[0].view::<f32>()?, call.outputs()[0].view::<f32>()?, output.view::<f32>()?);
        {
            let (param, mut sum) = (self.ddp.param(parameter)?, self.ddp.grad_mut(parameter)?);
            let mut dx = (stage > 0).then(|| call.input_grad_mut::<f32>(0)).transpose()?; // zeros
            for (i, &dy) in dy.iter().enumerate() {
                let (row, j) = (i / width, i % width);
                let d = if stage == 1 && y[i] <= 0.0 { 0.0 } else { dy };
                if stage % 2 == 1 {
                    sum[j] += d;
                    dx.iter_mut().for_each(|dx| dx[i] = d);
                    continue;
                }
                for k in 0..columns {
                    sum[j * columns + k] += d * x[row * columns + k];
                    dx.iter_mut().for_each(|dx| dx[row * columns + k] += d * param[j * columns + k]);
                }
            }
        }
        if call.is_last_backward() {
            self.ddp.ready(parameter)?; // averaged while other stages still compute
        }
        Ok(())
    }
}

/// Reports it. From here on, `y` is the gradient of the logits, for the backward.
fn loss(call: &StageCall<'_>, y: &mut [f32]) -> Result<()> {
    let labels = call.targets()[0].view::<i64>()?;
    let mut loss = 0.0;
    for (logits, &label) in y.chunks_exact_mut(CLASSES).zip(labels) {
        let label = label as usize;
        loss += f64::from(loss_of(logits, label, call.weight() as f32 / labels.len() as f32));
    }
    call.loss(loss / labels.len() as f64)
}
