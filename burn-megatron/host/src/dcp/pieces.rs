//! Where elements of a tensor are that is stored in boxes. Pure arithmetic.

use std::ops::Range;

/// Elements that follow each other in the tensor and in one of its boxes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Piece {
    /// Which box.
    pub chunk: usize,
    /// The first of them in the box, counted row-major.
    pub from: usize,
    /// How many they are.
    pub len: usize,
}

/// The pieces of the elements `run` of a tensor of this shape, counted row-major, in order. `boxes` hold every element
/// once.
pub(super) fn pieces<'a>(
    shape: &'a [usize],
    boxes: &'a [&'a [Range<usize>]],
    run: Range<usize>,
) -> impl Iterator<Item = Piece> + 'a {
    let (mut at, mut chunk) = (run.start, 0);
    std::iter::from_fn(move || {
        if at >= run.end {
            return None;
        }
        let index = unravel(shape, at);
        let holds = |chunk: &usize| boxes[*chunk].iter().zip(&index).all(|(range, index)| range.contains(index));
        // Neighbours are mostly in the same box, or in the next.
        chunk = (chunk..boxes.len()).chain(0..chunk).find(holds)?;
        let ranges = boxes[chunk];
        // Dimensions after `split` are whole in the box, so that its elements are contiguous there.
        let split = (0..shape.len()).rev().find(|&d| ranges[d].len() < shape[d]).unwrap_or(0);
        let after: usize = shape.get(split + 1..).unwrap_or_default().iter().product();
        let (inside, end) = match shape.get(split) {
            Some(size) => (at % (size * after), ranges[split].end * after),
            None => (0, 1),
        };
        let from = index.iter().zip(ranges).fold(0, |from, (index, range)| from * range.len() + index - range.start);
        let len = (run.end - at).min(end - inside);
        at += len;
        Some(Piece { chunk, from, len })
    })
}

/// The index of an element that is counted row-major.
fn unravel(shape: &[usize], mut at: usize) -> Vec<usize> {
    let mut index = vec![0; shape.len()];
    for (index, size) in index.iter_mut().zip(shape).rev() {
        (*index, at) = (at % size, at / size);
    }
    index
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Boundaries of one dimension.
    fn parts(size: usize, bounds: &[usize]) -> Vec<Range<usize>> {
        let mut ends: Vec<usize> = bounds.iter().map(|bound| bound % (size + 1)).chain([0, size]).collect();
        ends.sort_unstable();
        ends.dedup();
        ends.windows(2).map(|pair| pair[0]..pair[1]).collect()
    }

    proptest! {
        #[test]
        fn every_element_is_found_where_its_box_has_it(
            shape in prop::collection::vec(1usize..6, 0..4),
            bounds in prop::collection::vec(prop::collection::vec(0usize..9, 0..3), 3),
            ends in [0usize..300, 0usize..300],
        ) {
            let mut boxes: Vec<Vec<Range<usize>>> = vec![Vec::new()];
            for (size, bounds) in shape.iter().zip(&bounds) {
                boxes = boxes.iter().flat_map(|ranges| {
                    parts(*size, bounds).into_iter().map(move |part| [&ranges[..], &[part]].concat())
                }).collect();
            }
            boxes.reverse();
            let total: usize = shape.iter().product();
            // What every box holds: the flat positions of its elements, row-major.
            let contents: Vec<Vec<usize>> = boxes.iter().map(|ranges| {
                (0..total).filter(|at| unravel(&shape, *at).iter().zip(ranges).all(|(i, range)| range.contains(i))).collect()
            }).collect();
            let run = (ends[0] % (total + 1)).min(ends[1] % (total + 1))..(ends[0] % (total + 1)).max(ends[1] % (total + 1));
            let slices: Vec<&[Range<usize>]> = boxes.iter().map(Vec::as_slice).collect();
            let found: Vec<usize> = pieces(&shape, &slices, run.clone())
                .flat_map(|Piece { chunk, from, len }| contents[chunk][from..from + len].to_vec())
                .collect();
            prop_assert_eq!(found, run.collect::<Vec<_>>());
        }
    }
}
