//! The forward pass on all ranks, and their parts put together.

use std::collections::BTreeMap;

use backend_dist::collective::all_reduce;
use backend_dist::comm::ReduceOp;
use backend_dist::launch::{Rank, launch};
use backend_dist::mesh::{Axis, GridKind, Mesh, ParallelLayout};
use backend_dist::ops::context::{ContextParallel, CpCommType, zigzag};
use backend_dist::shard::{HostTensor, Registry};
use burn::module::{ModuleVisitor, Param};
use burn::tensor::{Device, FloatDType, Gradients, Int, Tensor, TensorData};
use models::layout::sequence_unit;
use models::{CausalLm, FamilyConfig, MicroBatch, ModelConfig, ParamBuilder, WeightSource, WithModel};

use super::error::ForwardError;
use super::loss::{IGNORED, counted, exact, fp32, shifted};
use crate::verify::{LocalTensor, assemble};

/// Tokens, and what they should be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Input {
    /// Rows of the batch.
    pub rows: usize,
    /// Tokens of a row.
    pub seq: usize,
    /// `[rows, seq]`.
    pub ids: Vec<i64>,
    /// `[rows, seq]`, as Hugging Face has them: the label of a token stands at its own place, and -100 does not count.
    pub labels: Option<Vec<i64>>,
}

/// How to compute.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Over which ranks.
    pub layout: ParallelLayout,
    /// Rank `r` is on device `r`, from the start again after the last.
    pub devices: Vec<Device>,
    /// Type of weights and activations.
    pub dtype: FloatDType,
    /// Everything in `dtype`. Otherwise what transformers computes in fp32 in any case is fp32 here too: the RMSNorms
    /// and the loss.
    pub exact: bool,
    /// Whether gradients of the loss are wanted.
    pub gradients: bool,
}

/// What came out.
#[derive(Clone, Debug, PartialEq)]
pub struct Output {
    /// Tokens of the vocabulary.
    pub vocab: usize,
    /// `[rows, seq, vocab]`.
    pub logits: Vec<f64>,
    /// Mean over the labels that count, if there are labels.
    pub loss: Option<f64>,
    /// The loss's gradient of every weight, under Hugging Face's name; empty unless it was wanted.
    pub gradients: BTreeMap<String, HostTensor>,
}

/// Runs a model with the weights of `source` on `input`.
///
/// # Errors
/// If input, model and layout do not fit, or a rank fails.
pub fn forward(
    config: &FamilyConfig,
    source: &dyn WeightSource,
    input: &Input,
    settings: &Settings,
) -> Result<Output, ForwardError> {
    config.visit(Run { family: config, source, input, settings })
}

struct Run<'a> {
    family: &'a FamilyConfig,
    source: &'a dyn WeightSource,
    input: &'a Input,
    settings: &'a Settings,
}

/// What a rank's places of its rows give: logits `[rows, places, vocab]`, and its part of the gradients.
struct Part {
    logits: Vec<f64>,
    gradients: Vec<LocalTensor>,
}

