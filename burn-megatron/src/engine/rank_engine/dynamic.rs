//! Steps in which each document is shared by as many data-parallel ranks as its length asks for, and short ones are packed into one sequence.
//!
//! By default a rank takes its sequences at its own pace. If every rank must join every pass (ZeRO 2 gradient sums, ZeRO 3
//! gathers, all-to-alls between experts, pipelines), all ranks run the same number of rounds. Sequences that many ranks
//! share come first, so a packed sequence has the same round index on each rank that shares it. A rank with nothing left
//! runs a dummy sequence, masked out of loss and routing. Ranks whose collectives block the host run rounds too: the last
//! backward pass sums each unit's gradients over all data-parallel ranks, and a rank that waits there cannot send its keys
//! to one that has more sequences.

use super::super::local_batch::LocalBatch;
use super::RankEngine;
use crate::engine::{ContextError, EngineConfig, EngineError, LossMean, TokenBatch};
use crate::schedule::Effort;
use crate::schedule::dynamic_context::{DynamicContext, PackedSequence, block_sizes};
use backend_dist::comm::Group;
use backend_dist::launch::Rank;
use backend_dist::mesh::{Axis, ParallelLayout};
use backend_dist::ops::context::ContextParallel;
use models::CausalLm;
use models::layers::DropoutKey;
use models::layout::{ModelDims, sequence_unit};
use std::collections::HashMap;
use std::ops::Range;

/// The groups that may share a document, and the most tokens of one per rank.
pub(super) struct DynamicGroups {
    /// This rank's block of every size.
    blocks: HashMap<usize, Group>,
    most: usize,
    effort: Effort,
    /// All data-parallel ranks make equally many passes.
    in_rounds: bool,
    /// Routers balance the tokens of a sequence: in an MoE model a sequence is one document.
    packs: bool,
}

impl DynamicGroups {
    /// Those of the configuration, if it wants any, in a model of these sizes.
    pub fn of(rank: &Rank, config: &EngineConfig, dims: &ModelDims) -> Result<Option<Self>, ContextError> {
        let Some(most) = config.context.max_tokens_per_rank.filter(|_| config.context.dynamic) else { return Ok(None) };
        if config.loss != LossMean::PerToken {
            return Err(ContextError::Alone("the loss must be per-token"));
        }
        let documents = config.documents;
        if !(documents.reset_attention_mask && documents.reset_position_ids) {
            return Err(ContextError::Alone("reset-attention-mask and reset-position-ids must be set"));
        }
        let layout = rank.mesh.layout();
        let block = |size: usize| (size, rank.subgroup(Axis::DpCp, size));
        let blocks = block_sizes(layout.dp * layout.cp).into_iter().filter(|size| *size > 1).map(block).collect();
        let in_rounds = layout.pp > 1 || layout.zero > 1 || dims.experts.is_some();
        Ok(Some(Self { blocks, most, effort: Effort::of_width(dims.hidden), in_rounds, packs: dims.experts.is_none() }))
    }
}

/// Padded length of a sequence of packed documents with `tokens` tokens that `cp` ranks share evenly. With `fills_up` each
/// rank has a multiple of 512 tokens: every other length needs a cuBLASLt plan of its own and memory of another size.
pub fn packed_length(layout: &ParallelLayout, cp: usize, tokens: usize, fills_up: bool) -> usize {
    let unit = sequence_unit(&ParallelLayout { cp, ..layout.clone() });
    tokens.next_multiple_of(if fills_up { (512 * cp).next_multiple_of(unit) } else { unit })
}

impl<M: CausalLm> RankEngine<M> {
    /// Sequences of the global batch that this rank reads for a step, micro-batch by micro-batch: its own, or all where
    /// documents are assigned over the data-parallel ranks.
    pub fn sequences_of_step(&self) -> Vec<Range<usize>> {
        match self.dynamic {
            Some(_) => Vec::from([0..self.plan.global()]),
            None => (0..self.plan.accumulation).map(|micro| self.plan.sequences(micro, self.rank.coords.dp)).collect(),
        }
    }

    /// This rank's shares of the packed documents of a global batch, in the order in which it computes them.
    pub(super) fn assign(&self, groups: &DynamicGroups, batch: &TokenBatch) -> Result<Vec<LocalBatch>, EngineError> {
        let (ranks, rank) = (self.dp_ranks.size(), self.dp_ranks.rank());
        let ranges = batch.document_ranges();
        let lengths: Vec<usize> = ranges.iter().map(Range::len).collect();
        let assign = if groups.packs { DynamicContext::new } else { DynamicContext::apart };
        let plan = assign(&lengths, ranks, groups.most, groups.effort)?;
        let comm = self.config.context.of_layer(0);
        let local = |packed: &PackedSequence| {
            let cp = packed.ranks.len();
            let group = groups.blocks.get(&cp).cloned();
            let context = group.map(|group| ContextParallel { group, comm });
            let seq = packed_length(self.rank.mesh.layout(), cp, packed.tokens, self.runs_ahead);
            let documents: Vec<_> = packed.sequences.iter().map(|sequence| ranges[*sequence].clone()).collect();
            let sequence = batch.packed(&documents, seq);
            let mut local = LocalBatch::new(&sequence, context, self.config.documents);
            let first_sample = packed.sequences[0];
            local.micro_batch.dropout = Some(DropoutKey { seed: self.dropout_seed(), first_sample });
            local.micro_batch.filled_from = Some(packed.tokens);
            local.micro_batch.auxiliary = self.auxiliary_grad(&sequence, &local);
            local
        };
        let mut local_batches: Vec<LocalBatch> = plan.of_rank(rank).map(local).collect();
        if groups.in_rounds || !self.runs_ahead {
            let rounds = (0..ranks).map(|rank| plan.of_rank(rank).count()).max().unwrap_or_default();
            local_batches.resize_with(self.legal_micro_batches(rounds), || self.dummy());
        }
        for (round, local) in local_batches.iter_mut().enumerate() {
            local.micro_batch.blocks = Some(plan.blocks(round).into());
        }
        Ok(local_batches)
    }

    /// The shortest sequence, without tokens that count in the loss or are routed.
    fn dummy(&self) -> LocalBatch {
        let seq = packed_length(self.rank.mesh.layout(), 1, 1, self.runs_ahead);
        let (tokens, labels, mask) = (vec![0; seq], vec![0; seq], Some(vec![false; seq]));
        let sequence =
            TokenBatch { sequences: 1, seq, tokens, labels, mask, documents: None, references: None, taught: None };
        let mut local = LocalBatch::new(&sequence, None, self.config.documents);
        local.micro_batch.filled_from = Some(0);
        local.micro_batch.auxiliary = self.auxiliary_grad(&sequence, &local);
        local
    }
}
