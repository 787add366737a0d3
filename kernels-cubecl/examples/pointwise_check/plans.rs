//! Gradients of norms, rope in place, column sums and gradients of an embedding cut into cubes in other ways than the chosen
//! one, which another card may like better.
use crate::checks::tokens::upload_i32;
use crate::clock::Clock;
use crate::timings::{VOCABULARY, even_ids, gradient_bytes, zipf_ids};
use half::bf16;
use kernels_cubecl::pointwise::column_sum::{Slicing, column_sum_sliced};
use kernels_cubecl::pointwise::embedding::{self, Fetch, TableShape, backward_planned};
use kernels_cubecl::pointwise::flat::FloatType;
use kernels_cubecl::pointwise::norm::{self, Affine, Gradients, NormShape, Plan};
use kernels_cubecl::pointwise::rope::{self, RopeShape};

const ROWS: usize = 8192;
const COLUMNS: usize = 4096;

pub fn norm_gradients(clock: &mut Clock) {
    let client = clock.client;
    let half = |len| clock.tensor(FloatType::Bf16, len);
    let len = ROWS * COLUMNS;
    let (x, y, slope, other, w) = (half(len), half(len), half(len), half(len), half(COLUMNS));
    let sums = client.empty(8 * COLUMNS);
    let chosen = Plan::of(client, COLUMNS, true);
    let cut = |units, vectors, side, ring| Plan { units, vectors, side, ring, ..chosen };
    let two = [cut(256, 2, 2, 3), cut(256, 2, 2, 4), cut(256, 2, 2, 5), cut(512, 1, 2, 4), cut(512, 1, 1, 8)];
    let more = [cut(256, 2, 3, 3), cut(256, 2, 4, 2)];
    let three = [cut(256, 2, 2, 2), cut(256, 2, 2, 3), cut(512, 1, 2, 3), cut(512, 1, 1, 6)];
    let (rms, layer) = (Affine::Rms(w.at(0)), Affine::Layer(w.at(0), w.at(1)));
    for (name, affine, adds, rows, plans) in [
        ("layer norm gradient", layer, false, ROWS, [[chosen].as_slice(), &two, &more].concat()),
        ("layer norm gradient with sum", layer, true, ROWS, [[chosen].as_slice(), &three].concat()),
        ("rms norm gradient", rms, false, ROWS, [[chosen].as_slice(), &two[..3], &more].concat()),
        // One turn: the start and the end.
        ("layer norm gradient of 264 rows", layer, false, 264, [[chosen].as_slice(), &two[1..2], &two[3..4]].concat()),
    ] {
        let shape = NormShape { rows, columns: COLUMNS };
        for plan in plans {
            let Plan { units, vectors, side, ahead, ring, .. } = plan;
            let name = format!("{name} plans: {units} × {vectors}, {side} side, {ahead} ahead, ring of {ring}");
            let call = |i: usize| {
                let (targets, adds) = (Gradients { x: y.at(i), affine: &sums }, adds.then_some(other.at(i)));
                norm::backward_planned::<bf16>(client, x.at(i), affine, slope.at(i), adds, targets, 1e-5, shape, plan)
                    .expect("legal");
            };
            let bytes = if adds { 8 } else { 6 } * rows * COLUMNS;
            if rows == ROWS { clock.time(&name, bytes, call) } else { clock.time_behind_a_copy(&name, bytes, call) }
        }
    }
}

pub fn ropes(clock: &mut Clock) {
    let client = clock.client;
    let whole = RopeShape { rows: ROWS, batch: 1, heads: 40, all_heads: 48, head_dim: 128, rotated: 128 };
    let latent = RopeShape { heads: 128, all_heads: 128, head_dim: 192, rotated: 64, ..whole };
    for (name, shape) in [("rope", whole), ("rope of 64 of 192 features", latent)] {
        let len = ROWS * shape.all_heads * shape.head_dim;
        let (x, angles) = (clock.tensor(FloatType::Bf16, len), clock.tensor(FloatType::Bf16, ROWS * shape.rotated / 2));
        let angles = (angles.at(0), angles.at(1));
        for lines in [false, true] {
            for each in [1, 2, 4, 8] {
                let plan = rope::Plan { each, lines };
                let name = format!("{name} in place plans: {each} heads of a unit, lines {lines}");
                clock.time(&name, 4 * ROWS * shape.heads * shape.rotated, |i| {
                    rope::apply_planned::<bf16>(client, x.at(i), angles, shape, false, plan).expect("legal")
                });
            }
        }
    }
}

pub fn column_sums(clock: &mut Clock) {
    let client = clock.client;
    let (x, sums) = (clock.tensor(FloatType::Bf16, ROWS * COLUMNS), client.empty(4 * COLUMNS));
    for (units, side, slices, ahead) in [(512, 4, 1, 8), (512, 4, 1, 5), (512, 4, 1, 4), (1024, 4, 1, 3)] {
        let how = Slicing { units, side, slices, ahead };
        clock.time(
            &format!("column sum plans: {units} units, {side} side, {slices} slices, {ahead} ahead"),
            2 * ROWS * COLUMNS,
            |i| column_sum_sliced::<bf16>(client, x.at(i), &sums, ROWS, COLUMNS, how).expect("legal"),
        );
    }
}

pub fn embeddings(clock: &mut Clock) {
    let client = clock.client;
    let shape = TableShape { rows: VOCABULARY, hidden: COLUMNS, first_row: 0, ids: ROWS };
    let out = clock.tensor(FloatType::Bf16, ROWS * COLUMNS);
    let sum = clock.tensor(FloatType::F32, VOCABULARY * COLUMNS);
    for (name, ids) in [("equal", even_ids(ROWS)), ("Zipf's", zipf_ids(ROWS))] {
        let (bytes, ids) = (gradient_bytes(&ids, COLUMNS), upload_i32(client, &ids));
        let chosen = embedding::Plan::of(client, shape);
        let fetching = embedding::Plan { fetch: Fetch::Gradient, ..chosen };
        for plan in [
            chosen,
            embedding::Plan { run: 16, ..chosen },
            fetching,
            embedding::Plan { run: 16, ..fetching },
            embedding::Plan { fetch: Fetch::Both, ..chosen },
            embedding::Plan { fetch: Fetch::Both, run: 16, ..chosen },
            embedding::Plan { early: 132, ..chosen },
            embedding::Plan { early: 264, ..chosen },
            embedding::Plan { early: 132, ..fetching },
            embedding::Plan { early: 264, ..fetching },
            embedding::Plan { early: 264, run: 16, ..fetching },
            embedding::Plan { ahead: 3, ..fetching },
            embedding::Plan { buckets: 64, ..fetching },
            embedding::Plan { buckets: 64, run: 16, ..fetching },
            embedding::Plan { side: 256, ..fetching },
            embedding::Plan { side: 256, run: 16, ..fetching },
            embedding::Plan { side: 64, run: 16, ..fetching },
            embedding::Plan { units: 256, side: 64, run: 16, ..fetching },
        ] {
            let embedding::Plan { units, side, buckets, ahead, run, fetch, early, .. } = plan;
            let cut = format!("{units}/{side}/{buckets}, {ahead} ahead, {run} run, {fetch:?}, {early} early");
            clock.time(&format!("embedding plans: {name} {cut}"), bytes, |i| {
                backward_planned::<bf16, f32>(client, out.at(i), &ids, sum.at(i), shape, true, plan).expect("legal")
            });
        }
    }
}
