//! What a layer of each relative is.

use super::config::{MixtralConfig, SWIGLU_ALPHA, SWIGLU_LIMIT};
use super::variant::MixtralVariant;
use crate::frame::{DecoderConfig, Frame};
use crate::layers::{Balance, BlockConfig, ExpertKind, Ffn, LayerPattern, MoeConfig, RouterConfig, SharedExperts};

impl MixtralConfig {
    /// The window of a layer, if it has one.
    pub fn window(&self, layer: usize) -> Option<usize> {
        LayerPattern::window(self.sliding_window, self.sliding_window_pattern.as_ref(), layer)
    }

    fn expert_kind(&self) -> ExpertKind {
        match self.variant {
            MixtralVariant::GptOss => {
                ExpertKind::Clamped { alpha: SWIGLU_ALPHA, limit: self.swiglu_limit.unwrap_or(SWIGLU_LIMIT) }
            }
            _ => ExpertKind::SwiGlu,
        }
    }

    pub(super) fn experts(&self) -> MoeConfig {
        MoeConfig {
            hidden: self.hidden_size,
            intermediate: self.expert_size(),
            experts: self.num_experts,
            kind: self.expert_kind(),
            router: RouterConfig {
                balance: Balance::new(self.router_balance, self.router_aux_loss_coef),
                z_loss: self.router_z_loss_coef,
                ..self.routing()
            },
            capacity: self.moe_capacity,
            dispatcher: self.moe_dispatcher,
            shared: self
                .shared_expert()
                .map(|intermediate| SharedExperts { intermediate, gate: self.has_shared_gate() }),
            input: self.llama().init(),
            output: self.llama().residual_init(),
        }
    }
}

impl DecoderConfig for MixtralConfig {
    fn frame(&self) -> Frame {
        Frame { norm: self.norm(), mtp: self.predictors(), ..self.llama().frame() }
    }

    fn block(&self, layer: usize) -> BlockConfig {
        let block = BlockConfig { mixer: Some(self.mixer(layer)), norm: self.norm(), ..self.llama().block(layer) };
        if self.is_dense(layer) { block } else { BlockConfig { mlp: Some(Ffn::Moe(self.experts())), ..block } }
    }
}
