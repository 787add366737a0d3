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
    /// The logarithm of a number that is uniform in an interval.
    LogOfUniform {
        /// Lower end, above zero.
        low: f64,
        /// Upper end.
        high: f64,
    },
    /// `softplus` of it is a number whose logarithm is uniform.
    SoftplusLogUniform {
        /// Smallest result of softplus, above zero.
        low: f64,
        /// Largest.
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
            Init::LogOfUniform { low, high } => Init::Uniform { low, high }.at(seed, stream, index).ln(),
            Init::SoftplusLogUniform { low, high } => {
                let [low, high] = [low, high].map(f64::ln);
                // softplus(x) = ln(1 + exp x).
                Init::Uniform { low, high }.at(seed, stream, index).exp().exp_m1().ln()
            }
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

    /// Every twentieth quantile of 100,000 draws lies within four standard errors of its share, each at most
    /// 0.5 / sqrt(100,000).
    #[test]
    fn quantiles_are_the_distributions() {
        let check = |init: Init, share_below: &dyn Fn(f64) -> f64| {
            let mut values: Vec<f64> = (0..100_000).map(|index| init.value(7, "layers.0.A_log", index)).collect();
            values.sort_by(f64::total_cmp);
            for twentieth in 1..20 {
                let (share, value) = (f64::from(twentieth) / 20.0, values[5_000 * twentieth as usize]);
                assert!(
                    (share_below(value) - share).abs() < 0.0064,
                    "{init:?}: {share} of the values are below {value}"
                );
            }
            [values[0], values[99_999]]
        };
        let (low, high) = (0.01f64, 16.0f64);
        let ends = check(Init::LogOfUniform { low, high }, &|log| (log.exp() - low) / (high - low));
        assert!(low.ln() < ends[0] && ends[0] < 0.02f64.ln() && 15.9f64.ln() < ends[1] && ends[1] < high.ln());
        let (low, high) = (0.001f64, 0.1f64);
        let softplus = |x: f64| x.exp().ln_1p();
        let ends = check(Init::SoftplusLogUniform { low, high }, &|x| (softplus(x) / low).ln() / (high / low).ln());
        let [least, most] = ends.map(softplus);
        assert!(low < least && least < 0.00101 && 0.099 < most && most < high);
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
