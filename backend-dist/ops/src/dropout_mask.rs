//! Dropout masks as a pure function of a seed and the element's position in the global tensor.

use std::ops::Range;

/// A dropout mask: a seed, and the position of the local tensor in the global one. Ranks that hold different shards of
/// one tensor and share the seed draw the same mask as a single rank that holds all of it.
///
/// ```
/// use ops::{DropoutMask, dropout};
/// use burn::tensor::{Device, Tensor};
///
/// let ones = |rows| Tensor::<2>::ones([rows, 8], &Device::flex());
/// let whole = dropout(ones(4), 0.5, DropoutMask::new(7));
/// let shard = dropout(ones(2), 0.5, DropoutMask::of_shard(7, &[2, 0], &[4, 8]));
/// assert_eq!(shard.into_data(), whole.narrow(0, 2, 2).into_data());
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DropoutMask {
    seed: u64,
    shard: Option<Shard>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Shard {
    offset: Vec<usize>,
    global: Vec<usize>,
    /// Ranges along the first dimension, instead of one range from its offset on.
    chunks: Vec<Range<usize>>,
}

impl DropoutMask {
    /// For a tensor that is whole on this rank. Use another seed for every dropout, step and micro-batch.
    pub fn new(seed: u64) -> Self {
        Self { seed, shard: None }
    }

    /// For the shard of a tensor of shape `global` that begins at `offset`.
    pub fn of_shard(seed: u64, offset: &[usize], global: &[usize]) -> Self {
        Self { seed, shard: Some(Shard { offset: offset.to_vec(), global: global.to_vec(), chunks: Vec::new() }) }
    }

    /// For `chunks` of the first dimension of a tensor of shape `global`, one after the other. Along the other
    /// dimensions the shard begins at `offset`, whose first number is ignored.
    pub fn of_chunks(seed: u64, chunks: Vec<Range<usize>>, offset: &[usize], global: &[usize]) -> Self {
        Self { seed, shard: Some(Shard { offset: offset.to_vec(), global: global.to_vec(), chunks }) }
    }

    /// The key of every matrix row (all dimensions but the last) of a tensor of shape `local`, and the global index of
    /// its first column.
    ///
    /// # Panics
    ///
    /// If the local tensor does not lie within the global one.
    pub(crate) fn rows(&self, local: &[usize]) -> (Vec<RowKey>, u32) {
        let whole = vec![0; local.len()];
        let (offset, global, chunks) = match &self.shard {
            Some(Shard { offset, global, chunks }) => (offset.as_slice(), global.as_slice(), chunks.as_slice()),
            None => (whole.as_slice(), local, [].as_slice()),
        };
        let first: Vec<usize> = match chunks {
            [] => (offset[0]..offset[0] + local[0]).collect(),
            chunks => chunks.iter().cloned().flatten().collect(),
        };
        let lead = local.len() - 1;
        let fits = offset.len() == local.len()
            && global.len() == local.len()
            && (first.len() == local[0] && first.iter().all(|index| *index < global[0]))
            && (1..local.len()).all(|i| offset[i] + local[i] <= global[i])
            && (lead > 0 || chunks.is_empty());
        let at = |dim: usize, index: usize| if dim == 0 { first[index] } else { offset[dim] + index };
        assert!(fits, "dropout: a shard of shape {local:?} at {offset:?} {chunks:?} is not within {global:?}");
        let n: usize = local[..lead].iter().product();
        let key = |mut i: usize| {
            let mut row = 0;
            let mut stride = 1;
            for d in (0..lead).rev() {
                row += at(d, i % local[d]) * stride;
                stride *= global[d];
                i /= local[d];
            }
            RowKey::new(self.seed, row as u64)
        };
        ((0..n).map(key).collect(), offset[lead] as u32)
    }
}

/// The two 32-bit keys of one global matrix row.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RowKey(u32, u32);

impl RowKey {
    /// The key of global matrix row `row`.
    pub(crate) fn new(seed: u64, row: u64) -> Self {
        let key = splitmix(seed ^ splitmix(row));
        Self((key >> 32) as u32, key as u32)
    }

    /// The two keys, for a kernel that draws as [`draw`](Self::draw) does.
    #[cfg(feature = "cuda")]
    pub(crate) fn words(self) -> [u32; 2] {
        [self.0, self.1]
    }

    /// 32 uniform bits for a column.
    #[inline(always)]
    pub(crate) fn draw(self, column: u32) -> u32 {
        mix(mix(column.wrapping_mul(0x9e37_79b9).wrapping_add(self.0)) ^ self.1)
    }
}

/// Draws below this are dropped, which happens with probability `p`.
pub(crate) fn threshold(p: f64) -> u32 {
    (p * 4_294_967_296.0).min(f64::from(u32::MAX)) as u32
}

/// SplitMix64 of Steele, Lea and Flood.
fn splitmix(x: u64) -> u64 {
    let x = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// Wellons' 32-bit finaliser `lowbias32`.
#[inline(always)]
fn mix(x: u32) -> u32 {
    let x = (x ^ (x >> 16)).wrapping_mul(0x7feb_352d);
    let x = (x ^ (x >> 15)).wrapping_mul(0x846c_a68b);
    x ^ (x >> 16)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn draws(key: &DropoutMask, local: &[usize]) -> Vec<u32> {
        let (rows, first) = key.rows(local);
        let columns = local[local.len() - 1] as u32;
        rows.iter().flat_map(|row| (first..first + columns).map(|c| row.draw(c))).collect()
    }

    #[test]
    fn a_shard_draws_its_shard_of_the_whole() {
        let global = [4, 3, 6];
        let whole = draws(&DropoutMask::new(7), &global);
        for (offset, local) in [([0, 0, 0], [4, 3, 6]), ([2, 0, 0], [2, 3, 6]), ([1, 1, 2], [2, 2, 3])] {
            let shard = draws(&DropoutMask::of_shard(7, &offset, &global), &local);
            let mut expected = Vec::new();
            for i in 0..local[0] {
                for j in 0..local[1] {
                    let start = ((i + offset[0]) * 3 + j + offset[1]) * 6 + offset[2];
                    expected.extend_from_slice(&whole[start..start + local[2]]);
                }
            }
            assert_eq!(shard, expected, "{local:?} at {offset:?}");
        }
        assert_ne!(whole, draws(&DropoutMask::new(8), &global));
    }

    #[test]
    fn chunks_draw_the_same_as_alone() {
        let global = [8, 3, 6];
        let alone =
            |start: usize, rows: usize| draws(&DropoutMask::of_shard(7, &[start, 1, 0], &global), &[rows, 2, 6]);
        let both = DropoutMask::of_chunks(7, vec![1..3, 5..7], &[0, 1, 0], &global);
        assert_eq!(draws(&both, &[4, 2, 6]), [alone(1, 2), alone(5, 2)].concat());
    }

    #[test]
    fn draws_are_spread_evenly() {
        let draws = draws(&DropoutMask::new(1), &[256, 256]);
        let below = draws.iter().filter(|&&d| d < threshold(0.1)).count() as f64 / draws.len() as f64;
        // Three standard deviations of 65,536 draws.
        assert!((below - 0.1).abs() < 3.0 * (0.09f64 / 65_536.0).sqrt(), "{below}");
        let mut sorted = draws.clone();
        sorted.sort_unstable();
        sorted.dedup();
        assert!(sorted.len() > 65_500, "{} distinct draws", sorted.len());
    }

    #[test]
    #[should_panic(expected = "a shard of shape [2, 3] at [3, 0] [] is not within [4, 3]")]
    fn a_shard_outside_is_refused() {
        DropoutMask::of_shard(0, &[3, 0], &[4, 3]).rows(&[2, 3]);
    }
}
