//! Steps in which each document is shared by as many replicas as its length asks for, and short ones share a row.

use super::super::losses::Losses;
use super::super::share::Share;
use super::RankEngine;
use crate::engine::{ContextError, EngineConfig, EngineError, LossMean, TokenBatch};
use crate::schedule::dynamic_context::{DynamicContext, Packed, block_sizes};
use crate::schedule::{Effort, Pass as Kind, Work};
use backend_dist::comm::Group;
use backend_dist::launch::Rank;
use backend_dist::mesh::{Axis, ParallelLayout};
use backend_dist::ops::context::ContextParallel;
use models::CausalLm;
use models::layers::DropoutKey;
use models::layout::sequence_unit;
use std::collections::HashMap;
use std::ops::Range;

/// The groups that may share a document, and what a rank may have of one.
pub(super) struct DynamicGroups {
    /// This rank's block of every size.
    blocks: HashMap<usize, Group>,
    most: usize,
    effort: Effort,
}

impl DynamicGroups {
    /// Those of the configuration, if it wants any, in a model of width `hidden`.
    pub fn of(rank: &Rank, config: &EngineConfig, hidden: usize) -> Result<Option<Self>, ContextError> {
        let Some(most) = config.context.max_tokens_per_rank.filter(|_| config.context.dynamic) else { return Ok(None) };
        if config.loss != LossMean::PerToken {
            return Err(ContextError::Alone("the loss must be per-token"));
        }
        let how = config.documents;
        if !(how.reset_attention_mask && how.reset_position_ids) {
            return Err(ContextError::Alone("reset-attention-mask and reset-position-ids must be set"));
        }
        let layout = rank.mesh.layout();
        let block = |size: usize| (size, rank.subgroup(Axis::DpCp, size));
        let blocks = block_sizes(layout.dp * layout.cp).into_iter().filter(|size| *size > 1).map(block).collect();
        Ok(Some(Self { blocks, most, effort: Effort::of_width(hidden) }))
    }
}

/// Tokens of a row of packed documents with `tokens` tokens that `cp` ranks share: what these can cut evenly. On GPUs each
/// has a multiple of 128 of it, as for every other number of rows cuBLASLt needs a plan of its own.
pub fn packed_length(layout: &ParallelLayout, cp: usize, tokens: usize, on_gpus: bool) -> usize {
    let unit = sequence_unit(&ParallelLayout { cp, ..layout.clone() });
    tokens.next_multiple_of(if on_gpus { 128 * unit } else { unit })
}

impl<M: CausalLm> RankEngine<M> {
    /// Rows of the global batch that this rank must be given for a step, micro-batch by micro-batch: its own ones, or all
    /// where documents are dealt out over the replicas.
    pub fn rows_of_step(&self) -> Vec<Range<usize>> {
        match self.dynamic {
            Some(_) => Vec::from([0..self.plan.global()]),
            None => (0..self.plan.accumulation).map(|micro| self.plan.rows(micro, self.rank.coords.dp)).collect(),
        }
    }

    /// This rank's parts of the packed documents of a global batch, in the order in which it computes them.
    pub(super) fn deal(&self, groups: &DynamicGroups, batch: &TokenBatch) -> Result<Vec<Share>, EngineError> {
        let (ranks, own) = (self.replicas.size(), self.replicas.rank());
        let places = batch.document_places();
        let lengths: Vec<usize> = places.iter().map(Range::len).collect();
        let plan = DynamicContext::new(&lengths, ranks, groups.most, groups.effort)?;
        let comm = self.config.context.of_layer(0);
        let share = |packed: &Packed| {
            let cp = packed.ranks.len();
            let group = groups.blocks.get(&cp).cloned();
            let context = group.map(|group| ContextParallel { group, comm });
            let seq = packed_length(self.rank.mesh.layout(), cp, packed.tokens, self.runs_ahead);
            let documents: Vec<_> = packed.sequences.iter().map(|sequence| places[*sequence].clone()).collect();
            let row = batch.packed(&documents, seq);
            let mut share = Share::new(&row, context, self.config.documents);
            let first_sample = packed.sequences[0];
            share.of.dropout = Some(DropoutKey { seed: self.dropout_seed(), first_sample });
            share.of.auxiliary = self.auxiliary_grad(&row, &share);
            share
        };
        Ok(plan.of_rank(own).map(share).collect())
    }

    /// Forward and backward passes of one row after the other.
    pub(super) fn passes_in_turn(&mut self, shares: &[Share]) -> Result<Losses, EngineError> {
        let mut losses = Losses::default();
        // Nothing is sent: there is one stage.
        let mut mail = self.mail(1, 1);
        for (index, share) in shares.iter().enumerate() {
            for pass in [Kind::Forward, Kind::Backward] {
                let last = pass == Kind::Backward && index + 1 == shares.len();
                let next = if pass == Kind::Forward { Kind::Backward } else { Kind::Forward };
                let next = if last { Vec::new() } else { self.chunks[0].first_used(next).to_vec() };
                let work = Work { pass, chunk: 0, micro_batch: index };
                let values = self.compute(work, (last, next), share, &mut mail);
                losses.extend(values.map(|values| (index, values)));
            }
            if !self.runs_ahead {
                losses = self.read(losses, shares)?;
            }
        }
        self.peak_in_flight = 1;
        self.sum_over_model_parallel();
        Ok(losses)
    }
}
