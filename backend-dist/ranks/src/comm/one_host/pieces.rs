//! Sources that go through a buffer of fixed size: one piece of it after the other, in rounds.

/// Each range of a source begins at a multiple of this many bytes behind the ranges before it.
const ALIGNMENT: usize = 256;

/// The ranges of a source that other members read, one behind the other.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Packed {
    /// Where each range begins, and where the last one ends.
    bounds: Vec<usize>,
}

/// A part of a range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Piece {
    /// Its first byte in the buffer.
    pub buffer: usize,
    /// Its first byte in the range.
    pub range: usize,
    pub bytes: usize,
}

impl Packed {
    /// Ranges of these sizes.
    pub(crate) fn of(bytes: impl IntoIterator<Item = usize>) -> Self {
        let mut bounds = vec![0];
        for bytes in bytes {
            let end: usize = bounds[bounds.len() - 1];
            bounds.push(end + bytes.next_multiple_of(ALIGNMENT));
        }
        Self { bounds }
    }

    /// Where `bytes` bytes of a range begin, if it has so many.
    pub(crate) fn start(&self, range: usize, bytes: usize) -> Option<usize> {
        let (start, end) = (*self.bounds.get(range)?, *self.bounds.get(range + 1)?);
        (end.checked_sub(start)? >= bytes).then_some(start)
    }

    /// How often a buffer of this size is filled.
    pub(crate) fn rounds(&self, buffer: usize) -> usize {
        self.bounds.last().map_or(0, |end| end.div_ceil(buffer))
    }

    pub(crate) fn to_bytes(&self) -> Vec<u8> {
        self.bounds.iter().flat_map(|bound| (*bound as u64).to_le_bytes()).collect()
    }

    /// What [`to_bytes`](Self::to_bytes) has written.
    pub(crate) fn from_bytes(bytes: &[u8]) -> Self {
        let (bounds, _) = bytes.as_chunks::<8>();
        Self { bounds: bounds.iter().map(|bound| u64::from_le_bytes(*bound) as usize).collect() }
    }
}

/// The part of a range, of `bytes` bytes from `start` on, that is in the buffer in a round.
pub(crate) fn piece(start: usize, bytes: usize, round: usize, buffer: usize) -> Option<Piece> {
    let (first, last) = (start.max(round * buffer), (start + bytes).min((round + 1) * buffer));
    (first < last).then(|| Piece { buffer: first - round * buffer, range: first - start, bytes: last - first })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// An all-to-all of random sizes, zero among them, through a small buffer of each member.
        #[test]
        fn every_byte_arrives_once(
            members in 2usize..5,
            sizes in prop::collection::vec(0usize..3000, 16),
            buffer in 1usize..9,
        ) {
            let (buffer, size) = (buffer * ALIGNMENT, |from: usize, to: usize| sizes[from * 4 + to]);
            let byte = |from: usize, to: usize, at: usize| (from * 101 + to * 53 + at * 7) as u8;
            let packed: Vec<Packed> = (0..members).map(|from| Packed::of((0..members).map(|to| size(from, to)))).collect();
            let rounds = packed.iter().map(|packed| packed.rounds(buffer)).max().unwrap();
            let mut found: Vec<Vec<Vec<u8>>> =
                (0..members).map(|to| (0..members).map(|from| vec![0; size(from, to)]).collect()).collect();
            for round in 0..rounds {
                let filled = |from: usize| {
                    let mut filled = vec![0; buffer];
                    for to in 0..members {
                        let start = packed[from].start(to, size(from, to)).unwrap();
                        if let Some(Piece { buffer, range, bytes }) = piece(start, size(from, to), round, buffer) {
                            (0..bytes).for_each(|at| filled[buffer + at] = byte(from, to, range + at));
                        }
                    }
                    filled
                };
                for from in 0..members {
                    let (filled, told) = (filled(from), Packed::from_bytes(&packed[from].to_bytes()));
                    for to in 0..members {
                        let start = told.start(to, size(from, to)).unwrap();
                        if let Some(Piece { buffer, range, bytes }) = piece(start, size(from, to), round, buffer) {
                            let target = &mut found[to][from][range..range + bytes];
                            prop_assert!(target.iter().all(|byte| *byte == 0), "a byte arrives twice");
                            target.copy_from_slice(&filled[buffer..buffer + bytes]);
                        }
                    }
                }
            }
            for to in 0..members {
                for from in 0..members {
                    let expected: Vec<u8> = (0..size(from, to)).map(|at| byte(from, to, at)).collect();
                    prop_assert_eq!(&found[to][from], &expected);
                }
            }
        }

        /// A member that offers less than a peer expects, or sends anything else, is not read.
        #[test]
        fn nothing_is_read_beyond_a_range(told in prop::collection::vec(any::<u8>(), 0..60), range in 0usize..9, bytes in 1usize..5000) {
            let told = Packed::from_bytes(&told);
            if let Some(start) = told.start(range, bytes) {
                prop_assert!(told.bounds[range + 1] - start >= bytes);
            }
            let packed = Packed::of([bytes, 0]);
            prop_assert_eq!(packed.start(1, bytes), None);
            prop_assert_eq!(packed.start(2, 0), None);
            prop_assert_eq!(packed.start(0, bytes.next_multiple_of(ALIGNMENT) + 1), None);
        }
    }
}
