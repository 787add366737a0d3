//! What a layer of each relative is, and the decoder around the layers.

use backend_dist::shard::Init;

use super::architecture::Bias;
use super::config::LlamaConfig;
use super::variant::LlamaVariant;
use crate::frame::{DecoderConfig, Frame};
use crate::layers::{
    AttentionConfig, BlockConfig, Ffn, LayerPattern, LinearConfig, Mixer, MlpConfig, QueryKeyNorm, RopeConfig, Vocab,
};

impl LlamaConfig {
    /// Distribution of embeddings and of projections inside a block.
    pub(crate) fn init(&self) -> Init {
        Init::Normal { std: self.initializer_range }
    }

    /// Distribution of projections onto the residual stream.
    pub(crate) fn residual_init(&self) -> Init {
        Init::Normal { std: self.initializer_range / (2.0 * self.num_hidden_layers as f64).sqrt() }
    }

    /// Whether queries, keys and values have biases, and whether attention's output has.
    pub(crate) fn attention_biases(&self) -> [bool; 2] {
        let has = |bias| bias == Bias::Always || bias == Bias::Key && self.attention_bias;
        self.variant.architecture().attention_biases.map(has)
    }

    /// The attention of a layer.
    pub fn attention(&self, layer: usize) -> AttentionConfig {
        let of = self.variant.architecture();
        let [input, output] = self.attention_biases();
        let input = LinearConfig { bias: input, init: self.init() };
        let output = LinearConfig { bias: output, init: self.residual_init() };
        let heads = [self.num_attention_heads, self.num_key_value_heads];
        AttentionConfig {
            rope: self.rope(layer),
            window: self.window(layer),
            scale: self.query_pre_attn_scalar.map(|scalar| scalar.sqrt().recip()).or(self.attention_multiplier),
            softcap: self.attn_logit_softcapping,
            dropout: self.attention_dropout,
            query_key_norm: of.query_key_norm.map(|over| QueryKeyNorm { over, kind: of.norm, eps: self.norm_eps() }),
            ..AttentionConfig::new(self.hidden_size, heads, self.head_dim, [input, output])
        }
    }

    /// The window of a layer, if it has one.
    pub fn window(&self, layer: usize) -> Option<usize> {
        LayerPattern::window(self.sliding_window, self.sliding_window_pattern.as_ref(), layer)
    }

    /// Features of a head that are rotated.
    pub(super) fn rotated(&self) -> usize {
        (self.head_dim as f64 * self.partial_rotary_factor.unwrap_or(1.0)) as usize
    }

    /// Whether queries and keys of a layer are rotated.
    pub(super) fn rotates(&self, layer: usize) -> bool {
        !self.no_rope_layer_interval.as_ref().is_some_and(|without| without.has(layer))
    }

    /// Base of the rotary frequencies of layers with a window, which have no scaling; OLMo 3 has the same as in the others.
    pub(super) fn local_base(&self) -> Option<f64> {
        self.rope_local_base_freq.or((self.variant == LlamaVariant::Olmo3).then_some(self.rope_theta))
    }

    /// Factor of what attention and MLP add to the residual stream.
    fn residual_multiplier(&self) -> f64 {
        self.residual_multiplier.unwrap_or(1.0)
    }

    /// Epsilon of the norms. What Granite adds to the residual stream has a factor, which is none here: the stream is Granite's
    /// divided by the factor, and norms of both are the same if epsilon is divided by its square.
    fn norm_eps(&self) -> f64 {
        self.rms_norm_eps / self.residual_multiplier().powi(2)
    }

    /// What embeddings are multiplied with.
    fn embedding_scale(&self) -> Option<f64> {
        // transformers has Gemma's factor in fp32.
        let of_gemma = || f64::from((self.hidden_size as f64).sqrt() as f32);
        let is_scaled = self.embedding_multiplier.or(self.residual_multiplier).is_some();
        let of_granite = is_scaled.then(|| self.embedding_multiplier.unwrap_or(1.0) / self.residual_multiplier());
        self.variant.architecture().scaled_embedding.then(of_gemma).or(of_granite)
    }

    fn rope(&self, layer: usize) -> Option<RopeConfig> {
        if !self.rotates(layer) {
            return None;
        }
        let head_dim = self.rotated();
        let local = self.local_base().filter(|_| self.window(layer).is_some());
        Some(match local {
            Some(theta) => RopeConfig { head_dim, theta, scaling: None },
            None => RopeConfig { head_dim, theta: self.rope_theta, scaling: self.rope_scaling },
        })
    }
}

impl DecoderConfig for LlamaConfig {
    fn frame(&self) -> Frame {
        let of = self.variant.architecture();
        let vocab =
            Vocab { size: self.vocab_size, hidden: self.hidden_size, divisor: self.make_vocab_size_divisible_by };
        Frame {
            tied: self.tie_word_embeddings,
            norm: of.norm,
            // Seed-OSS drops nothing behind the embedding.
            dropout: if self.variant == LlamaVariant::SeedOss { 0.0 } else { self.hidden_dropout },
            embedding_scale: self.embedding_scale(),
            logit_scale: self.logits_scaling.map(f64::recip),
            logit_softcap: self.final_logit_softcapping,
            ..Frame::new(vocab, self.num_hidden_layers, self.init(), self.norm_eps())
        }
    }

    fn block(&self, layer: usize) -> BlockConfig {
        let of = self.variant.architecture();
        let linear = |init| LinearConfig { bias: self.mlp_bias, init };
        BlockConfig {
            mixer: Some(Mixer::Attention(self.attention(layer))),
            mlp: Some(Ffn::Dense(MlpConfig {
                hidden: self.hidden_size,
                intermediate: self.intermediate_size,
                activation: of.activation,
                input: linear(self.init()),
                output: linear(self.residual_init()),
            })),
            norm: of.norm,
            placement: of.placement,
            norm_eps: self.norm_eps(),
            dropout: self.hidden_dropout,
        }
    }
}
