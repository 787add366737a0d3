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
        Ok(())
    }

    /// Whether the model can train on samples of `seq` tokens in a layout.
    ///
    /// # Errors
    /// Names what does not fit and the nearest legal values.
    pub fn check(&self, layout: &ParallelLayout, seq: usize) -> Result<(), ModelLayoutError> {
        self.check_tp(layout.tp)?;
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
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DIMS: ModelDims = ModelDims {
        vocab: 96,
        hidden: 48,
        heads: 12,
        kv_heads: 4,
        intermediate: 48,
        experts: None,
        layers: 2,
        max_positions: Some(64),
    };

    fn refuse(layout: &str, seq: usize) -> String {
        DIMS.check(&layout.parse().unwrap(), seq).unwrap_err().to_string()
    }

    #[test]
    fn experts_are_divided_over_the_ranks_that_there_are() {
        let dims = ModelDims { experts: Some(ExpertDims { count: 6, intermediate: 20 }), ..DIMS };
        let refuse = |layout: &str| dims.check(&layout.parse().unwrap(), 60).unwrap_err().to_string();
        assert_eq!(refuse("DP4 EP4"), "expert-parallel 4 does not divide the model's experts (6); nearest legal: 2");
        assert_eq!(
            refuse("TP4 DP3 ETP3"),
            "expert-tensor-parallel 3 does not divide the model's expert width (20); nearest legal: 2, 4"
        );
        assert!(refuse("TP12").contains("expert-tensor-parallel 12 does not divide"), "the same as tensor parallel");
        for layout in ["DP6 EP6", "TP2 EP3 DP3", "TP4 ETP1 EP2", "TP12 ETP2 EP6"] {
            assert_eq!(dims.check(&layout.parse().unwrap(), 60), Ok(()), "{layout}");
        }
        assert_eq!(
            DIMS.check(&"DP2 EP2".parse().unwrap(), 60).unwrap_err().to_string(),
            "expert-parallel 2: the model has no experts; nearest legal: 1"
        );
    }

    #[test]
    fn refusals_name_the_nearest_legal_values() {
        assert_eq!(
            refuse("TP5", 64),
            "tensor-parallel 5 does not divide the model's attention heads (12); nearest legal: 4, 12"
        );
        assert_eq!(
            refuse("TP3", 64),
            "tensor-parallel 3 and 4 key-value heads: one must divide the other; nearest legal tensor-parallel: 2, 4"
        );
        assert_eq!(
            refuse("TP4 SP", 63),
            "sequence length 63 is not a multiple of tensor-parallel 4, which sequence parallelism needs; nearest legal: 60, 64"
        );
        assert_eq!(refuse("TP1", 65), "sequence length 65 exceeds the model's 64 learned positions; nearest legal: 64");
        assert_eq!(
            refuse("CP4", 60),
            "sequence length 60 is not a multiple of 8: context-parallel 4 splits it into 8 chunks, and sequence \
             parallelism splits a rank's chunks over the tensor parallel ranks; nearest legal: 56, 64"
        );
        assert!(refuse("TP4 SP CP2", 60).contains("not a multiple of 8"));
        assert!(refuse("DP2 EP2", 64).contains("expert-parallel 2"));
    }

    #[test]
    fn legal_layouts_pass() {
        for layout in ["TP1", "TP2 SP", "TP4 SP DP2", "TP12", "CP3", "TP2 SP CP5"] {
            assert_eq!(DIMS.check(&layout.parse().unwrap(), 60), Ok(()), "{layout}");
        }
        assert_eq!(DIMS.check(&"TP4".parse().unwrap(), 63), Ok(()));
    }
}
