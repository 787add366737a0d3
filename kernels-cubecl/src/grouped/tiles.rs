//! Which tile of a result a cube computes, and which rows belong to it: plain arithmetic, the same on the host and in
//! the kernel.
#[cfg(feature = "cuda")]
use cubecl::prelude::*;

/// Rows of a tile of a result; a group has a multiple of these.
pub const ROWS: usize = 128;

/// Elements of the inner dimension of one step.
pub const DEPTH: usize = 64;

/// Rows of tiles that are visited column by column, so that the tiles that run at the same time share as few rows and
/// columns as possible: 132 of them, about twice as many columns as rows.
pub const BAND: u32 = 16;

/// Words of an entry of a table.
pub const WORDS: usize = 3;

/// A tile of a result.
#[cfg(feature = "cuda")]
#[derive(CubeType)]
pub struct Tile {
    pub group: u32,
    /// Row of tiles: of all rows, or of the group's matrix.
    pub row: u32,
    /// Column of tiles.
    pub column: u32,
    /// First row of the group's matrix, or of the group.
    pub first: u32,
    /// Steps along the inner dimension, at least one.
    pub steps: u32,
}

/// Position of a tile, counted in tiles.
#[cfg_attr(feature = "cuda", derive(CubeType))]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TilePosition {
    /// From above.
    pub row: u32,
    /// From the left.
    pub column: u32,
}

#[cfg_attr(feature = "cuda", cube)]
impl TilePosition {
    /// Tile number `index` of a band of `height` rows of tiles, of which the first is row `first`.
    pub fn in_band(index: u32, first: u32, height: u32) -> TilePosition {
        TilePosition { row: first + index % height, column: index / height }
    }

    /// Tile number `index` of a matrix of `rows` × `columns` tiles, visited in bands.
    pub fn in_matrix(index: u32, rows: u32, columns: u32) -> TilePosition {
        let first = index / (BAND * columns) * BAND;
        TilePosition::in_band(index - first * columns, first, u32::min(BAND, rows - first))
    }
}

/// An entry for each 128 rows: first row of tiles of its band, height of the band, and group. A band lies within a
/// group. Tile `index` of all results of `columns` columns of tiles is in the band of entry `index / columns`.
pub fn rows(counts: &[usize]) -> Vec<u32> {
    let mut table = Vec::new();
    let mut first = 0;
    for (group, count) in counts.iter().enumerate() {
        let end = first + (count / ROWS) as u32;
        while first < end {
            let height = BAND.min(end - first);
            (0..height).for_each(|_| table.extend([first, height, group as u32]));
            first += height;
        }
    }
    table
}

/// An entry for each group: group, first row, and steps of `depth` rows, most steps first. A group without rows takes one
/// step past the last row of all, where TMA fills in zeros; without `with_empty` it has no entry.
pub fn groups(counts: &[usize], depth: usize, with_empty: bool) -> Vec<u32> {
    let all: usize = counts.iter().sum();
    let mut entries = Vec::new();
    let mut first = 0;
    for (group, &count) in counts.iter().enumerate() {
        if count > 0 {
            entries.push([group, first, count / depth]);
        } else if with_empty {
            entries.push([group, all, 1]);
        }
        first += count;
    }
    entries.sort_by_key(|entry| std::cmp::Reverse(entry[2]));
    entries.into_iter().flatten().map(|word| word as u32).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    /// Row counts of groups: all combinations of up to three groups with few sizes, and long lists of any.
    fn all_counts() -> Vec<Vec<usize>> {
        let sizes = [0, 1, 2, 15, 16, 17, 33];
        let mut all: Vec<Vec<usize>> = Vec::new();
        for a in sizes {
            all.push(vec![a]);
            for b in sizes {
                all.push(vec![a, b]);
                all.extend(sizes.map(|c| vec![a, b, c]));
            }
        }
        let mut state = 1u64;
        for groups in [7, 60, 128] {
            let next = |_| {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                (state >> 33) as usize % 40
            };
            all.push((0..groups).map(next).collect());
        }
        all.into_iter().map(|counts| counts.into_iter().map(|count| count * ROWS).collect()).collect()
    }

    #[test]
    fn every_tile_of_all_rows_is_computed_once_with_the_matrix_of_its_group() {
        for counts in all_counts() {
            let table = rows(&counts);
            let blocks = table.len() / WORDS;
            assert_eq!(blocks, counts.iter().sum::<usize>() / ROWS, "{counts:?}");
            let group_of: Vec<u32> =
                (0..counts.len() as u32).flat_map(|group| vec![group; counts[group as usize] / ROWS]).collect();
            for columns in [1u32, 3, 8] {
                let mut seen = BTreeSet::new();
                for index in 0..blocks as u32 * columns {
                    let at = (index / columns) as usize * WORDS;
                    let [first, height, group] = [table[at], table[at + 1], table[at + 2]];
                    let position = TilePosition::in_band(index - first * columns, first, height);
                    assert_eq!(group, group_of[position.row as usize], "tile {index} of {counts:?}");
                    assert!(position.column < columns, "tile {index} of {counts:?} is at {position:?}");
                    assert!(seen.insert((position.row, position.column)), "tile {position:?} of {counts:?} twice");
                }
                assert_eq!(seen.len(), blocks * columns as usize, "{counts:?}");
            }
        }
    }

    #[test]
    fn every_tile_of_a_matrix_is_computed_once() {
        for (rows, columns) in (1..40).flat_map(|rows| [1, 2, 5, 9].map(|columns| (rows, columns))) {
            let positions: BTreeSet<_> = (0..rows * columns)
                .map(|index| TilePosition::in_matrix(index, rows, columns))
                .map(|position| (position.row, position.column))
                .filter(|(row, column)| *row < rows && *column < columns)
                .collect();
            assert_eq!(positions.len(), (rows * columns) as usize, "{rows} × {columns}");
        }
    }

    #[test]
    fn every_row_is_summed_up_in_the_gradient_of_its_group() {
        for counts in all_counts() {
            let all: usize = counts.iter().sum();
            let mut starts = vec![0];
            counts.iter().for_each(|count| starts.push(starts[starts.len() - 1] + count));
            for with_empty in [false, true] {
                let table = groups(&counts, DEPTH, with_empty);
                let mut seen = BTreeSet::new();
                let mut before = u32::MAX;
                for entry in table.chunks(WORDS) {
                    let (group, first, steps) = (entry[0] as usize, entry[1] as usize, entry[2]);
                    let expected = match counts[group] {
                        0 => (all, 1),
                        count => (starts[group], count / DEPTH),
                    };
                    assert_eq!((first, steps as usize), expected, "group {group} of {counts:?}");
                    assert!(steps <= before, "the longest come first: {counts:?}");
                    assert!(seen.insert(group), "group {group} of {counts:?} twice");
                    before = steps;
                }
                let wanted = counts.iter().filter(|count| with_empty || **count > 0).count();
                assert_eq!(seen.len(), wanted, "{counts:?}");
            }
        }
    }
}
