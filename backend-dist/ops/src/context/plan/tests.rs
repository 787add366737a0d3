use super::*;
use crate::context::zigzag;
use proptest::prelude::*;

fn one(rows: Range<usize>) -> Vec<Chunk> {
    chunks([rows])
}

fn causal(window: Option<usize>) -> Mask {
    Mask { causal: true, window }
}

/// Ranges of queries and keys of each call, and whether it has a causal mask.
fn shapes(blocks: &[ScoreBlock]) -> Vec<(Range<usize>, Range<usize>, bool)> {
    blocks.iter().map(|block| (block.queries.clone(), block.keys.clone(), block.causal)).collect()
}

#[test]
fn a_causal_ring_takes_one_call_a_step() {
    let of = |rank: usize| chunks(zigzag(rank, 4, 16));
    let calls = |queries: usize, keys: usize| blocks([&of(queries), &of(keys)], causal(None), 2, None, true);
    assert_eq!(shapes(&calls(1, 1)), [(0..16, 0..16, true)]);
    assert_eq!(shapes(&calls(1, 0)), [(0..16, 0..8, false)], "keys of a rank before: their first chunk for all");
    assert_eq!(shapes(&calls(1, 3)), [(8..16, 0..16, false)], "keys of a rank behind: all for the second chunk");
}

#[test]
fn a_window_leaves_out_what_nobody_sees() {
    let calls = blocks([&one(8..16), &one(0..8)], causal(Some(3)), 1, None, true);
    assert_eq!(shapes(&calls), [(0..0, 0..0, false)].map(|_| (0..2, 6..8, false)), "8 sees 6 and 7, 9 sees 7");
    assert_eq!(calls[0].window, Some(3));
    assert_eq!((calls[0].first, calls[0].first_query), ([8, 6], 2));
    assert!(blocks([&one(10..16), &one(0..8)], causal(Some(3)), 1, None, true).is_empty());
}

#[test]
fn documents_of_a_chunk_are_packed() {
    let documents = Documents::new(vec![vec![0, 3, 10], vec![0, 3, 10], vec![0, 7]]);
    let calls = blocks([&one(0..12), &one(0..12)], causal(None), 3, Some(&documents), true);
    assert_eq!(calls.len(), 2);
    assert_eq!((calls[0].samples.clone(), &calls[0].documents), (0..2, &vec![[0, 0], [3, 3], [10, 10]]));
    assert_eq!(
        calls[0].by_document()[1],
        ScoreBlock {
            samples: 0..2,
            queries: 3..10,
            keys: 3..10,
            first: [3, 3],
            documents: vec![],
            first_query: 0,
            ..calls[0].clone()
        }
    );
    // One document has keys in the chunk of keys and queries in the chunk of queries.
    let calls = blocks([&one(8..16), &one(0..8)], causal(None), 1, Some(&documents), true);
    assert_eq!(shapes(&calls), [(0..2, 3..8, false)]);
    // Some of the queries with all keys: the first document begins before them.
    let calls = blocks([&one(8..12), &one(0..12)], causal(None), 1, Some(&documents), true);
    assert_eq!((shapes(&calls), &calls[0].documents), (vec![(0..4, 3..12, true)], &vec![[0, 0], [2, 7]]));
}

/// Counts how often each query is paired with each key of a sample.
fn meetings(blocks: &[ScoreBlock], [queries, keys]: [&[Chunk]; 2], sample: usize, counts: &mut [Vec<usize>]) {
    let position = |chunks: &[Chunk], row: usize| {
        let chunk = chunks.iter().find(|c| (c.row..c.row + c.len).contains(&row)).expect("the row is in a chunk");
        chunk.position + row - chunk.row
    };
    for block in blocks.iter().flat_map(ScoreBlock::by_document).filter(|block| block.samples.contains(&sample)) {
        let options =
            AttentionOptions { scale: 1.0, causal: block.causal, window: block.window, ..AttentionOptions::causal(1) };
        for (i, row) in block.queries.clone().enumerate() {
            let (low, high) = options.visible(block.first_query + i as i64, block.keys.len());
            for key in low..high {
                counts[position(queries, row)][position(keys, block.keys.start + key)] += 1;
            }
        }
    }
}

prop_compose! {
    fn starts()(mut starts in proptest::collection::vec(1usize..96, 0..6)) -> Vec<usize> {
        starts.push(0);
        starts.sort_unstable();
        starts.dedup();
        starts
    }
}

proptest! {
    #[test]
    fn every_visible_pair_is_computed_once(
        size in 1usize..6,
        half in 1usize..9,
        causal: bool,
        window in proptest::option::of(1usize..40),
        of_samples in proptest::collection::vec(starts(), 2),
        has_documents: bool,
        joined: bool,
        gathered: bool,
    ) {
        let (rows, mask) = (2 * half, Mask { causal, window });
        let total = rows * size;
        let of_samples: Vec<Vec<usize>> =
            of_samples.into_iter().map(|starts| starts.into_iter().filter(|start| *start < total).collect()).collect();
        let documents = has_documents.then(|| Documents::new(of_samples.clone()));
        for (sample, starts) in of_samples.iter().enumerate() {
            let mut counts = vec![vec![0; total]; total];
            for rank in 0..size {
                let queries = chunks(zigzag(rank, size, rows));
                let holders = if gathered { 1 } else { size };
                for holder in 0..holders {
                    let keys = if gathered { one(0..total) } else { chunks(zigzag(holder, size, rows)) };
                    let calls = blocks([&queries, &keys], mask, 2, documents.as_ref(), joined);
                    for call in calls.iter().flat_map(ScoreBlock::by_document) {
                        prop_assert!(!call.queries.is_empty() && !call.keys.is_empty());
                        if !joined {
                            let [query, key] = call.first;
                            prop_assert_eq!(call.first_query, query as i64 - key as i64);
                        }
                        let options = AttentionOptions { scale: 1.0, causal: call.causal, window: call.window, ..AttentionOptions::causal(1) };
                        for i in 0..call.queries.len() {
                            let (low, high) = options.visible(call.first_query + i as i64, call.keys.len());
                            prop_assert!(low < high, "every query of a call sees a key");
                        }
                    }
                    meetings(&calls, [&queries, &keys], sample, &mut counts);
                }
            }
            let document = |position: usize| starts.iter().filter(|start| **start <= position).count();
            for (query, counts) in counts.iter().enumerate() {
                for (key, &count) in counts.iter().enumerate() {
                    let near = window.is_none_or(|window| query.abs_diff(key) < window);
                    let alike = !has_documents || document(query) == document(key);
                    let sees = near && alike && (!causal || key <= query);
                    prop_assert_eq!(count, usize::from(sees), "query {} and key {} of sample {}", query, key, sample);
                }
            }
        }
    }
}
