//! Column sums and gradients of an embedding cut into cubes in other ways than the chosen one, which another card may like
//! better.
use crate::checks::tokens::upload_i32;
use crate::clock::Clock;
use crate::timings::{VOCABULARY, even_ids, gradient_bytes, zipf_ids};
use half::bf16;
use kernels_cubecl::pointwise::CubeShape;
use kernels_cubecl::pointwise::column_sum::{Slicing, column_sum_sliced};
use kernels_cubecl::pointwise::embedding::{self, TableShape, backward_planned};
use kernels_cubecl::pointwise::flat::FloatType;
use kernels_cubecl::pointwise::head_norms::{self, HeadsShape, Line};
use kernels_cubecl::pointwise::norm::{self, Affine, Gradients, NormShape};

const ROWS: usize = 8192;
const COLUMNS: usize = 4096;

pub fn column_sums(clock: &mut Clock) {
    let client = clock.client;
    let (x, sums) = (clock.tensor(FloatType::Bf16, ROWS * COLUMNS), client.empty(4 * COLUMNS));
    for (units, side, slices, ahead) in
        [(512, 4, 1, 5), (512, 4, 1, 7), (256, 4, 1, 10), (256, 2, 1, 10), (512, 2, 1, 5), (1024, 4, 1, 3)]
    {
        let how = Slicing { units, side, slices, ahead };
        clock.time(
            &format!("column sum plans: {units} units, {side} side, {slices} slices, {ahead} ahead"),
            2 * ROWS * COLUMNS,
            |i| column_sum_sliced::<bf16>(client, x.at(i), &sums, ROWS, COLUMNS, how).expect("legal"),
        );
    }
}

/// Gradients of norms with other numbers of cubes.
pub fn norms(clock: &mut Clock) {
    let client = clock.client;
    for (rows, cubes) in [(ROWS, [132, 128]), (2 * ROWS, [132, 131])] {
        let half = |len| clock.tensor(FloatType::Bf16, len);
        let (x, y, slope, w) = (half(rows * COLUMNS), half(rows * COLUMNS), half(rows * COLUMNS), half(COLUMNS));
        let (shape, sums) = (NormShape { rows, columns: COLUMNS }, client.empty(8 * COLUMNS));
        for (name, affine) in [("layer", Affine::Layer(w.at(0), w.at(1))), ("rms", Affine::Rms(w.at(0)))] {
            for cubes in cubes {
                let chosen = norm::Plan::of(client, COLUMNS, true);
                let plan = norm::Plan { cubes: Some(cubes), ..chosen };
                clock.time(&format!("norm plans: {name}, {rows} rows, {cubes} cubes"), 6 * rows * COLUMNS, |i| {
                    let targets = Gradients { x: y.at(i), affine: &sums };
                    norm::backward_planned::<bf16>(
                        client,
                        x.at(i),
                        affine,
                        slope.at(i),
                        None,
                        targets,
                        1e-5,
                        shape,
                        plan,
                    )
                    .expect("legal")
                });
            }
        }
    }
}

/// Gradients of norms of heads with other rings and numbers of cubes.
pub fn heads(clock: &mut Clock) {
    let client = clock.client;
    let shape = HeadsShape { tokens: ROWS, heads: 32, kv_heads: 4, all_heads: 40, head_dim: 128 };
    let len = ROWS * 40 * 128;
    let half = |len| clock.tensor(FloatType::Bf16, len);
    let (x, y, slope, w, sums) = (half(len), half(len), half(len), half(128), client.empty(8 * 128));
    for (ring, units, each) in [(2, 256, 3), (3, 512, 1)] {
        let line = Line::of(CubeShape { units, ..CubeShape::GPU }, 128);
        clock.time(&format!("heads plans: ring of {ring}, {units} units, {each} cubes"), 6 * len, |i| {
            let (weights, targets) = ([w.at(0), w.at(1)], [y.at(i), &sums]);
            head_norms::backward_planned::<bf16>(
                client,
                x.at(i),
                weights,
                slope.at(i),
                targets,
                1e-5,
                shape,
                line,
                ring,
                each,
            )
            .expect("legal")
        });
    }
}

pub fn embeddings(clock: &mut Clock) {
    let client = clock.client;
    let shape = TableShape { rows: VOCABULARY, hidden: COLUMNS, first_row: 0, ids: ROWS };
    let out = clock.tensor(FloatType::Bf16, ROWS * COLUMNS);
    let sum = clock.tensor(FloatType::F32, VOCABULARY * COLUMNS);
    for (name, ids) in [("equal", even_ids(ROWS)), ("Zipf's", zipf_ids(ROWS))] {
        let (bytes, ids) = (gradient_bytes(&ids, COLUMNS), upload_i32(client, &ids));
        for (units, side, buckets, ahead, run) in [
            (256, 64, 128, 4, 8),
            (256, 64, 128, 3, 8),
            (256, 64, 64, 4, 8),
            (512, 128, 128, 4, 8),
            (512, 128, 128, 3, 8),
            (512, 128, 128, 2, 8),
            (512, 128, 64, 4, 8),
            (512, 64, 64, 4, 8),
        ] {
            let plan = embedding::Plan { units, side, buckets, ahead, run, ..embedding::Plan::of(client, shape) };
            clock.time(
                &format!("embedding plans: {name} {units}/{side}, {buckets}, {ahead} ahead, {run} run"),
                bytes,
                |i| {
                    backward_planned::<bf16, f32>(client, out.at(i), &ids, sum.at(i), shape, true, plan).expect("legal")
                },
            );
        }
    }
}
