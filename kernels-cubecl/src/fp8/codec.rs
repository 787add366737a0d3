//! The FP8 formats in plain arithmetic, for kernels and for the host.
use super::Format;
#[cfg(feature = "cuda")]
use cubecl::prelude::*;

/// Fields of a format.
#[derive(Clone, Copy, Debug)]
struct Fields {
    mantissa: u32,
    bias: u32,
}

fn fields(format: Format) -> Fields {
    match format {
        Format::E4m3 => Fields { mantissa: 3, bias: 7 },
        Format::E5m2 => Fields { mantissa: 2, bias: 15 },
    }
}

/// Mantissa bits of an `f32` that the format lacks.
fn dropped(format: Format) -> u32 {
    23 - fields(format).mantissa
}

/// Subtracted from the shifted bits of an `f32` to change its bias.
fn rebias(format: Format) -> u32 {
    (127 - fields(format).bias) << fields(format).mantissa
}

/// The bits of the smallest normal number, as `f32`.
fn smallest_normal(format: Format) -> u32 {
    (127 + 1 - fields(format).bias) << 23
}

/// An `f32` whose last bit has the weight of the last bit of a subnormal number of the format.
fn anchor(format: Format) -> f32 {
    let Fields { mantissa, bias } = fields(format);
    f32::from_bits((127 + 1 - bias - mantissa + 23) << 23)
}

/// The eight bits of `x`.
#[cfg(feature = "cuda")]
#[cube]
pub fn encode(x: f32, #[comptime] format: Format) -> u32 {
    let drop = comptime![dropped(format)];
    let bits = u32::reinterpret(x);
    let sign = (bits >> 24) & 0x80u32;
    let magnitude = bits & 0x7fff_ffffu32;
    let most = comptime![format.max().to_bits()];
    let clamped = min(magnitude, most);
    // To nearest even: half of the last digit, less one if the number is already even.
    let odd = (clamped >> drop) & 1u32;
    let normal = ((clamped + comptime![(1u32 << (drop - 1)) - 1] + odd) >> drop) - comptime![rebias(format)];
    // The addition rounds to the last digit of the anchor.
    let anchor = comptime![anchor(format)];
    let small = u32::reinterpret(f32::reinterpret(clamped) + anchor) - comptime![anchor.to_bits()];
    let finite = select(clamped < comptime![smallest_normal(format)], small, normal);
    select(magnitude > 0x7f80_0000u32, 0x7fu32, finite | sign)
}

/// The eight bits of `x`, on the host.
pub fn encode_host(x: f32, format: Format) -> u8 {
    let (drop, bits) = (dropped(format), x.to_bits());
    let (sign, magnitude) = ((bits >> 24) & 0x80, bits & 0x7fff_ffff);
    if magnitude > 0x7f80_0000 {
        return 0x7f;
    }
    let clamped = magnitude.min(format.max().to_bits());
    let finite = if clamped < smallest_normal(format) {
        (f32::from_bits(clamped) + anchor(format)).to_bits() - anchor(format).to_bits()
    } else {
        ((clamped + (1 << (drop - 1)) - 1 + ((clamped >> drop) & 1)) >> drop) - rebias(format)
    };
    (finite | sign) as u8
}

/// The number that eight bits stand for.
pub fn decode_host(bits: u8, format: Format) -> f32 {
    let Fields { mantissa, bias } = fields(format);
    let (magnitude, sign) = (u32::from(bits & 0x7f), if bits & 0x80 == 0 { 1.0 } else { -1.0 });
    let (exponent, fraction) = (magnitude >> mantissa, magnitude & ((1 << mantissa) - 1));
    let special = match format {
        Format::E4m3 => (magnitude == 0x7f).then_some(f32::NAN),
        Format::E5m2 => (exponent == 31).then_some(if fraction == 0 { f32::INFINITY } else { f32::NAN }),
    };
    let step = f32::from_bits((127 + exponent.max(1) - bias - mantissa) << 23);
    let implied = if exponent == 0 { 0 } else { 1 << mantissa };
    special.unwrap_or(sign * (fraction + implied) as f32 * step)
}

#[cfg(test)]
mod tests {
    use super::*;

    const FORMATS: [Format; 2] = [Format::E4m3, Format::E5m2];

    #[test]
    fn every_number_is_its_own_cast() {
        for format in FORMATS {
            for bits in 0..=255u8 {
                let x = decode_host(bits, format);
                if x.is_finite() {
                    assert_eq!(encode_host(x, format), bits, "{format:?} {x}");
                }
            }
        }
        assert_eq!([0x7e, 0x08, 0x01].map(|bits| decode_host(bits, Format::E4m3)), [448.0, 0.015625, 0.001953125]);
        let smallest = 2f32.powi(-16);
        assert_eq!([0x7b, 0x04, 0x01].map(|bits| decode_host(bits, Format::E5m2)), [57344.0, 4.0 * smallest, smallest]);
    }

    #[test]
    fn a_cast_takes_the_nearest_number_and_of_two_the_even_one() {
        for format in FORMATS {
            let mut numbers: Vec<(f32, u8)> = (0..0x80).map(|bits| (decode_host(bits, format), bits)).collect();
            numbers.retain(|(x, _)| x.is_finite());
            for pair in numbers.windows(2) {
                let ((low, below), (high, above)) = (pair[0], pair[1]);
                let middle = (low + high) / 2.0;
                let even = if below % 2 == 0 { below } else { above };
                assert_eq!(encode_host(middle, format), even, "{format:?} {middle}");
                assert_eq!(encode_host(middle.next_down(), format), below);
                assert_eq!(encode_host(middle.next_up(), format), above);
                assert_eq!(encode_host(-middle.next_up(), format), above | 0x80);
            }
        }
    }

    #[test]
    fn what_is_too_large_is_the_largest_and_nan_stays() {
        for format in FORMATS {
            for x in [format.max() * 1.1, f32::MAX, f32::INFINITY] {
                assert_eq!(decode_host(encode_host(x, format), format), format.max());
                assert_eq!(decode_host(encode_host(-x, format), format), -format.max());
            }
            assert!(decode_host(encode_host(f32::NAN, format), format).is_nan());
        }
    }
}
