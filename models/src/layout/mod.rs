//! Which layouts a model can run in.

use backend_dist::mesh::{Nearest, ParallelLayout};
use thiserror::Error;

/// The sizes of a model that a layout must divide.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ModelDims {
    /// Tokens of the vocabulary, without padding.
    pub vocab: usize,
    /// Features between two layers.
    pub hidden: usize,
    /// Attention heads.
    pub heads: usize,
    /// Key-value heads.
    pub kv_heads: usize,
    /// Width of the MLP; 0 where no layer has one.
    pub intermediate: usize,
    /// Experts of an MoE.
    pub experts: Option<ExpertDims>,
    /// Transformer layers.
    pub layers: usize,
    /// Longest sequence of the model, if its positions are learned.
    pub max_positions: Option<usize>,
    /// Heads of layers with linear attention or Mamba-2, if there are such.
    pub states: Option<StateDims>,
}

/// The sizes of a layer's routed experts that a layout must divide.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpertDims {
    /// Experts of a layer.
    pub count: usize,
    /// Width of one.
    pub intermediate: usize,
}

/// The sizes of layers whose heads have states.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StateDims {
    /// Heads that go to a tensor-parallel rank with their states.
    pub heads: usize,
    /// Groups of heads that share what is written into their states.
    pub groups: usize,
    /// States: context-parallel ranks share those of a tensor-parallel rank.
    pub states: usize,
    /// What such heads are called in messages.
    pub called: &'static str,
}

impl StateDims {
    /// Those of linear attention, whose key heads go to a rank with the value heads that they serve.
    pub fn linear(key_heads: usize, value_heads: usize) -> Self {
        Self { heads: key_heads, groups: key_heads, states: value_heads, called: "linear attention heads" }
    }

    /// Those of Mamba-2.
    pub fn mamba2(heads: usize, groups: usize) -> Self {
        Self { heads, groups, states: heads, called: "Mamba-2 heads" }
    }

    fn allows(self, tp: usize) -> bool {
        self.heads.is_multiple_of(tp) && (self.groups.is_multiple_of(tp) || tp.is_multiple_of(self.groups))
    }

    /// States and groups of a tensor-parallel rank.
    fn of_rank(self, tp: usize) -> [usize; 2] {
        [self.states / tp, self.groups / tp.min(self.groups).max(1)]
    }

    /// Whether `cp` ranks can share what a tensor-parallel rank has; with fewer groups, several ranks compute the same.
    fn allows_context(self, tp: usize, cp: usize) -> bool {
        let [states, groups] = self.of_rank(tp);
        states.is_multiple_of(cp) && (groups.is_multiple_of(cp) || cp.is_multiple_of(groups))
    }
}

/// Why a model cannot run in a layout.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[allow(missing_docs, reason = "the message of a variant names its fields")]
pub enum ModelLayoutError {
    /// The tensor parallel size does not divide a size of the model.
    #[error("tensor-parallel {tp} does not divide the model's {what} ({size}); nearest legal: {nearest}")]
    Indivisible { tp: usize, what: &'static str, size: usize, nearest: Nearest },
    /// Key-value heads can neither be divided over the ranks nor copied evenly to them.
    #[error(
        "tensor-parallel {tp} and {kv_heads} key-value heads: one must divide the other; nearest legal tensor-parallel: \
         {nearest}"
    )]
    KeyValueHeads { tp: usize, kv_heads: usize, nearest: Nearest },
    /// Groups of B and C can neither be divided over the ranks nor copied evenly to them.
    #[error(
        "tensor-parallel {tp} and {groups} groups of Mamba-2 heads: one must divide the other; nearest legal \
         tensor-parallel: {nearest}"
    )]
    StateGroups { tp: usize, groups: usize, nearest: Nearest },
    /// Sequence parallelism would split the sequence into unequal parts.
    #[error(
        "sequence length {seq} is not a multiple of tensor-parallel {tp}, which sequence parallelism needs; nearest legal: {nearest}"
    )]
    SequenceLength { seq: usize, tp: usize, nearest: Nearest },
    /// The ranks that share a sequence cannot have equal parts of it.
    #[error(
        "sequence length {seq} is not a multiple of {unit}: context-parallel {cp} splits it into {} chunks, and sequence \
         parallelism splits a rank's chunks over the tensor parallel ranks; nearest legal: {nearest}",
        2 * .cp
    )]
    ContextLength { seq: usize, cp: usize, unit: usize, nearest: Nearest },
    /// The sequence is longer than the table of learned positions.
    #[error("sequence length {seq} exceeds the model's {max} learned positions; nearest legal: {max}")]
    TooLong { seq: usize, max: usize },
    /// An expert parallel size does not divide a size of the experts.
    #[error("{key} {size} does not divide the model's {what} ({of}); nearest legal: {nearest}")]
    Experts { key: &'static str, size: usize, what: &'static str, of: usize, nearest: Nearest },
    /// The ranks that share a sequence cannot have equal parts of its states.
    #[error(
        "context-parallel {cp}: the ranks of a sequence cannot share the {states} states of {called} ({groups} groups) of a \
         tensor-parallel rank; nearest legal: {nearest}"
    )]
    States { cp: usize, states: usize, groups: usize, called: &'static str, nearest: Nearest },
    /// Expert parallelism without experts.
    #[error("expert-parallel {ep}: the model has no experts; nearest legal: 1")]
    NoExperts { ep: usize },
}

