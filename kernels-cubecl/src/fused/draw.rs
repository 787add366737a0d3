//! Random zeros and ones, on the host and in kernels.

use crate::random;
#[cfg(feature = "cuda")]
use crate::random::kernel::words;
#[cfg(feature = "cuda")]
use cubecl::prelude::*;

/// Random zeros and ones: element `i` is one if word `i % 4` of number `i / 4` of the stream, of those that
/// [`words`](random::words) gives, is below the probability as a fraction of 2³².
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Draw {
    /// Seed.
    pub seed: u64,
    /// Number of the stream.
    pub stream: u64,
    /// Probability of a one.
    pub probability: f64,
    /// Multiples of four, so that elements of one number are together in every share.
    part: Part,
}

/// Which elements of a draw a share of it has: its element `i` is element `first + i / width * stride + i % width`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part {
    /// Index of the first element.
    pub first: u64,
    /// From the first element of a row to that of the next.
    pub stride: u64,
    /// Elements of a row.
    pub width: u64,
}

impl Part {
    /// All elements: rows without a gap.
    const WHOLE: Self = Self { first: 0, stride: 4, width: 4 };

    /// The part of this number, of `count` equal ones in dimension `dim` of a tensor of this shape.
    pub fn of_dim(shape: &[usize], dim: usize, number: usize, count: usize) -> Self {
        let stride: u64 = shape[dim..].iter().map(|size| *size as u64).product();
        let width = stride / count as u64;
        Self { first: number as u64 * width, stride, width }
    }

    fn index(self, index: u64) -> u64 {
        self.first + index / self.width * self.stride + index % self.width
    }
}

impl Draw {
    /// All elements.
    pub fn new(seed: u64, stream: u64, probability: f64) -> Self {
        Self { seed, stream, probability, part: Part::WHOLE }
    }

    /// A share of all elements. There is none of a share, nor one whose rows begin or end within a number of four elements.
    pub fn share(self, part: Part) -> Option<Self> {
        let Part { first, stride, width } = part;
        let is_whole = self.part == Part::WHOLE && width > 0;
        let keeps_numbers = [first, stride, width].iter().all(|x| x.is_multiple_of(4) && x / 4 <= u64::from(u32::MAX));
        (is_whole && keeps_numbers).then_some(Self { part, ..self })
    }

    /// Words below this are ones. All are below the largest, which stands for 2³².
    fn threshold(self) -> u32 {
        (self.probability.clamp(0.0, 1.0) * 2f64.powi(32)).round() as u32
    }

    /// Element `index`.
    pub fn bernoulli(self, index: u64) -> f64 {
        let (index, threshold) = (self.part.index(index), self.threshold());
        let word = random::words(self.seed, self.stream, index / 4)[(index % 4) as usize];
        f64::from(word < threshold || threshold == u32::MAX)
    }
}

/// How many words of a kernel's arguments a draw takes.
#[cfg(feature = "cuda")]
pub(super) const DRAW_WORDS: usize = 8;

/// Stream, seed, part in fours and threshold, as [`four_draws`] reads them.
#[cfg(feature = "cuda")]
pub(crate) fn draw_words(draw: Draw) -> [u32; DRAW_WORDS] {
    let Draw { seed, stream, part: Part { first, stride, width }, .. } = draw;
    let [first, stride, width] = [first, stride, width].map(|x| (x / 4) as u32);
    [stream as u32, (stream >> 32) as u32, seed as u32, (seed >> 32) as u32, first, stride, width, draw.threshold()]
}

/// Elements `index`, a multiple of four, to `index + 3` of the draw whose words `draws` has from `at` on: bits 0 to 3.
#[cfg(feature = "cuda")]
#[cube]
pub(crate) fn four_draws(index: u64, draws: &Sequence<u32>, #[comptime] at: usize) -> u32 {
    let stream_low = draws[at];
    let stream_high = draws[comptime![at + 1]];
    let seed_low = draws[comptime![at + 2]];
    let seed_high = draws[comptime![at + 3]];
    let first = draws[comptime![at + 4]];
    let stride = draws[comptime![at + 5]];
    let width = draws[comptime![at + 6]];
    let threshold = draws[comptime![at + 7]];
    // A division in 64 bits would take as long as the numbers themselves.
    let four = u32::cast_from(index >> 2u64);
    let row = u64::cast_from(four / width) * u64::cast_from(stride);
    let four = row + u64::cast_from(first) + u64::cast_from(four % width);
    let (a, b, c, d) = words(four, stream_low, stream_high, seed_low, seed_high);
    bit(a, threshold, 0u32) | bit(b, threshold, 1u32) | bit(c, threshold, 2u32) | bit(d, threshold, 3u32)
}

