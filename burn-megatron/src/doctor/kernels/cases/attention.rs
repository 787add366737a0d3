//! Attention: packed, with earlier keys, and in the forms that have kernels of their own.

use backend_dist::ops::context::{Documents, attention_in_context};
use backend_dist::ops::{
    AttentionDropout, AttentionOptions, PackedHeads, PassContext, attention, attention_packed, latent_keys, split,
};
use burn::tensor::Tensor;

use super::{Case, Scale, angles, case, flat};

pub(super) fn attentions(scale: &Scale) -> Vec<Case> {
    let Scale { seq, batch, heads, head_dim, .. } = *scale;
    let tokens = scale.tokens();
    let causal = AttentionOptions::causal(head_dim);
    let full = AttentionOptions { causal: false, ..causal };
    let mut found = vec![
        packed_attention(scale, "attention_packed", causal),
        packed_attention(scale, "attention_packed, not causal", full),
    ];
    // As in a decoder: the queries are the last of the keys' positions.
    let keys = seq + 5;
    let kv = keys * batch * heads.kv_heads * head_dim;
    let inputs = [("q", tokens * heads.heads * head_dim), ("k", kv), ("v", kv)];
    let shape = format!("{}, {keys} keys", packed_shape(scale));
    found.push(case("attention, earlier keys", shape, 3, &inputs, move |_, x| {
        let q: Tensor<4> = x[0].clone().reshape([seq, batch, heads.heads, head_dim]);
        let [k, v] = [1, 2].map(|i: usize| x[i].clone().reshape([keys, batch, heads.kv_heads, head_dim]));
        flat(attention(q, k, v, causal))
    }));
    found.push(latent(scale));
    found
}

/// Keys and values of latent attention, from one projection.
fn latent(scale: &Scale) -> Case {
    let Scale { seq, batch, heads: PackedHeads { heads, .. }, head_dim, .. } = *scale;
    let (rotated, own, value) = (head_dim, 2 * head_dim, head_dim);
    let widths = [heads * (own + value), rotated];
    let features = widths[0] + widths[1];
    let shape = format!("[{seq}, {batch}, {heads} · ({own} | {value}) + {rotated}]");
    case("split, latent_keys", shape, 3, &[("x", scale.tokens() * features)], move |side, x| {
        let [kv, shared] = split(x[0].clone().reshape([seq, batch, features]), widths);
        let kv = kv.reshape([seq, batch, heads, own + value]);
        let [keys, values] = latent_keys(kv, shared, angles(side, [seq, rotated / 2]), own);
        Tensor::cat(vec![flat(keys), flat(values)], 0)
    })
}

fn packed_shape(scale: &Scale) -> String {
    let Scale { seq, batch, heads, head_dim, .. } = scale;
    format!("[{seq}, {batch}, {} + 2 · {}, {head_dim}]", heads.heads, heads.kv_heads)
}

fn packed_attention(scale: &Scale, name: &'static str, options: AttentionOptions) -> Case {
    let Scale { seq, batch, heads, head_dim, .. } = *scale;
    let inputs = [("qkv", scale.tokens() * heads.total() * head_dim)];
    case(name, packed_shape(scale), 3, &inputs, move |_, x| {
        let input: Tensor<4> = x[0].clone().reshape([seq, batch, heads.total(), head_dim]);
        flat(attention_packed(input, heads, options))
    })
}

/// Attention in the forms that have kernels of their own. These take a GPU long to compile.
pub fn attention_forms(scale: &Scale) -> Vec<Case> {
    let Scale { seq, heads, head_dim, .. } = *scale;
    let causal = AttentionOptions::causal(head_dim);
    let window = Some(seq / 3 + 1);
    // As on a rank that has some samples and heads of more.
    let dropout =
        Some(AttentionDropout { p: 0.1, seed: 7, first_sample: 3, first_head: heads.heads, heads: 2 * heads.heads });
    let forms = [
        ("attention_packed, window", AttentionOptions { window, ..causal }),
        ("attention_packed, window on both sides", AttentionOptions { window, causal: false, ..causal }),
        ("attention_packed, dropout", AttentionOptions { dropout, ..causal }),
        ("attention_packed, dropout and window", AttentionOptions { dropout, window, ..causal }),
    ];
    let mut found: Vec<Case> =
        forms.into_iter().map(|(name, options)| packed_attention(scale, name, options)).collect();
    found.extend([
        in_documents(scale, "attention_in_context, documents", causal),
        in_documents(scale, "attention_in_context, documents and window", AttentionOptions { window, ..causal }),
        in_documents(scale, "attention_in_context, documents and dropout", AttentionOptions { dropout, ..causal }),
    ]);
    found.extend(SIZES.map(|(name, sizes)| of_sizes(scale, name, sizes)));
    found
}

/// Documents of a single position among others, in each sample in other places.
fn in_documents(scale: &Scale, name: &'static str, options: AttentionOptions) -> Case {
    let Scale { seq, batch, heads, head_dim, .. } = *scale;
    let starts = |sample: usize| {
        let mut starts = vec![0, 1 + sample, seq / 2, seq - 2];
        starts.sort_unstable();
        starts.dedup();
        starts
    };
    let documents = Documents::new((0..batch).map(starts).collect());
    let inputs = [("qkv", scale.tokens() * heads.total() * head_dim)];
    case(name, packed_shape(scale), 3, &inputs, move |_, x| {
        let input: Tensor<4> = x[0].clone().reshape([seq, batch, heads.total(), head_dim]);
        flat(attention_in_context(input, heads, options, None, Some(&documents), &PassContext::default()))
    })
}

/// Heads of other models: lengths of queries and keys, and of values.
const SIZES: [(&str, [usize; 2]); 5] = [
    ("attention, head_dim 80", [80, 80]),
    ("attention, head_dim 96", [96, 96]),
    ("attention, head_dim 192, values of 128", [192, 128]),
    ("attention, head_dim 256", [256, 256]),
    ("attention, head_dim 12, values of 6", [12, 6]),
];

fn of_sizes(scale: &Scale, name: &'static str, [head_dim, value_dim]: [usize; 2]) -> Case {
    let Scale { seq, batch, heads: PackedHeads { heads, kv_heads }, .. } = *scale;
    let tokens = scale.tokens();
    let inputs =
        [("q", tokens * heads * head_dim), ("k", tokens * kv_heads * head_dim), ("v", tokens * kv_heads * value_dim)];
    let shape = format!("[{seq}, {batch}, {heads} / {kv_heads}, {head_dim} / {value_dim}]");
    case(name, shape, 3, &inputs, move |_, x| {
        let tensor = |i: usize, heads, length| -> Tensor<4> { x[i].clone().reshape([seq, batch, heads, length]) };
        let [q, k, v] = [tensor(0, heads, head_dim), tensor(1, kv_heads, head_dim), tensor(2, kv_heads, value_dim)];
        flat(attention(q, k, v, AttentionOptions::causal(head_dim)))
    })
}
