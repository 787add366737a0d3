//! What a model has without gradient, such as the bias that balances experts, or weights that are frozen by name: not in
//! the optimizer, but in checkpoints like a weight.

use super::RankEngine;
use super::state::Values;
use crate::checkpoint::{Checkpoint, CheckpointError, Kind, Slice};
use crate::engine::chunk::Chunk;
use backend_dist::shard::{ParamSpec, Section};
use burn::module::{ModuleMapper, ModuleVisitor, Param};
use burn::tensor::{DType, Tensor, TensorData};
use half::{bf16, f16};
use models::CausalLm;
use safetensors::Dtype;
use std::collections::HashMap;

impl<M: CausalLm> RankEngine<M> {
    /// The state that this rank holds, and its frozen weights.
    pub(super) fn untrained(&self) -> Vec<(ParamSpec, Vec<f64>)> {
        self.untrained_where(|_| true)
    }

    fn untrained_where(&self, which: impl Fn(&ParamSpec) -> bool) -> Vec<(ParamSpec, Vec<f64>)> {
        self.untrained_typed(which).into_iter().map(|(spec, _, values)| (spec, values)).collect()
    }

    fn untrained_typed(&self, which: impl Fn(&ParamSpec) -> bool) -> Vec<(ParamSpec, DType, Vec<f64>)> {
        let mut all = Vec::new();
        for chunk in &self.chunks {
            let registry = chunk.model().registry().iter();
            let specs: Vec<&ParamSpec> = registry.filter(|spec| !spec.trained && which(spec)).collect();
            if specs.is_empty() {
                continue;
            }
            let mut values = Values::of(specs.iter().map(|spec| spec.id));
            chunk.model().visit(&mut values);
            all.extend(specs.into_iter().filter_map(|spec| {
                let (dtype, values) = values.take_typed(spec.id)?;
                Some((spec.clone(), dtype, values))
            }));
        }
        all
    }

    /// What this rank writes of it into a checkpoint: each slice is written by one rank of the world.
    pub(super) fn untrained_slices(&self) -> Vec<Slice> {
        let slice = |section: &Section, dtype: DType, values: Vec<f64>| {
            let (dtype, data) = stored(dtype, values);
            let (name, global_shape) = (section.name.clone(), section.global_shape.clone());
            Slice { kind: Kind::Weight, name, global_shape, ranges: section.ranges(), dtype, data: data.into() }
        };
        let all = self.untrained_typed(|spec| self.is_saved_here(spec));
        let slices = all.iter().flat_map(|(spec, dtype, values)| {
            let owned = spec.sections_of(values).filter(|(section, _)| section.is_owned());
            owned.map(|(section, local)| slice(section, *dtype, section.unpad(local)))
        });
        slices.filter(|slice| slice.ranges.iter().all(|range| !range.is_empty())).collect()
    }

    fn is_saved_here(&self, spec: &ParamSpec) -> bool {
        !spec.frozen && self.rank.group(spec.unit.grid().dp_ranks()).rank() == 0
    }

    /// Bytes of these slices.
    pub(super) fn untrained_bytes(&self) -> u64 {
        let of_chunk = |chunk: &Chunk<M>| {
            let specs = chunk.model().registry().iter().filter(|spec| !spec.trained && self.is_saved_here(spec));
            let owned = |spec: &ParamSpec| {
                let sections = spec.sections.iter().filter(|section| section.is_owned());
                sections.map(|section| section.ranges().iter().map(ExactSizeIterator::len).product::<usize>()).sum()
            };
            let mut bytes = Bytes { elements: specs.map(|spec| (spec.id, owned(spec))).collect(), sum: 0 };
            chunk.model().visit(&mut bytes);
            bytes.sum
        };
        self.chunks.iter().map(of_chunk).sum()
    }

