//! Names that most families of Hugging Face share, and keys of `config.json` that are called as ours.

use std::ops::Range;

use serde::Serialize;
use serde_json::{Map, Value, json};

use super::{HfArchitecture, keys};
use crate::frame::Frame;
use crate::layers::{AttentionConfig, BlockConfig, Ffn, GatedDeltaConfig, Mixer, MlpConfig, MoeConfig, NormOver};
use crate::names::{NameMap, StackPart, latent, mamba2, mtp_module, without_inputs};

/// What a family calls a layer's feed-forward part when it has experts.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ExpertNames {
    pub module: &'static str,
    /// Gate, up and down of an expert.
    pub matrices: [&'static str; 3],
}

/// Experts are called as MLPs are.
const LIKE_MLPS: ExpertNames = ExpertNames { module: "mlp", matrices: MLP };

pub(super) const MLP: [&str; 3] = ["gate_proj", "up_proj", "down_proj"];

/// How a family calls the tensors of a layer, and which of them it stores together.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LayerNames {
    /// The norms before attention, after it, before the MLP, after it; as many as the family has count.
    pub norms: [&'static str; 4],
    pub experts: ExpertNames,
    /// Experts are stacks of transposed matrices, gate and up alternating, next to a `router`.
    pub stacked_experts: bool,
    /// `qkv_proj` is `[q; k; v]`.
    pub fused_qkv: bool,
    /// `gate_up_proj` is `[gate; up]`.
    pub fused_gate_up: bool,
    /// Neighbouring features are rotated with each other. Here the first half of the rotated ones is rotated with the
    /// second: the matrix rows have another order.
    pub interleaved: bool,
    /// The module of multi-token prediction is one next to the model, and no layer behind the last one.
    pub predictor_apart: bool,
}

/// The names of most families.
pub(crate) const USUAL: LayerNames = LayerNames {
    norms: ["input_layernorm", "", "post_attention_layernorm", ""],
    experts: LIKE_MLPS,
    stacked_experts: false,
    fused_qkv: false,
    fused_gate_up: false,
    interleaved: false,
    predictor_apart: false,
};

/// Parts of a module of multi-token prediction apart from the model, and of one behind its last layer.
const APART: [&str; 4] = ["pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm"];
const BEHIND: [&str; 4] = ["enorm", "hnorm", "eh_proj", "shared_head.norm"];

/// A decoder of RMSNorms, grouped queries and gated MLPs or experts; `block` says what each layer is.
pub(crate) fn names(frame: &Frame, block: impl Fn(usize) -> BlockConfig, called: LayerNames) -> NameMap {
    let mut map = NameMap::default();
    embedding(&mut map, frame.vocab.size, frame.vocab.hidden);
    for layer in 0..frame.all_layers() {
        let (ours, block, behind) = (format!("layers.{layer}"), block(layer), layer.checked_sub(frame.layers));
        let apart = behind.filter(|_| called.predictor_apart);
        let theirs = apart.map_or(format!("model.layers.{layer}"), |module| format!("mtp.layers.{module}"));
        for (place, norm) in block.norms() {
            let (ours, theirs) = (format!("{ours}.{norm}.weight"), format!("{theirs}.{}.weight", called.norms[place]));
            map.same(ours, theirs, &[frame.vocab.hidden]);
        }
        if let Some(mixer) = &block.mixer {
            let name = format!("{ours}.{}", mixer.name());
            match mixer {
                Mixer::Attention(of) => attention(&mut map, of, &name, &format!("{theirs}.self_attn"), called),
                Mixer::Latent(of) => latent(&mut map, of, &name, &format!("{theirs}.self_attn"), |part| part),
                Mixer::GatedDelta(of) => gated_delta(&mut map, of, &name, &format!("{theirs}.linear_attn")),
                Mixer::Mamba2(of) => mamba2(&mut map, of, &name, &format!("{theirs}.mixer")),
            }
        }
        match &block.mlp {
            None => {}
            Some(Ffn::Dense(mlp)) if called.fused_gate_up => {
                gate_up(&mut map, mlp, &format!("{ours}.mlp"), &format!("{theirs}.mlp"));
            }
            Some(Ffn::Moe(moe)) if called.stacked_experts => {
                stacked_experts(&mut map, moe, &format!("{ours}.mlp"), &format!("{theirs}.mlp"));
            }
            Some(mlp) => feed_forward(&mut map, mlp, &format!("{ours}.mlp"), &theirs, called.experts),
        }
        if behind.is_some() {
            let (theirs, parts) = if apart.is_some() { ("mtp", APART) } else { (&*theirs, BEHIND) };
            mtp_module(&mut map, &ours, theirs, frame.vocab.hidden, parts);
        }
    }
    head(&mut map, frame.vocab.size, frame.vocab.hidden, frame.tied);
    map
}

