//! NF4 with double quantisation, as bitsandbytes has it (`bitsandbytes/backends/default/ops.py`, `functional.py`).

/// Elements of a block.
pub const BLOCK: usize = 64;
/// Blocks whose scales are quantised together.
pub const NESTED: usize = 256;

/// The numbers of NF4 ("QLoRA", appendix E): quantiles of a normal distribution, scaled to -1 to 1, with a 0.
#[allow(clippy::excessive_precision, reason = "the paper's digits")]
pub const NUMBERS: [f32; 16] = [
    -1.0,
    -0.696_192_800_998_687_7,
    -0.525_073_051_452_636_7,
    -0.394_917_488_098_144_53,
    -0.284_441_381_692_886_35,
    -0.184_773_430_228_233_34,
    -0.091_050_036_251_544_95,
    0.0,
    0.079_580_299_556_255_34,
    0.160_930_201_411_247_25,
    0.246_112_301_945_686_34,
    0.337_915_241_718_292_24,
    0.440_709_829_330_444_34,
    0.562_617_003_917_694_1,
    0.722_956_836_223_602_3,
    1.0,
];

/// The 256 numbers of the 8-bit scales ("8-bit Approximations for Parallelism in Deep Learning", Dettmers, 2015; here
/// `create_dynamic_map()`): with every power of ten fewer, half as many numbers.
pub fn dynamic_numbers() -> Vec<f32> {
    let mut all = vec![0.0f32, 1.0];
    for exponent in 0..7i32 {
        let items = 1usize << exponent;
        // torch.linspace(0.1, 1, items + 1): from both ends to the middle.
        let step = (1.0f32 - 0.1) / items as f32;
        let from_start = |at: usize| at < items.div_ceil(2);
        let boundary =
            |at: usize| if from_start(at) { 0.1 + step * at as f32 } else { 1.0 - step * (items - at) as f32 };
        let factor = 10f64.powi(exponent - 6) as f32;
        for at in 0..items {
            let mean = (boundary(at) + boundary(at + 1)) / 2.0;
            all.extend([factor * mean, -factor * mean]);
        }
    }
    all.sort_unstable_by(f32::total_cmp);
    all
}

/// The codes of blocks: two elements a byte, the first in the upper half; and the amax of each.
///
/// # Panics
/// If the elements are not whole blocks.
pub fn quantize_blocks(x: &[f32]) -> (Vec<u8>, Vec<f32>) {
    assert!(x.len().is_multiple_of(BLOCK), "{} elements are not blocks of {BLOCK}", x.len());
    let bounds: [f32; 15] = std::array::from_fn(|at| (NUMBERS[at] + NUMBERS[at + 1]) / 2.0);
    let (mut codes, mut all) = (Vec::with_capacity(x.len() / 2), Vec::with_capacity(x.len() / BLOCK));
    for block in x.chunks_exact(BLOCK) {
        let amax = block.iter().fold(0.0f32, |most, x| most.max(x.abs()));
        let inverse = 1.0 / amax.max(TINY);
        // All bounds at once: a search is slower than one vector instruction.
        let code = |x: f32| bounds.iter().map(|bound| u8::from(*bound < x * inverse)).sum::<u8>();
        codes.extend(block.chunks_exact(2).map(|pair| code(pair[0]) << 4 | code(pair[1])));
        all.push(amax);
    }
    (codes, all)
}

/// The 8-bit scales of a whole matrix.
#[derive(Clone, Debug, PartialEq)]
pub struct Scales {
    /// By block.
    pub amax: Vec<u8>,
    /// By [`NESTED`] blocks.
    pub nested: Vec<f32>,
    /// Mean of the scales.
    pub offset: f32,
}

/// Quantises the amax of every block of a matrix.
pub fn quantize_scales(amax: &[f32]) -> Scales {
    // A sum in fp64, whose rounding does not depend on the order.
    let offset = (amax.iter().map(|amax| f64::from(*amax)).sum::<f64>() / amax.len().max(1) as f64) as f32;
    let bounds = bounds(&dynamic_numbers());
    let (mut codes, mut nested) = (Vec::with_capacity(amax.len()), Vec::with_capacity(amax.len().div_ceil(NESTED)));
    for block in amax.chunks(NESTED) {
        let most = block.iter().fold(0.0f32, |most, amax| most.max((amax - offset).abs()));
        let whole = block.len() == NESTED;
        let inverse = 1.0 / most.max(TINY);
        // bitsandbytes divides where a block is not whole.
        let scaled = |x: f32| if whole { x * inverse } else { x / most.max(TINY) };
        codes.extend(block.iter().map(|amax| nearest(&bounds, scaled(amax - offset).clamp(-1.0, 1.0))));
        nested.push(if whole { most } else { most.max(TINY) });
    }
    Scales { amax: codes, nested, offset }
}

/// A whole matrix, quantised.
#[derive(Clone, Debug, PartialEq)]
pub struct Quantized {
    /// Two elements a byte.
    pub codes: Vec<u8>,
    /// By block.
    pub amax: Vec<u8>,
    /// By [`NESTED`] blocks.
    pub nested: Vec<f32>,
    /// Mean of the scales.
    pub offset: f32,
}

/// A whole matrix, row by row.
///
/// # Panics
/// If the elements are not whole blocks.
pub fn quantize(x: &[f32]) -> Quantized {
    let (codes, amax) = quantize_blocks(x);
    let Scales { amax, nested, offset } = quantize_scales(&amax);
    Quantized { codes, amax, nested, offset }
}

/// What an amax of 0 is taken for.
const TINY: f32 = 1e-38;

/// The middles between neighbours.
fn bounds(numbers: &[f32]) -> Vec<f32> {
    numbers.windows(2).map(|pair| (pair[0] + pair[1]) / 2.0).collect()
}

/// The number of bounds below `x`: of two numbers that are as near, the lower one (`torch.bucketize`).
fn nearest(bounds: &[f32], x: f32) -> u8 {
    bounds.partition_point(|bound| *bound < x) as u8
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_their_own_codes_and_the_lower_of_two_wins() {
        let mut block = [0.0; BLOCK];
        block[..16].copy_from_slice(&NUMBERS.map(|number| number * 3.0));
        let (codes, amax) = quantize_blocks(&block);
        assert_eq!(amax, [3.0]);
        assert_eq!(codes[..8], [0x01, 0x23, 0x45, 0x67, 0x89, 0xab, 0xcd, 0xef]);
        assert!(codes[8..].iter().all(|code| *code == 0x77), "zeros");
        block[..16].copy_from_slice(&NUMBERS);
        block[1] = (NUMBERS[14] + NUMBERS[15]) / 2.0;
        assert_eq!(quantize_blocks(&block).0[0], 0x0e);
    }

    #[test]
    fn scales_have_256_numbers_from_below_minus_0_99_to_1() {
        let numbers = dynamic_numbers();
        assert_eq!((numbers.len(), numbers[127], numbers[255]), (256, 0.0, 1.0));
        assert!(numbers.windows(2).all(|pair| pair[0] < pair[1]));
        let scales = quantize_scales(&[2.0; 300]);
        assert_eq!((scales.offset, scales.nested.len()), (2.0, 2));
        assert!(scales.amax.iter().all(|code| *code == 127));
    }
}
