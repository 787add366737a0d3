//! Linear layers sharded over the tensor parallel ranks, by rows of the weight (column-parallel); those by columns are in
//! [`row_linear`](super::row_linear).
//!
//! The names are Megatron-LM's (`megatron/core/tensor_parallel/layers.py`) and speak of the mathematicians' `x A`: a
//! column-parallel layer shards the outputs, a row-parallel layer the inputs.

use backend_dist::ops::fp8::{Fp8Linear, ToldGradient};
use backend_dist::ops::{
    InputCollective, LinearOptions, Prologue, Residual, SharedInput, SwiGluNeighbours, add_bias, linear_with,
};
use backend_dist::shard::{Init, Section};
use burn::module::{Module, Param};
use burn::tensor::Tensor;

use super::linear_weight::LinearWeight;
use super::norm::Norm;
use crate::lora::{ColumnAdapters, apply};
use crate::micro_batch::MicroBatch;
use crate::observer::ObservedInput;
use crate::param::{ParamBuilder, Result, TensorParallel};
use crate::recompute;

/// What all linear layers of a model share.
#[derive(Clone, Copy, Debug)]
pub struct LinearConfig {
    /// Whether there is a bias; it starts at zero.
    pub bias: bool,
    /// Distribution of the weights.
    pub init: Init,
}

/// One of the outputs of a fused column-parallel layer.
#[derive(Clone, Copy, Debug)]
pub struct Output<'a> {
    /// Global name without `.weight` or `.bias`.
    pub name: &'a str,
    /// Global number of output features.
    pub features: usize,
    /// Number of shards; with fewer than ranks, neighbours hold the same shard.
    pub parts: usize,
}

/// `[s, b, in] -> [s, b, out/tp]`; under sequence parallelism the input is `[s/tp, b, in]`. Several outputs may be
/// fused: a rank's output is its shard of the first one, then of the second one, and so on.
#[derive(Module, Debug)]
pub struct ColumnParallelLinear {
    weight: LinearWeight,
    bias: Option<Param<Tensor<1>>>,
    /// By rank and scale.
    adapters: Vec<ColumnAdapters>,
    #[module(skip)]
    observed: Option<ObservedInput>,
    #[module(skip)]
    parallel: TensorParallel,
    #[module(skip)]
    recompute_norm: bool,
    #[module(skip)]
    fp8: Option<Fp8Linear>,
}

impl ColumnParallelLinear {
    /// A layer of `inputs` features with the given outputs.
    pub fn new(params: &mut ParamBuilder, inputs: usize, outputs: &[Output], config: LinearConfig) -> Result<Self> {
        let at = params.place();
        let weights = outputs.iter().map(|output| {
            let name = format!("{}.weight", output.name);
            (Section::split(name, &[output.features, inputs], 0, output.parts, at), config.init)
        });
        let weight = params.linear_weight(weights.collect())?;
        let biases = outputs.iter().map(|output| {
            let name = format!("{}.bias", output.name);
            (Section::split(name, &[output.features], 0, output.parts, at), Init::ZEROS)
        });
        let bias = if config.bias { Some(params.sections(biases.collect())?) } else { None };
        let of_adapters: Vec<_> = outputs.iter().map(|output| (output.name, output.features, output.parts)).collect();
        let adapters = ColumnAdapters::new(params, inputs, &of_adapters, &weight)?;
        let recompute_norm = params.recompute().selects(recompute::Module::Norms);
        let fp8 = outputs.first().and_then(|output| params.fp8_linear(output.name));
        let observed = params.observed(outputs.iter().map(|output| output.name));
        Ok(Self { weight, bias, adapters, observed, parallel: params.parallel().clone(), recompute_norm, fp8 })
    }

    /// The rank's outputs for the whole sequence of `norm(x)`.
    pub fn forward(&self, x: impl Into<Residual>, norm: &Norm, batch: &MicroBatch) -> Tensor<3> {
        if !self.adapters.is_empty() {
            return self.adapted(norm.of_residual(x.into()), batch);
        }
        let (x, prologue) = norm.in_front_of_linear(x.into());
        self.after(x, prologue, batch)
    }

    /// What it reads from memory.
    pub(super) fn weight_in_memory(&self) -> Option<Tensor<2>> {
        self.weight.in_memory()
    }

    /// The weight, if a decode step only multiplies with it, in its own precision.
    pub(super) fn plain_weight(&self) -> Option<Tensor<2>> {
        let is_plain = self.bias.is_none() && self.adapters.is_empty() && self.observed.is_none() && self.fp8.is_none();
        self.weight_in_memory().filter(|_| is_plain && !self.parallel.sequence)
    }

