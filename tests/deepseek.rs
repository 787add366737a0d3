//! DeepSeek-V3 trains in every layout like one device: latent attention, experts, multi-token prediction.

use backend_dist::mesh::ParallelLayout;
use burn_megatron::engine::ContextConfig;
use burn_megatron::verify::candidates;
use models::{DeepSeekV3, DeepSeekV3Config, ModelConfig};
use tests::{SETTINGS, equal_one_device, layouts, verified};

/// A layer without experts, three with, two modules of multi-token prediction, whose embedding is the first stage's.
fn deepseek() -> DeepSeekV3Config {
    models::sized! { DeepSeekV3Config::tiny();
        vocab_size: 101, hidden_size: 32, intermediate_size: 48, moe_intermediate_size: 16, num_hidden_layers: 4,
        num_attention_heads: 4, q_lora_rank: Some(24), qk_nope_head_dim: 6, v_head_dim: 5, num_nextn_predict_layers: 2,
        mtp_loss_scaling_factor: 0.5, initializer_range: 0.1
    }
}

#[test]
fn every_layout_of_two_ranks_equals_one_device() {
    let dims = deepseek().dims();
    let fits = |layout: &ParallelLayout, context: &ContextConfig| {
        dims.check(layout, SETTINGS.seq).is_ok() && context.check(layout, &dims).is_ok()
    };
    let layouts = candidates(2, SETTINGS.global_batch, dims.layers, dims.experts.is_some(), fits);
    assert!(layouts.len() > 30, "{}", layouts.len());
    verified::<DeepSeekV3>(&deepseek(), &SETTINGS, &layouts);
}

#[test]
fn experts_on_ranks_of_their_own_equal_one_device() {
    let layouts = layouts![
        "DP2 EP2 ZeRO1" "DP4 EP2 ZeRO3" "PP2 DP2 EP2 x4 1f1b" "TP2 SP EP2 ETP1" "TP2 SP DP2 EP4 ETP1 ZeRO2"
        "TP2 PP2 x2 gpipe" "TP2 SP CP2 EP2 ETP2" "CP2 PP2 EP2 x2 zb-h1" "DP2 ZeRO3 uniform1 keep-attention"
        "PP2 CP2 ZeRO3 x2 block1 keep-attention"
    ];
    equal_one_device::<DeepSeekV3>(&deepseek(), &SETTINGS, &layouts);
}
