//! Norms, column sums and gradients of an embedding cut into cubes in other ways than the chosen one, which another card may like better.
use crate::checks::tokens::upload_i32;
use crate::clock::Clock;
use crate::timings::{VOCABULARY, even_ids, gradient_bytes, zipf_ids};
use half::bf16;
use kernels_cubecl::pointwise::column_sum::{Slicing, column_sum_sliced};
use kernels_cubecl::pointwise::embedding::{self, TableShape, backward, backward_planned};
use kernels_cubecl::pointwise::flat::FloatType;
use kernels_cubecl::pointwise::norm::{self, Affine, Gradients, NormShape, Plan};

const ROWS: usize = 8192;
const COLUMNS: usize = 4096;
const HEADS: NormShape = NormShape { rows: 40 * ROWS, columns: 128 };

fn processors(clock: &Clock) -> u32 {
    clock.client.properties().hardware.num_streaming_multiprocessors.unwrap_or(1)
}

/// Times norms forward by the first plans, and their gradients by the second.
fn time(clock: &mut Clock, name: &str, layer: bool, shape: NormShape, forward: &[Plan], backward: &[Plan]) {
    let client = clock.client;
    let len = shape.rows * shape.columns;
    let half = |len| clock.tensor(FloatType::Bf16, len);
    let (x, y, slope, w) = (half(len), half(len), half(len), half(shape.columns));
    let sums = client.empty(8 * shape.columns);
    let affine = if layer { Affine::Layer(w.at(0), w.at(1)) } else { Affine::Rms(w.at(0)) };
    let told = |plan: &Plan| {
        let Plan { units, vectors, side, ahead, cubes, .. } = *plan;
        format!("{units} × {vectors}, {side} side, {ahead} ahead, {}", cubes.unwrap_or(0))
    };
    for plan in forward {
        clock.time(&format!("{name} plans: {}", told(plan)), 4 * len, |i| {
            norm::forward_planned::<bf16>(client, x.at(i), None, affine, y.at(i), 1e-5, shape, *plan).expect("legal")
        });
    }
    for plan in backward {
        clock.time(&format!("{name} gradient plans: {}", told(plan)), 6 * len, |i| {
            let targets = Gradients { x: y.at(i), affine: &sums };
            norm::backward_planned::<bf16>(client, x.at(i), affine, slope.at(i), None, targets, 1e-5, shape, *plan)
                .expect("legal")
        });
    }
}

pub fn norms(clock: &mut Clock) {
    let all = processors(clock);
    let shape = NormShape { rows: ROWS, columns: COLUMNS };
    for (layer, name) in [(false, "rms"), (true, "layer")] {
        let one = Plan { side: 1, ahead: 0, cubes: None, ..Plan::of(clock.client, COLUMNS, false) };
        let cut = |units, vectors| Plan { units, vectors, ..one };
        let forward = [
            one,
            Plan { ahead: 1, ..one },
            Plan { side: 2, ..one },
            cut(128, 4),
            Plan { side: 2, ..cut(128, 4) },
            Plan { ahead: 1, ..cut(512, 1) },
            Plan { ahead: 1, cubes: Some(4 * all), ..one },
        ];
        let chosen = Plan::of(clock.client, COLUMNS, true);
        let backward = [
            chosen,
            // The same number of turns for all.
            Plan { cubes: Some(128), ..chosen },
            Plan { side: 3, ahead: 0, ..chosen },
            Plan { side: 3, ahead: 0, cubes: Some(all - 1), ..chosen },
            Plan { units: 512, vectors: 1, side: 1, ahead: 2, ..chosen },
            Plan { units: 256, vectors: 2, side: 1, cubes: Some(2 * all), ..chosen },
        ];
        time(clock, name, layer, shape, &forward, &backward);
    }
}

pub fn heads(clock: &mut Clock) {
    let all = processors(clock);
    let one = Plan { cubes: None, ..Plan::of(clock.client, HEADS.columns, false) };
    let at_once = [(16, 0), (16, 1), (16, 2), (16, 3), (16, 7), (8, 3), (32, 3)];
    let mut forward = at_once.map(|(side, ahead)| Plan { side, ahead, ..one }).to_vec();
    forward.push(Plan { side: 16, cubes: Some(4 * all), ..one });
    let chosen = Plan::of(clock.client, HEADS.columns, true);
    let stay =
        [(32, 1, 1), (32, 3, 1), (32, 1, 2), (32, 2, 2), (16, 1, 3), (16, 1, 4), (16, 2, 3), (16, 3, 2), (8, 2, 6)];
    let backward = stay.map(|(side, ahead, each)| Plan { side, ahead, cubes: Some(each * all), ..chosen });
    time(clock, "heads", false, HEADS, &forward, &backward);
}

pub fn column_sums(clock: &mut Clock) {
    let client = clock.client;
    let (x, sums) = (clock.tensor(FloatType::Bf16, ROWS * COLUMNS), client.empty(4 * COLUMNS));
    for (units, side, slices, ahead) in
        [(512, 4, 1, 8), (512, 4, 1, 5), (256, 4, 1, 12), (256, 4, 1, 10), (384, 4, 1, 8), (384, 4, 1, 6)]
    {
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
        clock.time(&format!("embedding plans: {name} ids, sorted"), bytes, |i| {
            backward::<bf16, f32>(client, out.at(i), &ids, sum.at(i), shape, true).expect("legal")
        });
        for (side, buckets, ahead) in
            [(32, 128, 4), (32, 128, 8), (32, 64, 4), (32, 256, 4), (64, 128, 4), (64, 256, 4), (128, 256, 4)]
        {
            let plan = embedding::Plan { side, buckets, ahead, ..embedding::Plan::of(client, shape) };
            clock.time(
                &format!("embedding plans: {name} ids, {side} side, {buckets} buckets, {ahead} ahead"),
                bytes,
                |i| {
                    backward_planned::<bf16, f32>(client, out.at(i), &ids, sum.at(i), shape, true, plan).expect("legal")
                },
            );
        }
    }
}