/// As [`four_draws`], from any element on: bit 0 is element `index`, and those behind it of the same four follow.
#[cfg(feature = "cuda")]
#[cube]
pub(super) fn draws_from(index: u64, draws: &Sequence<u32>, #[comptime] at: usize) -> u32 {
    let within = index % 4u64;
    four_draws(index - within, draws, at) >> u32::cast_from(within)
}

/// Bit `at`, which is set if a word is below the threshold.
#[cfg(feature = "cuda")]
#[cube]
fn bit(word: u32, threshold: u32, at: u32) -> u32 {
    select(word < threshold || threshold == comptime![u32::MAX], 1u32 << at, 0u32)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fused::{Element, Extent, Output, Program, Step};

    fn values(draw: Draw, count: u64) -> Vec<f64> {
        (0..count).map(|index| draw.bernoulli(index)).collect()
    }

    fn mean(values: impl ExactSizeIterator<Item = f64>) -> f64 {
        let count = values.len() as f64;
        values.sum::<f64>() / count
    }

    /// Bounds are four standard errors: of all elements, of each word, and of the covariance with elements behind.
    #[test]
    fn elements_have_their_probability_and_are_independent() {
        for p in [0.1, 0.5, 0.9] {
            let x = values(Draw::new(3, 5, p), 40_000);
            let bound = |p: f64, count: f64| 4.0 * (p * (1.0 - p) / count).sqrt();
            assert!((mean(x.iter().copied()) - p).abs() < bound(p, 4e4));
            for word in 0..4 {
                let of_word: Vec<f64> = x.iter().skip(word).step_by(4).copied().collect();
                assert!((mean(of_word.into_iter()) - p).abs() < bound(p, 1e4), "word {word}");
            }
            for lag in [1, 2, 3, 4, 8] {
                let pairs = x.iter().zip(&x[lag..]).map(|(a, b)| (a - p) * (b - p));
                assert!(mean(pairs).abs() < 4.0 * p * (1.0 - p) / 200.0, "{lag} behind");
            }
        }
        let other = |seed, stream| values(Draw::new(seed, stream, 0.5), 64);
        assert!(other(3, 5) != other(3, 6) && other(3, 5) != other(4, 5));
    }

    #[test]
    fn the_ends_are_certain() {
        assert!(values(Draw::new(3, 5, 0.0), 10_000).iter().all(|x| *x == 0.0));
        assert!(values(Draw::new(3, 5, 1.0), 10_000).iter().all(|x| *x == 1.0));
        // No word is so large that it is not below 2³², and none so small that it is below zero.
        assert_eq!([0.0, 1.0, 0.5].map(|p| Draw::new(0, 0, p).threshold()), [0, u32::MAX, 1 << 31]);
    }

    #[test]
    fn a_share_is_the_slice_of_the_whole() {
        let whole = Draw::new(7, 1, 0.5);
        let (mut shared, mut refused) = (0, 0);
        for shape in [[4, 6, 8], [8, 4, 2], [2, 12, 5], [12, 2, 12]] {
            let all = values(whole, shape.iter().product::<usize>() as u64);
            for (dim, count) in (0..3).flat_map(|dim| [1, 2, 3, 4].map(|count| (dim, count))) {
                if !shape[dim].is_multiple_of(count) {
                    continue;
                }
                for number in 0..count {
                    let part = Part::of_dim(&shape, dim, number, count);
                    let Some(share) = whole.share(part) else {
                        // A row of the share is not a whole number of fours.
                        refused += usize::from(!part.width.is_multiple_of(4));
                        continue;
                    };
                    let inner: usize = shape[dim + 1..].iter().product();
                    let is_here = |index: &usize| index / inner % shape[dim] / (shape[dim] / count) == number;
                    let slice: Vec<f64> = (0..all.len()).filter(is_here).map(|index| all[index]).collect();
                    let found = values(share, slice.len() as u64);
                    assert_eq!(found, slice, "{shape:?}, dim {dim}, part {number} of {count}");
                    assert_eq!(share.share(part), None, "a share of a share");
                    shared += 1;
                }
            }
        }
        assert!(shared > 40 && refused > 4, "{shared} shares, {refused} refused");
    }

    #[test]
    fn a_program_draws_by_the_index_in_its_matrix() {
        let output = Output { register: 0, extent: Extent::Whole, element: Element::F32 };
        let program =
            Program { draws: 1, steps: vec![Step::Bernoulli(0)], outputs: vec![output], ..Program::default() };
        let share = Draw::new(7, 1, 0.3).share(Part { first: 8, stride: 24, width: 12 }).unwrap();
        assert_eq!(program.evaluate(&[], &[], &[], &[share], (5, 6)), [values(share, 30)]);
    }
}
