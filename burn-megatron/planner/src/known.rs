//! The sizes of published models.

use super::{Decoder, Experts, Latent, StateSpace};

/// What Llama and what follows it have in common.
fn llama() -> Decoder {
    Decoder { vocab_multiple: 128, norms: [true, false], gated: true, rope: true, ..Decoder::default() }
}

/// Llama 3 8B.
pub fn llama3_8b() -> Decoder {
    Decoder {
        vocab: 128_256,
        hidden: 4096,
        intermediate: 14_336,
        layers: 32,
        heads: 32,
        kv_heads: 8,
        head_dim: 128,
        ..llama()
    }
}

/// Llama 3.2 1B.
pub fn llama3_1b() -> Decoder {
    Decoder { hidden: 2048, intermediate: 8192, layers: 16, head_dim: 64, tied: true, ..llama3_8b() }
}

/// Mixtral 8x7B.
pub fn mixtral_8x7b() -> Decoder {
    let experts = Experts { count: 8, top_k: 2, intermediate: 14_336, ..Experts::default() };
    Decoder { vocab: 32_000, experts: Some(experts), ..llama3_8b() }
}

/// Qwen3 with 30 billion parameters, of which a token uses 3 billion.
pub fn qwen3_30b_a3b() -> Decoder {
    let experts = Experts { count: 128, top_k: 8, intermediate: 768, ..Experts::default() };
    Decoder {
        vocab: 151_936,
        hidden: 2048,
        intermediate: 768,
        experts: Some(experts),
        layers: 48,
        kv_heads: 4,
        head_norm: true,
        ..mixtral_8x7b()
    }
}

/// DeepSeek-V3, with one module of multi-token prediction.
pub fn deepseek_v3() -> Decoder {
    Decoder {
        vocab: 129_280,
        hidden: 7168,
        intermediate: 18_432,
        experts: Some(Experts {
            count: 256,
            top_k: 8,
            intermediate: 2048,
            shared: 2048,
            dense_layers: vec![0, 1, 2],
            ..Experts::default()
        }),
        layers: 61,
        heads: 128,
        kv_heads: 128,
        head_dim: 192,
        latent: Some(Latent { queries: Some(1536), keys: 512, rotated: 64, unrotated: 128, value: 128 }),
        mtp: 1,
        ..llama()
    }
}

/// mamba2-130m.
pub fn mamba2_130m() -> Decoder {
    mamba2(768, 24)
}

/// A Mamba-2 of arXiv 2405.21060, table 9.
pub fn mamba2(hidden: usize, layers: usize) -> Decoder {
    let heads = hidden / 32;
    Decoder {
        vocab: 50_288,
        vocab_multiple: 1,
        hidden,
        layers,
        heads,
        kv_heads: heads,
        head_dim: 64,
        mamba: Some(StateSpace {
            layers: (0..layers).collect(),
            heads,
            head_dim: 64,
            groups: 1,
            state: 128,
            kernel: 4,
            conv_bias: true,
            bias: false,
        }),
        lone_mlps: Some(Vec::new()),
        norms: [true, false],
        tied: true,
        ..Decoder::default()
    }
}
