//! The layers' view of a micro-batch: ranks that share its sequences, documents, dropout.

use std::ops::Range;
use std::sync::Arc;

use backend_dist::ops::context::{ContextParallel, Documents};
use backend_dist::ops::fp8::Sharing;
use backend_dist::ops::{AttentionOptions, CoreAttention, HandOvers, PassContext, PassKind};
use burn::tensor::Tensor;

use crate::layers::attention_logits::{self, AttentionLogits};
use crate::layers::moe::stats::RouterStats;
use crate::layers::moe::{BiasCounts, RouterRecords};

/// Everything that layers need to know of a micro-batch but its activations. The default is a whole sequence on each
/// rank, of one document, without dropout.
#[derive(Clone, Debug, Default)]
pub struct MicroBatch {
    /// The pass over it.
    pub pass: PassContext,
    /// What routers record, and whose experts they use.
    pub routers: RouterRecords,
    /// Where attention layers note their greatest logit, if that is wanted.
    pub attention_logits: Option<AttentionLogits>,
    /// With a key, dropout is applied.
    pub dropout: Option<DropoutKey>,
    /// The ranks that share the sequences, each with some of the positions.
    pub context: Option<ContextParallel>,
    /// Blocks of data-parallel ranks that share sequences in this pass, of all data-parallel ranks, where they differ
    /// in size.
    pub blocks: Option<Arc<[Range<usize>]>>,
    /// Attention does not cross the borders of documents.
    pub documents: Option<Documents>,
    /// Positions count from the start of each of these documents, not from that of the sequence.
    pub restarts: Option<Documents>,
    /// The factor of the gradients of auxiliary losses, which are means over the tokens of the micro-batch.
    pub auxiliary: f64,
    /// The position in every sequence from which on tokens are padding: no expert gets any of them, and no router
    /// counts them (Megatron-LM's `padding_mask`). At 0 the whole pass is padding: it runs because other ranks wait for
    /// this one.
    pub filled_from: Option<usize>,
}

/// The key of one forward pass's masks. Two passes with equal keys drop the same elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DropoutKey {
    /// Seed of the training step: another one for every step, the same on all ranks.
    pub seed: u64,
    /// Index of the micro-batch's first sample in the global batch.
    pub first_sample: usize,
}

impl MicroBatch {
    /// With dropout from this key, if there is one.
    pub fn with_dropout(dropout: Option<DropoutKey>) -> Self {
        Self { dropout, ..Self::default() }
    }

    /// The positions in the whole sequence of the `count` positions that this rank has, in its order.
    pub fn positions(&self, count: usize) -> Vec<Range<usize>> {
        match &self.context {
            Some(context) if context.group.size() > 1 => context.positions(count).to_vec(),
            _ => Vec::from([0..count]),
        }
    }

    /// Counts what operations on these tokens have not handed each other.
    pub(crate) fn hand_overs(&self) -> &HandOvers {
        &self.pass.hand_overs
    }

    /// What operations on activations of these tokens must know: FP8 scales are those of all tokens of the micro-batch,
    /// on whichever ranks they are.
    pub fn pass_context(&self) -> PassContext {
        let ranks = self.context.as_ref().map(|context| context.group.clone());
        let sharing = Sharing { ranks, blocks: self.blocks.clone(), is_dummy: self.filled_from == Some(0) };
        PassContext { sharing, ..self.pass.clone() }
    }

    /// Notes the greatest attention logit of queries `q` and keys `k`, if it is wanted, in a pass that counts.
    pub(crate) fn note_attention_logits(&self, q: Tensor<4>, k: Tensor<4>, options: AttentionOptions) {
        let Some(logits) = self.attention_logits.as_ref().filter(|_| self.pass.kind == PassKind::Training) else {
            return;
        };
        let over = (self.context.as_ref(), self.documents.as_ref());
        let greatest = attention_logits::greatest((q, k), options, over, &self.as_first_pass().pass);
        // A pass of padding runs because other ranks wait for it.
        if self.filled_from != Some(0) {
            logits.note(greatest);
        }
    }

    /// The counts that move biases of experts, in a pass that counts.
    pub(crate) fn bias_counts(&self) -> Option<&BiasCounts> {
        self.routers.bias.as_ref().filter(|_| self.pass.kind == PassKind::Training)
    }

    /// The statistics of routers, in a pass that counts.
    pub(crate) fn router_stats(&self) -> Option<&RouterStats> {
        self.routers.stats.as_ref().filter(|_| self.pass.kind == PassKind::Training)
    }

    /// The micro-batch for what no earlier pass has computed: only where gradients are recorded, and perhaps in a pass
    /// that recomputes all else.
    pub(crate) fn as_first_pass(&self) -> Self {
        let pass = PassContext { kind: PassKind::Training, attention: CoreAttention::Compute, ..self.pass.clone() };
        Self { pass, ..self.clone() }
    }

    /// Length of the whole sequence of which this rank has `positions`.
    pub fn sequence_length(&self, positions: usize) -> usize {
        positions * self.context.as_ref().map_or(1, |context| context.group.size())
    }
}

/// The elements `of` of `ranges` one after the other, as ranges.
pub(crate) fn sub_ranges(ranges: &[Range<usize>], of: Range<usize>) -> Vec<Range<usize>> {
    let mut before = 0;
    let sub_range = |range: &Range<usize>| {
        let start = range.start + of.start.saturating_sub(before).min(range.len());
        let end = range.start + of.end.saturating_sub(before).min(range.len());
        before += range.len();
        start..end
    };
    ranges.iter().map(sub_range).filter(|part| !part.is_empty()).collect()
}

/// The positions of the tokens at `positions` of every sample, counted from the start of their document: of all samples
/// at the first position, then of all at the next.
pub(crate) fn positions_in_documents(positions: &[Range<usize>], documents: &Documents) -> Vec<usize> {
    let samples = 0..documents.samples();
    let inside = |sample: usize, position: usize| {
        let starts = documents.starts(sample);
        position - starts[starts.partition_point(|start| *start <= position) - 1]
    };
    let of_samples = |position: usize| samples.clone().map(move |sample| inside(sample, position));
    positions.iter().cloned().flatten().flat_map(of_samples).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_of_two_chunks_may_touch_both() {
        let ranges = [2..4, 10..12];
        assert_eq!(sub_ranges(&ranges, 0..4), ranges);
        assert_eq!(sub_ranges(&ranges, 1..3), [3..4, 10..11]);
        assert_eq!(sub_ranges(&ranges, 2..4), [10..12]);
    }

    #[test]
    fn positions_count_from_the_start_of_their_document() {
        let documents = Documents::new(vec![vec![0, 3], vec![0, 1, 4]]);
        let whole = Vec::from([0..6]);
        assert_eq!(positions_in_documents(&whole, &documents), [0, 0, 1, 0, 2, 1, 0, 2, 1, 0, 2, 1]);
        assert_eq!(positions_in_documents(&[1..2, 4..5], &documents), [1, 0, 1, 0]);
    }
}
