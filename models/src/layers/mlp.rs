//! The feed-forward part of a block: column-parallel, activation, row-parallel.

use backend_dist::ops::decode::swiglu_linear;
use backend_dist::ops::{GeluKind, Prologue, Residual};
use burn::module::Module;
use burn::tensor::Tensor;

use super::linear::{ColumnParallelLinear, LinearConfig, Output};
use super::norm::Norm;
use super::row_linear::{RowParallelLinear, Summand};
use crate::micro_batch::MicroBatch;
use crate::param::{ParamBuilder, Result};
use crate::recompute;

/// The function between the two linear layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activation {
    /// `silu(gate) up`, with twice as many outputs of the first layer.
    SwiGlu,
    /// `gelu(gate) up`, with twice as many outputs of the first layer (Gemma).
    GeGlu(
        /// Exact, or the tanh approximation.
        GeluKind,
    ),
    /// GELU.
    Gelu(
        /// Exact, or GPT-2's approximation.
        GeluKind,
    ),
    /// `max(x, 0)²` (Nemotron-H).
    SquaredRelu,
}

impl Activation {
    /// Whether the first layer gives `[gate | up]`.
    pub fn is_gated(self) -> bool {
        !matches!(self, Self::Gelu(_) | Self::SquaredRelu)
    }
}

/// Sizes of an MLP.
#[derive(Clone, Copy, Debug)]
pub struct MlpConfig {
    /// Features in and out.
    pub hidden: usize,
    /// Features after the activation.
    pub intermediate: usize,
    /// The activation.
    pub activation: Activation,
    /// First layer.
    pub input: LinearConfig,
    /// Second layer, whose output is added to the residual stream.
    pub output: LinearConfig,
}

/// `down(activation(up(norm(x))))` with the norm of its block. On each rank the first layer gives `[gate | up]` of the
/// rank's features.
#[derive(Module, Debug)]
pub struct Mlp {
    up: ColumnParallelLinear,
    down: RowParallelLinear,
    #[module(skip)]
    activation: Activation,
    #[module(skip)]
    recompute_activation: bool,
}

impl Mlp {
    /// An MLP under the global name `name`.
    pub fn new(params: &mut ParamBuilder, name: &str, config: &MlpConfig) -> Result<Self> {
        let parts = params.place().size;
        let (gate, up) = (format!("{name}.gate_proj"), format!("{name}.up_proj"));
        let output = |name| Output { name, features: config.intermediate, parts };
        let outputs = if config.activation.is_gated() { vec![output(&gate), output(&up)] } else { vec![output(&up)] };
        let down = format!("{name}.down_proj");
        Ok(Self {
            up: ColumnParallelLinear::new(params, config.hidden, &outputs, config.input)?,
            down: RowParallelLinear::new(params, &down, config.intermediate, config.hidden, config.output)?,
            activation: config.activation,
            recompute_activation: params.recompute().selects(recompute::Module::MlpActivation),
        })
    }

    /// `[s, b, hidden]` to the same, or the rank's parts of the sequence to the same.
    pub fn forward(&self, x: impl Into<Residual>, norm: &Norm, batch: &MicroBatch) -> Tensor<3> {
        match self.is_fused() {
            true => self.fused(norm.of_residual(x.into()), batch),
            false => self.down(self.up.forward(x, norm, batch), batch),
        }
    }

    /// The same for a decode step on a GPU.
    pub(super) fn decode(&self, x: Residual, norm: &Norm) -> Summand {
        let batch = &MicroBatch::default();
        if self.is_fused() {
            return Summand::Whole(self.fused(norm.of_residual(x), batch));
        }
        match self.up.plain_weight().filter(|_| self.activation == Activation::SwiGlu) {
            Some(weight) => self.down.summand(swiglu_linear(norm.of_residual(x), weight), Prologue::None),
            None => self.down.summand(self.up.forward(x, norm, batch), self.prologue()),
        }
    }

    /// The weight that is read first.
    pub(super) fn first_weight(&self) -> Option<Tensor<2>> {
        self.up.weight_in_memory()
    }

    /// The same without the norm.
    pub(super) fn of_normed(&self, x: Tensor<3>, batch: &MicroBatch) -> Tensor<3> {
        if self.is_fused() { self.fused(x, batch) } else { self.down(self.up.after(x, Prologue::None, batch), batch) }
    }

    /// Whether the activation is one operation with the sum of the first layer's outputs and its adapters'.
    fn is_fused(&self) -> bool {
        self.activation == Activation::SwiGlu && self.up.has_swiglu()
    }

    fn fused(&self, x: Tensor<3>, batch: &MicroBatch) -> Tensor<3> {
        let activation = self.down.behind_swiglu(batch);
        self.down.of_swiglu(self.up.swiglu(x, activation.clone(), batch), activation, batch)
    }

    fn down(&self, x: Tensor<3>, batch: &MicroBatch) -> Tensor<3> {
        self.down.forward(x, self.prologue(), self.recompute_activation, batch)
    }

    /// The activation, in front of the second layer.
    fn prologue(&self) -> Prologue {
        match self.activation {
            Activation::SwiGlu => Prologue::SwiGlu,
            Activation::GeGlu(kind) => Prologue::GeGlu(kind),
            Activation::Gelu(kind) => Prologue::Gelu(kind),
            Activation::SquaredRelu => Prologue::SquaredRelu,
        }
    }
}
