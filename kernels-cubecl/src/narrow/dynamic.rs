//! Moments in 8 bits: blockwise dynamic quantisation (Dettmers et al.: <https://arxiv.org/abs/2110.02861>), with the maps
//! and the blocks of 256 that bitsandbytes (`create_dynamic_map`) and torchao's `AdamW8bit` use.
//!
//! A block of [`BLOCK`] numbers has one scale, its greatest magnitude. A number is the code of the entry of a [`Map`] that
//! is nearest to number / scale.
//!
//! ```
//! use kernels_cubecl::narrow::dynamic::Map;
//!
//! let block = [0.5, -0.02, 0.0, 1.0];
//! let scale = Map::scale(&block);
//! let read: Vec<f32> = block.iter().map(|x| Map::Signed.number(Map::Signed.code(*x, scale), scale)).collect();
//! assert!(block.iter().zip(read).all(|(x, y)| (x - y).abs() <= 0.04 * x.abs()));
//! ```

use std::sync::LazyLock;

/// Numbers with one scale.
pub const BLOCK: usize = 256;

/// Blocks whose greatest magnitude is less, 2⁻¹⁰⁰, are zero: every entry times a scale is a normal fp32
/// number, so that a block that was read and is quantised with the same scale has the same codes.
pub(crate) const LEAST: f32 = f32::from_bits(27 << 23);

/// What the 256 codes stand for, ascending, between −1 and 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Map {
    /// Seven decades of each sign, zero and one: for first moments.
    Signed,
    /// Seven decades, zero and one: for second moments. Numbers above zero never become zero: with a second moment of
    /// zero and no gradient, a first moment would be a step of `lr · exp_avg / eps`.
    Unsigned,
}

/// Entries, and between which numbers they are the nearest: a number has the code of how many thresholds are below it.
struct Table {
    numbers: [f32; BLOCK],
    thresholds: [f32; BLOCK - 1],
}

static TABLES: LazyLock<[Table; 2]> = LazyLock::new(|| [Map::Signed, Map::Unsigned].map(Map::table));

impl Map {
    /// Decade `i` of seven, from 10⁻⁶ up: the middles of equal parts of 0.1 to 1, 2ⁱ for each sign.
    fn table(self) -> Table {
        let signs: &[f64] = if self == Self::Signed { &[-1.0, 1.0] } else { &[1.0] };
        let mut all = vec![0.0, 1.0];
        for decade in 0..7 {
            let parts = (1u32 << decade) * if self == Self::Signed { 1 } else { 2 };
            for (sign, part) in signs.iter().flat_map(|sign| (0..parts).map(move |part| (sign, part))) {
                let middle = 0.1 + 0.9 * (f64::from(part) + 0.5) / f64::from(parts);
                all.push(sign * middle * 10f64.powi(decade - 6));
            }
        }
        all.sort_by(f64::total_cmp);
        let numbers = std::array::from_fn(|i| all[i] as f32);
        let mut thresholds = std::array::from_fn(|i| ((all[i] + all[i + 1]) / 2.0) as f32);
        if self == Self::Unsigned {
            thresholds[0] = 0.0;
        }
        Table { numbers, thresholds }
    }

    fn tables(self) -> &'static Table {
        &TABLES[self as usize]
    }

    /// The scale of a block.
    pub fn scale(block: &[f32]) -> f32 {
        let most = block.iter().fold(0.0f32, |most, x| most.max(x.abs()));
        if most < LEAST { 0.0 } else { most }
    }

    /// The code of a number of a block with this scale.
    pub fn code(self, number: f32, scale: f32) -> u8 {
        let scaled = if scale > 0.0 { number * (1.0 / scale) } else { 0.0 };
        self.tables().thresholds.partition_point(|threshold| *threshold < scaled) as u8
    }

    /// The number of a code.
    pub fn number(self, code: u8, scale: f32) -> f32 {
        self.tables().numbers[usize::from(code)] * scale
    }

    /// The tables of both maps as kernels read them: for each its entries, then its thresholds and one that no number
    /// is above.
    pub fn words() -> Vec<u32> {
        let of = |table: &Table| [&table.numbers[..], &table.thresholds, &[f32::INFINITY]].concat();
        TABLES.iter().flat_map(of).map(f32::to_bits).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAPS: [Map; 2] = [Map::Signed, Map::Unsigned];

    /// What `bitsandbytes.functional.create_dynamic_map` gives at its ends and around zero.
    #[test]
    fn maps_are_those_of_bitsandbytes() {
        let [signed, unsigned] = MAPS.map(|map| map.tables().numbers);
        assert_eq!((signed[127], signed[255], unsigned[0], unsigned[255]), (0.0, 1.0, 0.0, 1.0));
        let near = |a: f32, b: f64| (f64::from(a) / b - 1.0).abs() < 1e-6;
        // One part of the lowest decade, 64 of the highest; without signs twice as many.
        assert!(near(signed[128], 5.5e-7) && near(signed[126], -5.5e-7));
        assert!(near(signed[254], 1.0 - 0.9 / 128.0) && near(signed[0], -(1.0 - 0.9 / 128.0)));
        assert!(near(unsigned[1], 3.25e-7) && near(unsigned[2], 7.75e-7) && near(unsigned[254], 1.0 - 0.9 / 256.0));
        for map in MAPS {
            assert!(map.tables().numbers.is_sorted_by(|a, b| a < b));
        }
    }

    /// A code is that of the nearest entry, but for second moments above zero.
    #[test]
    fn codes_are_the_nearest_entries() {
        for map in MAPS {
            let numbers = &map.tables().numbers;
            for i in 0..20_000 {
                let size = 10f64.powf(-8.0 * f64::from(i % 5000) / 5000.0) as f32;
                let x = if map == Map::Signed && i % 2 == 1 { -size } else { size };
                let code = usize::from(map.code(x * 3.0, 3.0));
                let far = |entry: usize| (numbers[entry] - x).abs();
                let nearest = (0..BLOCK).map(far).fold(f32::INFINITY, f32::min);
                let lifted = map == Map::Unsigned && code == 1;
                assert!(far(code) <= nearest + 1e-6 * x.abs() || lifted, "{map:?} {x}: {code}");
            }
        }
        assert_eq!(Map::Unsigned.code(1e-30, 1.0), 1, "never zero");
        assert_eq!(Map::Unsigned.code(0.0, 1.0), 0);
        assert_eq!(Map::Signed.code(-0.0, 1.0), 127);
    }

    /// Every code is found again after its number was read, whatever the scale.
    #[test]
    fn numbers_that_were_read_have_their_codes() {
        for map in MAPS {
            for scale in [LEAST, 1.7e-20, 0.3, 1.0, 7.1e8, f32::MAX] {
                for code in 0..=255 {
                    assert_eq!(map.code(map.number(code, scale), scale), code, "{map:?} {scale}");
                }
            }
        }
    }

    #[test]
    fn small_blocks_are_zero() {
        assert_eq!(Map::scale(&[1e-31, -LEAST / 2.0]), 0.0);
        assert_eq!(Map::scale(&[0.0, -3.0, 2.0]), 3.0);
        for map in MAPS {
            assert_eq!(map.number(map.code(1e-31, 0.0), 0.0), 0.0);
        }
    }
}
