//! Hashes of files: of the whole, as `sha256sum` prints it, and of pieces, which all cores can check at once.

use std::fmt::Write;
use std::io;

use rayon::prelude::*;
use sha2::{Digest, Sha256};

use crate::positioned::PositionedFile;

/// Bytes of a piece; the last one of a file is shorter.
pub(super) const PIECE: usize = 64 << 20;
/// Bytes that are read at a time.
const BLOCK: usize = 1 << 20;

/// Hash of a file that consists of these parts.
pub(super) fn whole<'a>(parts: impl Iterator<Item = &'a [u8]>) -> String {
    let mut hash = Sha256::new();
    parts.for_each(|part| hash.update(part));
    hex(&hash.finalize())
}

/// Hashes of the pieces of a file that consists of these parts.
pub(super) fn pieces<'a>(parts: impl Iterator<Item = &'a [u8]>) -> Vec<String> {
    let (mut hashes, mut hash, mut filled) = (Vec::new(), Sha256::new(), 0);
    for mut part in parts {
        while !part.is_empty() {
            let (now, later) = part.split_at(part.len().min(PIECE - filled));
            hash.update(now);
            (part, filled) = (later, filled + now.len());
            if filled == PIECE {
                hashes.push(hex(&hash.finalize_reset()));
                filled = 0;
            }
        }
    }
    if filled > 0 {
        hashes.push(hex(&hash.finalize()));
    }
    hashes
}

/// Hash of a file's contents. Read, not mapped: a disk that fails gives an error then.
pub(super) fn of_file(file: &PositionedFile) -> io::Result<String> {
    of_range(file, 0, file.size())
}

/// The first piece whose hash is not the given one, and what it is instead. On all cores.
pub(super) fn first_changed(file: &PositionedFile, hashes: &[String]) -> io::Result<Option<(usize, String)>> {
    let check = |(index, hash): (usize, &String)| {
        let start = (index * PIECE) as u64;
        let found = of_range(file, start, file.size().min(start + PIECE as u64))?;
        Ok((found != *hash).then_some((index, found)))
    };
    let checked: Vec<io::Result<_>> = hashes.par_iter().enumerate().map(check).collect();
    checked.into_iter().find_map(Result::transpose).transpose()
}

fn of_range(file: &PositionedFile, start: u64, end: u64) -> io::Result<String> {
    let (mut hash, mut block) = (Sha256::new(), vec![0; BLOCK]);
    for at in (start..end).step_by(BLOCK) {
        let block = &mut block[..BLOCK.min((end - at) as usize)];
        file.read_into(at, block)?;
        hash.update(&*block);
    }
    Ok(hex(&hash.finalize()))
}

/// Lower-case hexadecimal, as `sha256sum` prints it.
pub(super) fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut text, byte| {
        write!(text, "{byte:02x}").expect("a string takes everything");
        text
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_do_not_depend_on_parts_and_a_changed_byte_is_found_in_its_piece() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        let mut contents: Vec<u8> = (0..PIECE + 1000).map(|index| (index % 251) as u8).collect();
        std::fs::write(&path, &contents).unwrap();
        let parts = [&contents[..5], &contents[5..PIECE - 1], &contents[PIECE - 1..]];
        let hashes = pieces(parts.into_iter());
        assert_eq!(hashes, [whole([&contents[..PIECE]].into_iter()), whole([&contents[PIECE..]].into_iter())]);
        let file = PositionedFile::open(&path).unwrap();
        assert_eq!(first_changed(&file, &hashes).unwrap(), None);
        assert_eq!(of_file(&file).unwrap(), whole(parts.into_iter()));
        contents[PIECE + 7] ^= 1;
        std::fs::write(&path, &contents).unwrap();
        let changed = first_changed(&file, &hashes).unwrap().unwrap();
        assert_eq!(changed, (1, whole([&contents[PIECE..]].into_iter())));
        assert_eq!(pieces([].into_iter()), [] as [&str; 0]);
    }
}
