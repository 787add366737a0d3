//! A contiguous run of a rank's local elements as boxes of the global tensor: what a shard reads and writes of a
//! checkpoint. Pure arithmetic.

use backend_dist::shard::Section;
use std::ops::Range;

/// A box of a global tensor, and where its elements lie in the local array of a section.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct BoxRuns {
    /// The box, one range per dimension of the global tensor.
    pub ranges: Vec<Range<usize>>,
    /// The same elements, flat in the section's local array, in the row-major order of the box; as few runs as
    /// possible.
    pub runs: Vec<Range<usize>>,
}

/// The boxes that the local elements `part` of a section make up, without padding, in the order of the elements: at
/// most two for each dimension but the last, and one of whole rows. Panics if `part` reaches beyond the section.
pub(super) fn box_runs(section: &Section, part: Range<usize>) -> Vec<BoxRuns> {
    let shape = section.local_shape();
    assert!(part.end <= section.local_len(), "{}: elements {part:?} of {shape:?}", section.name);
    let mut box_runs = Vec::new();
    for mut local in boxes(&shape, part) {
        let mut ranges = local.clone();
        if let Some(split) = &section.split {
            let first = split.part * (split.padded / split.parts);
            let inside = section.global_shape[split.dim].saturating_sub(first);
            let kept = &mut local[split.dim];
            *kept = kept.start.min(inside)..kept.end.min(inside);
            ranges[split.dim] = first + kept.start..first + kept.end;
        }
        let runs = runs(&shape, &local);
        if !runs.is_empty() {
            box_runs.push(BoxRuns { ranges, runs });
        }
    }
    box_runs
}

/// Splits a run of a row-major array into boxes.
fn boxes(shape: &[usize], run: Range<usize>) -> Vec<Vec<Range<usize>>> {
    if run.is_empty() {
        return Vec::new();
    }
    let Some((_, inner)) = shape.split_first() else { return vec![Vec::new()] };
    let row: usize = inner.iter().product();
    let of_row = |index: usize, part: Range<usize>| {
        let below = boxes(inner, part).into_iter();
        below.map(move |rest| [vec![index..index + 1], rest].concat())
    };
    let (first, last) = (run.start / row, run.end / row);
    let (head, tail) = (run.start % row, run.end % row);
    if first == last {
        return of_row(first, head..tail).collect();
    }
    let mut out: Vec<_> = if head > 0 { of_row(first, head..row).collect() } else { Vec::new() };
    let whole = first + usize::from(head > 0)..last;
    if !whole.is_empty() {
        out.push(std::iter::once(whole).chain(inner.iter().map(|&size| 0..size)).collect());
    }
    if tail > 0 {
        out.extend(of_row(last, 0..tail));
    }
    out
}

/// The runs of a row-major array that a box covers, in the box's order.
fn runs(shape: &[usize], ranges: &[Range<usize>]) -> Vec<Range<usize>> {
    let mut starts = vec![0];
    let Some((last, outer)) = ranges.split_last() else { return vec![0..1] };
    for (range, size) in outer.iter().zip(shape) {
        starts = starts.iter().flat_map(|start| range.clone().map(move |index| start * size + index)).collect();
    }
    let row = shape[shape.len() - 1];
    let mut runs: Vec<Range<usize>> = Vec::new();
    for run in starts.into_iter().map(|start| start * row + last.start..start * row + last.end) {
        match runs.last_mut() {
            _ if run.is_empty() => {}
            Some(before) if before.end == run.start => before.end = run.end,
            _ => runs.push(run),
        }
    }
    runs
}

#[cfg(test)]
mod tests {
    use super::*;
    use backend_dist::shard::GroupPosition;
    use proptest::prelude::*;

    #[test]
    fn a_run_is_a_partial_row_whole_rows_and_a_partial_row() {
        let at = GroupPosition { rank: 1, size: 2 };
        let section = Section::split("w", &[8, 3], 0, 2, at);
        let boxes = |part| box_runs(&section, part).into_iter().map(|part| part.ranges).collect::<Vec<_>>();
        assert_eq!(boxes(0..12), [[4..8, 0..3]]);
        assert_eq!(boxes(2..10), [[4..5, 2..3], [5..7, 0..3], [7..8, 0..1]]);
        assert_eq!(boxes(4..5), [[5..6, 1..2]]);
        assert!(boxes(7..7).is_empty());
    }

    #[test]
    fn padding_is_dropped() {
        // Columns 2, 3 of three: the second of each local row is padding.
        let columns = Section::split_padded("c", &[2, 3], 1, 2, 4, GroupPosition { rank: 1, size: 2 });
        assert_eq!(box_runs(&columns, 0..4), [BoxRuns { ranges: vec![0..2, 2..3], runs: vec![0..1, 2..3] }]);
        assert_eq!(box_runs(&columns, 1..2), []);
        let beyond = Section::split_padded("n", &[2, 1], 0, 2, 8, GroupPosition { rank: 1, size: 2 });
        assert_eq!(box_runs(&beyond, 0..4), []);
    }

    proptest! {
        /// However a section is sharded and its local array split into runs: the boxes hold each global element of the
        /// section once, in the order of the local array, with the values that the local array has there.
        #[test]
        fn runs_cover_the_section(
            shape in prop::collection::vec(1usize..6, 1..5),
            dim in any::<prop::sample::Index>(),
            (parts, slack, rank) in (1usize..5, 0usize..3, any::<prop::sample::Index>()),
            cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..5),
        ) {
            let dim = dim.index(shape.len());
            let padded = shape[dim].next_multiple_of(parts) + slack * parts;
            let at = GroupPosition { rank: rank.index(parts), size: parts };
            let section = Section::split_padded("w", &shape, dim, parts, padded, at);
            // Every element holds its index, counted from one; padding is zero.
            let count = shape.iter().product::<usize>();
            let global: Vec<usize> = (1..=count).collect();
            let local = section.slice(&global);
            let mut ends: Vec<usize> = cuts.iter().map(|cut| cut.index(local.len() + 1)).collect();
            ends.extend([0, local.len()]);
            ends.sort_unstable();
            let mut seen = Vec::new();
            for run in ends.windows(2) {
                for part in box_runs(&section, run[0]..run[1]) {
                    let values: Vec<usize> = part.runs.iter().flat_map(|run| local[run.clone()].to_vec()).collect();
                    let mut expected = vec![0];
                    for (range, size) in part.ranges.iter().zip(&shape) {
                        expected = expected.iter().flat_map(|start| range.clone().map(move |i| start * size + i)).collect();
                    }
                    prop_assert_eq!(&values, &expected.iter().map(|index| index + 1).collect::<Vec<_>>());
                    prop_assert!(part.runs.iter().all(|r| run[0] <= r.start && r.end <= run[1]));
                    seen.extend(values);
                }
            }
            let all: Vec<usize> = local.into_iter().filter(|value| *value > 0).collect();
            prop_assert_eq!(seen, all);
        }
    }
}