fn embedding(map: &mut NameMap, vocab: usize, hidden: usize) {
    map.same("embed_tokens.weight", "model.embed_tokens.weight", &[vocab, hidden]);
}

fn head(map: &mut NameMap, vocab: usize, hidden: usize, tied: bool) {
    map.same("norm.weight", "model.norm.weight", &[hidden]);
    if !tied {
        map.same("lm_head.weight", "lm_head.weight", &[vocab, hidden]);
    }
}

pub(super) fn attention(map: &mut NameMap, config: &AttentionConfig, ours: &str, theirs: &str, called: LayerNames) {
    let AttentionConfig { hidden, heads, kv_heads, head_dim, .. } = *config;
    let bias = config.input.bias;
    let rotated = config.rope.filter(|_| called.interleaved).map_or(0, |rope| rope.head_dim);
    let (queries, total) = (heads * head_dim, (heads + 2 * kv_heads) * head_dim);
    if config.output_gate {
        // `q_proj` is the queries and the gate of each head in turn.
        let every_other = |first: usize| (first..2 * heads).step_by(2).map(|at| at * head_dim..(at + 1) * head_dim);
        for (part, first) in [("q_proj", 0), ("gate_proj", 1)] {
            let (ours, theirs, rows) = (format!("{ours}.{part}"), format!("{theirs}.q_proj"), every_other(first));
            map.linear_rows(&ours, &theirs, rows.collect(), [2 * queries, hidden], bias);
        }
    }
    let mut first = 0;
    for (part, heads, rotated) in [("q_proj", heads, rotated), ("k_proj", kv_heads, rotated), ("v_proj", kv_heads, 0)] {
        let (ours, out) = (format!("{ours}.{part}"), heads * head_dim);
        let apart = format!("{theirs}.{part}");
        match (called.fused_qkv, rotated) {
            _ if config.output_gate && part == "q_proj" => {}
            (true, _) => {
                let rows = head_rows(first, heads, head_dim, rotated);
                map.linear_rows(&ours, &format!("{theirs}.qkv_proj"), rows, [total, hidden], bias);
            }
            (false, 0) => map.linear(&ours, &apart, [out, hidden], bias),
            (false, _) => map.linear_rows(&ours, &apart, head_rows(0, heads, head_dim, rotated), [out, hidden], bias),
        }
        first += out;
    }
    map.linear(&format!("{ours}.o_proj"), &format!("{theirs}.o_proj"), [hidden, queries], config.output.bias);
    if config.sinks {
        map.same(format!("{ours}.sinks"), format!("{theirs}.sinks"), &[heads]);
    }
    if let Some(norm) = config.query_key_norm {
        for (part, heads) in [("q_norm", heads), ("k_norm", kv_heads)] {
            let features = if norm.over == NormOver::Head { head_dim } else { heads * head_dim };
            map.same(format!("{ours}.{part}.weight"), format!("{theirs}.{part}.weight"), &[features]);
        }
    }
}

