//! The forward pass on all ranks, and the whole result from their shards.

use std::collections::BTreeMap;

use backend_dist::collective::all_reduce;
use backend_dist::comm::ReduceOp;
use backend_dist::launch::{BoxError, Rank};
use backend_dist::mesh::{Axis, GridKind, Mesh, ParallelLayout};
use backend_dist::ops::context::{ContextParallel, CpCommType, zigzag};
use backend_dist::shard::Registry;
use burn::module::{ModuleVisitor, Param};
use burn::tensor::{Gradients, Int, Tensor, TensorData};
use models::layout::sequence_unit;
use models::lora::Adapter;
use models::{CausalLm, FamilyConfig, MicroBatch, ModelConfig, ParamBuilder, WeightSource, WithModel};
use serde::{Deserialize, Serialize};

use super::error::ForwardError;
use super::loss::{IGNORED, counted, exact, fp32, shifted};
use super::settings::{Input, Output, Settings};
use crate::verify::{LocalTensor, assemble};

/// Runs a model with the weights of `source` on `input`. Fails if input, model and layout do not fit, or a rank fails.
pub fn forward(
    config: &FamilyConfig,
    source: &dyn WeightSource,
    input: &Input,
    settings: &Settings,
) -> Result<Output, ForwardError> {
    weighted(config, source, input, settings, None)
}

/// [`forward`] whose gradients are those of a weighted sum of the tokens' losses; `weights` has one for each of the
/// input's tokens, for the loss of predicting the next. Without weights it is the mean.
pub(super) fn weighted(
    config: &FamilyConfig,
    source: &dyn WeightSource,
    input: &Input,
    settings: &Settings,
    weights: Option<&[f64]>,
) -> Result<Output, ForwardError> {
    config.visit(Run { family: config, source, input, settings, weights })
}

struct Run<'a> {
    family: &'a FamilyConfig,
    source: &'a dyn WeightSource,
    input: &'a Input,
    settings: &'a Settings,
    weights: Option<&'a [f64]>,
}

/// The result of a rank: logits `[sequences, positions, vocab]` of its positions, and its shard of the gradients.
#[derive(Serialize, Deserialize)]
struct Shard {
    logits: Vec<f64>,
    gradients: Vec<LocalTensor>,
}

impl WithModel for Run<'_> {
    type Output = Result<Output, ForwardError>;

    fn with<M: CausalLm + 'static>(self, config: &M::Config) -> Self::Output {
        let Self { input, settings, .. } = self;
        let (layout, vocab) = (&settings.layout, config.vocab_size());
        check_ids(input, vocab)?;
        check_layout(layout)?;
        if !input.sequences.is_multiple_of(layout.dp) {
            return Err(ForwardError::Sequences { dp: layout.dp, sequences: input.sequences });
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

        let mean = |targets: &Vec<i64>| {
            let weight = 1.0 / counted(targets) as f64;
            targets.iter().map(|target| if *target == IGNORED { 0.0 } else { weight }).collect::<Vec<f64>>()
        };
        let weights = targets.as_ref().map(|targets| self.weights.map_or_else(|| mean(targets), <[f64]>::to_vec));
        let terms = targets.as_deref().zip(weights.as_deref()).filter(|_| settings.gradients);

        let mesh = Mesh::new(layout.clone())?;
        let shards = settings.cluster.launch_all(&mesh, |rank| {
            let model = build::<M>(&rank, config, self.source, settings)?;
            Ok(shard(&rank, &model, input, terms, padded).once(&rank))
        })?;

        let once = shards.iter().flat_map(|shard| &shard.gradients);
        let gradients = match settings.gradients {
            true => match &settings.adapter {
                Some(adapter) => adapter.plan.export("", &assemble(once)?)?,
                None => self.family.hf_names().export(&assemble(once)?)?,
            },
            false => BTreeMap::new(),
        };
        let logits = all_logits(&mesh, &shards, input, padded, vocab);
        let mean = if settings.exact { exact } else { fp32 };
        let loss = targets.map(|targets| mean(&logits, &targets, vocab));
        Ok(Output { vocab, logits, loss, gradients })
    }
}

