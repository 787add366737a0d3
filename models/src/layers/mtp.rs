//! Multi-token prediction (DeepSeek-V3, <https://arxiv.org/abs/2412.19437>, section 2.2): what a module has
//! besides a transformer block, and how its losses join those of the model.

use std::ops::Range;

use backend_dist::collective::all_gather_int;
use backend_dist::ops::context::{ContextParallel, Documents, zigzag};
use backend_dist::ops::tensor_parallel::gather_from_sequence_parallel;
use backend_dist::shard::Init;
use burn::module::Module;
use burn::tensor::kind::Basic;
use burn::tensor::{Element, Int, Tensor, TensorData};

use super::norm::{Norm, NormKind};
use super::replicated::ReplicatedLinear;
use crate::micro_batch::{MicroBatch, positions_in_documents};
use crate::param::{ParamBuilder, Result};

/// From the hidden states of the module before and the embeddings of the tokens that it predicted, both normalised, to
/// the input of the module's block.
#[derive(Module, Debug)]
pub struct MtpProjection {
    enorm: Norm,
    hnorm: Norm,
    eh_proj: ReplicatedLinear,
}

impl MtpProjection {
    /// A projection of `[embedding | hidden states]`, each of `hidden` features behind a norm of kind `norm` with epsilon
    /// `eps`, under the global name `name`.
    pub fn new(
        params: &mut ParamBuilder,
        name: &str,
        hidden: usize,
        (norm, eps): (NormKind, f64),
        init: Init,
    ) -> Result<Self> {
        let norm =
            |params: &mut ParamBuilder, part: &str| Norm::new(params, &format!("{name}.{part}"), hidden, norm, eps);
        let (enorm, hnorm) = (norm(params, "enorm")?, norm(params, "hnorm")?);
        let outputs = [(&*format!("{name}.eh_proj"), hidden)];
        Ok(Self { enorm, hnorm, eh_proj: ReplicatedLinear::new(params, 2 * hidden, &outputs, init)? })
    }

    /// `eh_proj [enorm(embedded) | hnorm(hidden)]`, all `[s, b, hidden]` or the rank's parts of the sequence. The
    /// embedding comes first, as in the published weights (the report has it second).
    pub fn forward(&self, embedded: Tensor<3>, hidden: Tensor<3>, batch: &MicroBatch) -> Tensor<3> {
        let both = vec![self.enorm.forward(embedded), self.hnorm.forward(hidden)];
        self.eh_proj.apply(Tensor::cat(both, 2), batch)
    }
}

/// What the module that looks `by` tokens beyond the next one embeds and predicts, from `labels [b, s]`: at each
/// position the token `by` positions later, and the token after that. Where the sequence, its padding or the document has
/// no such token it is 0, as in Megatron-LM, which rolls the tokens of the input (`roll_tensor` in
/// `megatron/core/transformer/multi_token_prediction.py`). No prediction from there counts, but such a position has a
/// place in what balances experts. With a context each rank has its positions of the sequence before and after.
pub fn ahead(labels: Tensor<2, Int>, by: usize, batch: &MicroBatch) -> [Tensor<2, Int>; 2] {
    let (positions, context) = (labels.dims()[1], batch.context.as_ref());
    let labels = match context {
        Some(context) => in_order(all_gather_int(labels, 1, &context.group), context),
        None => labels,
    };
    let seq = labels.dims()[1];
    let end = batch.filled_from.unwrap_or(seq).min(seq);
    let tokens = moved(&labels, by - 1, end.saturating_sub(by));
    let tokens = match &batch.documents {
        Some(documents) => {
            let here = inside(documents, by, seq).skip(by * documents.samples()).chain(std::iter::repeat(false));
            let mask = by_position(here.map(i64::from), &tokens);
            tokens * mask
        }
        None => tokens,
    };
    [tokens, moved(&labels, by, seq.saturating_sub(by))].map(|of| own(of, positions, context))
}

/// `count` of `tokens [b, s]` from position `from` on, then zeros.
fn moved(tokens: &Tensor<2, Int>, from: usize, count: usize) -> Tensor<2, Int> {
    let zeros = tokens.zeros_like();
    if count == 0 {
        return zeros;
    }
    let left = tokens.dims()[1] - count;
    Tensor::cat(vec![tokens.clone().narrow(1, from, count), zeros.narrow(1, 0, left)], 1)
}

