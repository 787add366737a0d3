//! Grouped GEMMs in fp64 on the host.
use super::gemms::Layer;
use crate::numbers::uniform;
use kernels_cubecl::grouped::Gemm;
use rayon::prelude::*;

/// Numbers around 0 that bf16 and fp16 hold.
pub fn numbers(len: usize, seed: u64) -> Vec<f64> {
    let mut next = uniform(seed);
    (0..len).map(|_| ((255.0 * next()).floor() - 127.0) / 64.0).collect()
}

/// `gemm` of `left` and `right`, added to `initial`.
pub fn multiply(layer: &Layer, gemm: Gemm, left: &[f64], right: &[f64], initial: &[f64]) -> Vec<f64> {
    let Layer { counts, features, inner } = layer;
    let (features, inner) = (*features, *inner);
    let group_of: Vec<usize> = counts.iter().enumerate().flat_map(|(group, rows)| vec![group; *rows]).collect();
    let mut out = initial.to_vec();
    match gemm {
        Gemm::Forward => out.par_chunks_mut(features).enumerate().for_each(|(row, out)| {
            let x = &left[row * inner..(row + 1) * inner];
            for (feature, out) in out.iter_mut().enumerate() {
                let from = (group_of[row] * features + feature) * inner;
                *out += x.iter().zip(&right[from..from + inner]).map(|(a, b)| a * b).sum::<f64>();
            }
        }),
        Gemm::InputGradient => out.par_chunks_mut(inner).enumerate().for_each(|(row, out)| {
            for feature in 0..features {
                let (factor, from) = (left[row * features + feature], (group_of[row] * features + feature) * inner);
                out.iter_mut().zip(&right[from..from + inner]).for_each(|(out, w)| *out += factor * w);
            }
        }),
        Gemm::WeightGradient => out.par_chunks_mut(inner).enumerate().for_each(|(line, out)| {
            let (group, feature) = (line / features, line % features);
            let first: usize = counts[..group].iter().sum();
            for row in first..first + counts[group] {
                let factor = left[row * features + feature];
                out.iter_mut().zip(&right[row * inner..(row + 1) * inner]).for_each(|(out, x)| *out += factor * x);
            }
        }),
    }
    out
}
