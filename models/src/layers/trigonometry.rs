//! Sine and cosine of fp32 angles, with the bits of PyTorch on x86 CPUs.
//!
//! PyTorch takes them from Intel's MKL (`vmsSin`, `vmsCos`, mode `VML_HA`). Its results are those of a minimax
//! polynomial of degree 9 in double precision, rounded once to fp32: up to 0.6 units in the last place from the true
//! value. A cosine rounded from the true value would differ from it in one case of twenty, and models whose norms round
//! to fp32 carry such a difference into every logit.

/// The first 32 bits of π, the next 32, and the rest: multiples by the number of half turns are exact.
const PI: [f64; 3] = [3.141_592_653_468_251_2, 1.215_420_101_260_793_2e-10, 4.044_532_497_591_901e-21];

/// `sin(r) / r - 1` in powers of `r²`, from the second: the minimax polynomial for `|r| <= π/2`. The coefficients were
/// found by a linear programme over 3.7 million results of `vmsSin`, all of which they reproduce.
const COEFFICIENTS: [f64; 4] =
    [-0.166_666_595_504_255_67, 0.008_333_066_246_143_2, -0.000_198_096_029_109_3, 2.605_780_663_615e-6];

/// Sine.
pub(super) fn sin(angle: f32) -> f32 {
    let half_turns = (f64::from(angle) / std::f64::consts::PI).round_ties_even();
    after(angle, half_turns, half_turns)
}

/// Cosine.
pub(super) fn cos(angle: f32) -> f32 {
    let half_turns = (f64::from(angle) / std::f64::consts::PI + 0.5).round_ties_even();
    after(angle, half_turns - 0.5, half_turns)
}

/// The sine of what `angle` exceeds `turned` half turns, with the other sign if `half_turns` is odd.
fn after(angle: f32, turned: f64, half_turns: f64) -> f32 {
    let r = PI.iter().fold(f64::from(angle), |r, part| r - turned * part);
    let [a, b, c, d] = COEFFICIENTS;
    let s = r * r;
    let sine = r + r * s * (a + s * (b + s * (c + s * d)));
    (if half_turns.rem_euclid(2.0) == 0.0 { sine } else { -sine }) as f32
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Bits that MKL 2025 gave, among them the values furthest from the true ones.
    #[test]
    fn bits_of_mkl() {
        for (angle, sine, cosine) in [
            (0x39e4ddcf, 0x39e4ddcf, 0x3f7fffff),
            (0x3a5352de, 0x3a5352dc, 0x3f7ffffb),
            (0x3d91f379, 0x3d91d3db, 0x3f7f59a6),
            (0x3efdf7e0, 0x3ef3ae52, 0x3f61257a),
            (0x3f87eabf, 0x3f5f8de8, 0x3ef979a5),
            (0x3fbf3c94, 0x3f7f3f05, 0x3d9d0ce8),
            (0x40cb996a, 0x3da2384b, 0x3f7f3216),
            (0x40948036, 0xbf7f576f, 0xbd92cb3e),
            (0x421684b5, 0xbd8e409b, 0x3f7f61b7),
            (0x424fa1a4, 0x3f7f5835, 0xbd92750a),
            (0x4448426c, 0x3d8bbd1f, 0xbf7f6744),
            (0x43a28b15, 0xbf7f675f, 0xbd8bb0c8),
            (0x452e2869, 0x3d8936a3, 0xbf7f6cbe),
            (0x450fa26f, 0xbf7f3d71, 0x3d9db0b8),
            (0x00000000, 0x00000000, 0x3f800000),
            (0x3f800000, 0x3f576aa4, 0x3f0a5141),
            (0x41000000, 0x3f7d4695, 0xbe14fdf6),
            (0x41b80000, 0xbf58a1e6, 0xbf0867bf),
            (0x42000000, 0x3f0d2a4d, 0x3f558fa9),
            (0x421c0000, 0x3f76bb4b, 0x3e88856c),
            (0x3da3d70a, 0x3da3aa50, 0x3f7f2e65),
            (0x47ffff80, 0xbf13430a, 0xbf51675e),
        ] {
            let angle = f32::from_bits(angle);
            assert_eq!((sin(angle).to_bits(), cos(angle).to_bits()), (sine, cosine), "{angle}");
        }
    }

    #[test]
    fn close_to_the_true_values() {
        for index in 0..200_000 {
            let angle = index as f32 * 0.655_36;
            let (s, c) = f64::from(angle).sin_cos();
            assert!((f64::from(sin(angle)) - s).abs() < 4e-8 && (f64::from(cos(angle)) - c).abs() < 4e-8, "{angle}");
        }
    }
}
