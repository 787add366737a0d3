//! The engine's state as slices of global tensors: what a checkpoint holds, in any layout; and the weights of the whole
//! model.

use super::RankEngine;
use crate::checkpoint::{Checkpoint, CheckpointError, Kind, Slice};
use crate::element::Element;
use crate::engine::AnomalyState;
use crate::engine::anomaly::AnomalyWatch;
use crate::host_memory;
use crate::optim::{LossScale, LossScaler};
use backend_dist::gpu;
use backend_dist::gpu::host_copy::HostCopy;
use backend_dist::shard::{HostFloats, ParamSpec, Section};
use burn::module::{ModuleMapper, ModuleVisitor, Param};
use burn::tensor::{DType, Tensor, TensorData};
use models::CausalLm;
use std::collections::HashMap;
use std::ops::Range;

/// Progress of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Position {
    /// Finished optimizer steps.
    pub step: u64,
    /// Rows of the data set consumed.
    pub consumed: u64,
    /// Updates of the optimizer, which its bias correction counts.
    pub updates: u64,
    /// Rows of the steps that were skipped, which the learning rate does not count.
    pub skipped: u64,
}

impl<M: CausalLm> RankEngine<M> {
    /// Progress of the run.
    pub fn position(&self) -> Position {
        let updates = self.optimizer.updates();
        Position { step: self.step, consumed: self.consumed, updates, skipped: self.skipped }
    }

    /// The loss scale of an `f16` run.
    pub fn loss_scale(&self) -> Option<LossScale> {
        self.scaler.as_ref().map(LossScaler::state)
    }

    /// Losses and gradient norms that spikes are measured by.
    pub fn anomaly_state(&self) -> AnomalyState {
        self.anomalies.state()
    }

    /// Bytes of the tensors of a checkpoint of the whole model.
    pub fn checkpoint_bytes(&self) -> u64 {
        self.checkpoint_bytes
    }

    /// This rank's share of weights and optimizer states: every element of the model is on exactly one rank of the
    /// world. Data-parallel ranks of the same weights share the work. On GPUs with
    /// [reserved host memory](Self::reserve_host_memory) the bytes arrive while the next step computes.
    pub fn snapshot(&self) -> Vec<Slice> {
        let mut copy = self.optimizer.begin_copy();
        let mut slices = Vec::new();
        for chunk in &self.chunks {
            for (_, bucket) in &chunk.buckets {
                slices.extend(self.optimizer.snapshot(*bucket, chunk.model(), copy.as_mut()));
            }
        }
        copy.into_iter().for_each(HostCopy::end);
        slices.extend(self.untrained_slices());
        slices
    }

    /// Reserves page-locked host memory for [`snapshot`](Self::snapshot) while the caller continues, if this rank is on
    /// a GPU and the memory is there for `ranks` ranks. Says why it is not there.
    pub fn reserve_host_memory(&mut self, ranks: usize) -> Option<String> {
        let gpu = gpu::index(&self.rank.device)?;
        let bytes = (self.optimizer.copied_bytes() * ranks) as u64;
        match host_memory::available() {
            // As much again stays free, for data and for the cache of files.
            Some(free) if free / 2 < bytes => {
                Some(format!("{:.1} GB are needed, of which {:.1} GB are free", bytes as f64 / 1e9, free as f64 / 1e9))
            }
            _ => self.optimizer.reserve_host_memory(gpu).err().map(|error| error.to_string()),
        }
    }

    /// Why fewer optimizer states are in host memory than
    /// [`cpu_offload`](crate::optim::AdamWConfig::cpu_offload) says, once.
    pub fn take_offload_trouble(&mut self) -> Option<String> {
        self.optimizer.take_offload_trouble()
    }

    /// Why some inputs of recomputed layers stay on the device although
    /// [`cpu_offload`](models::Recompute::cpu_offload) says otherwise, once.
    pub fn take_activation_trouble(&mut self) -> Option<String> {
        self.chunks.iter_mut().find_map(|chunk| chunk.take_host_trouble())
    }

    /// Why there is no reserved host memory although there was room for it, once.
    pub fn take_host_trouble(&self) -> Option<String> {
        self.optimizer.take_host_trouble()
    }

