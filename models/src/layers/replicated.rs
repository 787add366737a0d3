//! A linear layer that is whole on every tensor parallel rank.

use backend_dist::ops::fp8::Fp8Linear;
use backend_dist::ops::{LinearOptions, Prologue, Residual};
use backend_dist::shard::{Init, Section};
use burn::module::{Module, Param};
use burn::tensor::Tensor;

use super::norm::Norm;
use crate::lora::apply;
use crate::micro_batch::MicroBatch;
use crate::observer::ObservedInput;
use crate::param::{ParamBuilder, Result, TensorParallel};
use crate::recompute;

/// `[s, b, in] -> [s, b, out]` on every rank, or under sequence parallelism `[s/tp, b, in] -> [s/tp, b, out]`: then a
/// rank's gradient of the weight is that of its positions, to be summed over the ranks. Several outputs may be fused.
#[derive(Module, Debug)]
pub struct ReplicatedLinear {
    weight: Param<Tensor<2>>,
    #[module(skip)]
    observed: Option<ObservedInput>,
    #[module(skip)]
    parallel: TensorParallel,
    #[module(skip)]
    recompute_norm: bool,
    #[module(skip)]
    fp8: Option<Fp8Linear>,
}

impl ReplicatedLinear {
    /// A layer without bias of `inputs` features with the given outputs, global names without `.weight` and features.
    ///
    /// # Panics
    /// Without outputs.
    pub fn new(params: &mut ParamBuilder, inputs: usize, outputs: &[(&str, usize)], init: Init) -> Result<Self> {
        let at = params.place();
        let section = |(name, features): &(&str, usize)| {
            (Section::replicated(format!("{name}.weight"), &[*features, inputs], at), init)
        };
        let weight = params.on_sequence_sections(outputs.iter().map(section).collect())?;
        let recompute_norm = params.recompute().selects(recompute::Module::Norms);
        let fp8 = params.fp8_linear(outputs[0].0);
        let observed = params.observed(outputs.iter().map(|(name, _)| *name));
        Ok(Self { weight, observed, parallel: params.parallel().clone(), recompute_norm, fp8 })
    }

    /// The layer's outputs for `norm(x)`, side by side.
    pub fn forward(&self, x: impl Into<Residual>, norm: &Norm, batch: &MicroBatch) -> Tensor<3> {
        let (x, prologue) = norm.in_front_of_linear(x.into());
        self.after(x, prologue, self.recompute_norm, batch)
    }

    /// The layer's outputs for `x`, side by side.
    pub fn apply(&self, x: Tensor<3>, batch: &MicroBatch) -> Tensor<3> {
        self.after(x.into(), Prologue::None, false, batch)
    }

    fn after(&self, x: Residual, prologue: Prologue, recompute: bool, batch: &MicroBatch) -> Tensor<3> {
        if let Some(observed) = &self.observed {
            observed.record(apply(prologue.clone(), x.value(), batch));
        }
        let (overlap, fp8) = (self.parallel.overlap, self.fp8.clone());
        let options = LinearOptions { recompute, overlap, fp8, pass: batch.pass_context(), ..Default::default() };
        x.linear(prologue, self.weight.val(), None, options)
    }
}
