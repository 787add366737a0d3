//! The quantisation of linear layers.

use kernels_cubecl::fp8::BLOCK;
use serde::{Deserialize, Serialize};

/// All sizes of an FP8 GEMM must be multiples of this; with scales of blocks, of [`BLOCK`](super::BLOCK).
pub const MULTIPLE: usize = 16;

/// The element type of a quantised tensor (OCP 8-bit floating point specification, 2023).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Number {
    /// Three bits of mantissa, up to 448.
    E4m3,
    /// Two bits of mantissa, up to 57344.
    E5m2,
}

impl Number {
    /// The largest value.
    pub fn max(self) -> f64 {
        match self {
            Self::E4m3 => 448.0,
            Self::E5m2 => 57344.0,
        }
    }

    /// Bits of the mantissa, and bias of the exponent.
    pub(crate) fn fields(self) -> (i32, i32) {
        match self {
            Self::E4m3 => (3, 7),
            Self::E5m2 => (2, 15),
        }
    }
}

/// The element types, as Megatron-LM's `--fp8-format`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Fp8Format {
    /// e4m3 everywhere.
    E4m3,
    /// e4m3 for inputs and weights, e5m2 for output gradients.
    Hybrid,
}

/// How scales are computed, as Megatron-LM's `--fp8-recipe`. But for blocks, a scale is that of a whole tensor, over all ranks
/// that hold shards of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Fp8Scaling {
    /// From the tensor's present amax (current scaling).
    Tensorwise,
    /// From its amax in earlier steps.
    Delayed,
    /// From the present amax of each [`BLOCK`](super::BLOCK) consecutive numbers that are summed up, and of each square block of
    /// a weight; a power of two (Transformer Engine's `Float8BlockScaling`, after DeepSeek-V3).
    Blockwise,
}

/// Which amax of a history is used, as Megatron-LM's `--fp8-amax-compute-algo`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum AmaxAlgorithm {
    /// The maximum.
    #[serde(rename = "max")]
    Max,
    /// The latest.
    #[serde(rename = "most_recent")]
    MostRecent,
}

/// The quantisation of a model's linear layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fp8Recipe {
    /// The element types.
    pub format: Fp8Format,
    /// How scales are computed.
    pub scaling: Fp8Scaling,
    /// The amax is scaled to the format's maximum divided by `2^margin`.
    pub margin: u32,
    /// Steps in a history of [`Fp8Scaling::Delayed`], at least 1.
    pub amax_history_len: usize,
    /// Which amax of the history is used.
    pub amax_compute_algo: AmaxAlgorithm,
}

impl Fp8Recipe {
    /// Current scaling without a margin.
    pub fn tensorwise(format: Fp8Format) -> Self {
        let (scaling, amax_compute_algo) = (Fp8Scaling::Tensorwise, AmaxAlgorithm::MostRecent);
        Self { format, scaling, margin: 0, amax_history_len: 1, amax_compute_algo }
    }

    /// All sizes of a GEMM must be multiples of this: tokens, inputs and outputs of a rank.
    pub fn multiple(&self) -> usize {
        if self.is_blockwise() { BLOCK } else { MULTIPLE }
    }

    /// Whether each block has its own scale.
    pub(super) fn is_blockwise(&self) -> bool {
        self.scaling == Fp8Scaling::Blockwise
    }

    /// The element type of inputs and weights.
    pub fn forward(&self) -> Number {
        Number::E4m3
    }

    /// The element type of output gradients.
    pub fn backward(&self) -> Number {
        match self.format {
            Fp8Format::E4m3 => Number::E4m3,
            Fp8Format::Hybrid => Number::E5m2,
        }
    }
}
