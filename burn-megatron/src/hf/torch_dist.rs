//! Megatron-Core's `torch_dist`: how its tensors are those of Megatron-Core's `state_dict`, whose names our models know.
//!
//! A tensor of all layers is one stack, and of all experts another in it (`TransformerBlock.sharded_state_dict`,
//! `SequentialMLP.sharded_state_dict`). Norms have the names that they have in TransformerEngine's fused layers
//! (`get_gpt_layer_local_spec`).

use std::collections::{BTreeMap, BTreeSet, HashSet};

use models::layers::NormOver;
use models::{DecoderConfig, FamilyConfig};

use crate::dcp::DcpTensor;

/// A tensor that every such checkpoint of a GPT has.
pub(super) const EMBEDDING: &str = "embedding.word_embeddings.weight";
/// Megatron-LM pads a vocabulary to a multiple of 128 rows for each of up to 64 tensor-parallel ranks.
const MOST_PADDING: usize = 128 * 64;
const LAYERS: &str = "decoder.layers.";
/// Modules of multi-token prediction, and the layer of one.
const PREDICTORS: &str = "mtp.layers.";
const PREDICTED: &str = "transformer_layer.";
/// Ends the name of the bias that balances experts, which no optimizer updates.
pub(super) const EXPERT_BIAS: &str = ".router.expert_bias";
const LOCAL_EXPERTS: &str = "mlp.experts.local_experts.";
const EXPERTS: &str = ".mlp.experts.experts.";
/// Names in files, and in a `state_dict` without TransformerEngine.
const NORMS: [[&str; 2]; 4] = [
    [".self_attention.linear_qkv.layer_norm_", ".input_layernorm."],
    [".mlp.linear_fc1.layer_norm_", ".pre_mlp_layernorm."],
    [".self_attention.linear_q_up_proj.layer_norm_", ".self_attention.q_layernorm."],
    [".self_attention.linear_kv_up_proj.layer_norm_", ".self_attention.kv_layernorm."],
];
/// What Megatron-Core has no layer for, or none that runs without a GPU, so that no file of it was compared.
const UNKNOWN: [[&str; 2]; 4] = [
    ["post_self_attn_layernorm.", "Megatron-Core has no norm behind attention"],
    ["post_mlp_layernorm.", "Megatron-Core has no norm behind an MLP"],
    ["mixer.", "files of Megatron-Core's Mamba-2 layers, which need a GPU, were not compared"],
    [
        "self_attention.in_proj.",
        "files of Megatron-Core's Gated DeltaNet, which needs TransformerEngine, were not compared",
    ],
];

/// What no name tells of a model that Megatron-Core's layers do not compute.
pub(super) fn without_layers(model: &FamilyConfig) -> Option<String> {
    let norms = model.block(0).attention().and_then(|of| of.query_key_norm);
    let whole = norms.is_some_and(|norm| norm.over == NormOver::Projection);
    let frame = model.frame();
    for (factor, of) in [(frame.embedding_scale, "embeddings"), (frame.logit_scale, "logits")] {
        if factor.is_some_and(|factor| factor != 1.0) {
            return Some(format!("Megatron-Core has no factor of {of}"));
        }
    }
    whole.then(|| "Megatron-Core has no norm of whole queries and keys".into())
}

