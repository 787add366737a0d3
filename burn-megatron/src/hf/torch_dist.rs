//! Megatron-Core's `torch_dist`: how its tensors are those of Megatron-Core's `state_dict`, whose names our models know.
//!
//! A tensor of all layers is one stack, and of all experts another in it (`TransformerBlock.sharded_state_dict`,
//! `SequentialMLP.sharded_state_dict`). Norms have the names that they have in TransformerEngine's fused layers
//! (`get_gpt_layer_local_spec`).

use std::collections::{BTreeMap, BTreeSet};

use crate::dcp::DcpTensor;

/// A tensor that every such checkpoint of a GPT has.
pub(super) const EMBEDDING: &str = "embedding.word_embeddings.weight";
/// Megatron-LM pads a vocabulary to a multiple of 128 rows for each of up to 64 tensor-parallel ranks.
const MOST_PADDING: usize = 128 * 64;
const LAYERS: &str = "decoder.layers.";
const LOCAL_EXPERTS: &str = "mlp.experts.local_experts.";
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
}

/// Whether a file of the tensors with these names was compared with Megatron-Core: all layers have the same, which are
/// those of a Llama, a GPT or a Mixtral.
pub(super) fn is_known(names: &[&str]) -> bool {
    let parts = [
        "input_layernorm.",
        "pre_mlp_layernorm.",
        "self_attention.linear_qkv.",
        "self_attention.linear_proj.",
        "self_attention.q_layernorm.",
        "self_attention.k_layernorm.",
        "mlp.linear_fc1.",
        "mlp.linear_fc2.",
        "mlp.router.",
        LOCAL_EXPERTS,
    ];
    let of_layer = |name: &str| Some(name.strip_prefix(LAYERS).and_then(number)?.1.to_string());
    let known =
        names.iter().filter_map(|name| of_layer(name)).all(|rest| parts.iter().any(|part| rest.starts_with(part)));
    known && Stacks::of(names.iter().copied()).layers.is_some()
}

/// Whether a tensor of a `state_dict` is one of a routed expert.
pub(super) fn is_of_expert(name: &str) -> bool {
    name.contains(LOCAL_EXPERTS)
}

impl Stacks {
    /// Of the tensors with these names.
    pub fn of<'a>(names: impl Iterator<Item = &'a str>) -> Self {
        let (mut layers, mut experts): (BTreeMap<usize, BTreeSet<&str>>, usize) = (BTreeMap::new(), 0);
        for name in names {
            if let Some((layer, rest)) = name.strip_prefix(LAYERS).and_then(number) {
                layers.entry(layer).or_default().insert(rest);
                let expert = rest.strip_prefix(LOCAL_EXPERTS).and_then(number);
                experts = experts.max(expert.map_or(0, |(expert, _)| expert + 1));
            }
        }
        let mut of_layers = layers.values();
        let first = of_layers.next();
        let same = of_layers.all(|names| Some(names) == first);
        Self { layers: same.then_some(layers.len()), experts }
    }

    /// The name of a tensor's stack, and the place in each of its first dimensions with its size.
    pub fn place(&self, name: &str) -> (String, Vec<(usize, usize)>) {
        let Some((layer, rest)) = name.strip_prefix(LAYERS).and_then(number) else { return (name.into(), Vec::new()) };
        let (mut stack, mut at) = match self.layers {
            Some(layers) => (LAYERS.to_string(), vec![(layer, layers)]),
            None => (format!("{LAYERS}{layer}."), Vec::new()),
        };
        match rest.strip_prefix(LOCAL_EXPERTS).and_then(number) {
            Some((expert, rest)) => {
                at.push((expert, self.experts));
                stack += &format!("{}{rest}", &EXPERTS[1..]);
            }
            None => stack += rest,
        }
        // A layer of experts has a norm of its own before them.
        let norms = if self.experts > 0 { &NORMS[..1] } else { &NORMS[..] };
        let stack = norms.iter().fold(stack, |stack, [theirs, plain]| match stack.split_once(&plain[1..]) {
            Some((before, after)) if before.ends_with('.') => format!("{before}{}{after}", &theirs[1..]),
            _ => stack,
        });
        (stack, at)
    }
}

/// What a name has before its first dot, as a number, and what is after it.
fn number(name: &str) -> Option<(usize, &str)> {
    let (number, rest) = name.split_once('.')?;
    Some((number.parse().ok()?, rest))
}
