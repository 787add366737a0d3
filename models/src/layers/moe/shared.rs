//! Shared experts: an MLP that all tokens use, sharded over the tensor parallel ranks as any MLP.

use backend_dist::ops::{expand_dim, linear};
use burn::module::{Module, Param};
use burn::tensor::Tensor;
use burn::tensor::activation::sigmoid;

use super::config::{MoeConfig, SharedExperts};
use crate::layers::linear::LinearConfig;
use crate::layers::mlp::{Mlp, MlpConfig};
use crate::micro_batch::MicroBatch;
use crate::param::{ParamBuilder, Result};

/// The shared experts of a layer, as one MLP.
#[derive(Module, Debug)]
pub(super) struct Shared {
    mlp: Mlp,
    /// `[1, hidden]`.
    gate: Option<Param<Tensor<2>>>,
}

impl Shared {
    /// Shared experts under the global name `name`.
    pub fn new(params: &mut ParamBuilder, name: &str, config: &MoeConfig, shared: SharedExperts) -> Result<Self> {
        let linear = |init| LinearConfig { bias: false, init };
        let sizes = MlpConfig {
            hidden: config.hidden,
            intermediate: shared.intermediate,
            activation: config.kind.activation(),
            input: linear(config.input),
            output: linear(config.output),
        };
        let gate = match shared.gate {
            true => Some(params.on_sequence(&format!("{name}.gate.weight"), [1, config.hidden], config.input)?),
            false => None,
        };
        Ok(Self { mlp: Mlp::new(params, name, &sizes)?, gate })
    }

    /// `[s, b, hidden]` to the same, or the rank's parts of the sequence to the same.
    pub fn forward(&self, x: Tensor<3>, batch: &MicroBatch) -> Tensor<3> {
        let y = self.mlp.of_normed(x.clone(), batch);
        match &self.gate {
            Some(gate) => {
                let hidden = y.dims()[2];
                y * expand_dim(sigmoid(linear(x, gate.val())), 2, hidden)
            }
            None => y,
        }
    }
}
