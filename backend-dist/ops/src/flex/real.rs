//! The two element types of the loops.

use std::ops::{Add, AddAssign, Div, Mul, MulAssign, Neg, Sub};

use burn::backend::flex::{FlexTensor, Layout};
use burn::backend::{Bytes, DType, Shape};

/// f32 or f64.
pub(super) trait Real:
    Copy
    + Default
    + PartialOrd
    + Send
    + Sync
    + 'static
    + Add<Output = Self>
    + Sub<Output = Self>
    + Mul<Output = Self>
    + Div<Output = Self>
    + Neg<Output = Self>
    + AddAssign
    + MulAssign
{
    const ZERO: Self;
    const ONE: Self;
    const NEG_INFINITY: Self;

    fn of(value: f64) -> Self;
    fn sqrt(self) -> Self;
    fn ln(self) -> Self;
    fn tanh(self) -> Self;
    /// `eˣ`. The f32 version is accurate to rounding and saturates below -87.3 and above 88.3 instead of reaching 0 and
    /// infinity; NaN stays NaN.
    fn exp(self) -> Self;
    /// The error function to rounding.
    fn erf(self) -> Self;

    /// The elements of a tensor which is dense in memory.
    fn slice(x: &FlexTensor) -> &[Self];
    /// The whole buffer behind a tensor, to be addressed by its layout.
    fn buffer(x: &FlexTensor) -> &[Self];
    /// A tensor of these elements.
    fn tensor(data: Vec<Self>, shape: Shape) -> FlexTensor;
}

macro_rules! real_storage {
    ($E:ident, $dtype:expr) => {
        const ZERO: Self = 0.0;
        const ONE: Self = 1.0;
        const NEG_INFINITY: Self = $E::NEG_INFINITY;

        #[inline(always)]
        fn sqrt(self) -> Self {
            self.sqrt()
        }

        fn tanh(self) -> Self {
            self.tanh()
        }

        fn ln(self) -> Self {
            self.ln()
        }

        fn slice(x: &FlexTensor) -> &[Self] {
            x.as_slice::<$E>().expect("a kernel got a strided tensor, or one of another type")
        }

        fn buffer(x: &FlexTensor) -> &[Self] {
            x.storage::<$E>()
        }

        fn tensor(data: Vec<Self>, shape: Shape) -> FlexTensor {
            FlexTensor::new(Bytes::from_elems(data), Layout::contiguous(shape), $dtype)
        }
    };
}

impl Real for f64 {
    real_storage!(f64, DType::F64);

    #[inline(always)]
    fn of(value: f64) -> Self {
        value
    }

    #[inline(always)]
    fn exp(self) -> Self {
        self.exp()
    }

    #[inline(always)]
    fn erf(self) -> Self {
        libm::erf(self)
    }
}

impl Real for f32 {
    real_storage!(f32, DType::F32);

    #[inline(always)]
    fn of(value: f64) -> Self {
        value as f32
    }

    /// `eˣ = 2ⁿ eʳ`, `n` the nearest integer to `x/ln 2`, `eʳ` by the polynomial of Cephes' `expf`. Without branches or
    /// calls, so loops over it become vector code.
    #[inline(always)]
    fn exp(self) -> Self {
        // Adding 1.5·2²³ rounds to an integer and leaves it in the low bits.
        const ROUND: f32 = 12_582_912.0;
        let x = if self < -87.3 { -87.3 } else { self };
        let x = if x > 88.3 { 88.3 } else { x };
        let shifted = x * std::f32::consts::LOG2_E + ROUND;
        let n = shifted - ROUND;
        // ln 2 in two parts; the product of the first with n is exact.
        let r = x - n * 0.693_359_4 + n * 2.121_944_4e-4;
        let mut p = 1.987_569_1e-4;
        p = p * r + 1.398_199_9e-3;
        p = p * r + 8.333_452e-3;
        p = p * r + 4.166_579_6e-2;
        p = p * r + 1.666_666_5e-1;
        p = p * r + 0.5;
        let e = p * r * r + r + 1.0;
        let power = shifted.to_bits().wrapping_sub(ROUND.to_bits()).wrapping_add(127) << 23;
        e * f32::from_bits(power)
    }

    /// Rational minimax approximation on `[-4, 4]` (Eigen's `erf`), beyond which erf is ±1 in f32.
    #[inline(always)]
    fn erf(self) -> Self {
        let x = if self < -4.0 { -4.0 } else { self };
        let x = if x > 4.0 { 4.0 } else { x };
        let t = x * x;
        let mut p = -2.726_142_3e-10;
        p = p * t + 2.770_681_4e-8;
        p = p * t - 2.101_024e-6;
        p = p * t - 5.692_506_4e-5;
        p = p * t - 7.349_906_3e-4;
        p = p * t - 2.954_6e-3;
        p = p * t - 1.609_603_3e-2;
        let mut q = -1.456_607_2e-5;
        q = q * t - 2.133_740_6e-4;
        q = q * t - 1.682_827e-3;
        q = q * t - 7.373_329e-3;
        q = q * t - 1.426_474e-2;
        x * p / q
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn f32_exp_is_accurate_to_rounding() {
        for i in -87_000..88_000 {
            let x = i as f32 * 1e-3;
            let exact = (x as f64).exp();
            let error = (Real::exp(x) as f64 - exact).abs() / exact;
            assert!(error < 2.0 * f32::EPSILON as f64, "exp({x}) is off by {error:e}");
        }
        assert!(Real::exp(f32::NAN).is_nan());
        assert!(Real::exp(-1e30f32) < 2e-38);
        assert!(Real::exp(f32::INFINITY) > 1e38);
    }

    #[test]
    fn f32_erf_is_accurate_to_rounding() {
        for i in -6_000..6_000 {
            let x = i as f32 * 1e-3;
            let exact = libm::erf(x as f64);
            let error = (Real::erf(x) as f64 - exact).abs() / exact.abs().max(1e-30);
            assert!(error < 4.0 * f32::EPSILON as f64, "erf({x}) is off by {error:e}");
        }
        assert!(Real::erf(f32::NAN).is_nan());
    }

    #[test]
    fn f64_functions_are_exact() {
        assert_eq!(Real::exp(1.0f64), std::f64::consts::E);
        assert_eq!(Real::erf(0.5f64), 0.520_499_877_813_046_5);
    }
}