/// `modeling_qwen3_next.py`, `Qwen3NextGatedDeltaNet`: the projections are fused, for each key head in turn with what it
/// serves.
pub(super) fn gated_delta(map: &mut NameMap, config: &GatedDeltaConfig, ours: &str, theirs: &str) {
    let GatedDeltaConfig { hidden, key_heads, value_heads, key_dim, value_dim, .. } = *config;
    let serves = value_heads / key_heads;
    for (fused, parts) in [
        ("in_proj_qkvz", &[("q", key_dim), ("k", key_dim), ("v", serves * value_dim), ("z", serves * value_dim)][..]),
        ("in_proj_ba", &[("b", serves), ("a", serves)]),
    ] {
        let group: usize = parts.iter().map(|(_, rows)| rows).sum();
        let mut first = 0;
        for (part, rows) in parts {
            let places = (0..key_heads).map(|head| head * group + first..head * group + first + rows).collect();
            let (ours, theirs) = (format!("{ours}.{part}_proj"), format!("{theirs}.{fused}"));
            map.linear_rows(&ours, &theirs, places, [key_heads * group, hidden], false);
            first += rows;
        }
    }
    without_inputs(map, config, ours, theirs, "norm");
}

/// `modeling_gpt_oss.py`, `GptOssExperts`: `gate_up_proj [experts, hidden, 2 width]`, gate and up alternating, and
/// `down_proj [experts, width, hidden]`, each with a bias.
fn stacked_experts(map: &mut NameMap, config: &MoeConfig, ours: &str, theirs: &str) {
    let MoeConfig { hidden, experts, intermediate: width, .. } = *config;
    map.linear(&format!("{ours}.router"), &format!("{theirs}.router"), [experts, hidden], true);
    for (name, inputs, outputs, parts) in [
        ("gate_up_proj", hidden, 2 * width, &["gate_proj", "up_proj"][..]),
        ("down_proj", width, hidden, &["down_proj"]),
    ] {
        let (matrices, biases) = (format!("{theirs}.experts.{name}"), format!("{theirs}.experts.{name}_bias"));
        for (index, (first, part)) in (0..experts).flat_map(|expert| parts.iter().enumerate().map(move |p| (expert, p)))
        {
            let (ours, part) =
                (format!("{ours}.experts.{index}.{part}"), StackPart { index, first, every: parts.len() });
            map.stacked(format!("{ours}.weight"), &matrices, part, &[experts, inputs, outputs]);
            map.stacked(format!("{ours}.bias"), &biases, part, &[experts, outputs]);
        }
    }
}

/// Where the matrix rows of heads are whose first `rotated` features are pairs of neighbours: of each head the first
/// of every pair, then the second, then the others.
fn head_rows(first: usize, heads: usize, head_dim: usize, rotated: usize) -> Vec<Range<usize>> {
    if rotated == 0 {
        return std::iter::once(first..first + heads * head_dim).collect();
    }
    let head = |head: usize| {
        let start = first + head * head_dim;
        let pairs = start..start + rotated;
        let halves = pairs.clone().step_by(2).chain(pairs.skip(1).step_by(2)).map(|row| row..row + 1);
        halves.chain(std::iter::once(start + rotated..start + head_dim)).filter(|rows| !rows.is_empty())
    };
    (0..heads).flat_map(head).collect()
}

/// A gated MLP whose first layer is stored as one matrix.
fn gate_up(map: &mut NameMap, config: &MlpConfig, ours: &str, theirs: &str) {
    let MlpConfig { hidden, intermediate: width, input, .. } = *config;
    for (part, first) in [("gate_proj", 0), ("up_proj", width)] {
        let rows = std::iter::once(first..first + width).collect();
        let theirs = format!("{theirs}.gate_up_proj");
        map.linear_rows(&format!("{ours}.{part}"), &theirs, rows, [2 * width, hidden], input.bias);
    }
    map.linear(&format!("{ours}.down_proj"), &format!("{theirs}.down_proj"), [hidden, width], config.output.bias);
}

