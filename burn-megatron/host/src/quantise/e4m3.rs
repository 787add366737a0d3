//! Numbers of eight bits: sign, four of exponent, three of mantissa; no infinity, and NaN where all but the sign are ones
//! (`torch.float8_e4m3fn`).

/// The largest.
pub(super) const LARGEST: f64 = 448.0;

/// The number of a byte.
pub fn e4m3(byte: u8) -> f32 {
    let (exponent, mantissa) = (i32::from(byte >> 3 & 15), f32::from(byte & 7) / 8.0);
    let magnitude = match exponent {
        15 if byte & 7 == 7 => f32::NAN,
        0 => mantissa * (-6f32).exp2(),
        _ => (1.0 + mantissa) * ((exponent - 7) as f32).exp2(),
    };
    if byte & 128 == 0 { magnitude } else { -magnitude }
}

/// The byte of the nearest number, of two the even one; what is larger than 448 becomes 448.
pub fn to_e4m3(value: f64) -> u8 {
    if value.is_nan() {
        return 0x7f;
    }
    let sign = if value.is_sign_negative() { 128 } else { 0 };
    let magnitude = value.abs().min(LARGEST);
    // Neighbours are 2^(exponent - 3) apart; below 2^-6 as far as just above it.
    let exponent = magnitude.log2().floor().clamp(-6.0, 8.0) as i32;
    let steps = (magnitude / f64::from(exponent - 3).exp2()).round_ties_even() as u8;
    // 16 steps are 8 of the next exponent, and so is the byte.
    sign + ((exponent + 6) as u8) * 8 + steps
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_of_eight_bits() {
        assert_eq!([0x00, 0x01, 0x38, 0x7e, 0xb8].map(e4m3), [0.0, 0.001_953_125, 1.0, 448.0, -1.0]);
        assert!(e4m3(0x7f).is_nan() && e4m3(0xff).is_nan());
    }

    #[test]
    fn every_byte_is_its_own_nearest() {
        for byte in (0..=255u8).filter(|byte| byte & 127 != 127) {
            assert_eq!(to_e4m3(f64::from(e4m3(byte))), byte);
        }
        assert_eq!([1e9, -1e9, 464.0].map(to_e4m3), [0x7e, 0xfe, 0x7e]);
        assert!(e4m3(to_e4m3(f64::NAN)).is_nan());
    }

    #[test]
    fn what_lies_between_two_goes_to_the_nearer_and_halfway_to_the_even_one() {
        for byte in 0..0x7eu8 {
            let [low, high] = [byte, byte + 1].map(|byte| f64::from(e4m3(byte)));
            assert_eq!(to_e4m3(low + 0.49 * (high - low)), byte);
            assert_eq!(to_e4m3(low + 0.51 * (high - low)), byte + 1);
            assert_eq!(to_e4m3((low + high) / 2.0) & 1, 0);
        }
    }
}