    /// The rank's outputs for the whole sequence of `prologue(x)`.
    pub(super) fn after(&self, x: impl Into<Residual>, prologue: Prologue, batch: &MicroBatch) -> Tensor<3> {
        if !self.adapters.is_empty() {
            return self.adapted(apply(prologue, x.into().value(), batch), batch);
        }
        let x = x.into();
        if let Some(observed) = &self.observed {
            observed.record(apply(prologue.clone(), x.value(), batch));
        }
        let (entry, bias) = (entry(&self.parallel), self.bias.as_ref().map(Param::val));
        let (recompute, overlap, fp8) = (self.recompute_norm, self.parallel.overlap, self.fp8.clone());
        let stored = self.weight.stored();
        let options =
            LinearOptions { entry, recompute, overlap, fp8, stored, pass: batch.pass_context(), ..Default::default() };
        let weight = self.weight.value(x.is_autodiff());
        x.linear(prologue, weight, bias, options)
    }
}

impl ColumnParallelLinear {
    /// The rank's weight `[out/tp, in]` with its adapter, of a layer with one output that records no gradients.
    pub(super) fn whole_weight(&self) -> Tensor<2> {
        let weight = self.weight.value(false);
        self.adapters.iter().fold(weight, |weight, adapters| adapters.merged(weight))
    }

    /// The outputs with the adapters' for the layer's own input `x`.
    fn adapted(&self, x: Tensor<3>, batch: &MicroBatch) -> Tensor<3> {
        let (base, x) = self.base(x, self.fp8.clone(), batch);
        let sum = self.adapters.iter().fold(base, |sum, adapters| adapters.add(sum, x.clone(), &self.weight));
        with_bias(sum, self.bias.as_ref())
    }

    /// Whether there is [`swiglu`](Self::swiglu): with adapters of one kind other than DoRA's, and without a bias.
    pub(super) fn has_swiglu(&self) -> bool {
        self.bias.is_none() && matches!(&self.adapters[..], [adapters] if adapters.is_sum())
    }

    /// `silu(gate) up` of the outputs `[gate | up]` for the layer's own input `x`; `behind` is what it and the layer
    /// that reads it tell each other.
    ///
    /// # Panics
    /// Without adapters.
    pub(super) fn swiglu(&self, x: Tensor<3>, behind: SwiGluNeighbours, batch: &MicroBatch) -> Tensor<3> {
        let adapters = self.adapters.first().expect("the sum with adapters is one operation with the activation");
        let told = |fp8| ToldGradient::of(fp8, &batch.pass_context());
        let (fp8, gradient) = self.fp8.clone().map(told).unzip();
        let (base, x) = self.base(x, fp8, batch);
        adapters.swiglu(base, x, SwiGluNeighbours { gradient, ..behind })
    }

    /// What the weight makes of `x`, which the adapters' GEMM reads too.
    fn base(&self, x: Tensor<3>, fp8: Option<Fp8Linear>, batch: &MicroBatch) -> (Tensor<3>, (Tensor<3>, SharedInput)) {
        let (entry, overlap) = (entry(&self.parallel), self.parallel.overlap);
        let shared = SharedInput::new(batch.hand_overs());
        let options = LinearOptions {
            entry,
            overlap,
            fp8,
            stored: self.weight.stored(),
            shared_input: Some(shared.clone()),
            pass: batch.pass_context(),
            ..Default::default()
        };
        let weight = self.weight.value(x.device().is_autodiff());
        (linear_with(x.clone(), Prologue::None, weight, None, options), (x, shared))
    }
}

/// Added after the adapters: DoRA scales what is without it.
pub(super) fn with_bias(y: Tensor<3>, bias: Option<&Param<Tensor<1>>>) -> Tensor<3> {
    match bias {
        Some(bias) => add_bias(y, bias.val()),
        None => y,
    }
}

/// How activations enter a linear layer that computes some of the outputs on each rank.
pub(super) fn entry(parallel: &TensorParallel) -> InputCollective {
    let group = parallel.group.clone();
    if parallel.sequence { InputCollective::AllGather(group) } else { InputCollective::Copy(group) }
}

/// Pads the first dimension to `positions` with zeros: sequence parallelism splits it into equal parts.
pub(super) fn pad_sequence<const D: usize>(x: Tensor<D>, positions: usize) -> Tensor<D> {
    let mut shape = x.dims();
    if shape[0] == positions {
        return x;
    }
    shape[0] = positions - shape[0];
    let zeros = Tensor::zeros(shape, (&x.device(), x.dtype()));
    Tensor::cat(vec![x, zeros], 0)
}