/// An MLP or MoE of the layer `theirs`.
fn feed_forward(map: &mut NameMap, ffn: &Ffn, ours: &str, theirs: &str, experts: ExpertNames) {
    match ffn {
        Ffn::Dense(of) => dense(map, of, ours, &format!("{theirs}.mlp")),
        Ffn::Moe(moe) => map_moe(map, moe, ours, &format!("{theirs}.{}", experts.module), experts.matrices),
    }
}

/// An MLP, with a gate or without.
pub(super) fn dense(map: &mut NameMap, config: &MlpConfig, ours: &str, theirs: &str) {
    let MlpConfig { hidden, intermediate: width, activation, input, output } = *config;
    if activation.is_gated() {
        return mlp(map, [hidden, width], input.bias, MLP, ours, theirs);
    }
    ungated(map, [hidden, width], [input.bias, output.bias], ours, theirs);
}

fn ungated(map: &mut NameMap, [hidden, width]: [usize; 2], bias: [bool; 2], ours: &str, theirs: &str) {
    map.linear(&format!("{ours}.up_proj"), &format!("{theirs}.up_proj"), [width, hidden], bias[0]);
    map.linear(&format!("{ours}.down_proj"), &format!("{theirs}.down_proj"), [hidden, width], bias[1]);
}

/// transformers 5 puts the experts of a layer together in memory; in files each has its own matrices.
pub(super) fn map_moe(map: &mut NameMap, config: &MoeConfig, ours: &str, theirs: &str, matrices: [&str; 3]) {
    let MoeConfig { hidden, experts, intermediate, .. } = *config;
    map.same(format!("{ours}.router.weight"), format!("{theirs}.gate.weight"), &[experts, hidden]);
    if config.router.bias_rate.is_some() {
        map.same(format!("{ours}.router.expert_bias"), format!("{theirs}.gate.e_score_correction_bias"), &[experts]);
    }
    for index in 0..experts {
        let (ours, theirs) = (format!("{ours}.experts.{index}"), format!("{theirs}.experts.{index}"));
        expert(map, config, intermediate, matrices, &ours, &theirs);
    }
    if let Some(shared) = config.shared {
        // Qwen2-MoE has one, with a gate; DeepSeek-V3 some, without.
        if shared.gate {
            let theirs = format!("{theirs}.shared_expert_gate.weight");
            map.same(format!("{ours}.shared_experts.gate.weight"), theirs, &[1, hidden]);
        }
        let called = if shared.gate { "shared_expert" } else { "shared_experts" };
        let (ours, theirs) = (format!("{ours}.shared_experts"), format!("{theirs}.{called}"));
        expert(map, config, shared.intermediate, matrices, &ours, &theirs);
    }
}

/// An MLP as the experts of `config` are, of this width; its matrices are called gate, up and down.
fn expert(map: &mut NameMap, config: &MoeConfig, width: usize, matrices: [&str; 3], ours: &str, theirs: &str) {
    match config.kind.is_gated() {
        true => mlp(map, [config.hidden, width], false, matrices, ours, theirs),
        false => ungated(map, [config.hidden, width], [false; 2], ours, theirs),
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
pub(crate) fn written(of: HfArchitecture, config: &impl Serialize, keys: &[&str], rope: Value) -> Value {
    let ours = serde_json::to_value(config).expect("a configuration is plain data");
    let mut written = Map::new();
    written.insert("architectures".into(), json!([of.class]));
    written.insert("model_type".into(), json!(of.model_type));
    written.insert("hidden_act".into(), json!("silu"));
    let value = |key: &str| ours.get(key).unwrap_or_else(|| panic!("{key} is no key of ours")).clone();
    written.extend(keys.iter().map(|key| (key.to_string(), value(key))));
    written.insert("rope_parameters".into(), rope);
    Value::Object(written)
}

/// Keys of every decoder with grouped queries.
pub(crate) const GROUPED_QUERIES: [&str; 12] = keys![
    "vocab_size" "hidden_size" "intermediate_size" "num_hidden_layers" "num_attention_heads" "num_key_value_heads"
    "head_dim" "max_position_embeddings" "rms_norm_eps" "tie_word_embeddings" "initializer_range" "attention_dropout"
];
