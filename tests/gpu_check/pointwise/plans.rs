//! Column sums and gradients of an embedding with other plans than the default,
//! which may be faster on another GPU.
use super::bandwidths::Bandwidths;
use super::timings::{VOCABULARY, even_ids, gradient_bytes, zipf_ids};
use half::bf16;
use kernels_cubecl::pointwise::column_sum::{Slicing, column_sum_sliced};
use kernels_cubecl::pointwise::embedding::{self, TableShape, backward_planned};

const ROWS: usize = 8192;
const COLUMNS: usize = 4096;

pub fn column_sums(clock: &Bandwidths) {
    let (x, sums) = (clock.half(ROWS * COLUMNS), clock.empty(4 * COLUMNS));
    for (units, side, slices, in_flight) in [(512, 4, 1, 8), (512, 4, 1, 5), (512, 4, 1, 4), (1024, 4, 1, 3)] {
        let how = Slicing { units, side, slices, in_flight };
        clock.time(
            &format!("column sum plans: {units} units, {side} side, {slices} slices, {in_flight} in flight"),
            2 * ROWS * COLUMNS,
            |client, i| column_sum_sliced::<bf16>(client, x.at(i), sums.at(0), ROWS, COLUMNS, how).expect("legal"),
        );
    }
}

pub fn embeddings(clock: &Bandwidths) {
    let shape = TableShape { rows: VOCABULARY, hidden: COLUMNS, first_row: 0, ids: ROWS };
    let out = clock.half(ROWS * COLUMNS);
    let sum = clock.wide(VOCABULARY * COLUMNS);
    for (name, ids) in [("equal", even_ids(ROWS)), ("Zipf's", zipf_ids(ROWS))] {
        let (bytes, ids) = (gradient_bytes(&ids, COLUMNS), clock.integers(ids));
        for (units, side, buckets, in_flight, run) in [
            (256, 64, 128, 4, 16),
            (256, 64, 128, 4, 8),
            (512, 128, 128, 4, 8),
            (512, 128, 128, 3, 8),
            (512, 128, 64, 4, 8),
        ] {
            clock.time(
                &format!("embedding plans: {name} {units}/{side}, {buckets}, {in_flight} in flight, {run} run"),
                bytes,
                |client, i| {
                    let plan = embedding::Plan::of(client, shape);
                    let plan = embedding::Plan { units, side, buckets, in_flight, run, ..plan };
                    backward_planned::<bf16, f32>(client, out.at(i), ids.at(0), sum.at(i), shape, true, plan)
                        .expect("legal")
                },
            );
        }
    }
}