impl WithModel for Run<'_> {
    type Output = Result<Output, ForwardError>;

    fn with<M: CausalLm + 'static>(self, config: &M::Config) -> Self::Output {
        let Self { input, settings, .. } = self;
        let (layout, vocab) = (&settings.layout, config.vocab_size());
        check_ids(input, vocab)?;
        let training = [("pipeline-parallel", layout.pp, 1), ("zero", layout.zero.into(), 0)];
        for (key, value, legal) in training {
            if value > legal {
                return Err(ForwardError::TrainingOnly { key, value, legal });
            }
        }
        if !input.rows.is_multiple_of(layout.dp) {
            return Err(ForwardError::Rows { dp: layout.dp, rows: input.rows });
        }
        // Tokens after the last one change nothing before them.
        let padded = input.seq.next_multiple_of(sequence_unit(layout));
        config.dims().check(layout, padded)?;
        let targets = input.labels.as_ref().map(|labels| shifted(labels, input.seq));
        match &targets {
            None if settings.gradients => return Err(ForwardError::NoLabels),
            Some(targets) if counted(targets) == 0 => return Err(ForwardError::NothingToPredict),
            _ => {}
        }

        let mesh = Mesh::new(layout.clone())?;
        let parts = launch(&mesh, &settings.devices, |rank| {
            let params = ParamBuilder::new(&rank, settings.dtype, 0).with_source(self.source);
            let params = if settings.exact { params } else { params.with_fp32_norms() };
            let params = if settings.gradients { params } else { params.without_autodiff() };
            let model = M::build(config, params)?;
            Ok(part(&rank, &model, input, targets.as_deref().filter(|_| settings.gradients), padded))
        })?;

        // Replicas have the same gradients.
        let coords = |rank: usize| mesh.coords(rank);
        let is_first = |rank: usize, local: &LocalTensor| match local.unit.grid() {
            GridKind::Dense => (coords(rank).dp, coords(rank).cp) == (0, 0),
            GridKind::Expert => coords(rank).edp == 0,
        };
        let locals = parts.iter().enumerate().flat_map(|(rank, part)| part.gradients.iter().map(move |of| (rank, of)));
        let once = locals.filter(|(rank, local)| is_first(*rank, local)).map(|(_, local)| local);
        let gradients = match settings.gradients {
            true => self.family.hf_names().export(&assemble(once)?)?,
            false => BTreeMap::new(),
        };
        let logits = all_logits(&mesh, &parts, input, padded, vocab);
        let mean = if settings.exact { exact } else { fp32 };
        let loss = targets.map(|targets| mean(&logits, &targets, vocab));
        Ok(Output { vocab, logits, loss, gradients })
    }
}

/// Logits `[rows, seq, vocab]` of the whole batch. Ranks of a tensor parallel group have the same ones, those of a
/// context parallel group other places of the same rows, and data parallel ranks other rows.
fn all_logits(mesh: &Mesh, parts: &[Part], input: &Input, padded: usize, vocab: usize) -> Vec<f64> {
    let layout = mesh.layout();
    let own = padded / layout.cp;
    let mut logits = vec![0.0; input.rows * input.seq * vocab];
    for (rank, part) in parts.iter().enumerate().filter(|(rank, _)| mesh.coords(*rank).tp == 0) {
        let coords = mesh.coords(rank);
        let first = coords.dp * (input.rows / layout.dp);
        let places: Vec<usize> = zigzag(coords.cp, layout.cp, own).into_iter().flatten().collect();
        for (index, values) in part.logits.chunks_exact(vocab).enumerate() {
            let (row, place) = (first + index / own, places[index % own]);
            if place < input.seq {
                let at = (row * input.seq + place) * vocab;
                logits[at..at + vocab].copy_from_slice(values);
            }
        }
    }
    logits
}

fn check_ids(input: &Input, vocab: usize) -> Result<(), ForwardError> {
    let check = |tensor: &'static str, ids: &[i64], ignored: Option<i64>| {
        let legal = |id: i64| Some(id) == ignored || usize::try_from(id).is_ok_and(|id| id < vocab);
        match ids.iter().position(|id| !legal(*id)) {
            None => Ok(()),
            Some(at) => Err(ForwardError::Id {
                tensor,
                row: at / input.seq,
                position: at % input.seq,
                id: ids[at],
                legal: format!("0..{vocab}{}", ignored.map_or(String::new(), |id| format!(" and {id}"))),
            }),
        }
    };
    check("input_ids", &input.ids, None)?;
    check("labels", input.labels.as_deref().unwrap_or_default(), Some(IGNORED))
}

