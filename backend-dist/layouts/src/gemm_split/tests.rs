use super::*;
use crate::gpu_model::find;

/// In bf16; `ranks` gather the input or reduce the output.
fn gemm(rows: usize, inner: usize, columns: usize) -> Gemm {
    Gemm { rows, inner, columns, element: 2, gpu: find("h200").unwrap() }
}

fn bytes(rows: usize, columns: usize, ranks: usize) -> usize {
    rows * columns * 2 / ranks * (ranks - 1)
}

#[test]
fn small_tensors_stay_whole() {
    for (rows, width) in [(128, 64), (1024, 1024)] {
        let (gemm, bytes) = (gemm(rows, width, width), bytes(rows, width, 2));
        assert_eq!(Chunks::gathered(2, &gemm, bytes).count(), 1);
        assert_eq!(Chunks::scattered(2, &gemm, bytes).count(), 1);
        assert!([0, rows].contains(&gemm.overlapped_rows(bytes)));
    }
    let tiny = Chunks::gathered(2, &gemm(2, 64, 64), 128);
    assert_eq!((tiny.count(), tiny.rows(0)), (1, 1));
}

/// Llama-3-8B at sequence 8192: the first layer of the MLP over 2 ranks, whose collective is short, and over 8.
#[test]
fn the_overlapped_chunk_takes_about_as_long_as_the_collective() {
    let short = Chunks::gathered(2, &gemm(8192, 4096, 14336), bytes(8192, 4096, 2));
    assert!(short.count() == 2 && short.first * 8 <= short.shard, "{short:?}");
    let long = Chunks::gathered(8, &gemm(8192, 4096, 3584), bytes(8192, 4096, 8));
    assert!(long.count() == 2 && long.first * 4 >= long.shard && long.first < long.shard, "{long:?}");
    // The second layer has a partial sum: the larger chunk is first where the collective is short.
    let sum = Chunks::scattered(2, &gemm(8192, 7168, 4096), bytes(8192, 4096, 2));
    assert!(sum.count() == 2 && sum.first * 4 > sum.shard * 3, "{sum:?}");
}

#[test]
fn an_overlapped_gemm_leaves_sms_no_longer_than_needed() {
    let gemm = gemm(8192, 14336, 4096);
    let first = gemm.overlapped_rows(bytes(8192, 4096, 2));
    assert!(first > 0 && first * 4 < gemm.rows, "{first}");
    let short = Gemm { columns: 256, ..gemm };
    assert_eq!(short.overlapped_rows(1 << 30), short.rows, "the collective takes longer than all of it");
    assert_eq!(gemm.overlapped_rows(0), 0);
}

/// 8,192 tokens a rank, seven eighths of them for experts of other ranks: top-8 of 128 small experts
/// (Qwen3-30B-A3B), and top-2 of eight large ones (Mixtral 8x7B), whose GEMMs end later than the collective.
#[test]
fn experts_are_chunked_where_collectives_are_long_and_tiles_are_short() {
    let h200 = find("h200").unwrap();
    assert!(is_worth_chunking(h200, 8192 * 8 * 2048 * 2 / 8 * 7, [2048, 768]));
    assert!(!is_worth_chunking(h200, 8192 * 2 * 4096 * 2 / 8 * 7, [4096, 14336]));
}

/// Over a slow link a larger chunk of the same GEMM hides the same collective; a GPU of fewer SMs than NCCL takes
/// is no reason to fail.
#[test]
fn other_gpus_split_otherwise() {
    let on = |name| {
        let gemm = Gemm { gpu: find(name).unwrap(), ..gemm(8192, 4096, 14336) };
        Chunks::gathered(2, &gemm, bytes(8192, 4096, 2))
    };
    assert!(on("h100-pcie").first > on("h200").first, "{:?} {:?}", on("h100-pcie"), on("h200"));
    let small: &'static GpuModel = Box::leak(Box::new(GpuModel { sms: 16, ..*find("l40s").unwrap() }));
    assert!(Gemm { gpu: small, ..gemm(128, 64, 64) }.seconds(128, 1, COLLECTIVE_SMS).is_finite());
}

