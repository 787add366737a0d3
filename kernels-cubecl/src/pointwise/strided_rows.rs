//! Tensors whose rows are contiguous, but not one behind the other: heads of attention by sample and head, for example.
use super::{CubeShape, MOST, PointwiseError, buffer, check};
use cubecl::prelude::*;
use cubecl::server::Handle;

/// Bytes of an access.
const ACCESS: usize = 16;
/// 16 bytes of any type.
type Bytes16 = Vector<u32, Const<4>>;
/// Accesses of a unit.
const EACH: u32 = 4;

/// Rows at even distances in each of three dimensions, the last of which varies fastest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StridedRows {
    /// How many in each dimension.
    pub counts: [usize; 3],
    /// Bytes from one to the next.
    pub strides: [usize; 3],
    /// Bytes of a row.
    pub row: usize,
}

impl StridedRows {
    /// A tensor of elements of `size` bytes with these strides in elements, if it is that, and rows and strides are whole
    /// accesses of 16 bytes.
    pub fn of(shape: &[usize], strides: &[usize], size: usize) -> Option<Self> {
        // Dimensions of one element have no stride, and others may be one dimension.
        let mut merged: Vec<(usize, usize)> = Vec::new();
        for (&count, &stride) in shape.iter().zip(strides).filter(|&(&count, _)| count != 1) {
            match merged.last_mut() {
                Some((outer, apart)) if *apart == count * stride => (*outer, *apart) = (*outer * count, stride),
                _ => merged.push((count, stride)),
            }
        }
        let (columns, last) = merged.pop()?;
        let is_whole = |elements: &usize| (elements * size).is_multiple_of(ACCESS);
        if last != 1 || merged.len() > 3 || !is_whole(&columns) || !merged.iter().all(|(_, stride)| is_whole(stride)) {
            return None;
        }
        let mut rows = Self { counts: [1; 3], strides: [0; 3], row: columns * size };
        for (i, (count, stride)) in merged.into_iter().rev().enumerate() {
            (rows.counts[2 - i], rows.strides[2 - i]) = (count, stride * size);
        }
        Some(rows)
    }

    /// Bytes of all rows.
    pub fn bytes(&self) -> usize {
        self.counts.iter().product::<usize>() * self.row
    }

    /// Bytes from the first to behind the last.
    fn span(&self) -> usize {
        let last = self.counts.iter().zip(self.strides).map(|(count, stride)| (count - 1) * stride);
        last.sum::<usize>() + self.row
    }
}

#[cube(launch_unchecked)]
pub fn pack_rows(
    source: &[Bytes16],
    target: &mut [Bytes16],
    row: u32,
    inner: u32,
    middle: u32,
    outer_stride: u32,
    middle_stride: u32,
    inner_stride: u32,
    total: u32,
) {
    let first = CUBE_POS_X * CUBE_DIM_X * comptime![EACH] + UNIT_POS;
    let mut held = Array::<Bytes16>::new(comptime![EACH as usize]);
    #[unroll]
    for k in 0..comptime![EACH] {
        let at = first + k * CUBE_DIM_X;
        if at < total {
            let line = at / row;
            let samples = line / inner;
            let from = at % row
                + line % inner * inner_stride
                + samples % middle * middle_stride
                + samples / middle * outer_stride;
            held[k as usize] = source[from as usize];
        }
    }
    #[unroll]
    for k in 0..comptime![EACH] {
        let at = first + k * CUBE_DIM_X;
        if at < total {
            target[at as usize] = held[k as usize];
        }
    }
}

/// Writes the rows to `target`, one behind the other.
///
/// # Errors
/// If there are none or too many, or a buffer is too short.
pub fn pack(client: &Client, source: &Handle, rows: StridedRows, target: &Handle) -> Result<(), PointwiseError> {
    let total = rows.bytes() / ACCESS;
    check("rows", total, 1, MOST)?;
    check("strided rows", rows.span() / ACCESS, 1, MOST)?;
    let from = buffer("strided rows", source, rows.span() / ACCESS, ACCESS)?;
    let to = buffer("packed rows", target, total, ACCESS)?;
    let cube = CubeShape::of(client);
    let [outer, middle, inner] = rows.strides.map(|stride| (stride / ACCESS) as u32);
    // SAFETY: both buffers hold what the rows say; other units do nothing.
    unsafe {
        launch_kernel!(pack_rows, client, cube.line(total.div_ceil(EACH as usize)), cube.dim();
            from, to;
            (rows.row / ACCESS) as u32, rows.counts[2] as u32, rows.counts[1] as u32, outer, middle, inner,
            total as u32)
    };
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dimensions_are_merged_where_they_are_evenly_spaced() {
        // Heads of `[2, 512, 16 · 64]` as `[2, 16, 512, 64]`.
        let heads = StridedRows::of(&[2, 16, 512, 64], &[512 * 1024, 64, 1024, 1], 2);
        let expected = StridedRows { counts: [2, 16, 512], strides: [1 << 20, 128, 2048], row: 128 };
        assert_eq!(heads, Some(expected));
        assert_eq!(StridedRows::of(&[2, 1, 8, 16], &[128, 7, 16, 1], 4).map(|rows| rows.counts), Some([1; 3]));
        // Rows of a part of the columns, broadcast over samples.
        let part = StridedRows::of(&[3, 4, 8], &[0, 32, 1], 4);
        assert_eq!(part, Some(StridedRows { counts: [1, 3, 4], strides: [0, 0, 128], row: 32 }));
    }

    #[test]
    fn other_tensors_are_none() {
        let transposed = StridedRows::of(&[8, 16], &[1, 8], 2);
        let odd_rows = StridedRows::of(&[4, 12], &[16, 1], 2);
        let odd_stride = StridedRows::of(&[4, 16], &[20, 1], 2);
        let five = StridedRows::of(&[2, 2, 2, 2, 8], &[1000, 200, 48, 16, 1], 4);
        assert_eq!([transposed, odd_rows, odd_stride, five], [None; 4]);
    }
}
