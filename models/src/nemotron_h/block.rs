//! What the layers of a Nemotron-H are, and the decoder around them.

use backend_dist::shard::Init;

use super::config::{HybridLayer, NemotronHConfig};
use crate::frame::{DecoderConfig, Frame};
use crate::layers::{
    Activation, AttentionConfig, Balance, BlockConfig, ExpertKind, Ffn, LinearConfig, Mamba2MixerConfig, Mixer,
    MlpConfig, MoeConfig, NormKind, NormPlacement, RouterConfig, SharedExperts, Vocab,
};

impl NemotronHConfig {
    fn init(&self) -> Init {
        Init::Normal { std: self.initializer_range }
    }

    fn linears(&self, bias: bool) -> [LinearConfig; 2] {
        let residual = Init::Normal { std: self.initializer_range / (self.num_hidden_layers() as f64).sqrt() };
        [self.init(), residual].map(|init| LinearConfig { bias, init })
    }

    /// The sizes of a Mamba-2 layer. As in Megatron-LM, step sizes have no limits.
    fn mamba2(&self) -> Mamba2MixerConfig {
        let [input, output] = self.linears(self.use_bias);
        Mamba2MixerConfig {
            hidden: self.hidden_size,
            heads: self.mamba_num_heads,
            head_dim: self.mamba_head_dim,
            groups: self.n_groups,
            state: self.ssm_state_size,
            kernel: self.conv_kernel,
            conv_bias: self.use_conv_bias,
            step_limit: [0.0, f64::INFINITY],
            norm_eps: self.layer_norm_epsilon,
            input,
            output,
        }
    }

    fn attention(&self) -> AttentionConfig {
        let heads = [self.num_attention_heads, self.num_key_value_heads];
        let attention = AttentionConfig::new(self.hidden_size, heads, self.head_dim, self.linears(false));
        AttentionConfig { dropout: self.attention_dropout, ..attention }
    }

    fn mlp(&self) -> MlpConfig {
        let [input, output] = self.linears(self.mlp_bias);
        MlpConfig {
            hidden: self.hidden_size,
            intermediate: self.intermediate_size,
            activation: Activation::SquaredRelu,
            input,
            output,
        }
    }

    /// Experts, chosen as in DeepSeek-V3 (`NemotronHTopkRouter` of transformers), and a shared one.
    pub(super) fn moe(&self) -> MoeConfig {
        let [input, output] = self.linears(false).map(|linear| linear.init);
        MoeConfig {
            hidden: self.hidden_size,
            intermediate: self.moe_intermediate_size,
            experts: self.n_routed_experts,
            kind: ExpertKind::SquaredRelu,
            router: RouterConfig {
                balance: Balance::new(self.router_balance, self.router_aux_loss_coef),
                ..RouterConfig::sigmoid(
                    self.num_experts_per_tok,
                    self.norm_topk_prob,
                    [self.n_group, self.topk_group],
                    self.routed_scaling_factor,
                    self.moe_router_bias_update_rate,
                )
            },
            capacity: self.moe_capacity,
            dispatcher: self.moe_dispatcher,
            shared: Some(SharedExperts { intermediate: self.moe_shared_expert_intermediate_size, gate: false }),
            input,
            output,
        }
    }
}

impl DecoderConfig for NemotronHConfig {
    fn frame(&self) -> Frame {
        let vocab =
            Vocab { size: self.vocab_size, hidden: self.hidden_size, divisor: self.make_vocab_size_divisible_by };
        Frame {
            tied: self.tie_word_embeddings,
            dropout: self.hidden_dropout,
            ..Frame::new(vocab, self.num_hidden_layers(), self.init(), self.layer_norm_epsilon)
        }
    }

    fn block(&self, layer: usize) -> BlockConfig {
        let (mixer, mlp) = match self.kind(layer) {
            HybridLayer::Mamba2 => (Some(Mixer::Mamba2(self.mamba2())), None),
            HybridLayer::Attention => (Some(Mixer::Attention(self.attention())), None),
            HybridLayer::Mlp => (None, Some(Ffn::Dense(self.mlp()))),
            HybridLayer::Moe => (None, Some(Ffn::Moe(self.moe()))),
        };
        BlockConfig {
            mixer,
            mlp,
            norm: NormKind::Rms,
            placement: NormPlacement::Before,
            norm_eps: self.layer_norm_epsilon,
            dropout: self.hidden_dropout,
        }
    }
}
