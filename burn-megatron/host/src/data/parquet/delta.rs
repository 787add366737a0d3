//! Delta encodings, as far as their headers go: the library's decoders allocate memory by the numbers in them ("Delta Encoding" of
//! Parquet's encodings).

use parquet::basic::Encoding;

/// Values of a block at most; others write 128.
const MOST_OF_BLOCK: u64 = 1 << 16;

/// Whether the values of a page have so many lengths and differences at most as it has values.
pub(super) fn is_sound(encoding: Encoding, values: &[u8], most: u64) -> bool {
    // Behind the lengths of what values share with those before them are the lengths of the rest.
    let rest = behind_numbers(values, most);
    if encoding == Encoding::DELTA_BYTE_ARRAY {
        return rest.and_then(|rest| behind_numbers(rest, most)).is_some();
    }
    rest.is_some()
}

/// What is behind packed numbers, of which there are at most so many.
fn behind_numbers(mut bytes: &[u8], most: u64) -> Option<&[u8]> {
    let [of_block, parts, numbers, _first] = [(); 4].map(|()| number(&mut bytes));
    let (of_block, parts, numbers) = (of_block?, parts?, numbers?);
    if of_block > MOST_OF_BLOCK || parts == 0 || parts > of_block || numbers > most {
        return None;
    }
    let of_part = of_block / parts;
    // The first is in the header.
    let mut left = numbers.saturating_sub(1);
    while left > 0 {
        let _least = number(&mut bytes)?;
        for width in bytes.split_off(..parts as usize)? {
            // Parts behind the last number have widths, and no bytes.
            if left > 0 {
                bytes.split_off(..usize::from(*width) * of_part as usize / 8)?;
                left = left.saturating_sub(of_part);
            }
        }
    }
    Some(bytes)
}

/// Takes a number of seven bits a byte, the lowest first.
fn number(bytes: &mut &[u8]) -> Option<u64> {
    let mut number = 0;
    for shift in (0..64).step_by(7) {
        let byte = *bytes.split_off_first()?;
        number |= u64::from(byte & 0x7f) << shift;
        if byte < 0x80 {
            return Some(number);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Blocks of 128 numbers in 4 parts: 3, 5, 7 and so on, 130 of them.
    fn numbers() -> Vec<u8> {
        let mut bytes = vec![0x80, 1, 4, 0x82, 1, 6];
        bytes.extend([4, 0, 0, 0, 0]);
        bytes.extend([4, 1, 9, 9, 9, 0, 0, 0, 0]);
        bytes
    }

    #[test]
    fn numbers_are_counted_and_passed_over() {
        let packed = numbers();
        assert_eq!(behind_numbers(&[&packed[..], b"rest"].concat(), 130), Some(&b"rest"[..]));
        assert_eq!(behind_numbers(&packed, 129), None);
        assert!((0..packed.len()).all(|end| behind_numbers(&packed[..end], 130).is_none()));
        let twice = [&packed[..], &packed, b"abc"].concat();
        assert!(is_sound(Encoding::DELTA_BYTE_ARRAY, &twice, 130));
        assert!(
            !is_sound(Encoding::DELTA_BYTE_ARRAY, &packed, 130)
                && is_sound(Encoding::DELTA_BINARY_PACKED, &packed, 130)
        );
        // No numbers, numbers of more than 64 bits, no parts.
        assert_eq!(behind_numbers(&[0x80, 1, 4, 0, 0, 7], 0), Some(&[7][..]));
        for wrong in [&[0xff; 12][..], &[0x80, 1, 0, 1, 0], &[0x80, 1, 4, 0xff, 0xff, 0xff, 0x7f, 0]] {
            assert_eq!(behind_numbers(wrong, 130), None);
        }
    }
}
