//! The kernel calls of a rank's attention. Pure arithmetic.
//!
//! A call takes consecutive rows of queries against consecutive rows of keys. Rows of a tensor differ from positions of
//! the sequence: a rank has two chunks of the sequence, one from the front and one from the back
//! ([`zigzag`](super::zigzag)).
//!
//! Invariant: over all ranks, and all chunks of keys that a rank receives, every visible pair of query and key is
//! computed exactly once, and no other pair is.

use std::ops::Range;

use super::Documents;
use crate::options::AttentionOptions;

/// Consecutive positions of a sequence in consecutive rows of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Chunk {
    pub row: usize,
    pub position: usize,
    pub len: usize,
}

/// The chunks of a tensor that stores these positions one after the other, as few as possible.
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

/// The scores of one kernel call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ScoreBlock {
    pub samples: Range<usize>,
    /// Rows of the queries.
    pub queries: Range<usize>,
    /// Rows of the keys.
    pub keys: Range<usize>,
    /// Positions of the first query and the first key in the sequence.
    pub first: [usize; 2],
    /// The key position of the first query, counted from the first key.
    pub first_query: i64,
    /// Query `i` sees no key after `first_query + i`.
    pub causal: bool,
    /// Query `i` sees only keys less than this from `first_query + i`.
    pub window: Option<usize>,
    /// Several documents with separate attention: the first query and the first key of each, counted from those of the
    /// block. The last query of each has the position of its last key. Empty for a single document.
    pub documents: Vec<[usize; 2]>,
}

/// The mask within a document.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Mask {
    pub causal: bool,
    pub window: Option<usize>,
}

impl Mask {
    pub fn of(options: &AttentionOptions) -> Self {
        Self { causal: options.causal, window: options.window }
    }

    /// `queries` and `keys` without the queries that see none of the keys, and without the keys that no query sees.
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

    /// The mask without conditions that hide no key of `keys` from any of `queries`.
    fn needed(self, queries: &Range<usize>, keys: &Range<usize>) -> Self {
        let causal = self.causal && keys.end - 1 > queries.start;
        let behind = (queries.end - 1).saturating_sub(keys.start);
        let ahead = if self.causal { 0 } else { (keys.end - 1).saturating_sub(queries.start) };
        Self { causal, window: self.window.filter(|&window| behind.max(ahead) >= window) }
    }
}

/// The calls for `queries` and `keys` of `samples` samples. Without `joined`, no call spans rows whose positions are
/// not consecutive, because dropout counts positions from `ScoreBlock::first`.
pub(crate) fn blocks(
    [queries, keys]: [&[Chunk]; 2],
    mask: Mask,
    samples: usize,
    documents: Option<&Documents>,
    joined: bool,
) -> Vec<ScoreBlock> {
    let mut all = Vec::new();
    for (samples, starts) in groups(samples, documents) {
        if let Some(block) = causal_block([queries, keys], mask, &samples).filter(|_| joined && starts.len() == 1) {
            all.push(block);
            continue;
        }
        let mut found = Vec::new();
        for key in keys {
            for query in queries {
                found.extend(packed(of_documents([query, key], mask, &samples, starts), mask));
            }
        }
        if joined {
            join(&mut found);
        }
        all.extend(found);
    }
    all
}

/// Neighbouring samples with the same documents, and the starts of these.
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

