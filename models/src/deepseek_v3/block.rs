//! What the layers of a DeepSeek-V3 are, and the decoder around them.

use backend_dist::shard::Init;

use super::config::DeepSeekV3Config;
use super::variant::DeepSeekVariant;
use crate::frame::{DecoderConfig, Frame, Mtp};
use crate::layers::{
    Activation, Balance, BlockConfig, ExpertGroups, ExpertKind, Ffn, LinearConfig, Mixer, MlaConfig, MlpConfig,
    MoeConfig, NormKind, NormPlacement, RopeConfig, RopeScaling, RouterConfig, Scores, SharedExperts, Vocab,
};

/// transformers gives it to the norms of the latents whatever `rms_norm_eps` says.
const LATENT_NORM_EPS: f64 = 1e-6;

impl DecoderConfig for DeepSeekV3Config {
    fn frame(&self) -> Frame {
        let vocab =
            Vocab { size: self.vocab_size, hidden: self.hidden_size, divisor: self.make_vocab_size_divisible_by };
        let (modules, weight) = (self.num_nextn_predict_layers, self.mtp_loss_scaling_factor);
        Frame {
            mtp: (modules > 0).then(|| Mtp { modules, weight: weight / modules as f64 }),
            ..Frame::new(vocab, self.num_hidden_layers, self.init(), self.rms_norm_eps)
        }
    }

    fn block(&self, layer: usize) -> BlockConfig {
        let linear = |init| LinearConfig { bias: false, init };
        let dense = || MlpConfig {
            hidden: self.hidden_size,
            intermediate: self.intermediate_size,
            activation: Activation::SwiGlu,
            input: linear(self.init()),
            output: linear(self.residual_init()),
        };
        let experts = self.has_experts(layer);
        BlockConfig {
            mixer: Some(Mixer::Latent(self.latent_attention())),
            mlp: Some(if experts { Ffn::Moe(self.moe(self.residual_init())) } else { Ffn::Dense(dense()) }),
            norm: NormKind::Rms,
            placement: NormPlacement::Before,
            norm_eps: self.rms_norm_eps,
            dropout: 0.0,
        }
    }
}

impl DeepSeekV3Config {
    /// Distribution of projections onto the residual stream.
    fn residual_init(&self) -> Init {
        Init::Normal { std: self.initializer_range / (2.0 * self.num_hidden_layers as f64).sqrt() }
    }

    pub(crate) fn latent_attention(&self) -> MlaConfig {
        let head_dim = (self.qk_nope_head_dim + self.qk_rope_head_dim) as f64;
        let sharpened = self.rope_scaling.map_or(1.0, |yarn| yarn.score_factor());
        let scaling = self.rope_scaling.map(RopeScaling::Yarn);
        MlaConfig {
            hidden: self.hidden_size,
            heads: self.num_attention_heads,
            q_lora_rank: self.q_lora_rank,
            kv_lora_rank: self.kv_lora_rank,
            qk_nope_head_dim: self.qk_nope_head_dim,
            qk_rope_head_dim: self.qk_rope_head_dim,
            v_head_dim: self.v_head_dim,
            rope: RopeConfig { head_dim: self.qk_rope_head_dim, theta: self.rope_theta, scaling },
            interleaved: self.rope_interleave,
            norm_eps: LATENT_NORM_EPS,
            scale: sharpened / head_dim.sqrt(),
            input: self.init(),
            output: self.residual_init(),
        }
    }

    /// How experts are chosen, without the losses of it.
    fn routing(&self) -> RouterConfig {
        let groups = [self.n_group, self.topk_group];
        let (scaling, bias_rate) = (self.routed_scaling_factor, self.moe_router_bias_update_rate);
        let of_sigmoids =
            RouterConfig::sigmoid(self.num_experts_per_tok, self.norm_topk_prob, groups, scaling, bias_rate);
        match self.variant {
            DeepSeekVariant::DeepseekV3 => of_sigmoids,
            DeepSeekVariant::DeepseekV2 => RouterConfig {
                scores: Scores::SoftmaxBeforeTopK,
                groups: of_sigmoids.groups.map(|groups| ExpertGroups { best: 1, ..groups }),
                bias_rate: None,
                ..of_sigmoids
            },
        }
    }

    pub(super) fn moe(&self, output: Init) -> MoeConfig {
        let shared = SharedExperts { intermediate: self.shared_intermediate_size(), gate: false };
        MoeConfig {
            hidden: self.hidden_size,
            intermediate: self.moe_intermediate_size,
            experts: self.n_routed_experts,
            kind: ExpertKind::SwiGlu,
            router: RouterConfig {
                balance: Balance::new(self.router_balance, self.router_aux_loss_coef),
                ..self.routing()
            },
            capacity: self.moe_capacity,
            dispatcher: self.moe_dispatcher,
            shared: (self.n_shared_experts > 0).then_some(shared),
            input: self.init(),
            output,
        }
    }
}
