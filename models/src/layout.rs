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
    /// Key heads of layers with linear attention, if there are such; each goes with its states.
    pub state_heads: Option<usize>,
}

/// The sizes of a layer's routed experts that a layout must divide.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpertDims {
    /// Experts of a layer.
    pub count: usize,
    /// Width of one.
    pub intermediate: usize,
}

/// Why a model cannot run in a layout.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum ModelLayoutError {
    /// The tensor parallel size does not divide a size of the model.
    #[error("tensor-parallel {tp} does not divide the model's {what} ({size}); nearest legal: {nearest}")]
    Indivisible {
        /// Tensor parallel size.
        tp: usize,
        /// Which size of the model.
        what: &'static str,
        /// That size.
        size: usize,
        /// The closest tensor parallel sizes that the whole model allows.
        nearest: Nearest,
    },
    /// Key-value heads can neither be divided over the ranks nor copied evenly to them.
    #[error(
        "tensor-parallel {tp} and {kv_heads} key-value heads: one must divide the other; nearest legal tensor-parallel: \
         {nearest}"
    )]
    KeyValueHeads {
        /// Tensor parallel size.
        tp: usize,
        /// Key-value heads of the model.
        kv_heads: usize,
        /// The closest tensor parallel sizes that the whole model allows.
        nearest: Nearest,
    },
    /// Sequence parallelism would split the sequence into unequal parts.
    #[error(
        "sequence length {seq} is not a multiple of tensor-parallel {tp}, which sequence parallelism needs; nearest legal: {nearest}"
    )]
    SequenceLength {
        /// Tokens of a sample.
        seq: usize,
        /// Tensor parallel size.
        tp: usize,
        /// The closest sequence lengths.
        nearest: Nearest,
    },
    /// The ranks that share a sequence cannot have equal parts of it.
    #[error(
        "sequence length {seq} is not a multiple of {unit}: context-parallel {cp} splits it into {} chunks, and sequence \
         parallelism splits a rank's chunks over the tensor parallel ranks; nearest legal: {nearest}",
        2 * .cp
    )]
    ContextLength {
        /// Tokens of a sample.
        seq: usize,
        /// Context parallel size.
        cp: usize,
        /// What legal lengths are multiples of.
        unit: usize,
        /// The closest sequence lengths.
        nearest: Nearest,
    },
    /// The sequence is longer than the table of learned positions.
    #[error("sequence length {seq} exceeds the model's {max} learned positions; nearest legal: {max}")]
    TooLong {
        /// Tokens of a sample.
        seq: usize,
        /// Learned positions.
        max: usize,
    },
    /// An expert parallel size does not divide a size of the experts.
    #[error("{key} {size} does not divide the model's {what} ({of}); nearest legal: {nearest}")]
    Experts {
        /// Name of the size, as its flag is spelled.
        key: &'static str,
        /// The refused size.
        size: usize,
        /// Which size of the model.
        what: &'static str,
        /// That size.
        of: usize,
        /// The closest sizes that model and layout allow.
        nearest: Nearest,
    },
    /// States of linear attention would have to be passed between ranks.
    #[error(
        "context-parallel {cp}: the model's layers with linear attention do not pass their states between ranks; nearest \
         legal: 1"
    )]
    States {
        /// The refused size.
        cp: usize,
    },
    /// Expert parallelism without experts.
    #[error("expert-parallel {ep}: the model has no experts; nearest legal: 1")]
    NoExperts {
        /// The refused size.
        ep: usize,
    },
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
        if let Some(size) = self.state_heads.filter(|heads| !heads.is_multiple_of(tp)) {
            return Err(ModelLayoutError::Indivisible { tp, what: "linear attention heads", size, nearest: nearest() });
        }
        Ok(())
    }

    /// Whether `cp` context-parallel ranks can share the model's sequences.
    ///
    /// # Errors
    /// With the nearest legal size.
    pub fn check_cp(&self, cp: usize) -> Result<(), ModelLayoutError> {
        match self.state_heads {
            Some(_) if cp > 1 => Err(ModelLayoutError::States { cp }),
            _ => Ok(()),
        }
    }

    /// Whether the model can train on samples of `seq` tokens in a layout.
    ///
    /// # Errors
    /// Names what does not fit and the nearest legal values.
    pub fn check(&self, layout: &ParallelLayout, seq: usize) -> Result<(), ModelLayoutError> {
        self.check_tp(layout.tp)?;
        self.check_cp(layout.cp)?;
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
            && self.state_heads.is_none_or(|heads| heads.is_multiple_of(tp))
    }
}

#[cfg(test)]
mod tests;
