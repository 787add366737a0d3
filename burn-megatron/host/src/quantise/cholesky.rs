//! The Cholesky factor of a layer's Hessian.

use rayon::prelude::*;
use thiserror::Error;

/// Columns that are computed together, so that the factor's rows are read once for all of them.
const BLOCK: usize = 64;
/// What is added to the diagonal, in relation to its mean (Frantar et al., "GPTQ", 2022, section 3.3).
const DAMPING: f64 = 0.01;

/// The inputs of a layer say nothing that can be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("its inputs are not finite numbers for calibration")]
pub struct NotDefinite;

/// `L` of `H = L Lᵀ`, each column divided by its own diagonal element.
///
/// The error of a layer with the rounded weights `q` in place of `w` is `(w - q) H (w - q)ᵀ = |(w - q) L|²`. When the
/// weights after the `k`-th are rounded, the `k`-th term of that norm is zero for `q_k = w_k + Σ_{j>k} (w_j - q_j) L_jk / L_kk`:
/// the nearest number to that is GPTQ's choice, which the paper computes with the factor of the inverse of `H` (the two
/// are the same by Chen et al., "The geometry of LLM quantization", 2025), here for columns from the last to the first.
#[derive(Clone, Debug)]
pub struct Factor {
    size: usize,
    /// Row-major; above the diagonal are zeros.
    elements: Vec<f64>,
}

impl Factor {
    /// The factor of `xᵀ x`, `[size, size]`, of the layer's inputs `x`. An input that is always zero counts as one that
    /// has nothing to do with others.
    ///
    /// # Errors
    /// If there is no factor: not all elements are finite.
    pub fn new(mut hessian: Vec<f64>, size: usize) -> Result<Self, NotDefinite> {
        assert_eq!(hessian.len(), size * size, "a Hessian is square");
        let diagonal = |at: usize| at * size + at;
        let mean = (0..size).map(|at| hessian[diagonal(at)]).sum::<f64>() / size as f64;
        for at in 0..size {
            let element = &mut hessian[diagonal(at)];
            *element = if *element == 0.0 { 1.0 } else { *element } + DAMPING * mean;
        }
        for start in (0..size).step_by(BLOCK) {
            let end = (start + BLOCK).min(size);
            let (above, below) = hessian.split_at_mut(end * size);
            finish(above, start..end, size)?;
            let factor = &above[start * size..];
            below.par_chunks_mut(size).for_each(|row| solve(row, factor, start..end, size));
        }
        let inverse: Vec<f64> = (0..size).map(|at| hessian[diagonal(at)].recip()).collect();
        hessian.par_chunks_mut(size.max(1)).enumerate().for_each(|(at, row)| {
            row[at + 1..].fill(0.0);
            row.iter_mut().zip(&inverse).for_each(|(element, inverse)| *element *= inverse);
        });
        Ok(Self { size, elements: hessian })
    }

    /// Inputs of the layer.
    pub fn size(&self) -> usize {
        self.size
    }

    /// `L_jk / L_kk` by `k`, for all of them.
    pub fn row(&self, j: usize) -> &[f64] {
        &self.elements[j * self.size..(j + 1) * self.size]
    }
}

/// The rows of a block of the factor; columns before it are done.
fn finish(rows: &mut [f64], block: std::ops::Range<usize>, size: usize) -> Result<(), NotDefinite> {
    for row in block.clone() {
        let (above, own) = rows.split_at_mut(row * size);
        let own = &mut own[..size];
        solve(own, &above[block.start * size..], block.start..row, size);
        let rest = own[row] - dot(&own[..row], &own[..row]);
        if !(rest > 0.0 && rest.is_finite()) {
            return Err(NotDefinite);
        }
        own[row] = rest.sqrt();
    }
    Ok(())
}

/// The elements of a row in `columns`, whose own rows of the factor are `factor`.
fn solve(row: &mut [f64], factor: &[f64], columns: std::ops::Range<usize>, size: usize) {
    for (column, of) in columns.zip(factor.chunks_exact(size)) {
        row[column] = (row[column] - dot(&row[..column], &of[..column])) / of[column];
    }
}

/// In several sums, which the compiler computes side by side.
fn dot(a: &[f64], b: &[f64]) -> f64 {
    const LANES: usize = 8;
    let mut sums = [0.0; LANES];
    let (a, b) = (a.as_chunks::<LANES>(), b.as_chunks::<LANES>());
    for (a, b) in a.0.iter().zip(b.0) {
        for lane in 0..LANES {
            sums[lane] += a[lane] * b[lane];
        }
    }
    sums.iter().sum::<f64>() + a.1.iter().zip(b.1).map(|(a, b)| a * b).sum::<f64>()
}
