//! Which scores a rank computes, and in which calls of a kernel. Numbers only.
//!
//! A call takes queries in consecutive rows against keys in consecutive rows. Rows and positions run apart: a rank has
//! two chunks of the sequence, one from the front and one from the back ([`zigzag`](super::zigzag)).
//!
//! Invariant: over all ranks and all chunks of keys that a rank meets, every query meets every key that it sees exactly
//! once, and no other.

use std::ops::Range;

use super::Documents;
use crate::ops::options::AttentionOptions;

/// Consecutive positions of a sequence in consecutive rows of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Chunk {
    pub row: usize,
    pub position: usize,
    pub len: usize,
}

/// The rows of a tensor that holds these positions one after the other, in as few chunks as possible.
pub(crate) fn chunks(positions: impl IntoIterator<Item = Range<usize>>) -> Vec<Chunk> {
    let mut chunks: Vec<Chunk> = Vec::new();
    let mut row = 0;
    for range in positions.into_iter().filter(|range| !range.is_empty()) {
        match chunks.last_mut() {
            Some(last) if last.position + last.len == range.start => last.len += range.len(),
            _ => chunks.push(Chunk { row, position: range.start, len: range.len() }),
        }
        row += range.len();
    }
    chunks
}

/// One call of a kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Piece {
    pub samples: Range<usize>,
    /// Rows of the queries.
    pub queries: Range<usize>,
    /// Rows of the keys.
    pub keys: Range<usize>,
    /// Positions of the first query and the first key in the sequence.
    pub first: [usize; 2],
    /// At which of these keys the first query stands.
    pub first_query: i64,
    /// Query `i` sees no key after `first_query + i`.
    pub causal: bool,
    /// Query `i` sees only keys less than this from `first_query + i`.
    pub window: Option<usize>,
    /// Several documents that do not see each other: where the queries and the keys of each begin, counted from the
    /// first. The last query of each stands at its last key. Empty for a single one.
    pub documents: Vec<[usize; 2]>,
}

/// What decides who sees whom within a document.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sight {
    pub causal: bool,
    pub window: Option<usize>,
}

impl Sight {
    pub fn of(options: &AttentionOptions) -> Self {
        Self { causal: options.causal, window: options.window }
    }

    /// What is left of positions `queries` and `keys` without the queries that see none of the keys, and without the
    /// keys that none of the others sees.
    fn trimmed(self, mut queries: Range<usize>, mut keys: Range<usize>) -> Option<[Range<usize>; 2]> {
        let reach = self.window.map_or(usize::MAX, |window| window - 1);
        if queries.is_empty() || keys.is_empty() {
            return None;
        }
        let ahead = if self.causal { 0 } else { reach };
        queries.start = queries.start.max(keys.start.saturating_sub(ahead));
        queries.end = queries.end.min(keys.end.saturating_add(reach));
        if queries.is_empty() {
            return None;
        }
        keys.start = keys.start.max(queries.start.saturating_sub(reach));
        keys.end = keys.end.min(queries.end.saturating_add(ahead));
        Some([queries, keys])
    }

    /// Without what hides none of the keys from any of the queries.
    fn needed(self, queries: &Range<usize>, keys: &Range<usize>) -> Self {
        let causal = self.causal && keys.end - 1 > queries.start;
        let behind = (queries.end - 1).saturating_sub(keys.start);
        let ahead = if self.causal { 0 } else { (keys.end - 1).saturating_sub(queries.start) };
        Self { causal, window: self.window.filter(|&window| behind.max(ahead) >= window) }
    }
}

/// The calls for `queries` and `keys` of `samples` samples. Without `joined`, no call spans rows whose positions are
/// not consecutive: what dropout needs, which counts from `Piece::first`.
pub(crate) fn pieces(
    [queries, keys]: [&[Chunk]; 2],
    sight: Sight,
    samples: usize,
    documents: Option<&Documents>,
    joined: bool,
) -> Vec<Piece> {
    let mut all = Vec::new();
    for (samples, starts) in groups(samples, documents) {
        if let Some(piece) = ladder([queries, keys], sight, &samples).filter(|_| joined && starts.len() == 1) {
            all.push(piece);
            continue;
        }
        let mut found = Vec::new();
        for key in keys {
            for query in queries {
                found.extend(packed(of_documents([query, key], sight, &samples, starts), sight));
            }
        }
        if joined {
            join(&mut found);
        }
        all.extend(found);
    }
    all
}

/// Neighbouring samples with the same documents, and where these begin.
fn groups(samples: usize, documents: Option<&Documents>) -> Vec<(Range<usize>, &[usize])> {
    let Some(documents) = documents else { return vec![(0..samples, &[0])] };
    let mut groups: Vec<(Range<usize>, &[usize])> = Vec::new();
    for sample in 0..samples {
        let starts = documents.starts(sample);
        match groups.last_mut() {
            Some((group, same)) if *same == starts => group.end += 1,
            _ => groups.push((sample..sample + 1, starts)),
        }
    }
    groups
}

