//! Initial values that every layout agrees on: element `i` of a global tensor depends on nothing but the seed, the
//! tensor's name and `i`.

use kernels_cubecl::random::{standard_normal, words};

use super::stable_hash;

/// The distribution a global tensor starts from.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Init {
    /// Normal with mean zero.
    Normal {
        /// Standard deviation.
        std: f64,
    },
    /// Uniform in an interval.
    Uniform {
        /// Lower end.
        low: f64,
        /// Upper end.
        high: f64,
    },
    /// The same value everywhere.
    Constant(
        /// The value.
        f64,
    ),
}

impl Init {
    /// All zeros, for biases.
    pub const ZEROS: Init = Init::Constant(0.0);
    /// All ones, for the weights of norms.
    pub const ONES: Init = Init::Constant(1.0);

    /// The value at flat position `index` of the global tensor `name`, computed in `f64`.
    ///
    /// No element depends on a neighbour that may live on another rank, and none on the machine: see
    /// [`kernels_cubecl::random`].
    pub fn value(self, seed: u64, name: &str, index: u64) -> f64 {
        self.at(seed, stable_hash(name), index)
    }

    pub(super) fn at(self, seed: u64, stream: u64, index: u64) -> f64 {
        match self {
            Init::Constant(value) => value,
            Init::Uniform { low, high } => low + (high - low) * uniform(words(seed, stream, index)),
            Init::Normal { std } => std * standard_normal(words(seed, stream, index)),
        }
    }
}

/// A number in the open interval (0, 1) from the first two words.
fn uniform(words: [u32; 4]) -> f64 {
    let bits = ((u64::from(words[0]) << 32) | u64::from(words[1])) >> 12;
    (bits as f64 + 0.5) / (1u64 << 52) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    fn moments(init: Init) -> (f64, f64) {
        let count = 100_000;
        let values: Vec<f64> = (0..count).map(|index| init.value(7, "layers.0.mlp.up_proj.weight", index)).collect();
        let mean = values.iter().sum::<f64>() / count as f64;
        (mean, values.iter().map(|value| (value - mean).powi(2)).sum::<f64>() / count as f64)
    }

    /// Bounds are four standard errors of 100,000 draws.
    #[test]
    fn moments_are_the_distributions() {
        let (mean, variance) = moments(Init::Normal { std: 2.0 });
        assert!(mean.abs() < 0.026 && (variance - 4.0).abs() < 0.072, "{mean} {variance}");
        let (mean, variance) = moments(Init::Uniform { low: -1.0, high: 2.0 });
        assert!((mean - 0.5).abs() < 0.011 && (variance - 0.75).abs() < 0.009, "{mean} {variance}");
    }

    #[test]
    fn seed_name_and_index_all_matter() {
        let normal = Init::Normal { std: 1.0 };
        let base = normal.value(1, "a", 0);
        assert_eq!(base, normal.value(1, "a", 0));
        for other in
            [normal.value(2, "a", 0), normal.value(1, "b", 0), normal.value(1, "a", 1), normal.value(1, "a", 1 << 32)]
        {
            assert_ne!(base, other);
        }
    }
}