impl Shard {
    /// Without what other ranks have too: data-parallel ranks have the same gradients, tensor-parallel ranks the same
    /// logits.
    fn once(mut self, rank: &Rank) -> Self {
        let at = rank.coords;
        if at.tp > 0 {
            self.logits.clear();
        }
        self.gradients.retain(|local| match local.unit.grid() {
            GridKind::Dense => (at.dp, at.cp) == (0, 0),
            GridKind::Expert => at.edp == 0,
        });
        self
    }
}

/// Refuses what only training has. The error names the size.
pub(crate) fn check_layout(layout: &ParallelLayout) -> Result<(), ForwardError> {
    for (key, value, legal) in [("pipeline-parallel", layout.pp, 1), ("zero", layout.zero.into(), 0)] {
        if value > legal {
            return Err(ForwardError::TrainingOnly { key, value, legal });
        }
    }
    Ok(())
}

/// One rank's model, with the adapters of `settings`. Fails if weights cannot be read, or there is an adapter of a
/// layer that cannot have one.
pub(crate) fn build<M: CausalLm>(
    rank: &Rank,
    config: &M::Config,
    source: &dyn WeightSource,
    settings: &Settings,
) -> Result<M, BoxError> {
    build_over(rank, config, source, settings, None)
}

/// The same over the weights of `base`, a model with other adapters or without, as far as there is one: they are not
/// read again.
pub(crate) fn build_over<M: CausalLm>(
    rank: &Rank,
    config: &M::Config,
    source: &dyn WeightSource,
    settings: &Settings,
    base: Option<&M>,
) -> Result<M, BoxError> {
    let params = ParamBuilder::new(rank, settings.dtype, 0).with_source(source);
    let params = if let Some(base) = base { params.with_weights_of(base) } else { params };
    let params = if settings.exact { params } else { params.with_fp32_norms() };
    let params = if settings.gradients { params } else { params.without_autodiff() };
    let params = match &settings.adapter {
        Some(Adapter { plan, tensors }) => params.with_lora(plan, Some(tensors)),
        None => params,
    };
    let model = M::build(config, params)?;
    if let Some(Adapter { plan, .. }) = &settings.adapter {
        plan.check(model.registry())?;
    }
    Ok(model)
}

/// Logits `[sequences, seq, vocab]` of the whole batch. Ranks of a tensor parallel group have the same ones,
/// those of a context parallel group other positions of the same sequences, and data-parallel ranks other sequences.
fn all_logits(mesh: &Mesh, shards: &[Shard], input: &Input, padded: usize, vocab: usize) -> Vec<f64> {
    let layout = mesh.layout();
    let own = padded / layout.cp;
    let mut logits = vec![0.0; input.sequences * input.seq * vocab];
    for (rank, shard) in shards.iter().enumerate().filter(|(rank, _)| mesh.coords(*rank).tp == 0) {
        let coords = mesh.coords(rank);
        let first = coords.dp * (input.sequences / layout.dp);
        let positions: Vec<usize> = zigzag(coords.cp, layout.cp, own).into_iter().flatten().collect();
        for (index, values) in shard.logits.chunks_exact(vocab).enumerate() {
            let (sequence, position) = (first + index / own, positions[index % own]);
            if position < input.seq {
                let at = (sequence * input.seq + position) * vocab;
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
                sequence: at / input.seq,
                position: at % input.seq,
                id: ids[at],
                legal: format!("0..{vocab}{}", ignored.map_or(String::new(), |id| format!(" and {id}"))),
            }),
        }
    };
    check("input_ids", &input.ids, None)?;
    check("labels", input.labels.as_deref().unwrap_or_default(), Some(IGNORED))
}

