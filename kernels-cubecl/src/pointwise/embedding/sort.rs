//! Tokens in the order of their ids, those of an id in their own order: first within tiles, then every token looks up how
//! many of the other tiles stand before it.
use crate::pointwise::{CubeShape, PointwiseError, buffer};
use cubecl::prelude::*;
use cubecl::server::Handle;

/// Tokens that a cube sorts in.
const SORTED: u32 = 32;
/// Units that share the other tiles of a token.
const SEARCHERS: u32 = 16;

/// Four ids.
type Quad = Vector<i32, Const<4>>;

/// Tokens of a tile.
fn tile(cube: CubeShape) -> u32 {
    if cube.plane == 1 { 16 } else { 512 }
}

/// Units of a cube for each of its tokens.
fn lanes(cube: CubeShape, tokens: u32) -> u32 {
    (cube.units / tokens).max(1)
}

/// Writes every token and its id to its place in the order of its tile's ids. A cube sorts in its tokens among those of the
/// tile.
#[cube(launch_unchecked)]
pub fn sort_tiles(ids: &[i32], order: &mut [u32], sorted: &mut [i32], tokens: u32, #[comptime] cube: CubeShape) {
    let tile = comptime![tile(cube)];
    let lanes = comptime![lanes(cube, SORTED)];
    let own = comptime![cube.units / lanes];
    let mut quads = Shared::<[Quad]>::new_slice(comptime![(tile / 4) as usize]);
    let mut shares = Shared::<[u32]>::new_slice(comptime![cube.units as usize]);
    let first = CUBE_POS_X * own / tile * tile;
    let mut quad = UNIT_POS;
    while quad < comptime![tile / 4] {
        let mut four = Quad::empty();
        #[unroll]
        for k in 0..4usize {
            let at = first + quad * 4 + comptime![k as u32];
            // No id is greater than those behind the last token.
            four.insert(k, select(at < tokens, ids[min(at, tokens - 1) as usize], i32::MAX));
        }
        quads[quad as usize] = four;
        quad += comptime![cube.units];
    }
    sync_cube();
    let token = CUBE_POS_X * own + UNIT_POS % own;
    let id = ids[min(token, tokens - 1) as usize];
    let lane = UNIT_POS / own;
    let mut before = 0u32;
    #[unroll]
    for q in 0..comptime![tile / 4 / lanes] {
        let quad = lane * comptime![tile / 4 / lanes] + comptime![q];
        let four = quads[quad as usize];
        #[unroll]
        for k in 0..4usize {
            let (other, at) = (four.extract(k), first + quad * 4 + comptime![k as u32]);
            before += select(other < id || (other == id && at < token), 1u32, 0u32);
        }
    }
    shares[UNIT_POS as usize] = before;
    sync_cube();
    if UNIT_POS < own && token < tokens {
        let mut place = first;
        #[unroll]
        for lane in 0..comptime![lanes as usize] {
            place += shares[UNIT_POS as usize + comptime![lane * own as usize]];
        }
        order[place as usize] = token;
        sorted[place as usize] = id;
    }
}

/// How many ids of `sorted[first..end]`, which ascend, are smaller than `id`, or with `equal` not greater.
#[cube]
fn count_before(sorted: &[i32], first: u32, end: u32, id: i32, equal: bool) -> u32 {
    let mut low = first;
    let mut high = end;
    while low < high {
        let middle = (low + high) / 2;
        let other = sorted[middle as usize];
        if other < id || (equal && other == id) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    low - first
}

/// Merges sorted tiles.
#[cube(launch_unchecked)]
pub fn merge_tiles(
    tile_order: &[u32],
    tile_sorted: &[i32],
    order: &mut [u32],
    sorted: &mut [i32],
    tokens: u32,
    #[comptime] cube: CubeShape,
) {
    let tile = comptime![tile(cube)];
    let lanes = comptime![lanes(cube, cube.units / SEARCHERS.min(cube.units))];
    let own = comptime![cube.units / lanes];
    let mut shares = Shared::<[u32]>::new_slice(comptime![cube.units as usize]);
    let entry = CUBE_POS_X * own + UNIT_POS % own;
    let home = entry / tile;
    let id = tile_sorted[min(entry, tokens - 1) as usize];
    let mut before = 0u32;
    let mut other = UNIT_POS / own;
    while other * tile < tokens {
        if other != home {
            let end = min((other + 1) * tile, tokens);
            // In front of the token stand smaller ids, and equal ones of tiles before its own.
            before += count_before(tile_sorted, other * tile, end, id, other < home);
        }
        other += lanes;
    }
    shares[UNIT_POS as usize] = before;
    sync_cube();
    if UNIT_POS < own && entry < tokens {
        let mut place = entry % tile;
        #[unroll]
        for lane in 0..comptime![lanes as usize] {
            place += shares[UNIT_POS as usize + comptime![lane * own as usize]];
        }
        order[place as usize] = tile_order[entry as usize];
        sorted[place as usize] = id;
    }
}

/// Tokens and their ids, in the order of the ids.
pub struct Order {
    /// Tokens, `u32`.
    pub order: Handle,
    /// Their ids, `i32`.
    pub sorted: Handle,
}

/// The order of `tokens` ids (`i32`).
///
/// # Errors
/// If the buffer is too short.
pub fn sort(client: &Client, ids: &Handle, tokens: usize) -> Result<Order, PointwiseError> {
    let cube = CubeShape::of(client);
    let room = || Order { order: client.empty(4 * tokens), sorted: client.empty(4 * tokens) };
    let arguments = |order: &Order| -> Result<_, PointwiseError> {
        Ok((buffer("order", &order.order, tokens, 4)?, buffer("sorted ids", &order.sorted, tokens, 4)?))
    };
    let in_tiles = room();
    let ids = buffer("ids", ids, tokens, 4)?;
    let (order, sorted) = arguments(&in_tiles)?;
    let count = |own: u32| CubeCount::Static((tokens as u32).div_ceil(own), 1, 1);
    let own = cube.units / lanes(cube, SORTED);
    // SAFETY: places are in the tile of the token, and so in the buffers.
    unsafe { sort_tiles::launch_unchecked(client, count(own), cube.dim(), ids, order, sorted, tokens as u32, cube) };
    if tokens <= tile(cube) as usize {
        return Ok(in_tiles);
    }
    let merged = room();
    let ((tile_order, tile_sorted), (order, sorted)) = (arguments(&in_tiles)?, arguments(&merged)?);
    let own = cube.units / lanes(cube, cube.units / SEARCHERS.min(cube.units));
    // SAFETY: every token has a place of its own among all.
    unsafe {
        merge_tiles::launch_unchecked(
            client,
            count(own),
            cube.dim(),
            tile_order,
            tile_sorted,
            order,
            sorted,
            tokens as u32,
            cube,
        )
    };
    Ok(merged)
}
