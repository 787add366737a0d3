//! LZ4 as Parquet has it: a block alone (`LZ4_RAW`), or blocks behind their lengths as Hadoop wrote them (`LZ4`, which old
//! programs wrote as a block alone too). Nothing says how long a block alone is once it is decompressed.

use lz4_flex::block::{DecompressError, decompress_into};

/// The content of one block of at most `most` bytes; `None` if it is longer or damaged.
pub(super) fn block(packed: &[u8], most: u64) -> Option<Vec<u8>> {
    let most = usize::try_from(most).ok()?;
    // LZ4 makes text three times as long, at most 255 times.
    let mut room = packed.len().saturating_mul(4).clamp(64, most.max(64));
    loop {
        let mut out = vec![0; room];
        match decompress_into(packed, &mut out) {
            Ok(length) if length <= most => {
                out.truncate(length);
                return Some(out);
            }
            Err(DecompressError::OutputTooSmall { .. }) if room < most => room = room.saturating_mul(2).min(most),
            _ => return None,
        }
    }
}

/// The content of blocks as Hadoop wrote them, or of one alone.
pub(super) fn hadoop(packed: &[u8], most: u64) -> Option<Vec<u8>> {
    framed(packed, most).or_else(|| block(packed, most))
}

/// The length of some content, then each of its blocks behind its own length: Hadoop's `BlockCompressorStream` writes several
/// if the content is larger than its buffer.
fn framed(mut packed: &[u8], most: u64) -> Option<Vec<u8>> {
    let mut out = Vec::new();
    while !packed.is_empty() {
        let mut at = out.len();
        let end = at + length(&mut packed)?;
        if end as u64 > most {
            return None;
        }
        out.resize(end, 0);
        loop {
            let own = length(&mut packed)?;
            let block = packed.split_off(..own)?;
            at += decompress_into(block, &mut out[at..]).ok()?;
            if at == end {
                break;
            }
        }
    }
    Some(out)
}

/// Takes a length, which is big-endian.
fn length(packed: &mut &[u8]) -> Option<usize> {
    Some(u32::from_be_bytes(*packed.split_off(..4)?.first_chunk()?) as usize)
}

#[cfg(test)]
mod tests {
    use lz4_flex::block::compress;

    use super::*;

    #[test]
    fn blocks_are_read_alone_and_behind_their_lengths() {
        let text: Vec<u8> = b"to be or not to be, ".iter().copied().cycle().take(90_000).collect();
        let packed = compress(&text);
        assert!(packed.len() < 1000);
        let behind = |length: usize, rest: Vec<u8>| [(length as u32).to_be_bytes().to_vec(), rest].concat();
        let own = |text: &[u8]| behind(compress(text).len(), compress(text));
        let framed = [&text[..50_000], &text[50_000..]].map(|text| behind(text.len(), own(text))).concat();
        let several = [behind(80_000, own(&text[..50_000])), own(&text[50_000..80_000])].concat();
        let several = [several, behind(10_000, own(&text[80_000..]))].concat();
        let found =
            [(&packed, 100_000), (&framed, 90_000), (&several, 90_000)].map(|(packed, most)| hadoop(packed, most));
        for found in found.into_iter().chain([block(&packed, 90_000)]) {
            assert!(found == Some(text.clone()));
        }
        // Longer than they are said to be, or damaged.
        assert_eq!(
            [block(&packed, 89_999), hadoop(&framed, 89_999), block(&[0xF0, 1, 2], 1 << 20)],
            [const { None }; 3]
        );
        for framed in [framed, several] {
            assert_eq!(hadoop(&framed[..framed.len() - 1], 90_000), None);
        }
    }
}
