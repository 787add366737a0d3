//! Splits a GEMM into two chunks so that a collective overlaps one of them. Pure arithmetic.
//!
//! On Hopper, cuBLASLt's GEMMs occupy all SMs until they end, and a collective needs some SMs too: next to a GEMM that
//! leaves it none, the collective only delays the GEMM's end (<https://github.com/pytorch/pytorch/issues/143988>). A
//! GEMM that leaves some SMs free is slower for its whole duration. So the overlapped chunk should take about as long
//! as the collective; the other chunk uses all SMs.

use crate::gpu_model::GpuModel;

/// SMs left to an overlapped collective: the most that NCCL uses within a host.
pub const COLLECTIVE_SMS: usize = 32;
/// Output tile of an SM.
const TILE: [usize; 2] = [128, 256];
/// Seconds of overhead of one more GEMM or collective, which the host must launch too.
pub const CHUNK_OVERHEAD: f64 = 15e-6;
/// Splits are tried at multiples of this fraction of the rows.
const STEPS: usize = 16;

/// `[rows, inner] · [inner, columns]`, with elements of this many bytes.
#[derive(Clone, Copy, Debug)]
pub struct Gemm {
    pub rows: usize,
    pub inner: usize,
    pub columns: usize,
    pub element: usize,
    /// The GPU that computes it.
    pub gpu: &'static GpuModel,
}

impl Gemm {
    /// Seconds for `rows` of the rows in `blocks` separate blocks, on all SMs but `left`.
    pub fn seconds(&self, rows: usize, shards: usize, left: usize) -> f64 {
        let tiles = shards * (rows / shards).div_ceil(TILE[0]) * self.columns.div_ceil(TILE[1]);
        let tile = tile_seconds(self.gpu, self.inner) * self.element.max(2) as f64 / 2.0;
        // cuBLASLt takes smaller tiles where these would leave SMs idle.
        (tiles as f64 / self.gpu.sms.saturating_sub(left).max(1) as f64).max(0.5) * tile
    }

    /// How many of the rows are computed first, leaving SMs to an overlapped collective of `bytes`; the other rows
    /// follow. All rows if the collective takes longer, none if overlap is not worthwhile.
    pub fn overlapped_rows(&self, bytes: usize) -> usize {
        let collective = overlapped_seconds(self.gpu, bytes);
        let seconds = |first: usize| {
            let rest = self.rows - first;
            let overlapped = if first > 0 { self.seconds(first, 1, COLLECTIVE_SMS) } else { 0.0 };
            let after = if rest > 0 { self.seconds(rest, 1, 0) } else { 0.0 };
            let chunks = usize::from(first > 0) + usize::from(rest > 0);
            // The rest of the collective delays the other rows.
            let delay = if rest > 0 { (collective - overlapped).max(0.0) } else { 0.0 };
            (overlapped + delay + after).max(collective) + chunks as f64 * CHUNK_OVERHEAD
        };
        let splits = (0..=STEPS).map(|step| if step == STEPS { self.rows } else { round(self.rows, step) });
        splits.min_by(|&a, &b| seconds(a).total_cmp(&seconds(b))).unwrap_or(0)
    }
}

/// Whether local experts with these feature sizes are split into two chunks on this GPU, to overlap collectives of
/// `bytes` per rank. Of the four collectives of a layer's passes, the time of one and a half is hidden. In return the overlapped
/// GEMMs have fewer SMs, and each of the six additional GEMMs has a partial last wave.
pub fn is_worth_chunking(gpu: &GpuModel, bytes: usize, [hidden, intermediate]: [usize; 2]) -> bool {
    let taken = overlapped_seconds(gpu, bytes) * COLLECTIVE_SMS as f64 / gpu.sms as f64;
    // Forward, and input gradients, whose inner dimension is twice as long where gate and up are one GEMM.
    let inner = 2 * hidden + 3 * intermediate;
    1.5 * (collective_seconds(gpu, bytes) - taken) > 6.0 * CHUNK_OVERHEAD + tile_seconds(gpu, inner) / 2.0
}

/// Seconds of an SM for an output tile of a 16-bit GEMM.
fn tile_seconds(gpu: &GpuModel, inner: usize) -> f64 {
    2.0 * (TILE[0] * TILE[1] * inner) as f64 * gpu.sms as f64 / (gpu.operations.gemm * gpu.peak(2))
}

