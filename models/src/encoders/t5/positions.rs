//! Relative positions: a learned number for each head and each range of distances.

use burn::module::{Module, Param};
use burn::nn::Initializer;
use burn::tensor::{Device, Int, Tensor};

/// What is added to attention scores.
#[derive(Module, Debug)]
pub struct T5Positions {
    /// `[buckets, heads]`.
    pub bias: Param<Tensor<2>>,
    max_distance: usize,
    bidirectional: bool,
}

impl T5Positions {
    /// Distances from `max_distance` on are one bucket. In one direction, keys after the query are in the bucket of the
    /// query itself.
    pub fn new(
        [buckets, heads]: [usize; 2],
        max_distance: usize,
        bidirectional: bool,
        initializer: &Initializer,
        device: &Device,
    ) -> Self {
        Self { bias: initializer.init([buckets, heads], device), max_distance, bidirectional }
    }

    /// `[1, heads, queries, keys]`. The first query is at position `past`, the first key at 0.
    pub fn forward(&self, past: usize, queries: usize, keys: usize) -> Tensor<4> {
        let bias = self.bias.val();
        let [buckets, heads] = bias.dims();
        let bucket = |query: usize, key: usize| {
            relative_position_bucket(key as i64 - (past + query) as i64, self.bidirectional, buckets, self.max_distance)
        };
        let all: Vec<i64> = (0..queries)
            .flat_map(|query| (0..keys).map(move |key| (query, key)))
            .map(|(q, k)| bucket(q, k) as i64)
            .collect();
        let all = Tensor::<1, Int>::from_data(all.as_slice(), &bias.device());
        bias.select(0, all).reshape([1, queries, keys, heads]).permute([0, 3, 1, 2])
    }
}

/// The bucket of a distance from query to key: the first half of the buckets (of each direction) are single distances, the
/// others grow with the logarithm (Mesh TensorFlow's `_relative_position_bucket`, in fp32 as transformers computes it).
pub fn relative_position_bucket(distance: i64, bidirectional: bool, buckets: usize, max_distance: usize) -> usize {
    let (buckets, first, distance) = match bidirectional {
        true => (buckets / 2, if distance > 0 { buckets / 2 } else { 0 }, distance.unsigned_abs() as usize),
        false => (buckets, 0, (-distance).max(0) as usize),
    };
    let exact = buckets / 2;
    if distance < exact {
        return first + distance;
    }
    let growth = (max_distance as f64 / exact as f64).ln() as f32;
    let beyond = (distance as f32 / exact as f32).ln() / growth * (buckets - exact) as f32;
    first + (exact + beyond as usize).min(buckets - 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `T5Attention._relative_position_bucket` of transformers 5.17, 32 buckets up to 128.
    #[test]
    fn buckets_are_those_of_transformers() {
        let distances = [-200, -128, -127, -64, -33, -20, -16, -15, -9, -8, -7, -1, 0, 1, 7, 8, 12, 31, 90, 128, 500];
        let both = distances.map(|distance| relative_position_bucket(distance, true, 32, 128));
        assert_eq!(both, [15, 15, 15, 14, 12, 10, 10, 9, 8, 8, 7, 1, 0, 17, 23, 24, 25, 27, 30, 31, 31]);
        let one = distances.map(|distance| relative_position_bucket(distance, false, 32, 128));
        assert_eq!(one, [31, 31, 31, 26, 21, 17, 16, 15, 9, 8, 7, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
    }
}