/// All chunks at once if queries and keys lie in the same rows: under a causal mask alone only their order counts,
/// which is that of the rows.
fn ladder([queries, keys]: [&[Chunk]; 2], sight: Sight, samples: &Range<usize>) -> Option<Piece> {
    let ascends = queries.windows(2).all(|pair| pair[0].position < pair[1].position);
    let (first, last) = (queries.first()?, queries.last()?);
    let rows = first.row..last.row + last.len;
    let fits = sight.causal && sight.window.is_none() && queries == keys && ascends;
    fits.then(|| Piece {
        samples: samples.clone(),
        queries: rows.clone(),
        keys: rows,
        first: [first.position; 2],
        first_query: 0,
        causal: true,
        window: None,
        documents: vec![],
    })
}

/// A call for each document that has queries in one chunk and keys in the other which see each other.
fn of_documents([query, key]: [&Chunk; 2], sight: Sight, samples: &Range<usize>, starts: &[usize]) -> Vec<Piece> {
    let range = |chunk: &Chunk| chunk.position..chunk.position + chunk.len;
    let ends = starts[1..].iter().copied().chain([usize::MAX]);
    let documents = starts.iter().copied().zip(ends);
    let within = |chunk: Range<usize>, (start, end): (usize, usize)| chunk.start.max(start)..chunk.end.min(end);
    let piece = |document| {
        let [queries, keys] = sight.trimmed(within(range(query), document), within(range(key), document))?;
        let needed = sight.needed(&queries, &keys);
        let rows =
            |of: &Chunk, range: &Range<usize>| of.row + range.start - of.position..of.row + range.end - of.position;
        Some(Piece {
            samples: samples.clone(),
            queries: rows(query, &queries),
            keys: rows(key, &keys),
            first: [queries.start, keys.start],
            first_query: queries.start as i64 - keys.start as i64,
            causal: needed.causal,
            window: needed.window,
            documents: vec![],
        })
    };
    documents.filter_map(piece).collect()
}

/// Neighbouring documents in one call, where the last query of each stands at its last key.
fn packed(pieces: Vec<Piece>, sight: Sight) -> Vec<Piece> {
    let mut packed: Vec<Piece> = Vec::new();
    for piece in pieces {
        match packed.last_mut() {
            Some(last) if last.ends_together() && piece.ends_together() && last.goes_on_with(&piece) => {
                if last.documents.is_empty() {
                    last.documents.push([0, 0]);
                }
                last.documents.push([piece.queries.start - last.queries.start, piece.keys.start - last.keys.start]);
                last.queries.end = piece.queries.end;
                last.keys.end = piece.keys.end;
                last.causal = sight.causal;
                last.window = last.window.or(piece.window);
            }
            _ => packed.push(piece),
        }
    }
    packed
}

/// Calls without a mask that share their queries and have neighbouring keys, or the other way round, become one.
fn join(pieces: &mut Vec<Piece>) {
    let open = |piece: &Piece| !piece.causal && piece.window.is_none() && piece.documents.is_empty();
    let mut at = 0;
    while at < pieces.len() {
        let this = pieces[at].clone();
        let fits = |other: &Piece| {
            let keys_follow = this.queries == other.queries && this.keys.end == other.keys.start;
            let queries_follow = this.keys == other.keys && this.queries.end == other.queries.start;
            open(&this) && open(other) && (keys_follow || queries_follow)
        };
        match pieces.iter().position(fits) {
            Some(other) => {
                let other = pieces.remove(other);
                let at_now = pieces.iter().position(|piece| *piece == this).expect("only the other one was taken out");
                pieces[at_now].queries.end = this.queries.end.max(other.queries.end);
                pieces[at_now].keys.end = this.keys.end.max(other.keys.end);
                at = 0;
            }
            None => at += 1,
        }
    }
}

impl Piece {
    /// Whether the last query stands at the last key.
    fn ends_together(&self) -> bool {
        let [query, key] = self.first;
        query + self.queries.len() == key + self.keys.len()
    }

    /// Whether the rows of `next` are the next ones.
    fn goes_on_with(&self, next: &Piece) -> bool {
        self.queries.end == next.queries.start && self.keys.end == next.keys.start
    }

    /// A call for each document.
    pub fn apart(&self) -> Vec<Piece> {
        if self.documents.is_empty() {
            return vec![self.clone()];
        }
        let end = [self.queries.len(), self.keys.len()];
        let ends = self.documents[1..].iter().copied().chain([end]);
        let piece = |([query, key], [query_end, key_end]): ([usize; 2], [usize; 2])| Piece {
            samples: self.samples.clone(),
            queries: self.queries.start + query..self.queries.start + query_end,
            keys: self.keys.start + key..self.keys.start + key_end,
            first: [self.first[0] + query, self.first[1] + key],
            first_query: (key_end - key) as i64 - (query_end - query) as i64,
            causal: self.causal,
            window: self.window,
            documents: vec![],
        };
        self.documents.iter().copied().zip(ends).map(piece).collect()
    }

    /// The mask of the call.
    pub fn options(&self, options: AttentionOptions) -> AttentionOptions {
        AttentionOptions { causal: self.causal, window: self.window, ..options }
    }
}

#[cfg(test)]
mod tests;
