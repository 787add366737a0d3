//! The epilogue: an accumulator goes through shared memory to the tensor, by TMA.
use crate::attention::variant::{CubeSequence, Variant};
use crate::hopper::mma::{self, PANEL, Pair};
use cubecl::prelude::*;
use half::bf16;

/// Stores 64 rows of `acc`, each times its factor, at `row` of a sequence that begins at `first` in the tensor. `tile`
/// is 64 rows of shared memory that no MMA of this plane reads any more; each plane uses the 16 rows that its own MMAs
/// read. Rows past the tensor's end are not written; if sequences are packed, neither are those from `rows` on, which
/// belong to the next sequence.
#[cube]
pub fn store(
    acc: &Array<f32>,
    factor: &Array<f32>,
    tile: &mut [Pair],
    target: &mut TensorMap<bf16, Tiled>,
    sequence: &CubeSequence,
    head: i32,
    first: u32,
    row: u32,
    rows: u32,
    #[comptime] head_dim: usize,
    #[comptime] variant: Variant,
) {
    let width = comptime![head_dim.next_multiple_of(PANEL)];
    let layout = comptime![mma::k_major(mma::ROWS, width)];
    let plane = (UNIT_POS / 32) % 4;
    let lane = UNIT_POS % 32;
    if comptime![variant.packed] {
        // Without panels, a row's bytes overlap with what the MMAs of other planes read.
        sync_cube();
    }
    #[unroll]
    for i in 0..comptime![head_dim / 4] {
        let half = comptime![i % 2];
        let pair = mma::pack(acc[2 * i] * factor[half], acc[2 * i + 1] * factor[half], variant.element);
        let line = (plane * 16 + lane / 4) as usize + comptime![half * 8];
        let along = comptime![(i / 2) * 8] + ((lane % 4) * 2) as usize;
        if comptime![variant.packed] {
            tile[(line * width + along) / 2] = Pair::reinterpret(pair);
        } else {
            tile[layout.offset(line, along, 2usize) / 2] = Pair::reinterpret(pair);
        }
    }
    sync_async_proxy_shared();
    sync_plane();
    if comptime![variant.packed] {
        // Row by row: a box of several rows could reach into the next sequence.
        let line = plane * 16 + lane;
        if lane < 16 && row + line < rows {
            let from = line as usize * comptime![width / 2];
            let stored = tma_store_5d(
                tile.slice(from, from + comptime![head_dim / 2]),
                target,
                sequence.batch,
                head,
                0,
                (first + row + line) as i32,
                0,
            );
            stored.wait();
        }
        sync_plane();
    } else if lane == 0 {
        #[unroll]
        for p in 0..comptime![width / PANEL] {
            let from = plane as usize * comptime![16 * PANEL / 2] + comptime![p * mma::ROWS * PANEL / 2];
            let rows = tile.slice(from, from + comptime![16 * PANEL / 2]);
            let at = (row + plane * 16) as i32;
            // A head dimension of whole panels has a dimension of panels; any other is a single row of columns.
            let whole = comptime![head_dim % PANEL == 0];
            let panel = comptime![if whole { p as i32 } else { 0 }];
            let column = comptime![if whole { 0 } else { (p * PANEL) as i32 }];
            let stored = tma_store_5d(rows, target, sequence.batch, head, panel, at, column);
            stored.wait();
        }
    }
}
