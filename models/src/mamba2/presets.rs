//! Known sizes.

use super::config::Mamba2Config;

/// [`Mamba2Config::tiny`].
impl Default for Mamba2Config {
    fn default() -> Self {
        Self::tiny()
    }
}

impl Mamba2Config {
    /// Small enough for tests: 0.1 million parameters, eight heads in two groups.
    pub fn tiny() -> Self {
        Self {
            vocab_size: 256,
            hidden_size: 64,
            num_hidden_layers: 2,
            num_heads: 8,
            head_dim: 16,
            state_size: 16,
            n_groups: 2,
            conv_kernel: 4,
            use_conv_bias: true,
            use_bias: false,
            time_step_limit_min: 0.0,
            time_step_limit_max: None,
            layer_norm_epsilon: 1e-5,
            residual_in_fp32: false,
            tie_word_embeddings: false,
            initializer_range: 0.02,
            hidden_dropout: 0.0,
            make_vocab_size_divisible_by: 1,
        }
    }

    /// mamba2-130m.
    pub fn mamba2_130m() -> Self {
        Self::published(768, 24)
    }

    /// mamba2-370m.
    pub fn mamba2_370m() -> Self {
        Self::published(1024, 48)
    }

    /// mamba2-780m.
    pub fn mamba2_780m() -> Self {
        Self::published(1536, 48)
    }

    /// mamba2-1.3b.
    pub fn mamba2_1_3b() -> Self {
        Self::published(2048, 48)
    }

    /// mamba2-2.7b.
    pub fn mamba2_2_7b() -> Self {
        Self::published(2560, 64)
    }

    /// The models of arXiv 2405.21060, table 9: head_dim 64, all heads together twice as wide as the residual stream.
    fn published(hidden_size: usize, num_hidden_layers: usize) -> Self {
        Self {
            vocab_size: 50_288,
            hidden_size,
            num_hidden_layers,
            num_heads: hidden_size / 32,
            head_dim: 64,
            state_size: 128,
            n_groups: 1,
            tie_word_embeddings: true,
            ..Self::tiny()
        }
    }

    /// All presets by name, small ones for tests first.
    pub(super) fn by_name() -> Vec<(&'static str, Self)> {
        vec![
            ("mamba2-tiny", Self::tiny()),
            ("mamba2-130m", Self::mamba2_130m()),
            ("mamba2-370m", Self::mamba2_370m()),
            ("mamba2-780m", Self::mamba2_780m()),
            ("mamba2-1.3b", Self::mamba2_1_3b()),
            ("mamba2-2.7b", Self::mamba2_2_7b()),
        ]
    }
}