/// One rank's positions of its sequences. With targets and weights for all sequences, also the gradients, summed over
/// all ranks that have terms of them.
fn shard<M: CausalLm>(rank: &Rank, model: &M, input: &Input, terms: Option<(&[i64], &[f64])>, padded: usize) -> Shard {
    let dp_ranks = rank.group(Axis::Dp);
    let context = ContextParallel { group: rank.group(Axis::Cp), comm: CpCommType::default() };
    let own = padded / context.group.size();
    let batch = MicroBatch { context: (own < padded).then_some(context), ..MicroBatch::default() };
    let positions: Vec<usize> = batch.positions(own).into_iter().flatten().collect();
    let sequences = input.sequences / dp_ranks.size();
    let mine = dp_ranks.rank() * sequences * input.seq..(dp_ranks.rank() + 1) * sequences * input.seq;
    let device = if terms.is_some() { rank.device.clone().autodiff() } else { rank.device.clone() };
    let tensor = |ids: &[i64]| -> Tensor<2, Int> {
        Tensor::from_data(TensorData::new(at_positions(ids, input.seq, &positions, 0), [sequences, own]), &device)
    };
    let tokens = tensor(&input.ids[mine.clone()]);
    let logits = values(model.head_logits(model.hidden_states(tokens.clone(), &batch)));
    let Some((targets, weights)) = terms else { return Shard { logits, gradients: Vec::new() } };

    let (targets, weights) = (&targets[mine.clone()], &weights[mine]);
    let labels: Vec<i64> = targets.iter().map(|target| if *target == IGNORED { 0 } else { *target }).collect();
    let losses = model.training_losses(tokens, tensor(&labels), &batch);
    let weights = TensorData::new(at_positions(weights, input.seq, &positions, 0.0), [sequences, own]);
    let weights = Tensor::from_data(weights, (&device, losses.dtype()));
    let gradients = (losses * weights).sum().backward();
    let mut collect = Collect { rank, registry: model.registry(), gradients: &gradients, locals: Vec::new() };
    model.visit(&mut collect);
    Shard { logits, gradients: collect.locals }
}

/// Of every sequence of `seq` values those at `positions`, and `padding` where a sequence has ended.
fn at_positions<T: Copy>(values: &[T], seq: usize, positions: &[usize], padding: T) -> Vec<T> {
    let pick = |sequence: &[T]| {
        positions.iter().map(|position| sequence.get(*position).copied().unwrap_or(padding)).collect::<Vec<_>>()
    };
    values.chunks_exact(seq).flat_map(pick).collect()
}

fn values<const D: usize>(tensor: Tensor<D>) -> Vec<f64> {
    tensor.into_data().iter::<f64>().collect()
}

/// Every parameter's gradient, summed over the ranks that have terms of it; zeros for what no gradient changes.
struct Collect<'a> {
    rank: &'a Rank,
    registry: &'a Registry,
    gradients: &'a Gradients,
    locals: Vec<LocalTensor>,
}

impl ModuleVisitor for Collect<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let spec = self.registry.get(param.id.val()).expect("every parameter is registered");
        if spec.frozen {
            return;
        }
        let gradient = match spec.trained {
            true => param.val().grad(self.gradients).expect("every parameter takes part in the loss"),
            false => param.val().inner().zeros_like(),
        };
        let (grid, gradient) = (spec.unit.grid(), gradient.reshape([spec.local_len()]));
        let gradient = all_reduce(gradient, ReduceOp::Sum, &self.rank.group(grid.dp_ranks()));
        let mut local = values(gradient.clone());
        for sum in spec.gradient_sums() {
            let term = gradient.clone().narrow(0, sum.elements.start, sum.elements.len());
            let sum_of_ranks = all_reduce(term, ReduceOp::Sum, &self.rank.subgroup(grid.tensor_parallel(), sum.ranks));
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
