//! Names that most families of Hugging Face share, and keys of `config.json` that are called as ours.

use serde::Serialize;
use serde_json::{Map, Value, json};

use super::class_of;
use crate::layers::{AttentionConfig, BlockConfig, Ffn, MlpConfig, MoeConfig};
use crate::llama::Frame;
use crate::names::NameMap;

/// What a family calls a layer's feed-forward part when it has experts.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ExpertNames {
    pub module: &'static str,
    /// Gate, up and down of an expert.
    pub matrices: [&'static str; 3],
}

/// Experts are called as MLPs are.
pub(crate) const LIKE_MLPS: ExpertNames = ExpertNames { module: "mlp", matrices: MLP };

const MLP: [&str; 3] = ["gate_proj", "up_proj", "down_proj"];

/// A decoder of RMSNorms, grouped queries and gated MLPs or experts; `block` says what each layer is.
pub(crate) fn names(frame: &Frame, block: impl Fn(usize) -> BlockConfig, experts: ExpertNames) -> NameMap {
    let mut map = NameMap::default();
    embedding(&mut map, frame.vocab.size, frame.vocab.hidden);
    for layer in 0..frame.layers {
        let (ours, theirs, block) = (format!("layers.{layer}"), format!("model.layers.{layer}"), block(layer));
        norms(&mut map, &ours, &theirs, frame.vocab.hidden);
        attention(&mut map, &block.attention, &format!("{ours}.attention"), &format!("{theirs}.self_attn"));
        feed_forward(&mut map, &block.mlp, &format!("{ours}.mlp"), &theirs, experts);
    }
    head(&mut map, frame.vocab.size, frame.vocab.hidden, frame.tied);
    map
}

pub(crate) fn embedding(map: &mut NameMap, vocab: usize, hidden: usize) {
    map.same("embed_tokens.weight", "model.embed_tokens.weight", &[vocab, hidden]);
}

pub(crate) fn head(map: &mut NameMap, vocab: usize, hidden: usize, tied: bool) {
    map.same("norm.weight", "model.norm.weight", &[hidden]);
    if !tied {
        map.same("lm_head.weight", "lm_head.weight", &[vocab, hidden]);
    }
}

/// A block's two norms.
pub(crate) fn norms(map: &mut NameMap, ours: &str, theirs: &str, hidden: usize) {
    for norm in ["input_layernorm", "post_attention_layernorm"] {
        map.same(format!("{ours}.{norm}.weight"), format!("{theirs}.{norm}.weight"), &[hidden]);
    }
}

fn attention(map: &mut NameMap, config: &AttentionConfig, ours: &str, theirs: &str) {
    let AttentionConfig { hidden, heads, kv_heads, head_dim, .. } = *config;
    let (queries, keys) = (heads * head_dim, kv_heads * head_dim);
    for (part, out) in [("q_proj", queries), ("k_proj", keys), ("v_proj", keys)] {
        map.linear(&format!("{ours}.{part}"), &format!("{theirs}.{part}"), [out, hidden], config.input.bias);
    }
    map.linear(&format!("{ours}.o_proj"), &format!("{theirs}.o_proj"), [hidden, queries], config.output.bias);
    for part in ["q_norm", "k_norm"].iter().filter(|_| config.head_norm_eps.is_some()) {
        map.same(format!("{ours}.{part}.weight"), format!("{theirs}.{part}.weight"), &[head_dim]);
    }
}

/// An MLP or MoE of the layer `theirs`.
pub(crate) fn feed_forward(map: &mut NameMap, ffn: &Ffn, ours: &str, theirs: &str, experts: ExpertNames) {
    match ffn {
        Ffn::Dense(MlpConfig { hidden, intermediate, input, .. }) => {
            mlp(map, [*hidden, *intermediate], input.bias, MLP, ours, &format!("{theirs}.mlp"));
        }
        Ffn::Moe(moe) => map_moe(map, moe, ours, &format!("{theirs}.{}", experts.module), experts.matrices),
    }
}

/// transformers 5 puts the experts of a layer together in memory; in files each has its own matrices.
fn map_moe(map: &mut NameMap, config: &MoeConfig, ours: &str, theirs: &str, matrices: [&str; 3]) {
    let MoeConfig { hidden, experts, intermediate, .. } = *config;
    map.same(format!("{ours}.router.weight"), format!("{theirs}.gate.weight"), &[experts, hidden]);
    if config.router.bias_rate.is_some() {
        map.same(format!("{ours}.router.expert_bias"), format!("{theirs}.gate.e_score_correction_bias"), &[experts]);
    }
    for expert in 0..experts {
        let (ours, theirs) = (format!("{ours}.experts.{expert}"), format!("{theirs}.experts.{expert}"));
        mlp(map, [hidden, intermediate], false, matrices, &ours, &theirs);
    }
    if let Some(shared) = config.shared {
        let (ours, theirs) = (format!("{ours}.shared_experts"), format!("{theirs}.shared_experts"));
        mlp(map, [hidden, shared.intermediate], false, matrices, &ours, &theirs);
    }
}

fn mlp(map: &mut NameMap, [hidden, width]: [usize; 2], bias: bool, matrices: [&str; 3], ours: &str, theirs: &str) {
    let parts = [("gate", [width, hidden]), ("up", [width, hidden]), ("down", [hidden, width])];
    for ((part, shape), matrix) in parts.into_iter().zip(matrices) {
        map.linear(&format!("{ours}.{part}_proj"), &format!("{theirs}.{matrix}"), shape, bias);
    }
}

/// The beginning of the `config.json` of a model of Hugging Face's `kind`: `keys` of our configuration, which are
/// called so there too, and the rotary parameters.
///
/// # Panics
/// If the configuration has no such key.
pub(crate) fn written(kind: &str, config: &impl Serialize, keys: &[&str], rope: Value) -> Value {
    let ours = serde_json::to_value(config).expect("a configuration is plain data");
    let mut written = Map::new();
    written.insert("architectures".into(), json!([class_of(kind)]));
    written.insert("model_type".into(), json!(kind));
    written.insert("hidden_act".into(), json!("silu"));
    let value = |key: &str| ours.get(key).unwrap_or_else(|| panic!("{key} is no key of ours")).clone();
    written.extend(keys.iter().map(|key| (key.to_string(), value(key))));
    written.insert("rope_parameters".into(), rope);
    Value::Object(written)
}

/// Keys of every decoder with grouped queries.
pub(crate) const GROUPED_QUERIES: [&str; 12] = [
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "rms_norm_eps",
    "tie_word_embeddings",
    "initializer_range",
    "attention_dropout",
];
