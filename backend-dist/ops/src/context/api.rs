//! The public functions: checks, then the extension.

use burn::tensor::Tensor;

use super::algorithms::ContextOptions;
use super::node::{AttentionIn, AttentionOver};
use super::{ContextParallel, Documents};
use crate::attention::{attention_of_pass, attention_packed_of_pass, check_heads};
use crate::operation::apply;
use crate::options::{AttentionOptions, PackedHeads};
use crate::pass::PassContext;

/// [`attention`](crate::attention) over the ranks of `context` and within `documents`. `q [s, b, hq, d]`, `k [s, b, hkv, d]` and `v [s,
/// b, hkv, dv]` are those of this rank's [positions](ContextParallel::positions), and so is the output `[s, b, hq,
/// dv]`. All ranks of the group call it in the same order, also for the gradients.
///
/// A query sees only keys of its own document. Masks, windows and dropout use positions of the whole sequence: the
/// result is that of one rank with all positions, for any number of ranks and any `CpCommType`. Partial outputs and
/// gradient sums are at least f32.
///
/// # Panics
///
/// If shapes do not fit, `documents` has another number of samples, a document begins after the end, or the ranks do
/// not divide the heads where they must ([`CpCommType::check`](super::CpCommType::check)).
pub fn attention_over_context(
    q: Tensor<4>,
    k: Tensor<4>,
    v: Tensor<4>,
    options: AttentionOptions,
    context: Option<&ContextParallel>,
    documents: Option<&Documents>,
    pass: &PassContext,
) -> Tensor<4> {
    let context = context.filter(|context| context.group.size() > 1);
    if context.is_none() && documents.is_none() {
        return attention_of_pass(q, k, v, options, pass.attention.clone());
    }
    let ([s, b, hq, d], keys, values) = (q.dims(), k.dims(), v.dims());
    assert_eq!(keys[..3], values[..3], "attention: k is {keys:?}, v is {values:?}; only the last may differ");
    assert_eq!([s, b, d], [keys[0], keys[1], keys[3]], "attention in a context: q is {:?}, k is {keys:?}", q.dims());
    let context_options = context_options([s, b], [hq, keys[2]], options, context, documents);
    let operation = AttentionOver { context_options, attention: pass.attention.clone() };
    apply(operation, [q, k, v].map(Tensor::into_dispatch))
}

/// [`attention_over_context`] on a packed projection `qkv [s, b, hq + 2 hkv, d] = [q | k | v]`; its gradient is packed
/// too.
///
/// # Panics
///
/// As [`attention_over_context`], and if `heads` does not fit `qkv`.
pub fn attention_in_context(
    qkv: Tensor<4>,
    heads: PackedHeads,
    options: AttentionOptions,
    context: Option<&ContextParallel>,
    documents: Option<&Documents>,
    pass: &PassContext,
) -> Tensor<4> {
    let context = context.filter(|context| context.group.size() > 1);
    if context.is_none() && documents.is_none() {
        return attention_packed_of_pass(qkv, heads, options, pass.attention.clone());
    }
    let [s, b, all, _] = qkv.dims();
    assert_eq!(all, heads.total(), "attention in a context: {heads:?} do not make up the input's heads");
    let context_options = context_options([s, b], [heads.heads, heads.kv_heads], options, context, documents);
    apply(AttentionIn { heads, context_options, attention: pass.attention.clone() }, [qkv.into_dispatch()])
}

/// The checked options of a call for `positions` of `samples` sequences on a rank.
///
/// # Panics
///
/// As [`attention_over_context`].
pub(crate) fn context_options(
    [rows, samples]: [usize; 2],
    [heads, kv_heads]: [usize; 2],
    options: AttentionOptions,
    context: Option<&ContextParallel>,
    documents: Option<&Documents>,
) -> ContextOptions {
    check_heads(heads, kv_heads, options);
    let size = context.map_or(1, |context| context.group.size());
    if let Some(ContextParallel { group, comm }) = context {
        assert!(rows.is_multiple_of(2), "context parallel on {group:?}: {rows} positions a rank are not two chunks");
        comm.check(size, heads).unwrap_or_else(|message| panic!("context parallel on {group:?}: {message}"));
    }
    if let Some(documents) = documents {
        assert_eq!(documents.samples(), samples, "attention: documents of as many samples as the batch has");
        for sample in 0..samples {
            let last = *documents.starts(sample).last().expect("a sample has a document");
            let positions = rows * size;
            assert!(
                last < positions,
                "attention: a document of sample {sample} begins at {last} of {positions} positions"
            );
        }
    }
    ContextOptions { options, context: context.cloned(), documents: documents.cloned() }
}
