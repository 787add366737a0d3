//! State of a model without gradient, such as the bias that balances experts: not in the optimizer, but in checkpoints
//! like a weight.

use super::RankEngine;
use super::state::Values;
use crate::checkpoint::{Checkpoint, CheckpointError, Kind, Slice};
use backend_dist::shard::ParamSpec;
use burn::module::{ModuleMapper, Param};
use burn::tensor::{DType, Tensor, TensorData};
use models::CausalLm;
use safetensors::Dtype;
use std::collections::HashMap;

impl<M: CausalLm> RankEngine<M> {
    /// The state that this rank holds, and its frozen weights.
    pub(super) fn untrained(&self) -> Vec<(ParamSpec, Vec<f64>)> {
        self.untrained_where(|_| true)
    }

    fn untrained_where(&self, which: impl Fn(&ParamSpec) -> bool) -> Vec<(ParamSpec, Vec<f64>)> {
        let mut all = Vec::new();
        for chunk in &self.chunks {
            let registry = chunk.model().registry().iter();
            let specs: Vec<&ParamSpec> = registry.filter(|spec| !spec.trained && which(spec)).collect();
            if specs.is_empty() {
                continue;
            }
            let mut values = Values::of(specs.iter().map(|spec| spec.id));
            chunk.model().visit(&mut values);
            all.extend(specs.into_iter().filter_map(|spec| Some((spec.clone(), values.take(spec.id)?))));
        }
        all
    }

    /// This rank's local of the state in a checkpoint: each is written by one rank of the world.
    pub(super) fn untrained_slices(&self) -> Vec<Slice> {
        let wide = self.dtype == DType::F64;
        let slice = |(spec, values): (ParamSpec, Vec<f64>)| {
            let section = &spec.sections[0];
            let bytes = |value: f64| match wide {
                true => value.to_le_bytes().to_vec(),
                false => (value as f32).to_le_bytes().to_vec(),
            };
            Slice {
                kind: Kind::Weight,
                name: section.name.clone(),
                global_shape: section.global_shape.clone(),
                ranges: section.ranges(),
                dtype: if wide { Dtype::F64 } else { Dtype::F32 },
                data: values.into_iter().flat_map(bytes).collect::<Vec<u8>>().into(),
            }
        };
        let writes = |spec: &ParamSpec| !spec.frozen && self.dp_ranks.rank() == 0 && spec.sections[0].is_owned();
        self.untrained_where(writes).into_iter().map(slice).collect()
    }

    /// The state in a checkpoint, by parameter id.
    ///
    /// # Errors
    /// If it is missing or has another shape.
    pub(super) fn read_untrained(&self, checkpoint: &Checkpoint) -> Result<HashMap<u64, Vec<f64>>, CheckpointError> {
        let all = self.chunks.iter().flat_map(|chunk| chunk.model().registry().iter());
        let specs = all.filter(|spec| !spec.trained && !spec.frozen);
        let read = |spec: &ParamSpec| {
            let section = &spec.sections[0];
            let values = checkpoint.read_f64(Kind::Weight, &section.name, &section.global_shape, &section.ranges())?;
            Ok((spec.id, values))
        };
        specs.map(read).collect()
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