/// The tensors of a file under the names of a `state_dict`. Vocabularies are padded in files: of a table of embeddings,
/// `vocab` rows stay.
pub(super) fn state_dict(stored: BTreeMap<String, DcpTensor>, vocab: usize) -> BTreeMap<String, DcpTensor> {
    let layers = stored.into_iter().flat_map(|(name, tensor)| match name.strip_prefix(LAYERS) {
        Some(rest) if !rest.starts_with(|first: char| first.is_ascii_digit()) && is_stack(&tensor) => {
            (0..tensor.shape[0]).map(|layer| (format!("{LAYERS}{layer}.{rest}"), tensor.part(layer))).collect()
        }
        _ => vec![(name, tensor)],
    });
    let experts = layers.flat_map(|(name, tensor)| match name.split_once(EXPERTS) {
        Some((layer, rest)) if !rest.starts_with(|first: char| first.is_ascii_digit()) && is_stack(&tensor) => {
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
        // Another vocabulary is refused by its shape.
        let is_padding = padded && tensor.shape[0] > vocab && tensor.shape[0] - vocab < MOST_PADDING;
        (name, if is_padding { tensor.truncated(vocab) } else { tensor })
    };
    named.map(whole).collect()
}

/// Whether a tensor has parts: a size without elements says nothing about how many.
fn is_stack(tensor: &DcpTensor) -> bool {
    !tensor.shape.is_empty() && !tensor.shape.contains(&0)
}

/// The tensors of a `state_dict` in a file: of all layers together if every layer has the same tensors, otherwise layer by
/// layer (`non_homogeneous_layers`); of all experts together.
pub(super) struct Stacks {
    layers: Option<usize>,
    experts: usize,
    /// Layers with experts.
    sparse: HashSet<String>,
    /// Layers with latent attention.
    latent: HashSet<String>,
}

/// Why tensors with these names are not written: other parts of layers than those of which files were compared with
/// Megatron-Core.
pub(super) fn unknown(names: &[&str]) -> Option<String> {
    const PARTS: [&str; 17] = [
        "input_layernorm.",
        "pre_mlp_layernorm.",
        "self_attention.linear_qkv.",
        "self_attention.linear_proj.",
        "self_attention.q_layernorm.",
        "self_attention.k_layernorm.",
        "self_attention.linear_q_proj.",
        "self_attention.linear_q_down_proj.",
        "self_attention.linear_q_up_proj.",
        "self_attention.linear_kv_down_proj.",
        "self_attention.linear_kv_up_proj.",
        "self_attention.kv_layernorm.",
        "self_attention.core_attention.softmax_offset",
        "mlp.linear_fc",
        "mlp.router.",
        "mlp.shared_experts.",
        LOCAL_EXPERTS,
    ];
    let part = names.iter().filter_map(|name| Some(Layer::of(name)?.rest));
    let mut unknown = part.filter(|rest| !PARTS.iter().any(|part| rest.starts_with(part)));
    let found = unknown.next()?;
    let why =
        [found].into_iter().chain(unknown).find_map(|rest| UNKNOWN.iter().find(|[part, _]| rest.starts_with(part)));
    Some(why.map_or_else(
        || format!("files with `{found}` in a layer were not compared with Megatron-Core"),
        |[_, why]| why.to_string(),
    ))
}

/// Whether a tensor of a `state_dict` is one of a routed expert.
pub(super) fn is_of_expert(name: &str) -> bool {
    expert(name).is_some()
}

/// The expert that a tensor of a `state_dict` is of, and what it is there.
pub(super) fn expert(name: &str) -> Option<(usize, &str)> {
    number(name.split_once(LOCAL_EXPERTS)?.1)
}

/// Where a tensor of a `state_dict` is in a model: in a layer, or in that of a module of multi-token prediction.
#[derive(Clone, Copy)]
struct Layer<'a> {
    /// The layer with what is before it, `decoder.layers.3.` or `mtp.layers.0.transformer_layer.`.
    name: &'a str,
    /// Its number, if it may be in a stack: modules of multi-token prediction never are.
    stackable: Option<usize>,
    rest: &'a str,
}

impl<'a> Layer<'a> {
    fn of(name: &'a str) -> Option<Self> {
        let (stackable, rest) = match name.strip_prefix(LAYERS) {
            Some(after) => number(after).map(|(layer, rest)| (Some(layer), rest))?,
            None => (None, number(name.strip_prefix(PREDICTORS)?)?.1.strip_prefix(PREDICTED)?),
        };
        Some(Self { name: &name[..name.len() - rest.len()], stackable, rest })
    }
}

impl Stacks {
    /// Of the tensors with these names.
    pub fn of<'a>(names: impl Iterator<Item = &'a str>) -> Self {
        let mut layers = BTreeMap::<usize, BTreeSet<&str>>::new();
        let (mut sparse, mut latent, mut experts) = (HashSet::new(), HashSet::new(), 0);
        for layer in names.filter_map(Layer::of) {
            if let Some(index) = layer.stackable {
                layers.entry(index).or_default().insert(layer.rest);
            }
            if let Some((expert, _)) = layer.rest.strip_prefix(LOCAL_EXPERTS).and_then(number) {
                experts = experts.max(expert + 1);
                sparse.insert(layer.name.to_string());
            }
            if layer.rest.starts_with("self_attention.linear_kv_up_proj.") {
                latent.insert(layer.name.to_string());
            }
        }
        let mut of_layers = layers.values();
        let first = of_layers.next();
        let same = of_layers.all(|names| Some(names) == first);
        Self { layers: same.then_some(layers.len()), experts, sparse, latent }
    }

    /// The name of a tensor's stack, and the place in each of its first dimensions with its size.
    pub fn place(&self, name: &str) -> (String, Vec<(usize, usize)>) {
        let Some(layer) = Layer::of(name) else { return (name.into(), Vec::new()) };
        let (mut stack, mut at) = match (layer.stackable, self.layers) {
            (Some(index), Some(layers)) => (LAYERS.to_string(), vec![(index, layers)]),
            _ => (layer.name.to_string(), Vec::new()),
        };
        match layer.rest.strip_prefix(LOCAL_EXPERTS).and_then(number) {
            Some((expert, rest)) => {
                at.push((expert, self.experts));
                stack += &format!("{}{rest}", &EXPERTS[1..]);
            }
            None => stack += &self.rest(&layer),
        }
        (stack, at)
    }

    /// What a file calls a part of a layer. A layer of experts has a norm of its own before them, latent attention one
    /// before all its projections.
    fn rest(&self, layer: &Layer) -> String {
        let fused =
            |[theirs, plain]: &[&str; 2]| Some(format!("{}{}", &theirs[1..], layer.rest.strip_prefix(&plain[1..])?));
        let [input, mlp, latents @ ..] = &NORMS;
        let is_latent = self.latent.contains(layer.name);
        let of_attention = match is_latent {
            true => latents.iter().find_map(fused),
            false => fused(input),
        };
        let of_mlp = || fused(mlp).filter(|_| !self.sparse.contains(layer.name));
        of_attention.or_else(of_mlp).unwrap_or_else(|| layer.rest.to_string())
    }
}

/// What a name has before its first dot, as a number, and what is after it.
fn number(name: &str) -> Option<(usize, &str)> {
    let (number, rest) = name.split_once('.')?;
    Some((number.parse().ok()?, rest))
}

#[cfg(test)]
mod tests {
    use super::*;
    use models::{LlamaConfig, LlamaVariant};

    #[test]
    fn a_granite_has_factors_that_megatron_core_has_not() {
        let of = |residual_multiplier, logits_scaling| {
            let variant = LlamaVariant::Granite;
            let config = LlamaConfig { variant, residual_multiplier, logits_scaling, ..LlamaConfig::tiny() };
            without_layers(&FamilyConfig::Llama(config))
        };
        let no_factor = |of: &str| Some(format!("Megatron-Core has no factor of {of}"));
        assert_eq!((of(Some(0.2), None), of(None, Some(8.0))), (no_factor("embeddings"), no_factor("logits")));
        assert_eq!((of(None, None), of(Some(1.0), Some(1.0))), (None, None));
    }
}