#[test]
fn chunks_make_up_their_shard() {
    for (shard, first) in [(7, 7), (7, 3), (1024, 128), (1, 1)] {
        let chunks = Chunks { shard, shards: 4, first };
        let rows: Vec<usize> =
            (0..chunks.count()).flat_map(|i| chunks.start(i)..chunks.start(i) + chunks.rows(i)).collect();
        assert_eq!(rows, (0..shard).collect::<Vec<_>>());
    }
}

/// Every rank's shard is gathered chunk by chunk, and the GEMM runs chunk by chunk.
#[test]
fn gathered_chunks_fill_the_whole_in_order() {
    for (shard, shards, first) in [(12, 2, 3), (2, 4, 1), (5, 3, 5)] {
        let chunks = Chunks { shard, shards, first };
        let whole: Vec<usize> = (0..shards * shard).collect();
        let (mut gathered, mut gemm) = (vec![None; whole.len()], vec![None; whole.len()]);
        for chunk in 0..chunks.count() {
            for member in 0..shards {
                let local = &whole[member * shard..][..shard];
                for row in chunks.start(chunk)..chunks.start(chunk) + chunks.rows(chunk) {
                    assert_eq!(gathered[member * shard + row].replace(local[row]), None);
                }
            }
            for member in 0..shards {
                for row in chunks.start(chunk)..chunks.start(chunk) + chunks.rows(chunk) {
                    let row = member * shard + row;
                    assert_eq!(gemm[row].replace(10 * gathered[row].expect("gathered before")), None);
                }
            }
        }
        assert_eq!(gemm, whole.iter().map(|row| Some(10 * row)).collect::<Vec<_>>());
    }
}

/// The GEMM runs chunk by chunk; chunk `i` of shard `r` of the sum is reduced from its staging rows.
#[test]
fn scattered_chunks_fill_each_shard_in_order() {
    for (shard, shards, first) in [(12, 2, 9), (2, 4, 1), (5, 3, 5)] {
        let chunks = Chunks { shard, shards, first };
        let mut staged = vec![None; shards * shard];
        let mut sums = vec![vec![None; shard]; shards];
        for chunk in 0..chunks.count() {
            let (start, rows) = (chunks.start(chunk), chunks.rows(chunk));
            // A batch of `shards` matrices into a contiguous staging buffer.
            let from = (0..shards).flat_map(|member| (0..rows).map(move |row| member * shard + start + row));
            for (place, row) in from.enumerate() {
                assert_eq!(staged[chunks.staged(chunk) + place].replace(row), None);
            }
            // A reduce-scatter of that buffer.
            for (member, sum) in sums.iter_mut().enumerate() {
                for row in 0..rows {
                    sum[start + row] = staged[chunks.staged(chunk) + member * rows + row];
                }
            }
        }
        for (member, sum) in sums.into_iter().enumerate() {
            let expected: Vec<_> = (member * shard..(member + 1) * shard).map(Some).collect();
            assert_eq!(sum, expected);
        }
    }
}

/// Many decisions on the GPUs whose rates were measured, folded into one number: a description that is written otherwise
/// decides the same.
#[test]
fn decisions_on_hopper_are_those_of_the_measured_rates() {
    let mut digest = 0xcbf2_9ce4_8422_2325u64;
    let mut fold = |decision: usize| digest = (digest ^ decision as u64).wrapping_mul(0x100_0000_01b3);
    for name in ["h100", "h200"] {
        let gpu = find(name).unwrap();
        for (rows, ranks) in [(1024, 2), (4096, 4), (8192, 2), (8192, 8), (16384, 4), (65536, 8)] {
            for (inner, columns) in
                [(256, 1024), (2048, 768), (4096, 3584), (4096, 14336), (14336, 4096), (8192, 28672)]
            {
                let gemm = Gemm { gpu, ..gemm(rows, inner, columns) };
                let [read, written] = [inner, columns].map(|width| bytes(rows, width, ranks));
                fold(gemm.overlapped_rows(read));
                fold(Chunks::gathered(ranks, &gemm, read).first);
                fold(Chunks::scattered(ranks, &gemm, written).first);
                fold(usize::from(is_worth_chunking(gpu, read, [inner, columns])));
            }
        }
    }
    assert_eq!(digest, 2_450_285_857_162_125_093);
}
