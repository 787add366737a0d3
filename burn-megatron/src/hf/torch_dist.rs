//! Megatron-Core's `torch_dist`: how its tensors are those of Megatron-Core's `state_dict`, whose names our models know.
//!
//! A tensor of all layers is one stack, and of all experts another in it (`TransformerBlock.sharded_state_dict`,
//! `SequentialMLP.sharded_state_dict`). Norms have the names that they have in TransformerEngine's fused layers
//! (`get_gpt_layer_local_spec`).

use std::collections::BTreeMap;

use crate::dcp::DcpTensor;

/// A tensor that every such checkpoint of a GPT has.
pub(super) const EMBEDDING: &str = "embedding.word_embeddings.weight";
const LAYERS: &str = "decoder.layers.";
const EXPERTS: &str = ".mlp.experts.experts.";
/// Names in files, and in a `state_dict` without TransformerEngine.
const NORMS: [[&str; 2]; 2] = [
    [".self_attention.linear_qkv.layer_norm_", ".input_layernorm."],
    [".mlp.linear_fc1.layer_norm_", ".pre_mlp_layernorm."],
];

/// The tensors of a file under the names of a `state_dict`. Vocabularies are padded in files: of a table of embeddings,
/// `vocab` rows stay.
pub(super) fn state_dict(stored: BTreeMap<String, DcpTensor>, vocab: usize) -> BTreeMap<String, DcpTensor> {
    let layers = stored.into_iter().flat_map(|(name, tensor)| match name.strip_prefix(LAYERS) {
        Some(rest) if !rest.starts_with(|first: char| first.is_ascii_digit()) && !tensor.shape.is_empty() => {
            (0..tensor.shape[0]).map(|layer| (format!("{LAYERS}{layer}.{rest}"), tensor.part(layer))).collect()
        }
        _ => vec![(name, tensor)],
    });
    let experts = layers.flat_map(|(name, tensor)| match name.split_once(EXPERTS) {
        Some((layer, rest)) if !rest.starts_with(|first: char| first.is_ascii_digit()) && !tensor.shape.is_empty() => {
            let of = |expert: usize| format!("{layer}.mlp.experts.local_experts.{expert}.{rest}");
            (0..tensor.shape[0]).map(|expert| (of(expert), tensor.part(expert))).collect()
        }
        Some((layer, rest)) => vec![(format!("{layer}.mlp.experts.local_experts.{rest}"), tensor)],
        None => vec![(name, tensor)],
    });
    let named = experts.map(|(name, tensor)| {
        let norm = NORMS.iter().find(|[theirs, _]| name.contains(theirs));
        (norm.map_or(name.clone(), |[theirs, plain]| name.replace(theirs, plain)), tensor)
    });
    let whole = |(name, tensor): (String, DcpTensor)| {
        let padded = [EMBEDDING, "output_layer.weight"].contains(&name.as_str()) && tensor.shape.len() == 2;
        let rows = if padded { tensor.shape[0].min(vocab) } else { 0 };
        (name, if padded { tensor.truncated(rows) } else { tensor })
    };
    named.map(whole).collect()
}
