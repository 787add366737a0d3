//! Boxes of global indices, one range per dimension, and the row-major arrays that hold them. Pure arithmetic.

use std::ops::Range;

use crate::positioned::Run;

/// Number of elements; a box without dimensions holds one.
pub fn len(ranges: &[Range<usize>]) -> usize {
    ranges.iter().map(ExactSizeIterator::len).product()
}

/// Number of elements of a shape that may come from a file; `None` when it exceeds the address space.
pub fn checked_len(shape: &[usize]) -> Option<usize> {
    shape.iter().try_fold(1usize, |gemm, &size| gemm.checked_mul(size))
}

/// The box of a whole tensor.
pub fn whole(shape: &[usize]) -> Vec<Range<usize>> {
    shape.iter().map(|&size| 0..size).collect()
}

/// Size of every dimension of a box.
pub fn shape(ranges: &[Range<usize>]) -> Vec<usize> {
    ranges.iter().map(ExactSizeIterator::len).collect()
}

/// Whether the box lies inside a tensor of this shape.
pub fn fits(ranges: &[Range<usize>], shape: &[usize]) -> bool {
    let inside = |(range, size): (&Range<usize>, &usize)| range.start <= range.end && range.end <= *size;
    ranges.len() == shape.len() && ranges.iter().zip(shape).all(inside)
}

/// A box as it is printed, and appended to a tensor's name when it is not the whole: `[0:512,64:128]`.
pub fn text(ranges: &[Range<usize>]) -> String {
    let ranges: Vec<String> = ranges.iter().map(|range| format!("{}:{}", range.start, range.end)).collect();
    format!("[{}]", ranges.join(","))
}

/// What two boxes of one tensor have in common, if anything.
pub fn intersection(a: &[Range<usize>], b: &[Range<usize>]) -> Option<Vec<Range<usize>>> {
    a.iter()
        .zip(b)
        .map(|(a, b)| Some(a.start.max(b.start)..a.end.min(b.end)).filter(|common| common.start < common.end))
        .collect()
}

/// What two boxes of one tensor have in common, in the longest runs that are contiguous in both arrays, in ascending
/// order in both. `size` is the number of bytes of an element.
pub fn runs(from_box: &[Range<usize>], to_box: &[Range<usize>], size: usize) -> impl Iterator<Item = Run> {
    let common = intersection(from_box, to_box);
    let runs = common.map(|common| {
        // Dimensions after `split` are whole in both arrays, so a contiguous run spans them and the range of `split`.
        let whole_in_both = |&d: &usize| from_box[d] == common[d] && to_box[d] == common[d];
        let split = (0..common.len()).rev().find(|d| !whole_in_both(d)).unwrap_or(0);
        let bytes = len(common.get(split..).unwrap_or_default()) * size;
        let (from_strides, to_strides) = (strides(from_box, size), strides(to_box, size));
        let offset = |start: &[usize], ranges: &[Range<usize>], strides: &[usize]| -> usize {
            start.iter().zip(ranges).zip(strides).map(|((index, range), stride)| (index - range.start) * stride).sum()
        };
        let mut next: Option<Vec<usize>> = Some(common.iter().map(|range| range.start).collect());
        std::iter::from_fn(move || {
            let at = next.as_mut()?;
            let run = Run { from: offset(at, from_box, &from_strides), to: offset(at, to_box, &to_strides), bytes };
            match (0..split).rev().find(|&d| at[d] + 1 < common[d].end) {
                None => next = None,
                Some(further) => {
                    at[further] += 1;
                    (further + 1..split).for_each(|d| at[d] = common[d].start);
                }
            }
            Some(run)
        })
    });
    runs.into_iter().flatten()
}

/// Bytes between neighbours, per dimension.
fn strides(ranges: &[Range<usize>], size: usize) -> Vec<usize> {
    (0..ranges.len()).map(|d| len(&ranges[d + 1..]) * size).collect()
}

/// What is wrong with boxes that should make up a tensor.
#[derive(Debug, PartialEq, Eq)]
pub enum Flaw {
    /// Two of them, by index, share elements.
    Overlap(usize, usize),
    /// Some elements are in none; this many are in one.
    Missing(usize),
}

/// Checks that boxes inside `shape` hold every element exactly once.
pub fn check_cover(shape: &[usize], boxes: &[&[Range<usize>]]) -> Result<(), Flaw> {
    // Along the dimension that is split most, neighbours in order of their start are the only ones that can overlap.
    let starts = |d: usize| {
        let mut starts: Vec<usize> = boxes.iter().map(|ranges| ranges[d].start).collect();
        starts.sort_unstable();
        starts.dedup();
        starts.len()
    };
    if let Some(dim) = (0..shape.len()).max_by_key(|&d| starts(d)) {
        let mut order: Vec<usize> = (0..boxes.len()).filter(|&i| len(boxes[i]) > 0).collect();
        order.sort_by_key(|&i| boxes[i][dim].start);
        for (position, &a) in order.iter().enumerate() {
            let later = order[position + 1..].iter().take_while(|&&b| boxes[b][dim].start < boxes[a][dim].end);
            if let Some(&b) = later.into_iter().find(|&&b| intersection(boxes[a], boxes[b]).is_some()) {
                return Err(Flaw::Overlap(a.min(b), a.max(b)));
            }
        }
    } else if boxes.len() > 1 {
        return Err(Flaw::Overlap(0, 1));
    }
    match boxes.iter().map(|ranges| len(ranges)).sum::<usize>() {
        have if have == shape.iter().product::<usize>() => Ok(()),
        have => Err(Flaw::Missing(have)),
    }
}
