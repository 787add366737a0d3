//! A model as the planner sees it.

use models::DecoderConfig;
use models::layers::{BlockConfig, ExpertKind, Ffn, Mixer, NormKind, NormOver, NormPlacement};

use crate::plan::{Decoder, Experts, Latent, Linear, StateSpace};

/// The sizes of a model, which follow from its blocks. Layers differ in which of the parts they have, and attention by its
/// window; what else there is of a part the first layer that has it says.
pub fn decoder_of(config: &impl DecoderConfig) -> Decoder {
    let frame = config.frame();
    let blocks: Vec<BlockConfig> = (0..frame.layers).map(|layer| config.block(layer)).collect();
    let with =
        |has: fn(&BlockConfig) -> bool| (0..frame.layers).filter(|layer| has(&blocks[*layer])).collect::<Vec<_>>();
    let attention = blocks.iter().find_map(BlockConfig::attention);
    let linear = blocks.iter().find_map(|block| match &block.mixer {
        Some(Mixer::GatedDelta(of)) => Some(of),
        _ => None,
    });
    let mamba = blocks.iter().find_map(|block| match &block.mixer {
        Some(Mixer::Mamba2(of)) => Some(of),
        _ => None,
    });
    let latent = blocks.iter().find_map(|block| match &block.mixer {
        Some(Mixer::Latent(of)) => Some(of),
        _ => None,
    });
    let mlp = blocks.iter().find_map(|block| if let Some(Ffn::Dense(of)) = &block.mlp { Some(of) } else { None });
    let moe = blocks.iter().find_map(|block| if let Some(Ffn::Moe(of)) = &block.mlp { Some(of) } else { None });
    let [heads, kv_heads, head_dim] = match (attention, latent, mamba, linear) {
        (Some(of), ..) => [of.heads, of.kv_heads, of.head_dim],
        (None, Some(of), ..) => [of.heads, of.heads, of.qk_nope_head_dim + of.qk_rope_head_dim],
        (None, None, Some(of), _) => [of.heads, of.heads, of.head_dim],
        (None, None, None, Some(of)) => [of.value_heads, of.key_heads, of.value_dim],
        (None, None, None, None) => [1; 3],
    };
    let normed = attention.and_then(|of| of.query_key_norm).map(|norm| norm.over);
    let norms = blocks.first().map_or(NormPlacement::Before, |block| block.placement);
    let windows: Vec<usize> = blocks.iter().filter_map(|block| block.attention()?.window).collect();
    let is_lone = |block: &BlockConfig| block.mixer.is_none() || block.mlp.is_none();
    Decoder {
        vocab: frame.vocab.size,
        vocab_multiple: frame.vocab.divisor,
        hidden: frame.vocab.hidden,
        intermediate: mlp.map(|of| of.intermediate).or(moe.map(|of| of.intermediate)).unwrap_or(0),
        experts: moe.map(|of| Experts {
            count: of.experts,
            top_k: of.router.top_k,
            intermediate: of.intermediate,
            shared: of.shared.map_or(0, |shared| shared.intermediate),
            shared_gate: of.shared.is_some_and(|shared| shared.gate),
            biases: matches!(of.kind, ExpertKind::Clamped { .. }),
            dense_layers: with(|block| !matches!(block.mlp, Some(Ffn::Moe(_)))),
        }),
        layers: frame.layers,
        heads,
        kv_heads,
        head_dim,
        latent: latent.map(|of| Latent {
            queries: of.q_lora_rank,
            keys: of.kv_lora_rank,
            rotated: of.qk_rope_head_dim,
            unrotated: of.qk_nope_head_dim,
            value: of.v_head_dim,
        }),
        mtp: frame.mtp.map_or(0, |mtp| mtp.modules),
        linear: linear.map(|of| Linear {
            layers: with(|block| matches!(block.mixer, Some(Mixer::GatedDelta(_)))),
            key_heads: of.key_heads,
            value_heads: of.value_heads,
            key_dim: of.key_dim,
            value_dim: of.value_dim,
            kernel: of.kernel,
        }),
        mamba: mamba.map(|of| StateSpace {
            layers: with(|block| matches!(block.mixer, Some(Mixer::Mamba2(_)))),
            heads: of.heads,
            head_dim: of.head_dim,
            groups: of.groups,
            state: of.state,
            kernel: of.kernel,
            conv_bias: of.conv_bias,
            bias: of.input.bias,
        }),
        lone_mlps: blocks.iter().any(is_lone).then(|| with(|block| block.mixer.is_none())),
        window: windows.first().copied(),
        windowed_layers: windows.len(),
        gated: mlp.map_or(moe.is_some_and(|of| of.kind.is_gated()), |of| of.activation.is_gated()),
        head_norm: normed == Some(NormOver::Head),
        projection_norm: normed == Some(NormOver::Projection),
        norms: [norms.is_before(), norms.is_after()],
        norm_bias: frame.norm == NormKind::Layer,
        softcap: attention.is_some_and(|of| of.softcap.is_some()),
        sinks: attention.is_some_and(|of| of.sinks),
        output_gate: attention.is_some_and(|of| of.output_gate),
        attention_bias: attention.map_or([false; 2], |of| [of.input.bias, of.output.bias]),
        mlp_bias: mlp.is_some_and(|of| of.input.bias),
        positions: frame.positions,
        rope: blocks.iter().any(|block| block.rope().is_some()),
        tied: frame.tied,
    }
}

#[cfg(test)]
mod cached;
#[cfg(test)]
mod tests;
