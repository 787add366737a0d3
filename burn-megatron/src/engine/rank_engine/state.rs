//! The engine's state as slices of global tensors: what a checkpoint holds, in any layout.

use super::RankEngine;
use crate::checkpoint::{Checkpoint, CheckpointError, Kind, Slice};
use crate::optim::State;
use backend_dist::shard::{ParamSpec, Registry, Section};
use burn::module::{ModuleMapper, ModuleVisitor, Param};
use burn::tensor::{DType, Tensor, TensorData};
use models::CausalLm;
use safetensors::Dtype;
use std::collections::BTreeMap;
use std::ops::Range;

/// Optimizer states with their names in a checkpoint.
const STATES: [(State, Kind); 3] =
    [(State::FirstMoment, Kind::FirstMoment), (State::SecondMoment, Kind::SecondMoment), (State::Master, Kind::Master)];

/// How far a run has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Position {
    /// Finished optimizer steps.
    pub step: u64,
    /// Rows of the data set consumed.
    pub consumed: u64,
    /// Updates of the optimizer, which its bias correction counts.
    pub updates: u64,
}

impl<M: CausalLm> RankEngine<M> {
    /// How far the run has come.
    pub fn position(&self) -> Position {
        Position { step: self.step, consumed: self.consumed, updates: self.optimizer.updates() }
    }

    /// Bytes of the tensors of a checkpoint of the whole model.
    pub fn checkpoint_bytes(&self) -> u64 {
        struct Widths(u64);

        impl ModuleVisitor for Widths {
            fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
                // Two moments, and a wide copy of parameters that are narrower.
                let own = param.val().dtype().size() as u64;
                self.0 = own + 2 * own.max(4) + if own < 4 { 4 } else { 0 };
            }
        }
        let mut widths = Widths(0);
        self.model().visit(&mut widths);
        widths.0 * self.registry().global_elements() as u64
    }

    /// This rank's share of weights and optimizer states: every element of the model is on exactly one rank of the
    /// world. Replicas of the same weights share the work.
    pub fn snapshot(&self) -> Vec<Slice> {
        let registry = self.registry();
        let mine = share(registry, self.replicas.rank(), self.replicas.size());
        let mut weights = Weights { registry, mine: &mine, slices: Vec::new() };
        self.model().visit(&mut weights);
        let mut slices = weights.slices;
        for (slot, spec) in registry.iter().enumerate() {
            for (state, kind) in STATES {
                if let Some((dtype, bytes)) = self.optimizer.state(state, slot) {
                    cut(&mut slices, kind, spec, &mine[&spec.id], dtype, &bytes);
                }
            }
        }
        slices
    }

    /// Takes weights, optimizer states and position from a checkpoint that any layout has written. A checkpoint without
    /// updates, such as imported weights, leaves the optimizer at its start.
    ///
    /// # Errors
    /// If a tensor is missing, has another shape or does not cover this rank's slice; then nothing has changed.
    pub fn restore(&mut self, checkpoint: &Checkpoint) -> Result<(), CheckpointError> {
        let registry = self.registry().clone();
        let state = checkpoint.state();
        let weights = checkpoint.weights();
        // Without updates there are no moments yet.
        let moments = if state.updates > 0 { [Kind::FirstMoment, Kind::SecondMoment].as_slice() } else { &[] };
        for section in registry.sections() {
            for kind in [weights].iter().chain(moments) {
                checkpoint.check(*kind, &section.name, &section.global_shape)?;
            }
        }

        for (slot, spec) in registry.iter().enumerate() {
            for (state, kind) in STATES {
                let kind = if state == State::Master { weights } else { kind };
                if kind == weights || moments.contains(&kind) {
                    self.optimizer.set_state(state, slot, read(checkpoint, kind, spec)?);
                }
            }
        }
        let model = self.model.take().expect("the model is in place between steps");
        let mut restore = Restore { checkpoint, kind: weights, registry: &registry, error: None };
        self.model = Some(model.map(&mut restore));
        if let Some(error) = restore.error {
            return Err(error);
        }
        self.optimizer.set_updates(state.updates);
        (self.step, self.consumed) = (state.step, state.consumed_samples);
        Ok(())
    }
}

