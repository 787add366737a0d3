//! Which layouts compute the same in FP8 as one device with as many micro-batches. Pure.

use super::Candidate;
use crate::plan::{Decoder, LayerKind};
use backend_dist::mesh::ParallelLayout;
use backend_dist::ops::fp8::{Fp8Recipe, Fp8Scaling};

/// Why a layout computes other numbers in FP8 than one device, where that follows from FP8 (docs/fp8.md), for steps of
/// so many sequences and sequences of so many tokens.
pub fn different_in_fp8(
    decoder: &Decoder,
    candidate: &Candidate,
    [global_batch, seq]: [usize; 2],
    recipe: &Fp8Recipe,
) -> Option<&'static str> {
    let layout = &candidate.layout;
    if candidate.context.dynamic {
        return Some("which documents share a sequence, and so a scale, depends on the layout");
    }
    if layout.tp > decoder.kv_heads {
        return Some("ranks that hold the same key-value head cast their shares of its gradient, not the sum");
    }
    let divide = |a: usize, b: usize| a.is_multiple_of(b) || b.is_multiple_of(a);
    let (blockwise, members) = (recipe.scaling == Fp8Scaling::Blockwise, layout.ep * layout.expert_tp());
    if decoder.experts.is_some() && !(divide(members, layout.tp) && divide(dp_ranks_at(layout), layout.cp)) {
        return Some(
            "experts in FP8 are refused where ranks that share tokens and ranks that divide experts do not divide one the \
                     other",
        );
    }
    if decoder.experts.is_some() && blockwise && (layout.cp > 1 || members < layout.tp) {
        return Some(
            "an expert's tokens of a micro-batch are on several ranks, so that blocks of 128 have other tokens",
        );
    }
    let sequences = global_batch / (layout.dp * candidate.accumulation);
    let differs = in_fp8(decoder, layout, [sequences, seq], recipe)
        != in_fp8(decoder, &ParallelLayout::default(), [sequences, seq], recipe);
    differs.then_some(match blockwise {
        false => "a GEMM whose sizes are multiples of 16 on one device has other sizes on a rank, and stays out of FP8",
        true => {
            "a GEMM whose sizes are multiples of 128 on one device has other sizes on a rank, or blocks of other tokens"
        }
    })
}

/// Whether one device has any GEMM in FP8.
pub fn is_any_in_fp8(decoder: &Decoder, batch: [usize; 2], recipe: &Fp8Recipe) -> bool {
    in_fp8(decoder, &ParallelLayout::default(), batch, recipe).contains(&true)
}

/// Data-parallel ranks that divide the experts of a layer between them.
fn dp_ranks_at(layout: &ParallelLayout) -> usize {
    (layout.ep * layout.expert_tp() / layout.tp).max(1)
}

/// Which GEMMs of a layer have sizes on a rank that FP8 takes.
fn in_fp8(decoder: &Decoder, layout: &ParallelLayout, [sequences, seq]: [usize; 2], recipe: &Fp8Recipe) -> Vec<bool> {
    let (share, blockwise) = (decoder.local(layout, sequences, seq, seq), recipe.scaling == Fp8Scaling::Blockwise);
    // Blocks of tokens lie within a rank's part of a sequence, which is two parts of it under context parallelism.
    let tokens = match blockwise {
        true => share.stream_tokens / if layout.cp > 1 { 2 } else { 1 },
        false => share.tokens,
    };
    let (hidden, multiple) = (share.hidden, recipe.multiple() as u64);
    let fits = |sizes: [u64; 3]| sizes.iter().all(|size| *size > 0 && size.is_multiple_of(multiple));
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
                mlp(multiple, share.experts.intermediate);
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
    use backend_dist::ops::fp8::Fp8Format;
    use models::{DeepSeekV3Config, FamilyConfig, LlamaConfig, MixtralConfig};

    fn hybrid() -> Fp8Recipe {
        Fp8Recipe::tensorwise(Fp8Format::Hybrid)
    }

    /// Eight sequences of 64 tokens.
    fn why_not(config: &FamilyConfig, layout: &str) -> Option<&'static str> {
        different_in_fp8(&decoder_of(config), &layout.parse().unwrap(), [8, 64], &hybrid())
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
        assert!(is_any_in_fp8(&decoder_of(&llama), [8, 64], &hybrid()));
        let odd = FamilyConfig::Llama(LlamaConfig { hidden_size: 40, ..wide });
        assert!(!is_any_in_fp8(&decoder_of(&odd), [8, 64], &hybrid()));
    }

    /// Eight sequences of 512 tokens.
    #[test]
    fn blocks_lie_within_a_ranks_sizes_and_tokens() {
        let recipe = Fp8Recipe { scaling: Fp8Scaling::Blockwise, ..hybrid() };
        let llama = FamilyConfig::Llama(models::sized! { LlamaConfig::tiny();
            hidden_size: 256, intermediate_size: 256, num_attention_heads: 4, num_key_value_heads: 4, head_dim: 64
        });
        let decoder = decoder_of(&llama);
        let why_not = |layout: &str| different_in_fp8(&decoder, &layout.parse().unwrap(), [8, 512], &recipe);
        for layout in ["TP2", "TP2 SP x2", "CP2 DP2 x4", "TP2 SP PP2 DP2 x4", "DP4 ZeRO3"] {
            assert_eq!(why_not(layout), None, "{layout}");
        }
        for layout in ["TP4", "CP4 x8", "TP2 SP CP2 x8"] {
            assert!(why_not(layout).is_some_and(|why| why.contains("blocks of other tokens")), "{layout}");
        }
        assert!(is_any_in_fp8(&decoder, [8, 512], &recipe) && !is_any_in_fp8(&decoder, [1, 64], &recipe));
        let mixtral = decoder_of(&FamilyConfig::Mixtral(models::sized! { MixtralConfig::tiny();
            hidden_size: 256, intermediate_size: 256, num_attention_heads: 4, num_key_value_heads: 4, head_dim: 64
        }));
        let why_not = |layout: &str| different_in_fp8(&mixtral, &layout.parse().unwrap(), [8, 512], &recipe);
        assert_eq!(why_not("DP2 EP2"), None);
        for layout in ["CP2", "TP2 DP2 EP1 ETP1"] {
            assert!(why_not(layout).is_some_and(|why| why.contains("on several ranks")), "{layout}");
        }
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
