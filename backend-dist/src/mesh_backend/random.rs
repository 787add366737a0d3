//! Random tensors as functions of the seed, the number of the call, and the index: the same bits on every rank and in
//! every layout.

use burn::tensor::{DType, Distribution, Shape, TensorData};
use kernels_cubecl::fused::Draw;
use kernels_cubecl::random::{standard_normal, words};

/// Where a rank is in its stream of random tensors.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Random {
    seed: u64,
    calls: u64,
}

/// The random numbers of one tensor.
#[derive(Clone, Copy, Debug)]
pub(super) struct Stream {
    seed: u64,
    call: u64,
}

impl Random {
    /// Begins again with `seed`.
    pub fn seed(&mut self, seed: u64) {
        *self = Self { seed, calls: 0 };
    }

    /// The numbers of the next tensor.
    pub fn next(&mut self) -> Stream {
        let stream = Stream { seed: self.seed, call: self.calls };
        self.calls += 1;
        stream
    }
}

impl Stream {
    /// Zeros and ones.
    pub fn bernoulli(self, probability: f64) -> Draw {
        Draw::new(self.seed, self.call, probability)
    }

    /// The tensor.
    pub fn tensor(self, shape: &Shape, dtype: DType, distribution: Distribution) -> TensorData {
        let indices = 0..shape.num_elements() as u64;
        let values = indices.clone().map(|index| self.value(index, distribution));
        let data = match (dtype.is_int() || dtype.is_uint(), distribution) {
            // Burn's default for integers is every value of the type.
            (true, Distribution::Default) => {
                let all = indices.map(|index| bits(words(self.seed, self.call, index)));
                TensorData::new(all.map(|bits| bits as i64 >> (64 - 8 * dtype.size())).collect(), shape.clone())
            }
            // Rounding to nearest would make the ends of an interval rarer.
            (true, _) => TensorData::new(values.map(|value| value.floor() as i64).collect(), shape.clone()),
            (false, _) => TensorData::new(values.collect(), shape.clone()),
        };
        data.convert_dtype(dtype)
    }

    fn value(self, index: u64, distribution: Distribution) -> f64 {
        let words = || words(self.seed, self.call, index);
        let uniform = || (bits(words()) >> 11) as f64 / (1u64 << 53) as f64;
        match distribution {
            Distribution::Default => uniform(),
            Distribution::Uniform(low, high) => low + (high - low) * uniform(),
            Distribution::Bernoulli(probability) => self.bernoulli(probability).bernoulli(index),
            Distribution::Normal(mean, std) => mean + std * standard_normal(words()),
        }
    }
}

fn bits(words: [u32; 4]) -> u64 {
    (u64::from(words[0]) << 32) | u64::from(words[1])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn draws(distribution: Distribution, dtype: DType) -> Vec<f64> {
        let mut random = Random::default();
        random.seed(3);
        random.next().tensor(&Shape::from([50_000]), dtype, distribution).iter::<f64>().collect()
    }

    /// Bounds are four standard errors of 50,000 draws.
    #[test]
    fn distributions_have_their_means() {
        let mean = |values: Vec<f64>| values.iter().sum::<f64>() / values.len() as f64;
        assert!((mean(draws(Distribution::Default, DType::F64)) - 0.5).abs() < 0.0052);
        assert!((mean(draws(Distribution::Uniform(-1.0, 3.0), DType::F32)) - 1.0).abs() < 0.021);
        assert!((mean(draws(Distribution::Bernoulli(0.1), DType::F64)) - 0.1).abs() < 0.0054);
        assert!((mean(draws(Distribution::Normal(2.0, 0.5), DType::F64)) - 2.0).abs() < 0.009);
        let bytes = draws(Distribution::Default, DType::I8);
        assert!(bytes.contains(&-128.0) && bytes.contains(&127.0) && mean(bytes).abs() < 1.4);
        let integers = draws(Distribution::Uniform(0.0, 4.0), DType::I64);
        assert!(integers.iter().all(|value| [0.0, 1.0, 2.0, 3.0].contains(value)));
        assert!((mean(integers) - 1.5).abs() < 0.02);
    }

    #[test]
    fn calls_differ_and_a_seed_repeats_them() {
        let shape = Shape::from([8]);
        let mut random = Random::default();
        let first = random.next().tensor(&shape, DType::F64, Distribution::Default);
        assert_ne!(first, random.next().tensor(&shape, DType::F64, Distribution::Default));
        random.seed(0);
        assert_eq!(first, random.next().tensor(&shape, DType::F64, Distribution::Default));
        random.seed(1);
        assert_ne!(first, random.next().tensor(&shape, DType::F64, Distribution::Default));
    }
}
