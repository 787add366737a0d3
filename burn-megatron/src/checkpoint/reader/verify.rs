//! Whether files are still what was written.

use std::cmp::Reverse;
use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

use sha2::{Digest, Sha256};

use super::super::error::CheckpointError;
use super::super::manifest::SavedFile;
use super::super::shard::hex;
use super::{Checkpoint, find};

/// Bytes that are read and hashed at a time.
const PIECE: usize = 1 << 20;

impl Checkpoint {
    /// Compares the hashes of this share of the files, one of `of` that are about equally large, with those that were
    /// taken when they were written, so that ranks can share the work. Returns the bytes that were read.
    ///
    /// # Errors
    /// Names the file that has changed or cannot be read.
    pub fn verify(&self, share: usize, of: usize) -> Result<u64, CheckpointError> {
        let files: Vec<&SavedFile> = self.manifest.files.iter().chain(&self.manifest.tokenizer).collect();
        let sizes: Vec<u64> = files.iter().map(|file| file.bytes).collect();
        let mut bytes = 0;
        for index in share_of(&sizes, share, of) {
            let path = self.path.join(&files[index].name);
            let found = hash_file(&path).map_err(|cause| CheckpointError::io("read", &path, cause))?;
            if found != files[index].sha256 {
                let what = format!(
                    "has changed since it was written: its sha256 is {found}, the manifest says {}; it is damaged, \
                     restore it",
                    files[index].sha256
                );
                return Err(find::with_others(CheckpointError::file(&path, what), &self.path));
            }
            bytes += files[index].bytes;
        }
        Ok(bytes)
    }
}

/// Hash of a file's contents. Read, not mapped: a disk that fails gives an error then.
fn hash_file(path: &Path) -> io::Result<String> {
    let mut file = File::open(path)?;
    let (mut hash, mut piece) = (Sha256::new(), vec![0; PIECE]);
    loop {
        match file.read(&mut piece)? {
            0 => return Ok(hex(&hash.finalize())),
            read => hash.update(&piece[..read]),
        }
    }
}

/// Which of files of these sizes belong to a share: each file, largest first, goes to the share that has least.
fn share_of(sizes: &[u64], share: usize, of: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..sizes.len()).collect();
    order.sort_by_key(|&index| (Reverse(sizes[index]), index));
    let mut shares = vec![(0, Vec::new()); of.max(1)];
    for index in order {
        let least = shares.iter_mut().min_by_key(|(bytes, _)| *bytes).expect("there is a share");
        least.0 += sizes[index];
        least.1.push(index);
    }
    shares.into_iter().nth(share).map(|(_, files)| files).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::share_of;

    #[test]
    fn every_file_is_in_one_share_and_shares_are_about_equal() {
        let sizes = [5, 1, 9, 3, 3, 4];
        let shares: Vec<Vec<usize>> = (0..3).map(|share| share_of(&sizes, share, 3)).collect();
        assert_eq!(shares, [vec![2], vec![0, 4], vec![5, 3, 1]]);
        assert_eq!(share_of(&sizes, 7, 8), [] as [usize; 0], "more shares than files");
    }
}
