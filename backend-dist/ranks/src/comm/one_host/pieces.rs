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

    /// The range of a member's source that another one reads, and what has arrived of it.
    struct Sent {
        from: usize,
        range: usize,
        bytes: Vec<u8>,
        arrived: Vec<Option<u8>>,
    }

    impl Sent {
        fn new(from: usize, range: usize, size: usize) -> Self {
            let byte = |at: usize| (from * 101 + range * 53 + at * 7) as u8;
            Self { from, range, bytes: (0..size).map(byte).collect(), arrived: vec![None; size] }
        }

        fn piece(&self, packed: &Packed, round: usize, buffer: usize) -> Option<Piece> {
            piece(packed.start(self.range, self.bytes.len()).unwrap(), self.bytes.len(), round, buffer)
        }
    }

    proptest! {
        /// An all-to-all of random sizes, zero among them, through a small buffer of each member.
        #[test]
        fn every_byte_arrives_once(
            sizes in prop::collection::vec(prop::collection::vec(0usize..3000, 1..5), 2..5),
            buffer in 1usize..9,
        ) {
            let buffer = buffer * ALIGNMENT;
            let packed: Vec<Packed> = sizes.iter().map(|sizes| Packed::of(sizes.iter().copied())).collect();
            let told: Vec<Packed> = packed.iter().map(|packed| Packed::from_bytes(&packed.to_bytes())).collect();
            let of_member = |(from, sizes): (usize, &Vec<usize>)| {
                sizes.iter().enumerate().map(|(range, &size)| Sent::new(from, range, size)).collect::<Vec<_>>()
            };
            let mut all: Vec<Sent> = sizes.iter().enumerate().flat_map(of_member).collect();
            for round in 0..packed.iter().map(|packed| packed.rounds(buffer)).max().unwrap() {
                let mut buffers = vec![vec![None; buffer]; sizes.len()];
                for sent in &all {
                    if let Some(piece) = sent.piece(&packed[sent.from], round, buffer) {
                        for at in 0..piece.bytes {
                            let place = &mut buffers[sent.from][piece.buffer + at];
                            prop_assert_eq!(place.replace(sent.bytes[piece.range + at]), None, "two share a place");
                        }
                    }
                }
                for sent in &mut all {
                    if let Some(piece) = sent.piece(&told[sent.from], round, buffer) {
                        for at in 0..piece.bytes {
                            let byte = buffers[sent.from][piece.buffer + at];
                            prop_assert_eq!(std::mem::replace(&mut sent.arrived[piece.range + at], byte), None);
                        }
                    }
                }
            }
            for sent in all {
                prop_assert_eq!(sent.arrived, sent.bytes.into_iter().map(Some).collect::<Vec<_>>());
            }
        }

        /// A member that offers less than a peer expects, or sends anything else, is not read.
        #[test]
        fn nothing_is_read_beyond_a_range(
            told in prop::collection::vec(any::<u8>(), 0..60),
            range in 0usize..9,
            bytes in 1usize..5000,
        ) {
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
