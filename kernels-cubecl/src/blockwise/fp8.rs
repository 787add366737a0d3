//! FP8 with a scale for each block of 128 × 128 elements, as DeepSeek-V3's weights are stored.

use super::Sizes;
use crate::fp8::Format;
use crate::fp8::codec::encode_host;

/// Rows and columns of a block.
pub const BLOCK: usize = 128;

/// The codes of a matrix and the scales of its blocks, row by row: `amax / 448`, 1 for a block of zeros.
///
/// # Panics
/// If `x` does not have these sizes.
pub fn quantize(x: &[f32], Sizes { rows, columns }: Sizes) -> (Vec<u8>, Vec<f32>) {
    assert_eq!(x.len(), rows * columns, "a matrix of {rows} × {columns}");
    let blocks = columns.div_ceil(BLOCK);
    let mut amax = vec![0.0f32; rows.div_ceil(BLOCK) * blocks];
    for (row, x) in x.chunks_exact(columns.max(1)).enumerate() {
        for (at, x) in x.chunks(BLOCK).enumerate() {
            let amax = &mut amax[row / BLOCK * blocks + at];
            *amax = x.iter().fold(*amax, |most, x| most.max(x.abs()));
        }
    }
    let scales: Vec<f32> = amax.iter().map(|amax| if *amax > 0.0 { amax / Format::E4m3.max() } else { 1.0 }).collect();
    let code = |(at, x): (usize, &f32)| {
        let (row, column) = (at / columns, at % columns);
        encode_host(x / scales[row / BLOCK * blocks + column / BLOCK], Format::E4m3)
    };
    (x.iter().enumerate().map(code).collect(), scales)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::blockwise::{Format, Section, dequantize};

    #[test]
    fn every_block_has_a_scale_of_its_own_and_the_last_ones_may_be_smaller() {
        let sizes = Sizes { rows: 130, columns: 136 };
        let x: Vec<f32> = (0..130 * 136)
            .map(|at| {
                let size = if at / 136 < 128 && at % 136 < 128 { 1.0 } else { 1e-3 };
                ((at * 37 % 101) as f32 - 50.0) * size
            })
            .collect();
        let (codes, scales) = quantize(&x, sizes);
        assert_eq!(scales.len(), 4);
        let mut found = vec![0.0; x.len()];
        dequantize(Format::Fp8, &codes, &scales, &Section::whole(sizes), 0..130, &mut found);
        for (at, (found, x)) in found.iter().zip(&x).enumerate() {
            // Three bits of mantissa.
            assert!((found - x).abs() <= x.abs() / 16.0 + scales[at / 136 / 128 * 2 + at % 136 / 128] / 512.0, "{at}");
        }
        let (codes, scales) = quantize(&[0.0; 64], Sizes { rows: 8, columns: 8 });
        assert_eq!((codes, scales), (vec![0; 64], vec![1.0]));
    }
}
