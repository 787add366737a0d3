//! Norms and column sums cut into cubes in other ways than the chosen one, which another card may like better.
use crate::clock::Clock;
use half::bf16;
use kernels_cubecl::pointwise::column_sum::{Slicing, column_sum_sliced};
use kernels_cubecl::pointwise::flat::FloatType;
use kernels_cubecl::pointwise::norm::{self, Affine, Gradients, NormShape, Plan};

const ROWS: usize = 8192;
const COLUMNS: usize = 4096;

pub fn norms(clock: &mut Clock) {
    let client = clock.client;
    let half = |len| clock.tensor(FloatType::Bf16, len);
    let len = ROWS * COLUMNS;
    let (x, y, slope, w) = (half(len), half(len), half(len), half(COLUMNS));
    let (shape, sums) = (NormShape { rows: ROWS, columns: COLUMNS }, client.empty(8 * COLUMNS));
    for (affine, name) in [(Affine::Rms(w.at(0)), "rms"), (Affine::Layer(w.at(0), w.at(1)), "layer")] {
        let chosen = Plan::of(client, COLUMNS, false);
        let processors = client.properties().hardware.num_streaming_multiprocessors.unwrap_or(1);
        let rows = ROWS as u32;
        let one = Plan { ahead: 0, cubes: rows, ..chosen };
        let plans = [
            ("0 ahead, a row a cube", one),
            ("0 ahead, 4 vectors, a row a cube", Plan { units: 128, vectors: 4, ..one }),
            ("0 ahead, 4 vectors, 2 rows a cube", Plan { units: 128, vectors: 4, side: 2, ..one }),
            ("0 ahead, 2 rows in turn", Plan { cubes: rows / 2, ..one }),
            ("1 ahead, 4 rows in turn", Plan { ahead: 1, cubes: rows / 4, ..one }),
            ("1 ahead, 4 cubes", Plan { ahead: 1, cubes: 4 * processors, ..one }),
        ];
        for (what, plan) in plans {
            clock.time(&format!("{name} plans: {what}"), 4 * len, |i| {
                norm::forward_planned::<bf16>(client, x.at(i), None, affine, y.at(i), 1e-5, shape, plan).expect("legal")
            });
        }
        let chosen = Plan::of(client, COLUMNS, true);
        let plans = [
            ("2 ahead", Plan { ahead: 2, ..chosen }),
            ("twice the cubes", Plan { cubes: 2 * chosen.cubes, ..chosen }),
            ("4 times the cubes", Plan { cubes: 4 * chosen.cubes, ..chosen }),
            ("1 vector", Plan { units: 512, vectors: 1, side: 1, ..chosen }),
            ("2 cubes of a row", Plan { side: 1, cubes: 2 * processors, ..chosen }),
            ("8 cubes of a row", Plan { side: 1, cubes: 8 * processors, ..chosen }),
        ];
        for (what, plan) in plans {
            clock.time(&format!("{name} gradient plans: {what}"), 6 * len, |i| {
                let targets = Gradients { x: y.at(i), affine: &sums };
                norm::backward_planned::<bf16>(client, x.at(i), affine, slope.at(i), None, targets, 1e-5, shape, plan)
                    .expect("legal")
            });
        }
    }
}

pub fn column_sums(clock: &mut Clock) {
    let client = clock.client;
    let (x, sums) = (clock.tensor(FloatType::Bf16, ROWS * COLUMNS), client.empty(4 * COLUMNS));
    for (units, side, slices) in [(512, 4, 1), (256, 4, 2), (512, 8, 2), (512, 16, 4), (256, 16, 8), (256, 32, 16)] {
        let how = Slicing { units, side, slices };
        clock.time(
            &format!("column sum plans: {units} units, {side} side by side, {slices} slices"),
            2 * ROWS * COLUMNS,
            |i| column_sum_sliced::<bf16>(client, x.at(i), &sums, ROWS, COLUMNS, how).expect("legal"),
        );
    }
}
