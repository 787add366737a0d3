//! Steps in which each document is shared by as many replicas as its length asks for, and short ones share a row.
//!
//! Ranks take rows at their own pace, as many as they were dealt. Where more than the ranks of a row must be there for
//! a pass (to gather weights under ZeRO 3 or sum gradients under ZeRO 2, to exchange tokens between experts, or because
//! a schedule orders passes over several stages) all go in rounds: wide rows come first, so a row has one number on all
//! its ranks, and who has no row left takes part with one that has no tokens. So do ranks whose exchanges stop them:
//! the last backward pass sums each unit's gradients over all replicas, and a rank that waits there cannot give its
//! keys to one that has more rows.

use super::super::share::Share;
use super::RankEngine;
use crate::engine::{ContextError, EngineConfig, EngineError, LossMean, TokenBatch};
use crate::schedule::Effort;
use crate::schedule::dynamic_context::{DynamicContext, Packed, block_sizes};
use backend_dist::comm::Group;
use backend_dist::launch::Rank;
use backend_dist::mesh::{Axis, ParallelLayout};
use backend_dist::ops::context::ContextParallel;
use models::CausalLm;
use models::layers::DropoutKey;
use models::layout::{ModelDims, sequence_unit};
use std::collections::HashMap;
use std::ops::Range;

/// The groups that may share a document, and what a rank may have of one.
pub(super) struct DynamicGroups {
    /// This rank's block of every size.
    blocks: HashMap<usize, Group>,
    most: usize,
    effort: Effort,
    /// All replicas make equally many passes.
    in_rounds: bool,
    /// Routers balance the tokens of a row, so that in a mixture rows must be documents.
    packs: bool,
}

impl DynamicGroups {
    /// Those of the configuration, if it wants any, in a model of these sizes.
    pub fn of(rank: &Rank, config: &EngineConfig, dims: &ModelDims) -> Result<Option<Self>, ContextError> {
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
        let in_rounds = layout.pp > 1 || layout.zero > 1 || dims.experts.is_some();
        Ok(Some(Self { blocks, most, effort: Effort::of_width(dims.hidden), in_rounds, packs: dims.experts.is_none() }))
    }
}

/// Tokens of a row of packed documents with `tokens` tokens that `cp` ranks share: what these can cut evenly. With
/// `fills_up` each has a multiple of 512 of it: for every other number of rows a GPU needs a plan of cuBLASLt's of its
/// own, and memory of another size.
pub fn packed_length(layout: &ParallelLayout, cp: usize, tokens: usize, fills_up: bool) -> usize {
    let unit = sequence_unit(&ParallelLayout { cp, ..layout.clone() });
    tokens.next_multiple_of(if fills_up { (512 * cp).next_multiple_of(unit) } else { unit })
}

impl<M: CausalLm> RankEngine<M> {
    /// Rows of the global batch that this rank must be given for a step, micro-batch by micro-batch: its own ones, or
    /// all where documents are dealt out over the replicas.
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
        let deal = if groups.packs { DynamicContext::new } else { DynamicContext::apart };
        let plan = deal(&lengths, ranks, groups.most, groups.effort)?;
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
            share.of.filled_from = Some(packed.tokens);
            share.of.auxiliary = self.auxiliary_grad(&row, &share);
            share
        };
        let mut shares: Vec<Share> = plan.of_rank(own).map(share).collect();
        if groups.in_rounds || !self.runs_ahead {
            let rounds = (0..ranks).map(|rank| plan.of_rank(rank).count()).max().unwrap_or_default();
            shares.resize_with(self.legal_micro_batches(rounds), || self.nothing());
        }
        for (round, share) in shares.iter_mut().enumerate() {
            share.of.blocks = Some(plan.blocks(round).into());
        }
        Ok(shares)
    }

    /// A row without tokens that count or are routed, as short as this rank's can be.
    fn nothing(&self) -> Share {
        let seq = packed_length(self.rank.mesh.layout(), 1, 1, self.runs_ahead);
        let (tokens, labels, mask) = (vec![0; seq], vec![0; seq], Some(vec![false; seq]));
        let row = TokenBatch { rows: 1, seq, tokens, labels, mask, documents: None };
        let mut share = Share::new(&row, None, self.config.documents);
        share.of.filled_from = Some(0);
        share.of.auxiliary = self.auxiliary_grad(&row, &share);
        share
    }
}
