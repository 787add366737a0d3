//! The numbers that FP8 formats have.

use super::lanes;
use super::real::Real;

/// Rough cost of one element in picoseconds.
pub(super) const COST: usize = 500;

/// Rounding to 8-bit floats.
pub(super) trait Grid: Real {
    /// The nearest value of a format with `(mantissa bits, exponent bias)`, ties to even, clamped to `most`. NaN is
    /// unchanged.
    fn on_grid(self, fields: (i32, i32), most: Self) -> Self;
    /// Whether it is neither zero, infinite nor NaN.
    fn is_size(self) -> bool;
    /// The largest power of two that is not larger than this positive normal number.
    fn power_of_two(self) -> Self;
    const LARGEST: Self;
}

macro_rules! grid {
    ($E:ident, $I:ident, $bits:literal, $exponents:literal) => {
        impl Grid for $E {
            const LARGEST: Self = $E::MAX;

            #[inline(always)]
            fn on_grid(self, (mantissa, bias): (i32, i32), most: Self) -> Self {
                const ZERO: i32 = $exponents >> 1;
                let x = self.clamp(-most, most);
                let exponent = ((x.to_bits() >> $bits) & $exponents) as i32 - ZERO;
                // Subnormals have the spacing of the smallest normal numbers.
                let exponent = exponent.max(1 - bias) - mantissa;
                let step = $E::from_bits(((ZERO + exponent) as $I) << $bits);
                // Adding 1.5 · 2ᵐ, m being the bits of the mantissa, rounds to an integer without a call.
                const ROUND: $E = 1.5 * (1u64 << $bits) as $E;
                ((x / step + ROUND) - ROUND) * step
            }

            fn is_size(self) -> bool {
                self > 0.0 && self.is_finite()
            }

            fn power_of_two(self) -> Self {
                $E::from_bits(self.to_bits() >> $bits << $bits)
            }
        }
    };
}

grid!(f32, u32, 23, 0xff);
grid!(f64, u64, 52, 0x7ff);

/// The amax, ignoring NaN.
pub(super) fn amax<E: Grid>(x: &[E]) -> E {
    let magnitudes = x.chunks(4096).map(|chunk| {
        let low = chunk.iter().fold(E::ZERO, |low, &x| if x < low { x } else { low });
        let high = lanes::max(chunk);
        if high > -low { high } else { -low }
    });
    magnitudes.fold(E::ZERO, |top, x| if x > top { x } else { top })
}