/// Seconds of a collective of `bytes` between the GPUs of a host.
fn collective_seconds(gpu: &GpuModel, bytes: usize) -> f64 {
    gpu.operations.collective_latency + bytes as f64 / (gpu.operations.nccl * gpu.link * 1e9)
}

/// The same, overlapped with GEMMs.
fn overlapped_seconds(gpu: &GpuModel, bytes: usize) -> f64 {
    gpu.operations.collective_latency + bytes as f64 / (gpu.operations.overlapped_nccl * gpu.link * 1e9)
}

/// About `step` of `STEPS` of the rows, in whole tiles where there are enough.
fn round(rows: usize, step: usize) -> usize {
    let shard = rows * step / STEPS;
    if rows >= STEPS * TILE[0] { shard / TILE[0] * TILE[0] } else { shard }
}

/// A matrix in equal shards of rows, one for each rank, and each shard in one or two chunks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Chunks {
    /// Rows of a shard.
    pub shard: usize,
    /// Number of shards.
    pub shards: usize,
    /// Rows of a shard's first chunk; the second chunk has the other rows.
    pub first: usize,
}

impl Chunks {
    /// Shards of one chunk.
    pub fn whole(shard: usize, shards: usize) -> Self {
        Self { shard, shards, first: shard }
    }

    /// The fastest split if the rows are all-gathered, `bytes` for each rank, before the GEMM.
    pub fn gathered(shards: usize, gemm: &Gemm, bytes: usize) -> Self {
        let rows = |of: usize| of * shards;
        Self::fastest(gemm.rows / shards, shards, |shard, first| {
            if first == shard {
                return collective_seconds(gemm.gpu, bytes) + gemm.seconds(rows(shard), 1, 0) + CHUNK_OVERHEAD;
            }
            let one = collective_seconds(gemm.gpu, bytes * first / shard);
            let two = overlapped_seconds(gemm.gpu, bytes * (shard - first) / shard);
            let overlapped = gemm.seconds(rows(first), shards, COLLECTIVE_SMS);
            one + overlapped.max(two) + gemm.seconds(rows(shard - first), shards, 0) + 2.0 * CHUNK_OVERHEAD
        })
    }

    /// The fastest split if the GEMM's output is reduce-scattered, `bytes` for each rank.
    pub fn scattered(shards: usize, gemm: &Gemm, bytes: usize) -> Self {
        let rows = |of: usize| of * shards;
        Self::fastest(gemm.rows / shards, shards, |shard, first| {
            if first == shard {
                return gemm.seconds(rows(shard), 1, 0) + collective_seconds(gemm.gpu, bytes) + CHUNK_OVERHEAD;
            }
            let one = overlapped_seconds(gemm.gpu, bytes * first / shard);
            let two = collective_seconds(gemm.gpu, bytes * (shard - first) / shard);
            let overlapped = gemm.seconds(rows(shard - first), shards, COLLECTIVE_SMS);
            gemm.seconds(rows(first), shards, 0) + overlapped.max(one) + two + 2.0 * CHUNK_OVERHEAD
        })
    }

    fn fastest(shard: usize, shards: usize, seconds: impl Fn(usize, usize) -> f64) -> Self {
        let splits = (1..STEPS).map(|step| round(shard, step)).filter(|&first| first > 0);
        let all = std::iter::once(shard).chain(splits);
        let first = all.min_by(|&a, &b| seconds(shard, a).total_cmp(&seconds(shard, b))).unwrap_or(shard);
        Self { shard, shards, first }
    }

    /// One or two.
    pub fn count(&self) -> usize {
        if self.first == self.shard { 1 } else { 2 }
    }

    /// First row of chunk `chunk` of shard 0; consecutive shards are `shard` rows apart.
    pub fn start(&self, chunk: usize) -> usize {
        if chunk == 0 { 0 } else { self.first }
    }

    /// Rows of chunk `chunk` of a shard.
    pub fn rows(&self, chunk: usize) -> usize {
        if chunk == 0 { self.first } else { self.shard - self.first }
    }

    /// First row of chunk `chunk` in a staging buffer that stores chunk after chunk, each with all shards.
    pub fn staged(&self, chunk: usize) -> usize {
        self.start(chunk) * self.shards
    }
}

#[cfg(test)]
mod tests;
