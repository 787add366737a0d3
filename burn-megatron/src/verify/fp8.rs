//! Which layouts compute the same in FP8 as one device with as many micro-batches. Pure.

use super::Candidate;
use crate::plan::{Decoder, LayerKind};
use backend_dist::mesh::ParallelLayout;
use backend_dist::ops::fp8::MULTIPLE;

/// Why a layout computes other numbers in FP8 than one device, where that follows from FP8 (docs/fp8.md), for steps of
/// so many sequences and sequences of so many tokens.
pub fn different_in_fp8(
    decoder: &Decoder,
    candidate: &Candidate,
    [global_batch, seq]: [usize; 2],
) -> Option<&'static str> {
    let layout = &candidate.layout;
    if candidate.context.dynamic {
        return Some("which documents share a sequence, and so a scale, depends on the layout");
    }
    if layout.tp > decoder.kv_heads {
        return Some("ranks that hold the same key-value head cast their shares of its gradient, not the sum");
    }
    let divide = |a: usize, b: usize| a.is_multiple_of(b) || b.is_multiple_of(a);
    let members = layout.ep * layout.expert_tp();
    if decoder.experts.is_some() && !(divide(members, layout.tp) && divide(dp_ranks_at(layout), layout.cp)) {
        return Some(
            "experts in FP8 are refused where ranks that share tokens and ranks that divide experts do not divide one the \
                     other",
        );
    }
    let sequences = global_batch / (layout.dp * candidate.accumulation);
    let differs =
        in_fp8(decoder, layout, sequences, seq) != in_fp8(decoder, &ParallelLayout::default(), sequences, seq);
    differs.then_some(
        "a GEMM whose sizes are multiples of 16 on one device has other sizes on a rank, and stays out of FP8",
    )
}

/// Whether one device has any GEMM in FP8.
pub fn is_any_in_fp8(decoder: &Decoder, [global_batch, seq]: [usize; 2]) -> bool {
    in_fp8(decoder, &ParallelLayout::default(), global_batch, seq).contains(&true)
}

/// Data-parallel ranks that divide the experts of a layer between them.
fn dp_ranks_at(layout: &ParallelLayout) -> usize {
    (layout.ep * layout.expert_tp() / layout.tp).max(1)
}

