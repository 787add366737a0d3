//! The adapter next to a row-parallel layer.

use backend_dist::ops::fp8::ToldGradient;
use backend_dist::ops::tensor_parallel::Partial;
use backend_dist::ops::{SharedInput, add_linear};
use backend_dist::shard::{Init, Section};
use burn::module::{Module, Param};
use burn::tensor::Tensor;

use super::layers::{init_a, named, narrow, scaled};
use super::norms::{divided, merged, row_norms};
use super::plan::LayerAdapter;
use crate::layers::{LinearWeight, leave_tensor_parallel};
use crate::param::{ParamBuilder, Result, TensorParallel};

/// The adapter of a row-parallel layer.
#[derive(Module, Debug)]
pub(crate) struct RowAdapter {
    a: Param<Tensor<2>>,
    b: Param<Tensor<2>>,
    magnitude: Option<Param<Tensor<1>>>,
    #[module(skip)]
    scale: f64,
    #[module(skip)]
    parallel: TensorParallel,
}

impl RowAdapter {
    /// The adapter of the layer `name` with the weight `w`, if it has one.
    pub fn new(
        params: &mut ParamBuilder,
        name: &str,
        [inputs, outputs]: [usize; 2],
        w: &LinearWeight,
    ) -> Result<Option<Self>> {
        let Some(LayerAdapter { rank, scale, dora, .. }) = params.adapter_of(name) else { return Ok(None) };
        let (at, parallel) = (params.place(), params.parallel().clone());
        let a = Section::split(named(name, "A"), &[rank, inputs], 1, at.size, at);
        let a = params.adapter(vec![(a, init_a(inputs))])?;
        let b = Section::replicated(named(name, "B"), &[outputs, rank], at);
        let b = params.adapter_on_sequence(vec![(b, Init::ZEROS)])?;
        let magnitude = match dora {
            true => {
                let section = Section::replicated(named(name, "magnitude_vector"), &[outputs], at);
                let norms = row_norms(w.plain(), Some(&parallel.group));
                Some(params.adapter_of_values(section, norms, true)?)
            }
            false => None,
        };
        Ok(Some(Self { a, b, magnitude, scale, parallel }))
    }

    /// The layer's output from `base`, its own without bias, for the layer's input `x`; in FP8 the layer may be `told` of the
    /// gradient.
    pub fn add(
        &self,
        base: Tensor<3>,
        x: (Tensor<3>, SharedInput),
        w: &LinearWeight,
        told: Option<ToldGradient>,
    ) -> Tensor<3> {
        let low = leave_tensor_parallel(Partial::new(narrow(x, &self.a)), &self.parallel);
        let sum = add_linear(base, scaled(low, self.scale), self.b.val(), told);
        match &self.magnitude {
            None => sum,
            Some(magnitude) => {
                let whole = merged(w.plain(), self.a.val().inner(), self.b.val().inner(), self.scale);
                sum * divided(magnitude.val(), row_norms(whole, Some(&self.parallel.group))).unsqueeze()
            }
        }
    }
}
