//! Many runs of bytes of a file, read on all cores.
//!
//! Threads help even where the file is in the system's cache: most of the time is the copy, and the first touch of the
//! memory that is read to.

use std::io;
use std::mem::take;

use rayon::prelude::*;

use super::PositionedFile;

/// Bytes that are worth another thread.
const PIECE: usize = 4 << 20;
/// Runs of at least so many bytes are read where they belong. Shorter ones are read together and copied.
const LONG: usize = 64 << 10;
/// Bytes between two short runs that are read along with them: no slower than a second call of the system.
const GAP: usize = 16 << 10;
/// Bytes that are read at a time for short runs.
const BLOCK: usize = 1 << 20;

/// Bytes that are contiguous in a file and where they are read to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// Where they begin in the file.
    pub from: usize,
    /// Where they belong.
    pub to: usize,
    /// How many they are.
    pub bytes: usize,
}

impl PositionedFile {
    /// Reads runs to where they belong in `to`, in ascending order there. In the file they are counted from byte `start`
    /// on.
    ///
    /// # Errors
    /// If the file ends too early, or the system refuses.
    pub fn read_runs(&self, start: u64, runs: impl Iterator<Item = Run>, to: &mut [u8]) -> io::Result<()> {
        let mut pieces = pieces(runs, to);
        if let [piece] = &mut pieces[..] {
            return self.read_piece(start, piece);
        }
        let read = pieces.par_iter_mut().map(|piece| self.read_piece(start, piece));
        // The first failure in the order of the runs, whichever thread was faster.
        read.collect::<Vec<_>>().into_iter().collect()
    }

    fn read_piece(&self, start: u64, Piece { runs, to }: &mut Piece) -> io::Result<()> {
        let (mut block, mut rest) = (Vec::new(), &runs[..]);
        while let [first, others @ ..] = rest {
            if first.bytes >= LONG {
                self.read_into(start + first.from as u64, &mut to[first.to..][..first.bytes])?;
                rest = others;
                continue;
            }
            let mut end = first.from + first.bytes;
            let others = others.iter().take_while(|run| {
                let is_near = run.bytes < LONG
                    && (end..=end + GAP).contains(&run.from)
                    && run.from + run.bytes <= first.from + BLOCK;
                end = if is_near { run.from + run.bytes } else { end };
                is_near
            });
            let (together, later) = rest.split_at(1 + others.count());
            block.resize(end - first.from, 0);
            self.read_into(start + first.from as u64, &mut block)?;
            for run in together {
                to[run.to..][..run.bytes].copy_from_slice(&block[run.from - first.from..][..run.bytes]);
            }
            rest = later;
        }
        Ok(())
    }
}

/// What one thread reads: runs, and the memory between the first and the last of them.
struct Piece<'a> {
    runs: Vec<Run>,
    to: &'a mut [u8],
}

/// Divides runs into pieces of about the same size. Longer runs are split.
fn pieces(runs: impl Iterator<Item = Run>, to: &mut [u8]) -> Vec<Piece<'_>> {
    let split = |Run { from, to, bytes }: Run| {
        let part = move |at: usize| Run { from: from + at, to: to + at, bytes: PIECE.min(bytes - at) };
        (0..bytes).step_by(PIECE).map(part)
    };
    let (mut pieces, mut piece, mut filled) = (Vec::new(), Vec::new(), 0);
    // What is left of `to`, and where it begins.
    let (mut rest, mut at) = (to, 0);
    let mut runs = runs.flat_map(split).peekable();
    while let Some(run) = runs.next() {
        filled += run.bytes;
        piece.push(run);
        if filled < PIECE && runs.peek().is_some() {
            continue;
        }
        let (first, end) = (piece[0].to, run.to + run.bytes);
        let (window, later) = take(&mut rest)[first - at..].split_at_mut(end - first);
        piece.iter_mut().for_each(|run: &mut Run| run.to -= first);
        pieces.push(Piece { runs: take(&mut piece), to: window });
        (rest, at, filled) = (later, end, 0);
    }
    pieces
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// A file of these bytes after 24 others.
    fn file(contents: &[u8]) -> (tempfile::TempDir, PositionedFile) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        std::fs::write(&path, [&[0; 24], contents].concat()).unwrap();
        let file = PositionedFile::open(&path).unwrap();
        (folder, file)
    }

    fn contents(len: usize) -> Vec<u8> {
        (0..len as u32).map(|i| (i.wrapping_mul(0x9E37_79B9) >> 24) as u8).collect()
    }

    /// Reads `lens` bytes each after `gaps` in the file and in memory, and says which are wrong.
    fn check(file: &PositionedFile, contents: &[u8], lens: &[usize], gaps: [usize; 2]) {
        let (mut runs, mut from, mut to) = (Vec::new(), 0, 0);
        for &bytes in lens {
            (from, to) = (from + gaps[0], to + gaps[1]);
            runs.push(Run { from, to, bytes });
            (from, to) = (from + bytes, to + bytes);
        }
        let mut read = vec![7; to + gaps[1]];
        let mut expected = read.clone();
        for run in &runs {
            expected[run.to..][..run.bytes].copy_from_slice(&contents[run.from..][..run.bytes]);
        }
        file.read_runs(24, runs.into_iter(), &mut read).unwrap();
        assert!(read == expected, "{} runs with gaps {gaps:?}", lens.len());
    }

    /// Short runs in one block, short runs that are too far from each other, runs over blocks, long ones, and ones of
    /// several pieces.
    #[test]
    fn runs_of_any_length_and_distance_arrive_where_they_belong() {
        let contents = contents(20 << 20);
        let (_folder, file) = file(&contents);
        check(&file, &contents, &[], [0, 0]);
        check(&file, &contents, &[1], [5, 0]);
        check(&file, &contents, &[2; 100_000], [14, 1]);
        check(&file, &contents, &[100; 40], [GAP, 0]);
        check(&file, &contents, &[100; 40], [GAP + 1, 3]);
        check(&file, &contents, &[LONG, LONG - 1, 10, LONG + 1, 1], [9, 9]);
        check(&file, &contents, &[2 * PIECE + 3, 5, PIECE, 1], [77, 0]);
        check(&file, &contents, &[LONG; 200], [10, 0]);
        // Backwards in the file, as matrix rows that another system stores in another order.
        let mut read = vec![0; 300];
        let runs = [(200, 0), (100, 100), (0, 200)].map(|(from, to)| Run { from, to, bytes: 100 });
        file.read_runs(24, runs.into_iter(), &mut read).unwrap();
        assert_eq!(read, [&contents[200..300], &contents[100..200], &contents[..100]].concat());
    }

    #[test]
    fn of_a_truncated_file_the_first_missing_piece_is_told() {
        let (_folder, file) = file(&contents(1 << 20));
        let run = Run { from: 0, to: 0, bytes: 4 * PIECE };
        let error = file.read_runs(24, [run].into_iter(), &mut vec![0; 4 * PIECE]).unwrap_err();
        assert!(error.to_string().contains(&format!("byte {} is needed", 24 + PIECE)), "{error}");
    }

    proptest! {
        #[test]
        fn any_runs_arrive(lens in prop::collection::vec(0usize..200_000, 0..30), gaps in [0usize..40_000, 0usize..100]) {
            let contents = contents(8 << 20);
            let (_folder, file) = file(&contents);
            check(&file, &contents, &lens, gaps);
        }
    }
}
