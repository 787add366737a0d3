//! Megatron-LM's names of a decoder's parameters (`megatron/core/models/gpt/gpt_model.py`; with Mamba-2 layers
//! `models/mamba/mamba_model.py`; of latent attention and multi-token prediction
//! `transformer/{multi_latent_attention,multi_token_prediction}.py`), as one rank stores them.

use std::ops::Range;

use crate::frame::Frame;
use crate::layers::{
    Activation, AttentionConfig, BlockConfig, Ffn, GatedDeltaConfig, Mixer, MlpConfig, MoeConfig, NormKind, NormOver,
    Vocab,
};
use crate::names::{NameMap, latent, mamba2, mtp_module, without_inputs};

/// Before attention, after it, before the MLP, after it. Megatron-Core itself has the first and the third.
const NORMS: [&str; 4] = ["input_layernorm", "post_self_attn_layernorm", "pre_mlp_layernorm", "post_mlp_layernorm"];

/// All parameters of a decoder; `block` says what each layer is.
pub(crate) fn names(frame: &Frame, block: impl Fn(usize) -> BlockConfig) -> NameMap {
    let (mut map, Vocab { size, hidden, .. }) = (NameMap::default(), frame.vocab);
    map.same("embed_tokens.weight", "embedding.word_embeddings.weight", &[size, hidden]);
    if let Some(positions) = frame.positions {
        map.same("embed_positions.weight", "embedding.position_embeddings.weight", &[positions, hidden]);
    }
    let mut last_norm = "final_layernorm";
    for index in 0..frame.layers {
        let block = block(index);
        if is_mamba(&block) {
            last_norm = "final_norm";
        }
        layer(&mut map, frame, &block, &format!("layers.{index}"), &format!("decoder.layers.{index}"));
    }
    norm(&mut map, "norm", &format!("decoder.{last_norm}"), hidden, frame.norm);
    for index in frame.layers..frame.all_layers() {
        let (ours, theirs) = (format!("layers.{index}"), format!("mtp.layers.{}", index - frame.layers));
        mtp_module(&mut map, &ours, &theirs, hidden, ["enorm", "hnorm", "eh_proj", "final_layernorm"]);
        layer(&mut map, frame, &block(index), &ours, &format!("{theirs}.transformer_layer"));
    }
    if !frame.tied {
        map.same("lm_head.weight", "output_layer.weight", &[size, hidden]);
    }
    map
}

fn is_mamba(block: &BlockConfig) -> bool {
    matches!(block.mixer, Some(Mixer::Mamba2(_)))
}

fn layer(map: &mut NameMap, frame: &Frame, block: &BlockConfig, ours: &str, theirs: &str) {
    for (place, name) in block.norms() {
        let called = if is_mamba(block) { "norm" } else { NORMS[place] };
        norm(map, &format!("{ours}.{name}"), &format!("{theirs}.{called}"), frame.vocab.hidden, frame.norm);
    }
    if let Some(mixer) = &block.mixer {
        let (name, in_place) = (format!("{ours}.{}", mixer.name()), format!("{theirs}.self_attention"));
        match mixer {
            Mixer::Attention(of) => attention(map, of, &name, &in_place),
            Mixer::Latent(of) => latent(map, of, &name, &in_place, latent_part),
            Mixer::GatedDelta(of) => gated_delta(map, of, &name, &in_place),
            Mixer::Mamba2(of) => mamba2(map, of, &name, &format!("{theirs}.mixer")),
        }
    }
    if let Some(mlp) = &block.mlp {
        feed_forward(map, mlp, &format!("{ours}.mlp"), &format!("{theirs}.mlp"));
    }
}

