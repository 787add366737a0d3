//! Boxes that are stored as flat arrays, sharded anywhere: as boxes of the tensor. Pure arithmetic.

use std::ops::Range;

/// Of a tensor of `shape` that is stored as `stored`, the number of boxes along each dimension and then the elements of
/// one: the boxes of the tensor that a stored box consists of, in the order of its elements. Fails if such boxes do not
/// make up the tensor.
pub(super) fn boxes(
    shape: &[usize],
    stored: &[usize],
    ranges: &[Range<usize>],
) -> Result<Vec<Vec<Range<usize>>>, String> {
    let strange = || format!("is stored as {stored:?}, which are no boxes of shape {shape:?}");
    let Some((elements, counts)) = stored.split_last().filter(|(_, counts)| counts.len() == shape.len()) else {
        return Err(strange());
    };
    if shape.iter().zip(counts).any(|(size, count)| *count == 0 || size % count != 0) {
        return Err(strange());
    }
    let sizes: Vec<usize> = shape.iter().zip(counts).map(|(size, count)| size / count).collect();
    let one_box = ranges[..shape.len()].iter().all(|range| range.len() == 1);
    let count = sizes.iter().try_fold(1_usize, |count, size| count.checked_mul(*size));
    if count != Some(*elements) || !one_box {
        return Err(strange());
    }
    let first: Vec<usize> = ranges.iter().zip(&sizes).map(|(range, size)| range.start * size).collect();
    let mut found = Vec::new();
    split(&sizes, ranges[shape.len()].clone(), &mut Vec::new(), &mut found);
    let moved = |parts: Vec<Range<usize>>| {
        parts.into_iter().zip(&first).map(|(part, first)| first + part.start..first + part.end).collect()
    };
    Ok(found.into_iter().map(moved).collect())
}

/// The boxes of `run`, elements of a box of these sizes counted row-major, in their order; `before` are the places in the
/// dimensions before.
pub(super) fn split(
    sizes: &[usize],
    run: Range<usize>,
    before: &mut Vec<Range<usize>>,
    found: &mut Vec<Vec<Range<usize>>>,
) {
    if run.is_empty() {
        return;
    }
    let Some((_, rest)) = sizes.split_first() else { return found.push(before.clone()) };
    let row: usize = rest.iter().product();
    let mut at = run.start;
    while at < run.end {
        let (first, inside) = (at / row, at % row);
        let whole = (run.end - at) / row;
        let (rows, end) = match inside == 0 && whole > 0 {
            true => (first..first + whole, at + whole * row),
            false => (first..first + 1, run.end.min((first + 1) * row)),
        };
        before.push(rows.clone());
        match inside == 0 && whole > 0 {
            true => found.push(before.iter().cloned().chain(rest.iter().map(|size| 0..*size)).collect()),
            false => split(rest, inside..inside + end - at, before, found),
        }
        before.pop();
        at = end;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Every element of every stored box is in one box of the tensor, in order.
        #[test]
        fn boxes_hold_the_elements_in_order(
            sizes in prop::collection::vec(1usize..5, 1..4),
            counts in prop::collection::vec(1usize..3, 3),
            ends in [0usize..64, 0usize..64],
        ) {
            let counts = &counts[..sizes.len()];
            let shape: Vec<usize> = sizes.iter().zip(counts).map(|(size, count)| size * count).collect();
            let elements: usize = sizes.iter().product();
            let stored = [counts, &[elements]].concat();
            let run = (ends[0] % (elements + 1)).min(ends[1] % (elements + 1))..(ends[0] % (elements + 1)).max(ends[1] % (elements + 1));
            // The last box along every dimension.
            let at: Vec<Range<usize>> = counts.iter().map(|count| count - 1..*count).chain([run.clone()]).collect();
            let mut found = Vec::new();
            for ranges in boxes(&shape, &stored, &at).unwrap() {
                let mut indices = vec![Vec::new()];
                for range in ranges {
                    indices = indices.into_iter().flat_map(|index: Vec<usize>| {
                        range.clone().map(move |at| [&index[..], &[at]].concat())
                    }).collect();
                }
                found.extend(indices.into_iter().map(|index| {
                    index.iter().zip(&sizes).zip(counts).fold(0, |flat, ((at, size), count)| {
                        flat * size + at - (count - 1) * size
                    })
                }));
            }
            prop_assert_eq!(found, run.collect::<Vec<_>>());
        }
    }

    #[test]
    fn other_boxes_are_refused() {
        let refused = |shape: &[usize], stored: &[usize]| boxes(shape, stored, &vec![0..1; stored.len()]).unwrap_err();
        assert!(refused(&[4, 6], &[3, 1, 8]).contains("no boxes of shape [4, 6]"));
        assert!(refused(&[4, 6], &[2, 1, 10]).contains("no boxes of shape [4, 6]"));
        assert!(refused(&[4, 6], &[2, 12]).contains("no boxes of shape [4, 6]"));
    }
}