/// One rank's places of its rows. With `targets` for all rows, also the gradients, summed over all ranks that have
/// parts of them.
fn part<M: CausalLm>(rank: &Rank, model: &M, input: &Input, targets: Option<&[i64]>, padded: usize) -> Part {
    let replicas = rank.group(Axis::Dp);
    let context = ContextParallel { group: rank.group(Axis::Cp), comm: CpCommType::default() };
    let own = padded / context.group.size();
    let batch = MicroBatch { context: (own < padded).then_some(context), ..MicroBatch::default() };
    let places: Vec<usize> = batch.places(own).into_iter().flatten().collect();
    let rows = input.rows / replicas.size();
    let mine = replicas.rank() * rows * input.seq..(replicas.rank() + 1) * rows * input.seq;
    let device = if targets.is_some() { rank.device.clone().autodiff() } else { rank.device.clone() };
    let tensor = |ids: &[i64]| -> Tensor<2, Int> {
        Tensor::from_data(TensorData::new(at_places(ids, input.seq, &places, 0), [rows, own]), &device)
    };
    let tokens = tensor(&input.ids[mine.clone()]);
    let logits = values(model.head_logits(model.hidden_states(tokens.clone(), &batch)));
    let Some(targets) = targets else { return Part { logits, gradients: Vec::new() } };

    let weight = 1.0 / counted(targets) as f64;
    let targets = &targets[mine];
    let labels: Vec<i64> = targets.iter().map(|target| if *target == IGNORED { 0 } else { *target }).collect();
    let weights: Vec<f64> = targets.iter().map(|target| if *target == IGNORED { 0.0 } else { weight }).collect();
    let losses = model.training_losses(tokens, tensor(&labels), &batch);
    let weights = TensorData::new(at_places(&weights, input.seq, &places, 0.0), [rows, own]);
    let weights = Tensor::from_data(weights, (&device, losses.dtype()));
    let gradients = (losses * weights).sum().backward();
    let mut collect = Collect { rank, registry: model.registry(), gradients: &gradients, locals: Vec::new() };
    model.visit(&mut collect);
    Part { logits, gradients: collect.locals }
}

/// Of every row of `seq` values those at `places`, and `filling` where a row has ended.
fn at_places<T: Copy>(values: &[T], seq: usize, places: &[usize], filling: T) -> Vec<T> {
    let row = |row: &[T]| places.iter().map(|place| row.get(*place).copied().unwrap_or(filling)).collect::<Vec<_>>();
    values.chunks_exact(seq).flat_map(row).collect()
}

fn values<const D: usize>(tensor: Tensor<D>) -> Vec<f64> {
    tensor.into_data().iter::<f64>().collect()
}

/// Every parameter's gradient, summed over the ranks that have parts of it; zeros for what no gradient changes.
struct Collect<'a> {
    rank: &'a Rank,
    registry: &'a Registry,
    gradients: &'a Gradients,
    locals: Vec<LocalTensor>,
}

impl ModuleVisitor for Collect<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let spec = self.registry.get(param.id.val()).expect("every parameter is registered");
        let gradient = match spec.trained {
            true => param.val().grad(self.gradients).expect("every parameter takes part in the loss"),
            false => param.val().inner().zeros_like(),
        };
        let (grid, gradient) = (spec.unit.grid(), gradient.reshape([spec.local_len()]));
        let gradient = all_reduce(gradient, ReduceOp::Sum, &self.rank.group(grid.replicas()));
        let mut local = values(gradient.clone());
        for sum in spec.gradient_sums() {
            let part = gradient.clone().narrow(0, sum.elements.start, sum.elements.len());
            let sum_of_ranks = all_reduce(part, ReduceOp::Sum, &self.rank.subgroup(grid.tensor_parallel(), sum.ranks));
            local[sum.elements].copy_from_slice(&values(sum_of_ranks));
        }
        let sections = spec.sections_of(&local);
        self.locals.extend(sections.map(|(section, values)| LocalTensor {
            section: section.clone(),
            unit: spec.unit,
            values: values.into(),
        }));
    }
}
