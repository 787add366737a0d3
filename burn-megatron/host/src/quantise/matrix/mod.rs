//! A matrix in few bits.

use rayon::prelude::*;

use super::cholesky::Factor;
use super::scheme::Scheme;

/// Columns whose errors reach the columns before them together, where no group says how many.
const BLOCK: usize = 128;
/// Matrix rows that a task has.
const ROWS: usize = 16;
/// Columns of the factor that stay in a core's cache.
const TILE: usize = 512;

/// A matrix as codes and scales.
#[derive(Clone, Debug, PartialEq)]
pub struct Quantised {
    /// `[rows, columns]`.
    pub codes: Vec<u8>,
    /// `[rows, groups]`, what numbers are multiplied with.
    pub scales: Vec<f64>,
}

impl Quantised {
    /// The weights that it stands for.
    pub fn values(&self, scheme: Scheme, columns: usize) -> Vec<f64> {
        let (group, groups) = (scheme.group_of(columns), scheme.groups(columns));
        let value = |(at, code): (usize, &u8)| {
            scheme.grid.decode(*code) * self.scales[at / columns * groups + at % columns / group]
        };
        self.codes.par_iter().enumerate().map(value).collect()
    }
}

/// Quantises a matrix of `columns` inputs: with a factor of the inputs by GPTQ (Frantar et al., 2022), without one every
/// weight to its nearest number. Scales are rounded by `scale`, to the type that they are stored in.
///
/// # Panics
/// If the factor is of another number of inputs, or groups do not divide the columns.
pub fn quantise(
    weight: &[f64],
    columns: usize,
    scheme: Scheme,
    scale: impl Fn(f64) -> f64 + Sync,
    factor: Option<&Factor>,
) -> Quantised {
    let groups = scheme.groups(columns);
    assert!(columns.is_multiple_of(scheme.group_of(columns)), "{columns} inputs in groups of {:?}", scheme.group);
    assert!(factor.is_none_or(|factor| factor.size() == columns), "a factor of {columns} inputs");
    let mut codes = vec![0; weight.len()];
    let mut scales = vec![0.0; weight.len() / columns * groups];
    let tasks = weight.par_chunks(ROWS * columns).zip(codes.par_chunks_mut(ROWS * columns));
    tasks.zip(scales.par_chunks_mut(ROWS * groups)).for_each(|((weight, codes), scales)| {
        Rows { weight, columns, scheme, codes, scales }.quantise(&scale, factor);
    });
    Quantised { codes, scales }
}

/// Some matrix rows.
struct Rows<'a> {
    weight: &'a [f64],
    columns: usize,
    scheme: Scheme,
    codes: &'a mut [u8],
    scales: &'a mut [f64],
}

impl Rows<'_> {
    fn quantise(self, scale: &impl Fn(f64) -> f64, factor: Option<&Factor>) {
        let Self { weight, columns, scheme, codes, scales } = self;
        let (grid, groups) = (scheme.grid, scheme.groups(columns));
        let scale_of = |weights: &[f64]| {
            let largest = weights.iter().fold(0.0, |largest: f64, weight| largest.max(weight.abs()));
            let scale = scale(largest / grid.span());
            // Of nothing but zeros any scale is right that can be divided by.
            if scale > 0.0 { scale } else { 1.0 }
        };
        // What each weight should become, for the errors of those after it.
        let mut wanted = weight.to_vec();
        if scheme.group.is_none() {
            for (row, scale) in weight.chunks_exact(columns).zip(scales.iter_mut()) {
                *scale = scale_of(row);
            }
        }
        let block = scheme.group.unwrap_or(BLOCK);
        let mut errors = vec![0.0; weight.len() / columns * block];
        for start in (0..columns).step_by(block).rev() {
            let end = (start + block).min(columns);
            for (row, errors) in errors.chunks_exact_mut(block).enumerate() {
                let at = row * columns;
                let scale = match scheme.group {
                    Some(group) => {
                        let scale = scale_of(&wanted[at + start..at + end]);
                        scales[row * groups + start / group] = scale;
                        scale
                    }
                    None => scales[row],
                };
                for column in (start..end).rev() {
                    // In fp32, as torch divides: the largest weight is then just as far from zero as the span is.
                    let code = grid.encode(f64::from((wanted[at + column] / scale) as f32));
                    codes[at + column] = code;
                    let error = weight[at + column] - grid.decode(code) * scale;
                    errors[column - start] = error;
                    if let Some(factor) = factor {
                        add(&mut wanted[at + start..at + column], &factor.row(column)[start..column], error);
                    }
                }
            }
            let Some(factor) = factor else { continue };
            for first in (0..start).step_by(TILE) {
                let tile = first..(first + TILE).min(start);
                for (wanted, errors) in wanted.chunks_exact_mut(columns).zip(errors.chunks_exact(block)) {
                    for (column, error) in (start..end).zip(errors) {
                        add(&mut wanted[tile.clone()], &factor.row(column)[tile.clone()], *error);
                    }
                }
            }
        }
    }
}

fn add(to: &mut [f64], values: &[f64], factor: f64) {
    to.iter_mut().zip(values).for_each(|(to, value)| *to += factor * value);
}

#[cfg(test)]
mod tests;
