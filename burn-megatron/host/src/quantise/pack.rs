//! Integers of few bits in words of 32, as `pack_to_int32` of compressed-tensors packs them: the first of them in the
//! lowest bits, each plus half the number of codes, so that none is negative.

/// Words of a matrix row of `columns` integers.
pub fn packed_len(columns: usize, bits: usize) -> usize {
    columns.div_ceil(32 / bits)
}

/// The words of one matrix row; `bits` divides 32.
pub fn pack(codes: &[u8], bits: usize) -> impl Iterator<Item = u32> {
    let offset = 1i32 << (bits - 1);
    codes.chunks(32 / bits).map(move |codes| {
        let word = |(index, code): (usize, &u8)| ((i32::from(*code as i8) + offset) as u32) << (index * bits);
        codes.iter().enumerate().map(word).sum()
    })
}

/// The integer at `column` of a packed matrix row.
pub fn unpack(words: impl Fn(usize) -> u32, column: usize, bits: usize) -> i8 {
    let per_word = 32 / bits;
    let field = words(column / per_word) >> (column % per_word * bits) & ((1 << bits) - 1);
    (field as i32 - (1 << (bits - 1))) as i8
}

#[cfg(test)]
mod tests {
    use super::*;

    /// By the rule of `pack_to_int32`: the integer at `i`, plus half the number of codes, begins at bit `i * bits`.
    #[test]
    fn words_are_those_of_compressed_tensors() {
        let row = |codes: &[i8], bits| pack(&codes.iter().map(|code| *code as u8).collect::<Vec<_>>(), bits).collect();
        let words: Vec<u32> = row(&[-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7], 4);
        assert_eq!(words, [0x7654_3210, 0xfedc_ba98]);
        let words: Vec<u32> = row(&[-128, -1, 0, 127, 5], 8);
        assert_eq!(words, [0xff80_7f00, 133]);
    }

    #[test]
    fn what_is_packed_is_unpacked() {
        for (bits, columns) in [(4, 1), (4, 8), (4, 21), (8, 7), (8, 8)] {
            let half = 1i32 << (bits - 1);
            let codes: Vec<u8> = (0..columns).map(|at| ((at * 37) % (2 * half) - half) as i8 as u8).collect();
            let words: Vec<u32> = pack(&codes, bits).collect();
            assert_eq!(words.len(), packed_len(codes.len(), bits));
            let back: Vec<u8> = (0..codes.len()).map(|column| unpack(|at| words[at], column, bits) as u8).collect();
            assert_eq!(back, codes);
        }
    }
}
