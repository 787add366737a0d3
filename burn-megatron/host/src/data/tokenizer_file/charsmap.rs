//! The `precompiled_charsmap` of SentencePiece's normalizer: a trie of characters, and the texts to which it leads. The
//! `spm_precompiled` crate trusts it, and a damaged one would end the program, at once or with some text.

/// Whether no text leads out of the trie or out of its texts.
pub(super) fn is_sound(charsmap: &[u8]) -> bool {
    parts(charsmap).is_some_and(|(trie, texts)| stays_inside(&trie, texts))
}

/// The trie, which comes after its size in bytes, and the texts.
fn parts(charsmap: &[u8]) -> Option<(Vec<usize>, &str)> {
    let (size, rest) = charsmap.split_first_chunk()?;
    let size = u32::from_le_bytes(*size) as usize;
    let (trie, texts) = rest.split_at_checked(size)?;
    let (units, odd) = trie.as_chunks();
    let units: Vec<usize> = units.iter().map(|unit| u32::from_le_bytes(*unit) as usize).collect();
    (!units.is_empty() && odd.is_empty()).then_some((units, std::str::from_utf8(texts).ok()?))
}

/// Goes to every node of the double array (`darts.h` of SentencePiece) as `DoubleArray::common_prefix_search` does.
fn stays_inside(trie: &[usize], texts: &str) -> bool {
    let offset = |unit: usize| (unit >> 10) << ((unit & (1 << 9)) >> 6);
    let mut seen = vec![false; trie.len()];
    let mut nodes = vec![offset(trie[0])];
    while let Some(node) = nodes.pop() {
        // Any byte can come next, and each is looked up.
        if node | 0xff >= trie.len() {
            return false;
        }
        if std::mem::replace(&mut seen[node], true) {
            continue;
        }
        for byte in 1..=0xff {
            let unit = trie[node ^ byte];
            if unit & (1 << 31 | 0xff) != byte {
                continue;
            }
            let next = node ^ byte ^ offset(unit);
            let has_leaf = unit >> 8 & 1 == 1;
            let is_text = |leaf: &usize| texts.is_char_boundary(leaf & ((1 << 31) - 1));
            if has_leaf && !trie.get(next).is_some_and(is_text) {
                return false;
            }
            nodes.push(next);
        }
    }
    true
}

#[cfg(test)]
mod tests {
    use tokenizers::normalizers::Precompiled;

    use super::*;

    /// A trie of `units` units which writes the text at `text` for `a`, whose leaf is `offset` away.
    fn charsmap(units: usize, offset: u32, text: u32, texts: &[u8]) -> Vec<u8> {
        let mut trie = vec![0u32; units];
        trie[usize::from(b'a')] = offset << 10 | 1 << 8 | u32::from(b'a');
        trie[usize::from(b'a' ^ 1)] = 1 << 31 | text;
        let trie: Vec<u8> = trie.into_iter().flat_map(u32::to_le_bytes).collect();
        [&(trie.len() as u32).to_le_bytes(), &trie[..], texts].concat()
    }

    #[test]
    fn a_damaged_one_is_told() {
        let sound = charsmap(256, 1, 0, b"b\0");
        assert!(is_sound(&sound));
        assert_eq!(Precompiled::from(&sound).unwrap().normalize_string("cab"), "cbb");
        for (what, broken) in [
            ("a leaf behind the texts", charsmap(256, 1, 3, b"b\0")),
            ("a leaf within a character", charsmap(256, 1, 1, "é\0".as_bytes())),
            ("texts that are none", charsmap(256, 1, 0, b"\xff\0")),
            ("a node outside", charsmap(256, 256, 0, b"b\0")),
            ("less than a block", charsmap(255, 1, 0, b"b\0")),
            ("a size of zero", [&[0; 4], &sound[4..]].concat()),
            ("a size that is not whole units", [&[2, 4, 0, 0], &sound[4..]].concat()),
            ("a size of more than there is", [&[0xff; 4], &sound[4..]].concat()),
            ("no size", vec![0; 3]),
        ] {
            assert!(!is_sound(&broken), "{what}");
        }
    }
}