/// `losses [b, s]`, whose gradient also flows to the losses of the modules. A token's loss in the first module is one
/// position before its loss in `losses`, in the second module two, and so on: the factor of a token's loss is also that
/// of its losses in the modules, times `weight`. That is Megatron-LM's rolled loss mask
/// (`megatron/core/transformer/multi_token_prediction.py`). Predictions beyond the end of a sequence get no gradient,
/// nor do those beyond the end of a document that attention does not cross (`_roll_tensor_packed_seq` there). With a
/// context each rank has the losses of its positions.
pub fn with_mtp_losses(losses: Tensor<2>, modules: Vec<Tensor<2>>, weight: f64, batch: &MicroBatch) -> Tensor<2> {
    let (positions, context) = (losses.dims()[1], batch.context.as_ref());
    modules.into_iter().enumerate().fold(losses, |losses, (index, module)| {
        let module = match context {
            // Every rank weights the losses of its own positions: the gradients of all are summed.
            Some(context) => {
                in_order(gather_from_sequence_parallel(module.transpose(), &context.group).transpose(), context)
            }
            None => module,
        };
        let (seq, by) = (module.dims()[1], index + 1);
        let aligned = if by < seq {
            let before = module.clone().narrow(1, 0, by).zeros_like();
            let aligned = Tensor::cat(vec![before, module.narrow(1, 0, seq - by)], 1);
            match &batch.documents {
                Some(documents) => {
                    let here = inside(documents, by, seq).map(|here| if here { weight } else { 0.0 });
                    aligned.clone() * by_position(here, &aligned)
                }
                None => aligned.mul_scalar(weight),
            }
        } else {
            // The backward pass goes through the module all the same: other ranks may wait for this one's experts.
            module.mul_scalar(0.0)
        };
        let aligned = own(aligned, positions, context);
        losses + (aligned.clone() - aligned.detach())
    })
}

/// Whether a token has at least `by` others of its document before it: of all samples at the first position, then of all
/// at the next.
fn inside(documents: &Documents, by: usize, seq: usize) -> impl Iterator<Item = bool> + use<> {
    positions_in_documents(&Vec::from([0..seq]), documents).into_iter().map(move |position| position >= by)
}

/// `[b, s]` like `of`, from values in that order.
fn by_position<K: Basic, E: Element>(values: impl Iterator<Item = E>, of: &Tensor<2, K>) -> Tensor<2, K> {
    let [samples, seq] = of.dims();
    let values: Vec<E> = values.take(seq * samples).collect();
    Tensor::from_data(TensorData::new(values, [seq, samples]), (&of.device(), of.dtype())).transpose()
}

/// Sequences `[b, s]` that are gathered in the order of a context's ranks, in the order of the positions.
fn in_order<K: Basic>(gathered: Tensor<2, K>, context: &ContextParallel) -> Tensor<2, K> {
    let size = context.group.size();
    if size == 1 {
        return gathered;
    }
    let each = gathered.dims()[1] / size;
    let mut chunks: Vec<(usize, Range<usize>)> = Vec::with_capacity(2 * size);
    for rank in 0..size {
        let [first, second] = zigzag(rank, size, each);
        let (start, middle) = (rank * each, rank * each + first.len());
        chunks.extend([(first.start, start..middle), (second.start, middle..start + each)]);
    }
    chunks.sort_unstable_by_key(|(position, _)| *position);
    let piece = |(_, at): (usize, Range<usize>)| gathered.clone().narrow(1, at.start, at.len());
    Tensor::cat(chunks.into_iter().map(piece).collect(), 1)
}

/// The rank's `count` positions of whole sequences `[b, s]`.
fn own<K: Basic>(whole: Tensor<2, K>, count: usize, context: Option<&ContextParallel>) -> Tensor<2, K> {
    match context {
        Some(context) if context.group.size() > 1 => {
            let piece = |at: Range<usize>| whole.clone().narrow(1, at.start, at.len());
            Tensor::cat(context.positions(count).map(piece).to_vec(), 1)
        }
        _ => whole,
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::Device;

    use super::*;

    /// Rolled as by Megatron-Core 0.16.1, which rolls once more for each module.
    #[test]
    fn tokens_beyond_the_end_of_a_document_are_zero() {
        let labels = Tensor::<2, Int>::from_data([[11, 12, 13, 14, 15, 16, 17, 18]], &Device::flex());
        let of = |by, batch: &MicroBatch| {
            let read = |of: Tensor<2, Int>| of.into_data().iter::<i64>().collect::<Vec<_>>();
            ahead(labels.clone(), by, batch).map(read)
        };
        let whole = MicroBatch::default();
        assert_eq!(of(1, &whole), [[11, 12, 13, 14, 15, 16, 17, 0], [12, 13, 14, 15, 16, 17, 18, 0]]);
        assert_eq!(of(2, &whole), [[12, 13, 14, 15, 16, 17, 0, 0], [13, 14, 15, 16, 17, 18, 0, 0]]);
        assert_eq!(of(9, &whole), [[0; 8]; 2]);
        let padded = MicroBatch { filled_from: Some(6), ..MicroBatch::default() };
        assert_eq!(of(1, &padded)[0], [11, 12, 13, 14, 15, 0, 0, 0]);
        let documents = MicroBatch { documents: Some(Documents::new(vec![vec![0, 3, 4]])), ..MicroBatch::default() };
        assert_eq!(of(1, &documents)[0], [11, 12, 0, 0, 15, 16, 17, 0]);
        assert_eq!(of(2, &documents)[0], [12, 0, 0, 0, 16, 17, 0, 0]);
        let both = MicroBatch { filled_from: Some(7), ..documents };
        assert_eq!(of(2, &both)[0], [12, 0, 0, 0, 16, 0, 0, 0]);
    }
}