    /// The state in a checkpoint, by parameter id. Fails if it is missing or has another shape.
    pub(super) fn read_untrained(&self, checkpoint: &Checkpoint) -> Result<HashMap<u64, Vec<f64>>, CheckpointError> {
        let all = self.chunks.iter().flat_map(|chunk| chunk.model().registry().iter());
        let specs = all.filter(|spec| !spec.trained && !spec.frozen);
        let read = |spec: &ParamSpec| {
            let of_section = |section: &Section| {
                let (name, shape) = (&section.name, &section.global_shape);
                // A weight that was trained before has a master.
                let kind = if checkpoint.holds(Kind::Master, name) { Kind::Master } else { Kind::Weight };
                Ok(section.pad(&checkpoint.read_f64(kind, name, shape, &section.ranges())?))
            };
            let values = spec.sections.iter().map(of_section).collect::<Result<Vec<_>, CheckpointError>>()?;
            Ok((spec.id, values.concat()))
        };
        specs.map(read).collect()
    }

    /// Fails if a checkpoint of adapters has something that is frozen under them and is not what this model has: routers'
    /// biases once moved there.
    pub(super) fn check_frozen(&self, checkpoint: &Checkpoint) -> Result<(), CheckpointError> {
        let held = |spec: &ParamSpec| spec.frozen && checkpoint.holds(Kind::Weight, spec.name());
        for (spec, values) in self.untrained_where(held) {
            for (section, own) in spec.sections_of(&values) {
                let (name, shape) = (&section.name, &section.global_shape);
                let saved = checkpoint.read_f64(Kind::Weight, name, shape, &section.ranges())?;
                if saved != section.unpad(own) {
                    return Err(CheckpointError::Frozen { path: checkpoint.path().into(), name: name.clone() });
                }
            }
        }
        Ok(())
    }

    /// Replaces state, by parameter id.
    pub(super) fn set_untrained(&mut self, values: &HashMap<u64, Vec<f64>>) {
        if !values.is_empty() {
            self.chunks.iter_mut().for_each(|chunk| chunk.change(|model| model.map(&mut Set(values))));
        }
    }

    /// Adds to the elements of one parameter.
    pub(super) fn add_to_untrained(&mut self, param: u64, step: &[f64]) {
        let old = self.untrained_where(|spec| spec.id == param).pop();
        let (_, mut values) = old.expect("a router's bias is a state of the model");
        values.iter_mut().zip(step).for_each(|(value, step)| *value += step);
        self.set_untrained(&HashMap::from([(param, values)]));
    }
}

/// Values in the bytes of a type.
fn stored(dtype: DType, values: Vec<f64>) -> (Dtype, Vec<u8>) {
    let values = values.into_iter();
    match dtype {
        DType::F64 => (Dtype::F64, values.flat_map(f64::to_le_bytes).collect()),
        DType::BF16 => (Dtype::BF16, values.flat_map(|value| bf16::from_f64(value).to_le_bytes()).collect()),
        DType::F16 => (Dtype::F16, values.flat_map(|value| f16::from_f64(value).to_le_bytes()).collect()),
        _ => (Dtype::F32, values.flat_map(|value| (value as f32).to_le_bytes()).collect()),
    }
}

/// Bytes of so many elements of some parameters, by id.
struct Bytes {
    elements: HashMap<u64, usize>,
    sum: u64,
}

impl ModuleVisitor for Bytes {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if let Some(elements) = self.elements.get(&param.id.val()) {
            self.sum += (elements * param.val().dtype().size()) as u64;
        }
    }
}

struct Set<'a>(&'a HashMap<u64, Vec<f64>>);

impl ModuleMapper for Set<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let Some(values) = self.0.get(&param.id.val()) else { return param };
        let (id, tensor, mapper) = param.consume();
        let data = TensorData::new(values.clone(), tensor.dims());
        let tensor = Tensor::from_data(data, (&tensor.device(), tensor.dtype())).set_require_grad(false);
        Param::from_mapped_value(id, tensor, mapper)
    }
}
