//! A block with latent attention: norm, attention, residual; norm, MLP or experts, residual.

use backend_dist::ops::Residual;
use backend_dist::shard::Init;
use burn::module::Module;
use burn::tensor::Tensor;

use super::config::DeepSeekV3Config;
use crate::layers::paged::{PagedKvCache, Step};
use crate::layers::{
    Activation, Angles, Balance, ExpertGroups, ExpertKind, FeedForward, Ffn, LatentAttention, LinearConfig, MlaConfig,
    MlpConfig, MoeConfig, Norm, NormKind, RouterConfig, Scores, SharedExperts,
};
use crate::micro_batch::MicroBatch;
use crate::param::{BuildError, ParamBuilder};

/// transformers gives it to the norms of the latents whatever `rms_norm_eps` says.
const LATENT_NORM_EPS: f64 = 1e-6;

/// What a block is made of.
#[derive(Clone, Copy, Debug)]
pub(super) struct LatentBlockConfig {
    pub attention: MlaConfig,
    pub mlp: Ffn,
    pub norm_eps: f64,
}

impl DeepSeekV3Config {
    pub(super) fn block(&self, index: usize) -> LatentBlockConfig {
        let residual = Init::Normal { std: self.initializer_range / (2.0 * self.num_hidden_layers as f64).sqrt() };
        let head_dim = (self.qk_nope_head_dim + self.qk_rope_head_dim) as f64;
        let sharpened = self.rope_scaling.map_or(1.0, |yarn| yarn.score_factor());
        let linear = |init| LinearConfig { bias: false, init };
        let dense = MlpConfig {
            hidden: self.hidden_size,
            intermediate: self.intermediate_size,
            activation: Activation::SwiGlu,
            input: linear(self.init()),
            output: linear(residual),
        };
        LatentBlockConfig {
            attention: MlaConfig {
                hidden: self.hidden_size,
                heads: self.num_attention_heads,
                q_lora_rank: self.q_lora_rank,
                kv_lora_rank: self.kv_lora_rank,
                qk_nope_head_dim: self.qk_nope_head_dim,
                qk_rope_head_dim: self.qk_rope_head_dim,
                v_head_dim: self.v_head_dim,
                norm_eps: LATENT_NORM_EPS,
                scale: sharpened / head_dim.sqrt(),
                input: self.init(),
                output: residual,
            },
            mlp: if self.has_experts(index) { Ffn::Moe(self.moe(residual)) } else { Ffn::Dense(dense) },
            norm_eps: self.rms_norm_eps,
        }
    }

    pub(super) fn moe(&self, output: Init) -> MoeConfig {
        let balance = Balance { over: self.router_balance, coefficient: self.router_aux_loss_coef };
        let shared = SharedExperts { intermediate: self.shared_intermediate_size(), gate: false };
        MoeConfig {
            hidden: self.hidden_size,
            intermediate: self.moe_intermediate_size,
            experts: self.n_routed_experts,
            kind: ExpertKind::SwiGlu,
            router: RouterConfig {
                scores: if self.norm_topk_prob { Scores::Sigmoid } else { Scores::PlainSigmoid },
                groups: (self.n_group > 1).then_some(ExpertGroups { groups: self.n_group, top_k: self.topk_group }),
                scaling: self.routed_scaling_factor,
                bias_rate: Some(self.moe_router_bias_update_rate),
                balance: (balance.coefficient != 0.0).then_some(balance),
                ..RouterConfig::new(self.num_experts_per_tok)
            },
            capacity: self.moe_capacity,
            dispatcher: self.moe_dispatcher,
            shared: (self.n_shared_experts > 0).then_some(shared),
            input: self.init(),
            output,
        }
    }
}

/// One layer of a DeepSeek-V3. Activations between its parts are `[s, b, hidden]`, under sequence parallelism
/// `[s/tp, b, hidden]`.
#[derive(Module, Debug)]
pub struct LatentBlock {
    input_layernorm: Norm,
    attention: LatentAttention,
    post_attention_layernorm: Norm,
    mlp: FeedForward,
}

impl LatentBlock {
    pub(super) fn new(params: &mut ParamBuilder, name: &str, config: &LatentBlockConfig) -> Result<Self, BuildError> {
        let norm = |params: &mut ParamBuilder, part: &str| {
            Norm::new(params, &format!("{name}.{part}"), config.attention.hidden, NormKind::Rms, config.norm_eps)
        };
        Ok(Self {
            input_layernorm: norm(params, "input_layernorm")?,
            attention: LatentAttention::new(params, &format!("{name}.attention"), &config.attention)?,
            post_attention_layernorm: norm(params, "post_attention_layernorm")?,
            mlp: FeedForward::new(params, &format!("{name}.mlp"), &config.mlp)?,
        })
    }

    /// The block's output; see [`LatentAttention::forward`].
    pub fn forward(&self, x: Tensor<3>, angles: &Angles, batch: &MicroBatch) -> Tensor<3> {
        self.around(x, batch, |x, norm| self.attention.forward(x, norm, angles, batch))
    }

    /// The same for tokens of several sequences; see [`LatentAttention::extend`].
    pub fn extend(&self, x: Tensor<3>, step: &Step, angles: &Angles, cache: (usize, &mut PagedKvCache)) -> Tensor<3> {
        self.around(x, &MicroBatch::default(), |x, norm| self.attention.extend(x, norm, step, angles, cache))
    }

    fn around(
        &self,
        x: Tensor<3>,
        batch: &MicroBatch,
        attention: impl FnOnce(Residual, &Norm) -> Tensor<3>,
    ) -> Tensor<3> {
        let x = Residual::enter(x, &batch.pass);
        let attention = attention(x.clone(), &self.input_layernorm);
        let x = self.post_attention_layernorm.of_sum(x, attention);
        let mlp = self.mlp.forward(x.clone(), &self.post_attention_layernorm, batch);
        x.leave(mlp)
    }
}