    /// Takes weights, optimizer states and position from a checkpoint that any layout has written. A checkpoint without
    /// updates, such as imported weights, leaves the optimizer at its start.
    ///
    /// # Errors
    /// If a tensor is missing, has another shape or does not cover this rank's slice; then nothing has changed.
    pub fn restore(&mut self, checkpoint: &Checkpoint) -> Result<(), CheckpointError> {
        let state = checkpoint.state();
        let weights = checkpoint.weights();
        // Without updates there are no moments yet; those of updates that are undone become zeros.
        let has_moments = state.updates > 0;
        let moments = has_moments || self.optimizer.updates() > 0;
        // An average that the run did not have begins at the weights.
        let averages = checkpoint.tensors().iter().any(|tensor| tensor.kind == Kind::Average);
        let buckets: Vec<usize> = self.chunks.iter().flat_map(|c| &c.buckets).map(|(_, bucket)| *bucket).collect();
        for bucket in buckets {
            for section in self.optimizer.spec(bucket).params.iter().flat_map(|spec| &spec.sections) {
                checkpoint.check(weights, &section.name, &section.global_shape)?;
            }
            for (kind, section) in self.optimizer.kinds(bucket) {
                let needed = match kind {
                    Kind::Master => false,
                    Kind::Average => averages,
                    _ => has_moments,
                };
                if needed {
                    checkpoint.check(kind, &section.name, &section.global_shape)?;
                }
            }
        }
        self.check_frozen(checkpoint)?;
        let untrained = self.read_untrained(checkpoint)?;
        let mut read = |kind: Kind, section: &Section, ranges: &[Range<usize>]| {
            let kind = match kind {
                Kind::Weight | Kind::Master => weights,
                Kind::Average if !averages => weights,
                Kind::FirstMoment | Kind::SecondMoment | Kind::FirstScale | Kind::SecondScale if !has_moments => {
                    let elements = ranges.iter().map(Range::len).product();
                    return Ok(HostFloats::zeros(Element::F32, elements));
                }
                // Scales of moments.
                Kind::FirstScale | Kind::SecondScale => {
                    let shape = &section.global_shape;
                    return checkpoint.scales(kind, &section.name, shape, ranges).map(HostFloats::F32);
                }
                kind => kind,
            };
            checkpoint.read_floats(kind, &section.name, &section.global_shape, ranges)
        };
        let mut result = Ok(());
        for chunk in &mut self.chunks {
            chunk.for_buckets(|bucket, model| {
                let (model, restored) = self.optimizer.restore(bucket, model, moments, &mut read);
                if let (true, Err(error)) = (result.is_ok(), restored) {
                    result = Err(error);
                }
                model
            });
        }
        result?;
        self.set_untrained(&untrained);
        self.restore_fp8(&state.fp8);
        self.optimizer.set_updates(state.updates);
        (self.step, self.consumed) = (state.step, state.consumed_samples);
        self.follow_ramp();
        let per_step = state.consumed_samples.checked_div(state.step).unwrap_or(0);
        self.skipped = state.skipped_samples.unwrap_or((state.step - state.updates) * per_step);
        let anomalies: AnomalyState = serde_json::from_value(state.anomalies.clone()).unwrap_or_default();
        self.anomalies = AnomalyWatch::restored(&anomalies);
        // Weights from a run of another type have no scale.
        if let (Some(scaler), Ok(scale)) = (&mut self.scaler, serde_json::from_value(state.loss_scale.clone())) {
            *scaler = LossScaler::new(self.config.loss_scale).with_state(scale);
        }
        Ok(())
    }

    /// Leaves out the samples up to `consumed`, as if their steps had been skipped.
    pub(crate) fn skip_to(&mut self, consumed: u64) {
        self.skipped += consumed.saturating_sub(self.consumed);
        self.consumed = consumed;
        self.follow_ramp();
    }

    /// This rank's parameters. All ranks call it together.
    pub fn parameters(&mut self) -> Vec<(ParamSpec, Vec<f64>)> {
        let mut all = Vec::new();
        for chunk in &mut self.chunks {
            chunk.for_buckets(|bucket, model| {
                let model = self.optimizer.gather(bucket, model);
                let params = &self.optimizer.spec(bucket).params;
                let mut values = Values::of(params.iter().map(|spec| spec.id));
                model.visit(&mut values);
                all.extend(params.iter().filter_map(|spec| Some((spec.clone(), values.take(spec.id)?))));
                self.optimizer.release(bucket, model)
            });
        }
        all.extend(self.untrained());
        all
    }

    /// `whole`, a model that this rank has built of all layers, with the trained weights. For generation at the end of
    /// a run, whatever the layout; on every rank it takes the memory of all stages. All ranks call it together.
    ///
    /// # Panics
    /// If `whole` has a parameter that the trained model does not have.
    pub fn fill(&mut self, whole: M) -> M {
        let own: HashMap<u64, Vec<f64>> =
            self.parameters().into_iter().map(|(spec, values)| (spec.id, values)).collect();
        // Both copies of a tied weight are the same.
        let all = self.stages.all_gather_host(own).into_iter().flatten().collect();
        whole.map(&mut Fill(all))
    }
}

/// The values of some parameters, by id.
pub(super) struct Values(HashMap<u64, Option<(DType, Vec<f64>)>>);

impl Values {
    /// To visit a model with, for these parameters.
    pub fn of(ids: impl Iterator<Item = u64>) -> Self {
        Self(ids.map(|id| (id, None)).collect())
    }

    /// The values of a parameter that the model has.
    pub fn take(&mut self, id: u64) -> Option<Vec<f64>> {
        self.take_typed(id).map(|(_, values)| values)
    }

    /// The same with the type that the model has them in.
    pub fn take_typed(&mut self, id: u64) -> Option<(DType, Vec<f64>)> {
        self.0.remove(&id).flatten()
    }
}

impl ModuleVisitor for Values {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if let Some(values) = self.0.get_mut(&param.id.val()) {
            let data = param.val().inner().into_data();
            *values = Some((data.dtype(), data.iter::<f64>().collect()));
        }
    }
}

struct Fill(HashMap<u64, Vec<f64>>);

impl ModuleMapper for Fill {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let (id, tensor, mapper) = param.consume();
        let values = self.0.remove(&id.val()).expect("the whole model has the parameters of its stages");
        let data = TensorData::new(values, tensor.dims());
        let filled = Tensor::from_data(data, (&tensor.device(), tensor.dtype()));
        let filled = if tensor.is_require_grad() { filled.require_grad() } else { filled };
        Param::from_mapped_value(id, filled, mapper)
    }
}
