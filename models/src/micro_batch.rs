//! What layers must know of the micro-batch that they compute.

use std::ops::Range;
use std::sync::Arc;

use backend_dist::ops::context::{ContextParallel, Documents};
use backend_dist::ops::fp8::{Sharing, with_sharing};

use crate::layers::DropoutKey;

/// What layers must know of a micro-batch besides its activations. The default is a whole sequence on each rank, of one
/// document, without dropout.
#[derive(Clone, Debug, Default)]
pub struct MicroBatch {
    /// With a key, dropout is applied.
    pub dropout: Option<DropoutKey>,
    /// The ranks that share the sequences, each with some of the positions.
    pub context: Option<ContextParallel>,
    /// Blocks of replicas that share sequences in this pass, of all replicas, where they differ in size.
    pub blocks: Option<Arc<[Range<usize>]>>,
    /// Attention does not cross the borders of documents.
    pub documents: Option<Documents>,
    /// Positions count from the start of each of these documents, not from that of the sequence.
    pub restarts: Option<Documents>,
    /// What the gradients of auxiliary losses, means over the tokens of the micro-batch, are multiplied with.
    pub auxiliary: f64,
    /// The place in every sequence from which on tokens only fill it up: no expert gets any of them, and no router
    /// counts them (Megatron-LM's `padding_mask`). At 0 nothing means anything: it is computed because other ranks wait
    /// for this one.
    pub filled_from: Option<usize>,
}

impl MicroBatch {
    /// With dropout from this key, if there is one.
    pub fn with_dropout(dropout: Option<DropoutKey>) -> Self {
        Self { dropout, ..Self::default() }
    }

    /// The places of this rank's `rows` rows in the whole sequence, in the order of the rows.
    pub fn places(&self, rows: usize) -> Vec<Range<usize>> {
        match &self.context {
            Some(context) if context.group.size() > 1 => context.positions(rows).to_vec(),
            _ => Vec::from([0..rows]),
        }
    }

    /// Runs layers whose FP8 scales are those of all tokens of the micro-batch, on whichever ranks they are.
    pub(crate) fn in_whole<T>(&self, layers: impl FnOnce() -> T) -> T {
        let ranks = self.context.as_ref().map(|context| context.group.clone());
        let is_nothing = self.filled_from == Some(0);
        with_sharing(Sharing { ranks, blocks: self.blocks.clone(), is_nothing }, layers)
    }

    /// Rows of the whole sequence of which this rank has `rows`.
    pub fn sequence_length(&self, rows: usize) -> usize {
        rows * self.context.as_ref().map_or(1, |context| context.group.size())
    }
}

/// Rows `rows` of what lies at `places` one after the other.
pub(crate) fn part_of(places: &[Range<usize>], rows: Range<usize>) -> Vec<Range<usize>> {
    let mut before = 0;
    let cut = |place: &Range<usize>| {
        let start = place.start + rows.start.saturating_sub(before).min(place.len());
        let end = place.start + rows.end.saturating_sub(before).min(place.len());
        before += place.len();
        start..end
    };
    places.iter().map(cut).filter(|part| !part.is_empty()).collect()
}

/// The positions of the tokens at `places` of every sample, counted from the start of their document: of all samples at
/// the first place, then of all at the next.
pub(crate) fn positions_in_documents(places: &[Range<usize>], documents: &Documents) -> Vec<usize> {
    let samples = 0..documents.samples();
    let position = |sample: usize, place: usize| {
        let starts = documents.starts(sample);
        place - starts[starts.partition_point(|start| *start <= place) - 1]
    };
    let row = |place: usize| samples.clone().map(move |sample| position(sample, place));
    places.iter().cloned().flatten().flat_map(row).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_of_two_chunks_may_touch_both() {
        let places = [2..4, 10..12];
        assert_eq!(part_of(&places, 0..4), places);
        assert_eq!(part_of(&places, 1..3), [3..4, 10..11]);
        assert_eq!(part_of(&places, 2..4), [10..12]);
    }

    #[test]
    fn positions_count_from_the_start_of_their_document() {
        let documents = Documents::new(vec![vec![0, 3], vec![0, 1, 4]]);
        let whole = Vec::from([0..6]);
        assert_eq!(positions_in_documents(&whole, &documents), [0, 0, 1, 0, 2, 1, 0, 2, 1, 0, 2, 1]);
        assert_eq!(positions_in_documents(&[1..2, 4..5], &documents), [1, 0, 1, 0]);
    }
}