/// Which GEMMs of a layer have sizes on a rank that FP8 takes.
fn in_fp8(decoder: &Decoder, layout: &ParallelLayout, sequences: usize, seq: usize) -> Vec<bool> {
    let share = decoder.local(layout, sequences, seq, seq);
    let (tokens, hidden) = (share.tokens, share.hidden);
    let fits = |sizes: [u64; 3]| sizes.iter().all(|size| *size > 0 && size.is_multiple_of(MULTIPLE as u64));
    let kinds = decoder.layer_kinds();
    let mut sizes = match decoder.latent {
        None if !kinds.iter().any(|kind| kind.attention) => Vec::new(),
        None => {
            let gate = if decoder.output_gate { share.queries } else { 0 };
            vec![[tokens, share.queries + gate + 2 * share.keys, hidden], [tokens, hidden, share.queries]]
        }
        Some(latent) => {
            let [queries, keys, rotated, unrotated, value] =
                [latent.queries.unwrap_or(0), latent.keys, latent.rotated, latent.unrotated, latent.value]
                    .map(|features| features as u64);
            let inputs = if queries > 0 { queries } else { hidden };
            vec![
                [share.stream_tokens, queries + keys + rotated, hidden],
                [tokens, share.heads * (rotated + unrotated), inputs],
                [tokens, share.heads * (unrotated + value), keys],
                [tokens, hidden, share.heads * value],
            ]
        }
    };
    if let Some(mamba) = &decoder.mamba {
        let [inner, heads] = [mamba.heads * mamba.head_dim, mamba.heads].map(|all| (all / layout.tp) as u64);
        let grouped = (mamba.groups / layout.tp.min(mamba.groups) * mamba.state) as u64;
        sizes.extend([[tokens, 2 * inner + 2 * grouped + heads, hidden], [tokens, hidden, inner]]);
    }
    if let Some(linear) = &decoder.linear {
        let (keys, values) = (linear.key_heads * linear.key_dim, linear.value_heads * linear.value_dim);
        let projected = (2 * (keys + values + linear.value_heads) / layout.tp) as u64;
        sizes.extend([[tokens, projected, hidden], [tokens, hidden, (values / layout.tp) as u64]]);
    }
    let mut mlp = |tokens: u64, width: u64| {
        let first = if decoder.gated { 2 * width } else { width };
        sizes.extend([[tokens, first, hidden], [tokens, hidden, width]]);
    };
    for LayerKind { moe, .. } in kinds.into_iter().filter(|kind| kind.mlp) {
        match moe {
            false => mlp(tokens, share.intermediate),
            true => {
                // Their tokens are padded.
                mlp(MULTIPLE as u64, share.experts.intermediate);
                mlp(tokens, share.experts.shared);
            }
        }
    }
    sizes.into_iter().map(fits).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::decoder_of;
    use models::{DeepSeekV3Config, FamilyConfig, LlamaConfig, MixtralConfig};

    /// Eight sequences of 64 tokens.
    fn why_not(config: &FamilyConfig, layout: &str) -> Option<&'static str> {
        different_in_fp8(&decoder_of(config), &layout.parse().unwrap(), [8, 64])
    }

    #[test]
    fn layouts_with_other_numbers_are_named_with_their_reason() {
        let wide = models::sized! { LlamaConfig::tiny();
            hidden_size: 64, intermediate_size: 128, num_attention_heads: 8, num_key_value_heads: 4, head_dim: 8
        };
        let llama = FamilyConfig::Llama(wide.clone());
        for layout in ["TP4 SP", "DP4 x2", "CP4 DP2 x4", "TP2 SP CP2 PP2 x4 zb-h1", "DP4 ZeRO3 selective"] {
            assert_eq!(why_not(&llama, layout), None, "{layout}");
        }
        for (layout, words) in [
            ("DP2 dynamic:64", "documents share a sequence"),
            ("TP8", "the same key-value head"),
            ("CP8 x8", "multiples of 16 on one device"),
        ] {
            assert!(why_not(&llama, layout).is_some_and(|why| why.contains(words)), "{layout}");
        }
        assert!(is_any_in_fp8(&decoder_of(&llama), [8, 64]));
        let odd = FamilyConfig::Llama(LlamaConfig { hidden_size: 40, ..wide });
        assert!(!is_any_in_fp8(&decoder_of(&odd), [8, 64]));
    }

    #[test]
    fn experts_have_rules_of_their_own() {
        let mixtral = FamilyConfig::Mixtral(models::sized! { MixtralConfig::tiny();
            hidden_size: 64, intermediate_size: 64, num_attention_heads: 8, num_key_value_heads: 8, head_dim: 8
        });
        for layout in ["DP2 EP2", "TP2 SP EP2 ETP1", "TP4 SP EP2 ETP2", "CP2 DP2 EP4", "DP4 EP1 ETP4"] {
            assert_eq!(why_not(&mixtral, layout), None, "{layout}");
        }
        assert!(why_not(&mixtral, "CP3 DP2 EP2").is_some_and(|why| why.contains("do not divide one the other")));
        assert!(why_not(&mixtral, "DP8 EP1 ETP8").is_some_and(|why| why.contains("multiples of 16")));
        // The latents' GEMM has the tokens of a rank's part of the sequence.
        let deepseek = FamilyConfig::DeepSeekV3(models::sized! { DeepSeekV3Config::tiny();
            hidden_size: 64, num_attention_heads: 8, q_lora_rank: Some(32), kv_lora_rank: 24, qk_rope_head_dim: 8
        });
        assert_eq!(why_not(&deepseek, "TP2 SP x8"), None);
        assert!(why_not(&deepseek, "TP8 SP x8").is_some_and(|why| why.contains("multiples of 16")));
    }
}
