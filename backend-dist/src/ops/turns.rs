//! In how many products a matrix is computed whose parts, one for each rank, copy engines exchange. Pure arithmetic.
//!
//! Copies need no multiprocessors, so unlike beside NCCL's kernels (`pieces`) products run at their full rate, and
//! parts may come one by one. What more products cost is the last round of tiles of each, which leaves multiprocessors
//! without work.

use super::pieces::{PIECE, Product};
use std::ops::Range;

/// Bytes per second that a GPU copies from its peers beside products, of four H200s.
const COPIED: f64 = 265e9;
/// Seconds that one more copy takes however small it is.
const COPY: f64 = 10e-6;
/// Seconds until the members know of each other's parts.
const TOLD: f64 = 25e-6;
/// Bytes per second of a sum of parts.
const SUMMED: f64 = 3.6e12;
/// Parts are copied if they have as many bytes: below, NCCL's kernels are there sooner.
#[cfg(feature = "cuda")]
pub(crate) const LEAST: usize = 1 << 20;
/// Up to as many parts all ways to join neighbours in a product are tried.
const MANY: usize = 8;

/// How many parts each product has, in the order in which they come: the rank's own part first, by itself, then those
/// of the ranks behind it. One product of all if that is quicker. A part has `bytes` in front of the product, which is
/// that of all parts.
pub(crate) fn gathered(parts: usize, product: &Product, bytes: usize) -> Vec<usize> {
    let seconds = |sizes: &[usize]| {
        let (mut now, mut there) = (0.0f64, 0);
        for size in sizes {
            there += size;
            // Its own needs no copy, unless all wait for it too.
            let copies = if there == 1 { 0 } else { there - 1 + usize::from(sizes.len() == 1) };
            let arrival = if copies == 0 { 0.0 } else { TOLD + copies as f64 * copy_seconds(bytes) };
            now = now.max(arrival) + multiply(product, parts, *size);
        }
        now
    };
    let rest = cuts(parts - 1).map(|rest| [vec![1], rest].concat());
    quickest(rest.chain([vec![parts]]), seconds)
}

/// The same for products whose results are summed up over the ranks: the parts of the ranks behind come first, the
/// rank's own last. A part has `bytes` behind the product, and what does not need the sum takes `after` seconds.
pub(crate) fn scattered(parts: usize, product: &Product, bytes: usize, after: f64) -> Vec<usize> {
    let sum = (parts + 1) as f64 * bytes as f64 / SUMMED;
    let seconds = |sizes: &[usize]| {
        let (mut now, mut copied, mut there) = (0.0f64, 0.0f64, 0);
        for size in sizes {
            now += multiply(product, parts, *size);
            let others = (there + size).min(parts - 1) - there.min(parts - 1);
            if others > 0 {
                copied = copied.max(now) + TOLD + others as f64 * copy_seconds(bytes);
            }
            there += size;
        }
        (now + after).max(copied) + sum
    };
    quickest(cuts(parts), seconds)
}

/// The ranks at these offsets behind `rank`, of `size`, as runs without a gap; all of them are one.
pub(crate) fn runs(rank: usize, offsets: Range<usize>, size: usize) -> impl Iterator<Item = Range<usize>> {
    let start = if offsets.len() == size { 0 } else { (rank + offsets.start) % size };
    let count = offsets.len();
    let end = (start + count).min(size);
    [start..end, 0..start + count - end].into_iter().filter(|run| !run.is_empty())
}

fn copy_seconds(bytes: usize) -> f64 {
    COPY + bytes as f64 / COPIED
}

fn multiply(product: &Product, parts: usize, count: usize) -> f64 {
    product.seconds(product.rows / parts * count, 1, 0) + PIECE
}

/// All ways to cut `parts` in a row into runs; of many parts only single ones, halves and all.
fn cuts(parts: usize) -> Box<dyn Iterator<Item = Vec<usize>>> {
    if parts > MANY {
        return Box::new([vec![1; parts], vec![parts / 2, parts - parts / 2], vec![parts]].into_iter());
    }
    Box::new((0..1usize << parts.saturating_sub(1)).map(move |ends| {
        let mut sizes = vec![0];
        for part in 0..parts {
            *sizes.last_mut().expect("never empty") += 1;
            if part + 1 < parts && ends >> part & 1 == 1 {
                sizes.push(0);
            }
        }
        sizes
    }))
}

fn quickest(ways: impl Iterator<Item = Vec<usize>>, seconds: impl Fn(&[usize]) -> f64) -> Vec<usize> {
    ways.min_by(|a, b| seconds(a).total_cmp(&seconds(b))).expect("there is a way")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn product(rows: usize, inner: usize, columns: usize) -> Product {
        Product { rows, inner, columns, element: 2 }
    }

    /// Llama 3 8B over four ranks, two sequences of 8,192 tokens: a part has 4,096 rows of 4,096 features.
    const PART: usize = 4096 * 4096 * 2;

    #[test]
    fn a_long_product_hides_all_copies_behind_its_own_part() {
        // The first layer of the MLP: its own part takes as long as three copies.
        let sizes = gathered(4, &product(16384, 4096, 7168), PART);
        assert_eq!((sizes[0], sizes.iter().sum::<usize>()), (1, 4), "{sizes:?}");
        // The second: results are summed up while its own part is multiplied.
        let sizes = scattered(4, &product(16384, 3584, 4096), PART, 0.0);
        assert!(sizes.len() > 1 && sizes.last() == Some(&1), "{sizes:?}");
    }

    #[test]
    fn what_runs_behind_a_product_hides_the_copies_as_well() {
        let short = product(16384, 1536, 4096);
        assert!(scattered(4, &short, PART, 0.0).len() >= scattered(4, &short, PART, 1e-2).len());
        assert_eq!(scattered(4, &short, PART, 1e-2), [4]);
    }

    #[test]
    fn tiny_parts_are_multiplied_together() {
        let tiny = product(512, 256, 256);
        // Its own while the others come.
        assert_eq!(gathered(4, &tiny, 1 << 10), [1, 3]);
        assert_eq!(scattered(4, &tiny, 1 << 10, 0.0), [4]);
    }

    #[test]
    fn all_parts_are_in_a_product_once() {
        for parts in [2, 3, 4, 8, 16] {
            for (inner, columns) in [(64, 64), (4096, 1536), (14336, 4096)] {
                let product = product(2048 * parts, inner, columns);
                for sizes in [gathered(parts, &product, PART), scattered(parts, &product, PART, 0.0)] {
                    assert!(sizes.iter().sum::<usize>() == parts && !sizes.contains(&0), "{parts}: {sizes:?}");
                }
            }
        }
    }

    #[test]
    fn runs_go_around() {
        let all = |rank, offsets| runs(rank, offsets, 4).collect::<Vec<_>>();
        assert_eq!(all(1, 0..1), [1..2]);
        assert_eq!(all(1, 1..4), [2..4, 0..1]);
        assert_eq!(all(3, 1..3), [0..2]);
        assert_eq!([all(0, 1..5), all(2, 0..4)], [[0..4], [0..4]]);
        assert_eq!(all(2, 4..5), [2..3]);
    }
}
