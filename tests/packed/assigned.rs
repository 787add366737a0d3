//! Documents that ranks share by their lengths (dynamic context parallelism) teach what they teach one device.

use burn_megatron::engine::TokenBatch;
use burn_megatron::verify::RankTrace;
use models::{CausalLm, DeepSeekV3, DeepSeekV3Config, Llama, Mamba2, Mixtral, MixtralConfig, ModelConfig};
use tests::{SETTINGS, layouts, llama, train_on};

use super::{each_equals, mamba2, packed, packed_equals_unpacked, qwen3_next, unpacked};

/// The ranks that share a sequence, and so a layer's heads, are others in every pass.
#[test]
fn recurrent_layers_share_documents_by_length() {
    let layouts = ["DP4 dynamic:4", "DP2 CP2 ZeRO3 dynamic:5", "TP2 SP DP2 dynamic:8 uniform1"];
    assigned_equals_unpacked::<Mamba2>(&mamba2(), &layouts);
    assigned_equals_unpacked::<Mixtral>(&qwen3_next(), &layouts);
}

/// Each document is shared by as many ranks as its length needs; ranks take different numbers of them.
#[test]
fn documents_that_are_assigned_by_length_teach_the_same() {
    let layouts = layouts![
        "DP4 dynamic:4" "DP2 CP2 ZeRO1 all_gather dynamic:8" "CP4 a2a dynamic:5" "TP2 SP DP2 selective dynamic:16"
        "DP6 dynamic:3 uniform1"
    ];
    assigned_equals_unpacked::<Llama>(&llama(), &layouts);
}

/// A sequence that is the last one of a rank, which sums gradients within it, and not of another that shares it.
#[test]
fn a_rank_without_further_sequences_stops_nobody() {
    packed_equals_unpacked::<Llama>(&llama(), &["DP4 dynamic:4", "DP2 CP2 ZeRO1 dynamic:4"]);
}

/// Where others wait for a rank in every pass, all run equally many: the last ones of some have no tokens.
#[test]
fn documents_that_are_assigned_in_rounds_teach_the_same() {
    let layouts = layouts![
        "DP4 ZeRO2 dynamic:4" "DP2 CP2 ZeRO3 dynamic:5" "TP2 SP DP2 ZeRO3 dynamic:8 uniform1" "PP2 DP3 dynamic:6"
        "PP2 DP2 ZeRO2 x2 zb-h1 dynamic:8 selective" "PP2 VPP2 CP2 x4 interleaved dynamic:8"
        "PP2 DP2 x2 zb-v dynamic:16"
    ];
    assigned_equals_unpacked::<Llama>(&llama(), &layouts);
    // Auxiliary losses are means over the tokens of a sequence: of several documents on one device, of one here.
    let mixtral = MixtralConfig { router_aux_loss_coef: 0.0, ..mixtral() };
    assigned_equals_unpacked::<Mixtral>(&mixtral, &MOES);
}

fn mixtral() -> MixtralConfig {
    models::sized! { MixtralConfig::tiny();
        vocab_size: 101, hidden_size: 32, intermediate_size: 16, num_hidden_layers: 2, num_attention_heads: 4,
        num_key_value_heads: 2, num_experts: 4
    }
}

const MOES: [&str; 6] = layouts![
    "DP4 dynamic:6" "DP4 EP2 dynamic:4" "DP2 CP2 EP4 ZeRO3 dynamic:5" "DP2 EP1 ETP2 ZeRO2 dynamic:8"
    "TP2 SP DP2 EP2 ETP1 dynamic:8 uniform1" "PP2 DP2 EP2 x2 zb-h1 dynamic:8"
];

/// One device has every document as it is, several pad it to a length that they can shard: padding is in no auxiliary
/// loss and in no count that a router's bias follows.
#[test]
fn padding_of_documents_is_not_balanced() {
    let mixtral = MixtralConfig { router_aux_loss_coef: 0.1, router_z_loss_coef: 0.01, ..mixtral() };
    assigned_equals_one_device::<Mixtral>(&mixtral, &[&MOES[..], &["TP2 DP2 dynamic:8", "CP4 dynamic:4"]].concat());
    let deepseek = models::sized! { DeepSeekV3Config::tiny();
        vocab_size: 101, hidden_size: 32, intermediate_size: 48, moe_intermediate_size: 16, num_attention_heads: 4,
        moe_router_bias_update_rate: 0.05, router_aux_loss_coef: 0.1
    };
    assigned_equals_one_device::<DeepSeekV3>(&deepseek, &["DP4 EP2 dynamic:4", "TP2 SP CP2 dynamic:8"]);
}

/// With sequences of one document each this is what is trained without dynamic context parallelism.
#[test]
fn whole_sequences_that_are_assigned_are_balanced_as_sequences() {
    let mixtral = MixtralConfig { router_aux_loss_coef: 0.1, router_z_loss_coef: 0.01, ..mixtral() };
    let job = SETTINGS.job(mixtral.vocab_size());
    let one = train_on::<Mixtral>(&mixtral, "TP1 x8", &job);
    let layouts = ["DP2 CP2 dynamic:16", "DP4 EP2 dynamic:4"];
    each_equals(&one, &layouts, |layout| train_on::<Mixtral>(&mixtral, layout, &job));
}

fn assigned_equals_unpacked<M: CausalLm>(config: &M::Config, layouts: &[&str]) {
    let one = train_on::<M>(config, "TP1", &unpacked(config.vocab_size()));
    each_equals(&one, layouts, |layout| assigned::<M>(config, layout));
}

fn assigned_equals_one_device<M: CausalLm>(config: &M::Config, layouts: &[&str]) {
    each_equals(&assigned::<M>(config, "TP1 dynamic:16"), layouts, |layout| assigned::<M>(config, layout));
}

fn assigned<M: CausalLm>(config: &M::Config, layout: &str) -> Vec<RankTrace> {
    let mut job = packed(config.vocab_size());
    // Sequences are assigned whatever their number is.
    job.engine.global_batch = 12;
    job.batches.iter_mut().for_each(|batch| *batch = three_times(batch));
    train_on::<M>(config, layout, &job)
}

/// Each sequence three times: means, and so gradients, stay the same.
fn three_times(batch: &TokenBatch) -> TokenBatch {
    TokenBatch {
        sequences: 3 * batch.sequences,
        tokens: batch.tokens.repeat(3),
        labels: batch.labels.repeat(3),
        mask: batch.mask.as_ref().map(|mask| mask.repeat(3)),
        documents: batch.documents.as_ref().map(|documents| vec![documents.clone(); 3].concat()),
        seq: batch.seq,
        ..TokenBatch::default()
    }
}