/// Which sections this replica writes, by parameter: of the owned ones, each to the replica with the fewest bytes so
/// far.
fn share(registry: &Registry, replica: usize, replicas: usize) -> BTreeMap<u64, Vec<bool>> {
    let mut load = vec![0usize; replicas];
    let mut takes = |section: &Section| {
        let least = (0..replicas).min_by_key(|&replica| load[replica]).expect("there is a replica");
        if section.is_owned() {
            load[least] += section.local_len();
        }
        section.is_owned() && least == replica
    };
    registry.iter().map(|spec| (spec.id, spec.sections.iter().map(&mut takes).collect())).collect()
}

/// Adds this rank's slices of a parameter, given its local bytes.
fn cut(slices: &mut Vec<Slice>, kind: Kind, spec: &ParamSpec, mine: &[bool], dtype: DType, bytes: &[u8]) {
    let width = dtype.size();
    for ((section, elements), _) in spec.sections.iter().zip(spec.elements()).zip(mine).filter(|(_, mine)| **mine) {
        let local = &bytes[elements.start * width..elements.end * width];
        let pieces = section.unpadded();
        let mut data = Vec::with_capacity(pieces.iter().map(Range::len).sum::<usize>() * width);
        for piece in pieces {
            data.extend_from_slice(&local[piece.start * width..piece.end * width]);
        }
        if data.is_empty() {
            continue; // Nothing but padding.
        }
        slices.push(Slice {
            kind,
            name: section.name.clone(),
            global_shape: section.global_shape.clone(),
            ranges: section.ranges(),
            dtype: stored(dtype),
            data,
        });
    }
}

/// The type's name in a safetensors file.
fn stored(dtype: DType) -> Dtype {
    match dtype {
        DType::F64 => Dtype::F64,
        DType::F32 | DType::Flex32 => Dtype::F32,
        DType::F16 => Dtype::F16,
        DType::BF16 => Dtype::BF16,
        other => unreachable!("parameters are floats, not {other:?}"),
    }
}

struct Weights<'a> {
    registry: &'a Registry,
    mine: &'a BTreeMap<u64, Vec<bool>>,
    slices: Vec<Slice>,
}

impl ModuleVisitor for Weights<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let id = param.id.val();
        let spec = self.registry.get(id).expect("the optimizer has checked that all parameters are registered");
        let mine = &self.mine[&id];
        if mine.contains(&true) {
            let data = param.val().inner().into_data();
            cut(&mut self.slices, Kind::Weight, spec, mine, data.dtype(), data.bytes());
        }
    }
}

/// The local values of a parameter, padding included.
fn read(checkpoint: &Checkpoint, kind: Kind, spec: &ParamSpec) -> Result<Vec<f64>, CheckpointError> {
    let mut values = Vec::with_capacity(spec.local_len());
    for section in &spec.sections {
        let read = checkpoint.read_f64(kind, &section.name, &section.global_shape, &section.ranges())?;
        values.extend(section.pad(&read));
    }
    Ok(values)
}

struct Restore<'a> {
    checkpoint: &'a Checkpoint,
    kind: Kind,
    registry: &'a Registry,
    error: Option<CheckpointError>,
}

impl ModuleMapper for Restore<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let (id, tensor, mapper) = param.consume();
        let spec = self.registry.get(id.val()).expect("the optimizer has checked that all parameters are registered");
        let tensor = match read(self.checkpoint, self.kind, spec) {
            Err(error) => {
                self.error.get_or_insert(error);
                tensor
            }
            Ok(values) => {
                let data = TensorData::new(values, tensor.dims());
                let restored = Tensor::from_data(data, (&tensor.device(), tensor.dtype()));
                if tensor.is_autodiff() { restored.require_grad() } else { restored }
            }
        };
        Param::from_mapped_value(id, tensor, mapper)
    }
}