/// All chunks in one call if queries and keys are in the same rows: a pure causal mask depends only on their order,
/// which is that of the rows.
fn causal_block([queries, keys]: [&[Chunk]; 2], mask: Mask, samples: &Range<usize>) -> Option<ScoreBlock> {
    let ascends = queries.windows(2).all(|pair| pair[0].position < pair[1].position);
    let (first, last) = (queries.first()?, queries.last()?);
    let rows = first.row..last.row + last.len;
    let fits = mask.causal && mask.window.is_none() && queries == keys && ascends;
    fits.then(|| ScoreBlock {
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

/// A call for each document with queries in one chunk that see keys in the other chunk.
fn of_documents([query, key]: [&Chunk; 2], mask: Mask, samples: &Range<usize>, starts: &[usize]) -> Vec<ScoreBlock> {
    let range = |chunk: &Chunk| chunk.position..chunk.position + chunk.len;
    let ends = starts[1..].iter().copied().chain([usize::MAX]);
    let documents = starts.iter().copied().zip(ends);
    let within = |chunk: Range<usize>, (start, end): (usize, usize)| chunk.start.max(start)..chunk.end.min(end);
    let block = |document| {
        let [queries, keys] = mask.trimmed(within(range(query), document), within(range(key), document))?;
        let needed = mask.needed(&queries, &keys);
        let rows =
            |of: &Chunk, range: &Range<usize>| of.row + range.start - of.position..of.row + range.end - of.position;
        Some(ScoreBlock {
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
    documents.filter_map(block).collect()
}

/// Joins neighbouring documents into one call if the last query of each has the position of its last key.
fn packed(blocks: Vec<ScoreBlock>, mask: Mask) -> Vec<ScoreBlock> {
    let mut packed: Vec<ScoreBlock> = Vec::new();
    for block in blocks {
        match packed.last_mut() {
            Some(last) if last.ends_together() && block.ends_together() && last.is_followed_by(&block) => {
                if last.documents.is_empty() {
                    last.documents.push([0, 0]);
                }
                last.documents.push([block.queries.start - last.queries.start, block.keys.start - last.keys.start]);
                last.queries.end = block.queries.end;
                last.keys.end = block.keys.end;
                last.causal = mask.causal;
                last.window = last.window.or(block.window);
            }
            _ => packed.push(block),
        }
    }
    packed
}

/// Joins calls without a mask if they share queries and their keys are consecutive, or the other way round.
fn join(blocks: &mut Vec<ScoreBlock>) {
    let open = |block: &ScoreBlock| !block.causal && block.window.is_none() && block.documents.is_empty();
    let mut at = 0;
    while at < blocks.len() {
        let this = blocks[at].clone();
        let fits = |other: &ScoreBlock| {
            let keys_follow = this.queries == other.queries && this.keys.end == other.keys.start;
            let queries_follow = this.keys == other.keys && this.queries.end == other.queries.start;
            open(&this) && open(other) && (keys_follow || queries_follow)
        };
        match blocks.iter().position(fits) {
            Some(other) => {
                let other = blocks.remove(other);
                let at_now = blocks.iter().position(|block| *block == this).expect("only the other one was taken out");
                blocks[at_now].queries.end = this.queries.end.max(other.queries.end);
                blocks[at_now].keys.end = this.keys.end.max(other.keys.end);
                at = 0;
            }
            None => at += 1,
        }
    }
}

impl ScoreBlock {
    /// Whether the last query has the position of the last key.
    fn ends_together(&self) -> bool {
        let [query, key] = self.first;
        query + self.queries.len() == key + self.keys.len()
    }

    /// Whether `next` has the following rows.
    fn is_followed_by(&self, next: &ScoreBlock) -> bool {
        self.queries.end == next.queries.start && self.keys.end == next.keys.start
    }

    /// A call for each document.
    pub fn by_document(&self) -> Vec<ScoreBlock> {
        if self.documents.is_empty() {
            return vec![self.clone()];
        }
        let end = [self.queries.len(), self.keys.len()];
        let ends = self.documents[1..].iter().copied().chain([end]);
        let block = |([query, key], [query_end, key_end]): ([usize; 2], [usize; 2])| ScoreBlock {
            samples: self.samples.clone(),
            queries: self.queries.start + query..self.queries.start + query_end,
            keys: self.keys.start + key..self.keys.start + key_end,
            first: [self.first[0] + query, self.first[1] + key],
            first_query: (key_end - key) as i64 - (query_end - query) as i64,
            causal: self.causal,
            window: self.window,
            documents: vec![],
        };
        self.documents.iter().copied().zip(ends).map(block).collect()
    }

    /// The mask of the call.
    pub fn options(&self, options: AttentionOptions) -> AttentionOptions {
        AttentionOptions { causal: self.causal, window: self.window, ..options }
    }
}

#[cfg(test)]
mod tests;
