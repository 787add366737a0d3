//! The meaning of a model's sizes. Which of them a model has, and of which kind they are, its family decides.

use serde_json::json;

use super::{FAMILIES, FamilyConfig};

/// Sizes that several families have, in the order that people expect.
const COMMON: &[(&str, &str)] = &[
    ("variant", "Variant of the family"),
    ("vocab_size", "Vocabulary size; default with a tokenizer that is made from the text: its size"),
    ("hidden_size", "Hidden size"),
    ("intermediate_size", "Intermediate size of the MLP; of each expert in mixtral"),
    ("num_hidden_layers", "Number of transformer layers"),
    ("num_attention_heads", "Number of query heads"),
    ("num_key_value_heads", "Number of key-value heads; default of a family: num-attention-heads"),
    ("head_dim", "Head dimension; default of a family: hidden-size / num-attention-heads"),
    ("max_position_embeddings", "Maximum sequence length; default of a family: training.seq-length"),
    (
        "sliding_window",
        "Size of the sliding attention window, the current position included; none: full causal attention",
    ),
    (
        "sliding_window_pattern",
        "Layers with full attention instead of the window: the last of every so many, or a list such as [0, 5]",
    ),
    ("rope_theta", "RoPE base"),
    (
        "rope_scaling",
        "RoPE scaling, by rope_type: linear, dynamic, llama3, yarn or longrope: { rope_type, factor, ... }",
    ),
    ("partial_rotary_factor", "Fraction of the head dimension that has RoPE"),
    ("rms_norm_eps", "Epsilon of RMSNorm"),
    ("layer_norm_epsilon", "Epsilon of LayerNorm; of RMSNorm in mamba2 and nemotron_h"),
    ("attention_bias", "Use biases in the query, key, value and output projections"),
    ("mlp_bias", "Use biases in the MLP"),
    ("tie_word_embeddings", "Share the weight of the embedding with the output layer"),
    ("initializer_range", "Standard deviation of the random initial weights"),
    ("hidden_dropout", "Dropout after the embedding and before each residual addition"),
    ("attention_dropout", "Dropout of the attention probabilities"),
    ("n_routed_experts", "Number of routed experts of a layer"),
    ("num_experts_per_tok", "Routed experts per token (top-k)"),
    ("moe_intermediate_size", "Intermediate size of an expert"),
    ("norm_topk_prob", "Normalise the top-k probabilities of a token to a sum of one"),
    ("routed_scaling_factor", "Factor of the top-k probabilities"),
    ("n_group", "Number of expert groups (group-limited routing)"),
    ("topk_group", "Expert groups per token (group-limited routing)"),
    ("first_k_dense_replace", "Number of first layers with a dense MLP instead of experts"),
    ("router_aux_loss_coef", "Coefficient of the load-balancing (auxiliary) loss"),
    ("router_balance", "Tokens over which the load-balancing loss is computed: micro-batch, sequence, global"),
    ("moe_router_bias_update_rate", "Update rate of the expert bias (auxiliary-loss-free load balancing)"),
    ("num_nextn_predict_layers", "Number of multi-token prediction (MTP) modules"),
    ("mtp_loss_scaling_factor", "Weight of the mean MTP loss"),
    ("moe_capacity", "Expert capacity: { factor, policy = probs or position, pad }; none: dropless"),
    ("moe_dispatcher", "Token dispatcher: all-to-all, all-gather"),
    ("n_groups", "Mamba-2: number of groups of heads that share B and C, and that the output is normalised in"),
    ("conv_kernel", "Mamba-2: positions that the convolution sees"),
    ("use_conv_bias", "Mamba-2: use a bias in the convolution"),
    ("use_bias", "Mamba-2: use biases in the projections"),
    (
        "make_vocab_size_divisible_by",
        "Vocabulary padding: the shard of every tensor-parallel rank is a multiple of this",
    ),
];

impl FamilyConfig {
    /// The keys of all families and their meaning, with the families or relatives that have a key which not all models
    /// of a family have, or which one family alone has.
    pub fn sizes() -> Vec<(&'static str, String)> {
        let common = COMMON.iter().map(|(key, meaning)| (*key, said(meaning, &owners(key))));
        let own = FAMILIES.iter().flat_map(|family| {
            family.sizes.iter().map(|(key, meaning)| {
                let mut owners = (family.owners)(key);
                if owners.is_empty() {
                    owners.push(family.name.into());
                }
                (*key, said(meaning, &owners))
            })
        });
        common.chain(own).collect()
    }
}

/// The relatives that have a key, and the families all of whose models have it; nobody if that is all who have it.
fn owners(key: &str) -> Vec<String> {
    let relatives: Vec<Vec<String>> = FAMILIES.iter().map(|family| (family.owners)(key)).collect();
    if relatives.iter().all(Vec::is_empty) {
        return Vec::new();
    }
    let families = FAMILIES.iter().zip(relatives).map(|(family, relatives)| {
        let has = || (family.presets)().first().is_some_and(|(_, config)| json!(config).get(key).is_some());
        if relatives.is_empty() && has() { vec![family.name.into()] } else { relatives }
    });
    families.flatten().collect()
}

/// A meaning with who has the key; nobody is named where that is no question.
fn said(meaning: &str, owners: &[String]) -> String {
    if owners.is_empty() { meaning.into() } else { format!("{meaning} ({})", owners.join(", ")) }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use serde_json::Value;

    use super::*;
    use crate::causal_lm::ModelConfig;

    #[test]
    fn every_size_of_every_family_has_one_meaning() {
        let keys = |config: &FamilyConfig| match serde_json::to_value(config) {
            Ok(Value::Object(fields)) => fields.into_iter().map(|(key, _)| key).collect::<Vec<_>>(),
            _ => unreachable!("a struct with named fields"),
        };
        let mut known: BTreeSet<String> = FamilyConfig::presets().iter().flat_map(|(_, config)| keys(config)).collect();
        known.remove("family");
        let sizes = FamilyConfig::sizes();
        let said: BTreeSet<String> = sizes.iter().map(|(key, _)| (*key).into()).collect();
        assert_eq!(said, known);
        assert_eq!(said.len(), sizes.len(), "a key is in two lists");
    }

    #[test]
    fn relatives_that_have_a_key_are_named() {
        let said = |key: &str| FamilyConfig::sizes().into_iter().find(|(known, _)| *known == key).unwrap().1;
        assert_eq!(said("hidden_size"), "Hidden size");
        assert!(said("variant").contains("(llama, mistral, qwen2,"), "{}", said("variant"));
        assert!(said("partial_rotary_factor").ends_with("(phi3, glm4, qwen3_next, glm4_moe)"));
        assert!(said("gelu_tanh").ends_with("(gpt)"));
    }
}
