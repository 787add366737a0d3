//! Column sums and gradients of an embedding with other plans than the default,
//! which may be faster on another GPU.
use crate::checks::upload_i32;
use crate::clock::Clock;
use crate::timings::{VOCABULARY, even_ids, gradient_bytes, zipf_ids};
use half::bf16;
use kernels_cubecl::pointwise::column_sum::{Slicing, column_sum_sliced};
use kernels_cubecl::pointwise::embedding::{self, TableShape, backward_planned};
use kernels_cubecl::pointwise::flat::FloatType;

const ROWS: usize = 8192;
const COLUMNS: usize = 4096;

pub fn column_sums(clock: &mut Clock) {
    let client = clock.client;
    let (x, sums) = (clock.tensor(FloatType::Bf16, ROWS * COLUMNS), client.empty(4 * COLUMNS));
    for (units, side, slices, in_flight) in [(512, 4, 1, 8), (512, 4, 1, 5), (512, 4, 1, 4), (1024, 4, 1, 3)] {
        let how = Slicing { units, side, slices, in_flight };
        clock.time(
            &format!("column sum plans: {units} units, {side} side, {slices} slices, {in_flight} in flight"),
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
        for (units, side, buckets, in_flight, run) in [
            (256, 64, 128, 4, 16),
            (256, 64, 128, 4, 8),
            (512, 128, 128, 4, 8),
            (512, 128, 128, 3, 8),
            (512, 128, 64, 4, 8),
        ] {
            let plan = embedding::Plan { units, side, buckets, in_flight, run, ..embedding::Plan::of(client, shape) };
            clock.time(
                &format!("embedding plans: {name} {units}/{side}, {buckets}, {in_flight} in flight, {run} run"),
                bytes,
                |i| {
                    backward_planned::<bf16, f32>(client, out.at(i), &ids, sum.at(i), shape, true, plan).expect("legal")
                },
            );
        }
    }
}
