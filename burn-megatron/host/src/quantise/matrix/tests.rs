//! GPTQ is what the paper says, and better than rounding.

use super::*;
use crate::quantise::Grid;

/// Numbers between -1 and 1, the same every time.
fn noise(count: usize, seed: u64) -> Vec<f64> {
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as f64 / (1u64 << 30) as f64 - 1.0
    };
    (0..count).map(|_| next()).collect()
}

/// `xᵀ x` of inputs that have much in common.
fn hessian(size: usize, seed: u64) -> Vec<f64> {
    let (own, common) = (noise(4 * size * size, seed), noise(4 * size * 3, seed + 1));
    let mixed = noise(3 * size, seed + 2);
    let x = |token: usize, input: usize| {
        let shared: f64 = (0..3).map(|at| common[token * 3 + at] * mixed[at * size + input]).sum();
        0.2 * own[token * size + input] + shared
    };
    let mut sums = vec![0.0; size * size];
    for token in 0..4 * size {
        for row in 0..size {
            (0..size).for_each(|column| sums[row * size + column] += x(token, row) * x(token, column));
        }
    }
    sums
}

/// The error of a layer's outputs, squared and summed over the calibration's tokens.
fn error(weight: &[f64], rounded: &[f64], hessian: &[f64], size: usize) -> f64 {
    let rows = weight.chunks_exact(size).zip(rounded.chunks_exact(size));
    rows.map(|(weight, rounded)| {
        let delta: Vec<f64> = weight.iter().zip(rounded).map(|(a, b)| a - b).collect();
        let with = |row: usize| -> f64 { (0..size).map(|at| hessian[row * size + at] * delta[at]).sum() };
        (0..size).map(|row| delta[row] * with(row)).sum::<f64>()
    })
    .sum()
}

fn schemes(size: usize) -> [Scheme; 4] {
    let int = |bits| Grid::Int { bits };
    [(Grid::Fp8, None), (int(8), None), (int(4), None), (int(4), Some(size / 3))]
        .map(|(grid, group)| Scheme { grid, group })
}

#[test]
fn weights_go_to_the_nearest_number() {
    let (rows, size) = (5, 24);
    let weight = noise(rows * size, 1);
    for scheme in schemes(size) {
        let rounded = quantise(&weight, size, scheme, |scale| scale, None);
        let group = scheme.group_of(size);
        for (index, (weight, value)) in weight.iter().zip(rounded.values(scheme, size)).enumerate() {
            let scale = rounded.scales[index / size * scheme.groups(size) + index % size / group];
            let next = |code: u8| (scheme.grid.decode(code) * scale - weight).abs();
            let best = (0..=255).filter(|code| scheme.grid.encode(scheme.grid.decode(*code)) == *code).map(next);
            let best = best.fold(f64::INFINITY, f64::min);
            assert!(((value - weight).abs() - best).abs() < 1e-6 * scale, "{scheme:?}: {weight} became {value}");
        }
    }
}

#[test]
fn gptq_has_less_error_than_rounding() {
    let (rows, size) = (20, 192);
    let (weight, hessian) = (noise(rows * size, 3), hessian(size, 4));
    let factor = Factor::new(hessian.clone(), size).unwrap();
    for scheme in schemes(size) {
        let of = |factor| quantise(&weight, size, scheme, |scale| scale, factor).values(scheme, size);
        let [nearest, gptq] = [of(None), of(Some(&factor))].map(|rounded| error(&weight, &rounded, &hessian, size));
        assert!(gptq < 0.6 * nearest, "{scheme:?}: GPTQ {gptq}, nearest {nearest}");
    }
}

/// The paper's algorithm as it is written there: after each weight the others move by the rows of the inverse of the
/// Hessian of those that are left.
fn as_in_the_paper(weight: &[f64], size: usize, scheme: Scheme, hessian: &[f64]) -> Vec<f64> {
    let mut damped = hessian.to_vec();
    let mean = (0..size).map(|at| hessian[at * size + at]).sum::<f64>() / size as f64;
    (0..size).for_each(|at| damped[at * size + at] += 0.01 * mean);
    let mut inverse = inverse(damped, size);
    let mut weight = weight.to_vec();
    let scales: Vec<f64> = weight
        .chunks_exact(size)
        .map(|row| row.iter().fold(0.0, |most: f64, weight| most.max(weight.abs())) / scheme.grid.span())
        .collect();
    for column in (0..size).rev() {
        let diagonal = inverse[column * size + column];
        for (row, scale) in weight.chunks_exact_mut(size).zip(&scales) {
            let rounded = scheme.grid.decode(scheme.grid.encode(f64::from((row[column] / scale) as f32))) * scale;
            let error = (row[column] - rounded) / diagonal;
            (0..column).for_each(|at| row[at] -= error * inverse[column * size + at]);
            row[column] = rounded;
        }
        let own = inverse[column * size..(column + 1) * size].to_vec();
        for row in 0..column {
            (0..column).for_each(|at| inverse[row * size + at] -= own[row] * own[at] / diagonal);
        }
    }
    weight
}

/// By Gauss and Jordan.
fn inverse(mut matrix: Vec<f64>, size: usize) -> Vec<f64> {
    let mut inverse: Vec<f64> = (0..size * size).map(|at| f64::from(u8::from(at / size == at % size))).collect();
    for pivot in 0..size {
        let factor = matrix[pivot * size + pivot].recip();
        for at in 0..size {
            matrix[pivot * size + at] *= factor;
            inverse[pivot * size + at] *= factor;
        }
        for row in (0..size).filter(|row| *row != pivot) {
            let factor = matrix[row * size + pivot];
            for at in 0..size {
                matrix[row * size + at] -= factor * matrix[pivot * size + at];
                inverse[row * size + at] -= factor * inverse[pivot * size + at];
            }
        }
    }
    inverse
}

#[test]
fn gptq_is_that_of_the_paper() {
    let (rows, size) = (3, 150);
    let (weight, hessian) = (noise(rows * size, 5), hessian(size, 6));
    let factor = Factor::new(hessian.clone(), size).unwrap();
    for scheme in schemes(size).into_iter().filter(|scheme| scheme.group.is_none()) {
        let ours = quantise(&weight, size, scheme, |scale| scale, Some(&factor)).values(scheme, size);
        let theirs = as_in_the_paper(&weight, size, scheme, &hessian);
        let differ = ours.iter().zip(&theirs).filter(|(a, b)| (*a - *b).abs() > 1e-9).count();
        assert_eq!(differ, 0, "{scheme:?}");
    }
}

#[test]
fn inputs_that_are_zero_or_no_numbers() {
    let size = 4;
    let weight = noise(size, 7);
    let scheme = Scheme { grid: Grid::Int { bits: 4 }, group: None };
    let factor = Factor::new(vec![0.0; size * size], size).unwrap();
    let of = |factor| quantise(&weight, size, scheme, |scale| scale, factor);
    assert_eq!(of(Some(&factor)), of(None));
    assert!(Factor::new(vec![f64::NAN; size * size], size).is_err());
    let zeros = quantise(&vec![0.0; size], size, scheme, |scale| scale, None);
    assert_eq!((zeros.codes, zeros.scales), (vec![0; size], vec![1.0]));
}
