//! Sigmoid scores as Hugging Face transformers computes DeepSeek-V3's: the router's product, the scores and what becomes of
//! them are fp32 whatever the model computes in (`DeepseekV3TopkRouter`).
//!
//! A product's sums have the order of Intel's MKL for short rows: one fused product after the other.

use crate::layers::fp32_softmax::exp;

/// `x wᵀ` of rows of `hidden` values.
pub(super) fn logits(x: &[f64], weight: &[f64], hidden: usize) -> Vec<f64> {
    let single = |values: &[f64]| values.iter().map(|&value| value as f32).collect::<Vec<f32>>();
    let (x, weight) = (single(x), single(weight));
    let product = |x: &[f32], row: &[f32]| x.iter().zip(row).fold(0.0, |sum: f32, (x, w)| x.mul_add(*w, sum));
    let rows = x.chunks_exact(hidden);
    rows.flat_map(|x| weight.chunks_exact(hidden).map(move |row| f64::from(product(x, row)))).collect()
}

/// The scores of a token's experts: each one's, of the `chosen` ones divided by their sum if that is asked for, times
/// `scaling`.
pub(super) fn scores(logits: &[f64], chosen: &[usize], normalised: bool, scaling: f64) -> Vec<f64> {
    let score = |logit: &f64| 1.0 / (1.0 + exp(-(*logit as f32)));
    let scores: Vec<f32> = logits.iter().map(score).collect();
    let sum = match normalised {
        true => chosen.iter().map(|expert| scores[*expert]).sum::<f32>() + 1e-20,
        false => 1.0,
    };
    scores.iter().map(|score| f64::from(score / sum * scaling as f32)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A fused product keeps what rounding its factors' product alone would lose.
    #[test]
    fn products_are_fused() {
        let small = 1.0 + 2f64.powi(-12);
        let expected = small as f32 * small as f32;
        let exact = f64::from((small * small - f64::from(expected)) as f32);
        assert!(exact != 0.0);
        assert_eq!(logits(&[1.0, small], &[-f64::from(expected), small], 2), [exact]);
    }

    #[test]
    fn close_to_the_exact_scores() {
        let logits = [-3.0, 0.25, 1.5, 9.0];
        let sigmoid = |logit: f64| 1.0 / (1.0 + (-logit).exp());
        let (plain, normalised) = (scores(&logits, &[1, 2], false, 2.5), scores(&logits, &[1, 2], true, 2.5));
        let sum = sigmoid(0.25) + sigmoid(1.5);
        for (index, logit) in logits.into_iter().enumerate() {
            assert!((plain[index] - 2.5 * sigmoid(logit)).abs() < 1e-6);
            assert!((normalised[index] - 2.5 * sigmoid(logit) / sum).abs() < 1e-6);
        }
    }
}
