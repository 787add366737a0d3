//! The feed-forward part of a block: column-parallel, activation, row-parallel.

use backend_dist::ops::{GeluKind, gelu, swiglu};
use burn::module::Module;
use burn::tensor::Tensor;

use super::linear::{ColumnParallelLinear, LinearConfig, Output, RowParallelLinear};
use crate::param::{BuildError, ParamBuilder};

/// The function between the two linear layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activation {
    /// `silu(gate) up`, with twice as many outputs of the first layer.
    SwiGlu,
    /// GELU.
    Gelu(
        /// Exact, or GPT-2's approximation.
        GeluKind,
    ),
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

/// `down(activation(up(x)))`. On each rank the first layer gives `[gate | up]` of the rank's features.
#[derive(Module, Debug)]
pub struct Mlp {
    up: ColumnParallelLinear,
    down: RowParallelLinear,
    #[module(skip)]
    activation: Activation,
}

impl Mlp {
    /// An MLP under the global name `name`.
    ///
    /// # Errors
    /// See [`BuildError`].
    pub fn new(params: &mut ParamBuilder, name: &str, config: &MlpConfig) -> Result<Self, BuildError> {
        let parts = params.place().size;
        let (gate, up) = (format!("{name}.gate_proj"), format!("{name}.up_proj"));
        let output = |name| Output { name, features: config.intermediate, parts };
        let outputs = match config.activation {
            Activation::SwiGlu => vec![output(&gate), output(&up)],
            Activation::Gelu(_) => vec![output(&up)],
        };
        let down = format!("{name}.down_proj");
        Ok(Self {
            up: ColumnParallelLinear::new(params, config.hidden, &outputs, config.input)?,
            down: RowParallelLinear::new(params, &down, config.intermediate, config.hidden, config.output)?,
            activation: config.activation,
        })
    }

    /// `[s, b, hidden]` to the same, or the rank's parts of the sequence to the same.
    pub fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        let x = self.up.forward(x);
        let x = match self.activation {
            Activation::SwiGlu => swiglu(x),
            Activation::Gelu(kind) => gelu(x, kind),
        };
        self.down.forward(x)
    }
}
