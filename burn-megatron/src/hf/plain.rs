//! Elements of a tensor that a file holds as they are.

use std::io;

use models::names::Run;
use rayon::prelude::*;

use super::tensors::Stored;
use crate::positioned;

/// Matrix rows of ours that are gathered at a time from a transposed matrix: one cache line of most types.
const TILE: usize = 32;

/// Fills `to` with the elements of runs of a tensor, in their order; `size` is the bytes of one.
pub(super) fn read_plain(tensor: &Stored, runs: &[Run], size: usize, to: &mut [u8]) -> io::Result<()> {
    if runs.iter().all(|run| run.step == 1) {
        let mut at = 0;
        // Runs that follow each other are one.
        let joined = runs.chunk_by(|first, second| first.start + first.len == second.start).map(|runs| {
            let bytes = runs.iter().map(|run| run.len).sum::<usize>() * size;
            let run = positioned::Run { from: runs[0].start * size, to: at, bytes };
            at += bytes;
            run
        });
        return tensor.read_runs(joined, to);
    }
    match size {
        2 => gather::<2>(tensor, runs, to),
        4 => gather::<4>(tensor, runs, to),
        _ => gather::<8>(tensor, runs, to),
    }
}

/// The elements of a transposed matrix are not contiguous: all between the first and the last are read, and ours are
/// taken from them.
fn gather<const SIZE: usize>(tensor: &Stored, runs: &[Run], to: &mut [u8]) -> io::Result<()> {
    let ends = runs.iter().filter(|run| run.len > 0).map(|run| (run.start, run.start + (run.len - 1) * run.step + 1));
    let Some((start, end)) = ends.reduce(|a, b| (a.0.min(b.0), a.1.max(b.1))) else { return Ok(()) };
    let mut span = vec![0; (end - start) * SIZE];
    let whole = positioned::Run { from: start * SIZE, to: 0, bytes: span.len() };
    tensor.read_runs([whole].into_iter(), &mut span)?;
    let (span, to) = (span.as_chunks::<SIZE>().0, to.as_chunks_mut::<SIZE>().0);
    let len = runs[0].len;
    to.par_chunks_mut(TILE * len).zip(runs.par_chunks(TILE)).for_each(|(to, runs)| {
        for index in 0..len {
            for (row, run) in runs.iter().enumerate() {
                to[row * len + index] = span[run.start + index * run.step - start];
            }
        }
    });
    Ok(())
}

/// Fills each matrix row of `to`, on all cores.
pub(super) fn by_row(
    rows: usize,
    to: &mut [u8],
    fill: impl Fn(usize, &mut [u8]) -> io::Result<()> + Sync,
) -> io::Result<()> {
    if to.is_empty() {
        return Ok(());
    }
    let row = to.len() / rows;
    to.par_chunks_mut(row).enumerate().try_for_each(|(row, to)| fill(row, to))
}