/// A part of latent attention that Hugging Face calls so.
fn latent_part(part: &'static str) -> &'static str {
    match part {
        "q_a_proj" => "linear_q_down_proj",
        "q_a_layernorm" => "q_layernorm",
        "q_b_proj" => "linear_q_up_proj",
        "q_proj" => "linear_q_proj",
        "kv_a_proj_with_mqa" => "linear_kv_down_proj",
        "kv_a_layernorm" => "kv_layernorm",
        "kv_b_proj" => "linear_kv_up_proj",
        _ => "linear_proj",
    }
}

fn attention(map: &mut NameMap, config: &AttentionConfig, ours: &str, theirs: &str) {
    let AttentionConfig { hidden, heads, kv_heads, head_dim, .. } = *config;
    let gate = if config.output_gate { heads } else { 0 };
    let height = (heads + gate + 2 * kv_heads) * head_dim;
    for (part, part_rows) in ["q", "gate", "k", "v"].iter().zip(qkv_rows(config)).filter(|(_, rows)| !rows.is_empty()) {
        let (ours, theirs) = (format!("{ours}.{part}_proj"), format!("{theirs}.linear_qkv"));
        map.linear_rows(&ours, &theirs, part_rows, [height, hidden], config.input.bias);
    }
    if let Some(norm) = config.query_key_norm {
        for (our, their, heads) in [("q_norm", "q_layernorm", heads), ("k_norm", "k_layernorm", kv_heads)] {
            let features = if norm.over == NormOver::Head { head_dim } else { heads * head_dim };
            map.same(format!("{ours}.{our}.weight"), format!("{theirs}.{their}.weight"), &[features]);
        }
    }
    if config.sinks {
        map.same(format!("{ours}.sinks"), format!("{theirs}.core_attention.softmax_offset"), &[heads]);
    }
    let (ours, theirs) = (format!("{ours}.o_proj"), format!("{theirs}.linear_proj"));
    map.linear(&ours, &theirs, [hidden, heads * head_dim], config.output.bias);
}

/// Megatron-Core's `ssm/gated_delta_net.py`: one projection `[q; k; v; gate; beta; alpha]`.
fn gated_delta(map: &mut NameMap, config: &GatedDeltaConfig, ours: &str, theirs: &str) {
    let GatedDeltaConfig { hidden, value_heads, .. } = *config;
    let [keys, _, values] = config.features();
    let height = 2 * keys + 2 * values + 2 * value_heads;
    let mut first = 0;
    for (part, features) in
        ["q", "k", "v", "z", "b", "a"].into_iter().zip([keys, keys, values, values, value_heads, value_heads])
    {
        let rows = std::iter::once(first..first + features).collect();
        map.linear_rows(&format!("{ours}.{part}_proj"), &format!("{theirs}.in_proj"), rows, [height, hidden], false);
        first += features;
    }
    without_inputs(map, config, ours, theirs, "out_norm");
}

/// Matrix rows of the fused projection are ordered by key-value group: `q … q k v | q … q k v | …`, with gates of the
/// output behind the queries (`megatron/core/transformer/attention.py`). Of queries, gates, keys and values.
fn qkv_rows(config: &AttentionConfig) -> [Vec<Range<usize>>; 4] {
    let (d, queries) = (config.head_dim, config.heads / config.kv_heads);
    let gates = if config.output_gate { queries } else { 0 };
    let group = (queries + gates + 2) * d;
    let part = |start: usize, heads: usize| -> Vec<Range<usize>> {
        (0..config.kv_heads).map(|g| g * group + start..g * group + start + heads * d).collect()
    };
    let (first_gate, keys) = (queries * d, (queries + gates) * d);
    let of_gates = if gates > 0 { part(first_gate, gates) } else { Vec::new() };
    [part(0, queries), of_gates, part(keys, 1), part(keys + d, 1)]
}

/// An MLP or MoE.
fn feed_forward(map: &mut NameMap, ffn: &Ffn, ours: &str, theirs: &str) {
    match ffn {
        Ffn::Dense(MlpConfig { hidden, intermediate, activation, input, .. }) => {
            mlp(map, [*hidden, *intermediate], *activation, input.bias, ours, theirs);
        }
        Ffn::Moe(moe) => map_moe(map, moe, ours, theirs),
    }
}

/// `megatron/core/transformer/moe/{router,experts,shared_experts}.py`, with one module per expert.
fn map_moe(map: &mut NameMap, config: &MoeConfig, ours: &str, theirs: &str) {
    let MoeConfig { experts, hidden, intermediate, kind, .. } = *config;
    let bias = kind.has_biases();
    map.linear(&format!("{ours}.router"), &format!("{theirs}.router"), [experts, hidden], bias);
    if config.router.bias_rate.is_some() {
        map.same(format!("{ours}.router.expert_bias"), format!("{theirs}.router.expert_bias"), &[experts]);
    }
    if config.shared.is_some_and(|shared| shared.gate) {
        let theirs = format!("{theirs}.shared_experts.gate_weight");
        map.same(format!("{ours}.shared_experts.gate.weight"), theirs, &[1, hidden]);
    }
    let mut of_width = |width, ours: String, theirs: String| {
        mlp(map, [hidden, width], kind.activation(), bias, &ours, &theirs);
    };
    for expert in 0..experts {
        of_width(intermediate, format!("{ours}.experts.{expert}"), format!("{theirs}.experts.local_experts.{expert}"));
    }
    if let Some(shared) = config.shared {
        of_width(shared.intermediate, format!("{ours}.shared_experts"), format!("{theirs}.shared_experts"));
    }
}

/// A gated `linear_fc1` is `[gate; up]`.
fn mlp(map: &mut NameMap, [hidden, width]: [usize; 2], activation: Activation, bias: bool, ours: &str, theirs: &str) {
    let fc1 = format!("{theirs}.linear_fc1");
    let up = format!("{ours}.up_proj");
    match activation.is_gated() {
        true => {
            let gate = format!("{ours}.gate_proj");
            for (part, start) in [(gate, 0), (up, width)] {
                let rows = std::iter::once(start..start + width).collect();
                map.linear_rows(&part, &fc1, rows, [2 * width, hidden], bias);
            }
        }
        false => map.linear(&up, &fc1, [width, hidden], bias),
    }
    map.linear(&format!("{ours}.down_proj"), &format!("{theirs}.linear_fc2"), [hidden, width], bias);
}

fn norm(map: &mut NameMap, ours: &str, theirs: &str, hidden: usize, kind: NormKind) {
    map.same(format!("{ours}.weight"), format!("{theirs}.weight"), &[hidden]);
    if kind == NormKind::Layer {
        map.same(format!("{ours}.bias"), format!("{theirs}.bias"), &[hidden]);
    }
}
