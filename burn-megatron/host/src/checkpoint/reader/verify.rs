//! Whether files are still what was written.

use std::cmp::Reverse;
use std::io;
use std::path::Path;

use super::super::error::{CheckpointError, Result};
use super::super::hashes;
use super::super::manifest::SavedFile;
use super::{Checkpoint, find};
use crate::positioned::PositionedFile;

impl Checkpoint {
    /// Compares the hashes of this share of the files, one of `of` that are about equally large, with those that were
    /// taken when they were written, so that ranks can share the work. Returns the bytes that were read.
    ///
    /// # Errors
    /// Names the file that has changed or cannot be read.
    pub fn verify(&self, share: usize, of: usize) -> Result<u64> {
        let files: Vec<&SavedFile> = self.manifest.files.iter().chain(&self.manifest.tokenizer).collect();
        let sizes: Vec<u64> = files.iter().map(|file| file.bytes).collect();
        let mut bytes = 0;
        for index in share_of(&sizes, share, of) {
            let file = files[index];
            let path = self.path.join(&file.name);
            let flaw = flaw(&path, file).map_err(|cause| CheckpointError::io("read", &path, cause))?;
            if let Some(what) = flaw {
                let what = format!("has changed since it was written: {what}; it is damaged, restore it");
                return Err(find::with_others(CheckpointError::file(&path, what), &self.path));
            }
            bytes += file.bytes;
        }
        Ok(bytes)
    }
}

/// How the contents of a file differ from what was written.
fn flaw(path: &Path, saved: &SavedFile) -> io::Result<Option<String>> {
    let file = PositionedFile::open(path)?;
    if file.size() != saved.bytes {
        return Ok(Some(format!("it has {} bytes, the manifest says {}", file.size(), saved.bytes)));
    }
    if saved.pieces.is_empty() {
        let found = hashes::of_file(&file)?;
        return Ok(
            (found != saved.sha256).then(|| format!("its sha256 is {found}, the manifest says {}", saved.sha256))
        );
    }
    Ok(hashes::first_changed(&file, &saved.pieces)?.map(|(index, found)| {
        let (start, expected) = (index * hashes::PIECE, &saved.pieces[index]);
        format!("the sha256 of the 64 MiB from byte {start} on is {found}, the manifest says {expected}")
    }))
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
