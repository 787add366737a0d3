//! Norms and column sums cut into cubes in other ways than the chosen one, which another card may like better.
use crate::clock::Clock;
use half::bf16;
use kernels_cubecl::pointwise::column_sum::{Slicing, column_sum_sliced};
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
            Plan { ahead: 1, ..cut(128, 4) },
            cut(512, 1),
            Plan { ahead: 1, ..cut(512, 1) },
            Plan { ahead: 3, ..cut(512, 1) },
            cut(64, 8),
            Plan { side: 4, ..cut(64, 8) },
            Plan { ahead: 1, cubes: Some(4 * all), ..one },
            Plan { ahead: 1, cubes: Some(3 * all), ..one },
            Plan { ahead: 1, cubes: Some(5 * all), ..one },
            Plan { ahead: 0, cubes: Some(ROWS as u32), ..one },
        ];
        let chosen = Plan::of(clock.client, COLUMNS, true);
        let backward = [
            chosen,
            Plan { ahead: 2, ..chosen },
            Plan { cubes: Some(2 * all), ..chosen },
            Plan { units: 512, vectors: 1, side: 1, ahead: 2, ..chosen },
            Plan { units: 512, vectors: 1, side: 1, ahead: 2, cubes: Some(2 * all), ..chosen },
            Plan { units: 512, vectors: 1, side: 2, ..chosen },
            Plan { units: 128, vectors: 4, side: 4, ..chosen },
            Plan { units: 128, vectors: 4, side: 3, ..chosen },
            Plan { units: 256, vectors: 2, side: 1, cubes: Some(2 * all), ..chosen },
        ];
        time(clock, name, layer, shape, &forward, &backward);
    }
}

pub fn heads(clock: &mut Clock) {
    let all = processors(clock);
    let one = Plan { cubes: None, ..Plan::of(clock.client, HEADS.columns, false) };
    let at_once = [(16, 0), (16, 1), (16, 2), (16, 3), (16, 5), (16, 7), (8, 3), (8, 7), (32, 1), (32, 3)];
    let mut forward = at_once.map(|(side, ahead)| Plan { side, ahead, ..one }).to_vec();
    forward.extend([(16, 3, 4), (16, 2, 6), (32, 3, 2)].map(|(side, ahead, each)| Plan {
        side,
        ahead,
        cubes: Some(each * all),
        ..one
    }));
    let chosen = Plan::of(clock.client, HEADS.columns, true);
    let stay = [
        (32, 1, 1),
        (32, 2, 1),
        (32, 3, 1),
        (32, 4, 1),
        (32, 1, 2),
        (32, 2, 2),
        (32, 3, 2),
        (16, 1, 4),
        (16, 2, 3),
        (16, 2, 4),
        (16, 3, 3),
        (16, 4, 2),
        (64, 1, 1),
    ];
    let backward = stay.map(|(side, ahead, each)| Plan { side, ahead, cubes: Some(each * all), ..chosen });
    time(clock, "heads", false, HEADS, &forward, &backward);
}

pub fn column_sums(clock: &mut Clock) {
    let client = clock.client;
    let (x, sums) = (clock.tensor(FloatType::Bf16, ROWS * COLUMNS), client.empty(4 * COLUMNS));
    for (units, side, slices, ahead) in [
        (512, 4, 1, 8),
        (512, 4, 1, 12),
        (512, 4, 1, 6),
        (256, 4, 1, 16),
        (256, 4, 1, 12),
        (256, 4, 1, 8),
        (1024, 4, 1, 4),
        (512, 8, 1, 16),
        (512, 8, 1, 8),
        (1024, 8, 1, 8),
        (256, 2, 1, 8),
        (256, 2, 1, 16),
        (512, 8, 2, 8),
        (256, 8, 2, 16),
        (256, 16, 4, 16),
        (256, 32, 8, 16),
    ] {
        let how = Slicing { units, side, slices, ahead };
        clock.time(
            &format!("column sum plans: {units} units, {side} side, {slices} slices, {ahead} ahead"),
            2 * ROWS * COLUMNS,
            |i| column_sum_sliced::<bf16>(client, x.at(i), &sums, ROWS, COLUMNS, how).expect("legal"),
        );
    }
}