/// What the length of a sequence must be a multiple of: a context parallel rank has two chunks of it, and sequence
/// parallelism splits these over the tensor parallel ranks.
pub fn sequence_unit(layout: &ParallelLayout) -> usize {
    let parts = if layout.sequence_parallel() { layout.tp } else { 1 };
    match layout.cp {
        1 => parts,
        cp if parts.is_multiple_of(2) => cp * parts,
        cp => 2 * cp * parts,
    }
}

/// Whether the ranks of a layout can have equal parts of sequences of `seq` tokens.
///
/// # Errors
/// With the nearest legal lengths.
pub fn check_sequence(layout: &ParallelLayout, seq: usize) -> Result<(), ModelLayoutError> {
    let unit = sequence_unit(layout);
    if seq.is_multiple_of(unit) {
        return Ok(());
    }
    let nearest = Nearest::where_legal(seq, seq + unit, |seq| seq.is_multiple_of(unit));
    Err(match layout.cp {
        1 => ModelLayoutError::SequenceLength { seq, tp: layout.tp, nearest },
        cp => ModelLayoutError::ContextLength { seq, cp, unit, nearest },
    })
}

impl ModelDims {
    /// Whether the model can run with `tp` tensor parallel ranks.
    ///
    /// # Errors
    /// Names the size that does not fit and the nearest legal tensor parallel sizes.
    pub fn check_tp(&self, tp: usize) -> Result<(), ModelLayoutError> {
        let nearest = || Nearest::where_legal(tp, self.heads, |tp| self.allows(tp));
        if let Some(StateDims { heads, groups, called, .. }) = self.states.filter(|states| !states.allows(tp)) {
            return Err(match heads.is_multiple_of(tp) {
                true => ModelLayoutError::StateGroups { tp, groups, nearest: nearest() },
                false => ModelLayoutError::Indivisible { tp, what: called, size: heads, nearest: nearest() },
            });
        }
        if !self.heads.is_multiple_of(tp) {
            let (what, size) = ("attention heads", self.heads);
            return Err(ModelLayoutError::Indivisible { tp, what, size, nearest: nearest() });
        }
        if !self.intermediate.is_multiple_of(tp) {
            let (what, size) = ("intermediate size", self.intermediate);
            return Err(ModelLayoutError::Indivisible { tp, what, size, nearest: nearest() });
        }
        if !self.kv_heads.is_multiple_of(tp) && !tp.is_multiple_of(self.kv_heads) {
            return Err(ModelLayoutError::KeyValueHeads { tp, kv_heads: self.kv_heads, nearest: nearest() });
        }
        Ok(())
    }

    /// Whether `cp` context-parallel ranks can share the model's sequences, with legal `tp`: those of recurrent layers
    /// share the heads of a tensor-parallel rank.
    ///
    /// # Errors
    /// With the nearest legal sizes.
    pub fn check_cp(&self, tp: usize, cp: usize) -> Result<(), ModelLayoutError> {
        let Some(of) = self.states.filter(|states| !states.allows_context(tp, cp)) else { return Ok(()) };
        let [states, groups] = of.of_rank(tp);
        let nearest = Nearest::where_legal(cp, states, |cp| of.allows_context(tp, cp));
        Err(ModelLayoutError::States { cp, states, groups, called: of.called, nearest })
    }

    /// Whether the model can train on samples of `seq` tokens in a layout.
    ///
    /// # Errors
    /// Names what does not fit and the nearest legal values.
    pub fn check(&self, layout: &ParallelLayout, seq: usize) -> Result<(), ModelLayoutError> {
        self.check_tp(layout.tp)?;
        self.check_cp(layout.tp, layout.cp)?;
        self.check_experts(layout.expert_tp(), layout.ep, layout.tp * layout.cp * layout.dp)?;
        if let Some(max) = self.max_positions.filter(|max| seq > *max) {
            return Err(ModelLayoutError::TooLong { seq, max });
        }
        check_sequence(layout, seq)
    }

    /// Whether each expert can be sharded over `etp` ranks, and the experts of a layer divided over `ep` ranks of
    /// `ranks`, those of a pipeline stage.
    ///
    /// # Errors
    /// Names the size that does not fit and the nearest legal sizes.
    pub fn check_experts(&self, etp: usize, ep: usize, ranks: usize) -> Result<(), ModelLayoutError> {
        let Some(ExpertDims { count, intermediate }) = self.experts else {
            return if ep == 1 { Ok(()) } else { Err(ModelLayoutError::NoExperts { ep }) };
        };
        let sizes = [
            ("expert-tensor-parallel", etp, "expert width", intermediate, ranks),
            ("expert-parallel", ep, "experts", count, ranks / etp),
        ];
        for (key, size, what, of, ranks) in sizes {
            if !of.is_multiple_of(size) {
                let nearest = Nearest::where_legal(size, of, |x| of.is_multiple_of(x) && ranks.is_multiple_of(x));
                return Err(ModelLayoutError::Experts { key, size, what, of, nearest });
            }
        }
        Ok(())
    }

    fn allows(&self, tp: usize) -> bool {
        self.heads.is_multiple_of(tp)
            && self.intermediate.is_multiple_of(tp)
            && (self.kv_heads.is_multiple_of(tp) || tp.is_multiple_of(self.kv_heads))
            && self.states.is_none_or(|states| states.allows(tp))
    }
}

#[cfg(test)]
mod tests;
