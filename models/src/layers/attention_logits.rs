//! The greatest attention logit of a step, by which a diverging run shows itself early (Megatron-LM's
//! `--log-max-attention-logit`; arXiv 2507.20534, section 2.1).

use std::sync::Arc;

use backend_dist::ops::context::{ContextParallel, Documents, attention_over_context};
use backend_dist::ops::{AttentionOptions, PassContext};
use burn::tensor::{DType, Tensor};
use parking_lot::Mutex;

/// Factor of the scores with which a softmax takes the greatest of them: it gives any other that is smaller by 0.01 a
/// weight below e⁻⁴⁰.
const SHARPNESS: f64 = 4096.0;

/// What a rank's attention layers have seen since it was taken last. Clones share it. For reports alone: nothing that is
/// computed depends on it.
#[derive(Clone, Debug, Default)]
pub struct AttentionLogits(Arc<Mutex<Option<Tensor<1>>>>);

/// The greatest score `q · k scale` that any query `[s, b, hq, d]` of this rank has with a key `[t, b, hkv, d]` that it sees,
/// before any soft cap and without sinks.
///
/// It costs as much as the attention: of keys as values a sharp softmax gives each query the key with the greatest score,
/// whatever masks, documents and ranks are between them.
pub(crate) fn greatest(
    (q, k): (Tensor<4>, Tensor<4>),
    options: AttentionOptions,
    (context, documents): (Option<&ContextParallel>, Option<&Documents>),
    pass: &PassContext,
) -> Tensor<1> {
    let (q, k) = (q.inner(), k.inner());
    let sharp = AttentionOptions { scale: options.scale * SHARPNESS, softcap: None, dropout: None, ..options };
    let nearest = attention_over_context(q.clone(), k.clone(), k, sharp, context, documents, pass);
    let wide = |x: Tensor<4>| if x.dtype() == DType::F64 { x } else { x.cast(DType::F32) };
    (wide(q) * wide(nearest)).sum_dim(3).max().mul_scalar(options.scale)
}

impl AttentionLogits {
    /// Notes the greatest logit of a layer.
    pub(crate) fn note(&self, greatest: Tensor<1>) {
        let mut seen = self.0.lock();
        *seen = Some(match seen.take() {
            Some(before) => before.max_pair(greatest),
            None => greatest,
        });
    }

    /// The greatest logit since the last call; waits for the device. `None` if no attention has run.
    pub fn take(&self) -> Option<f64> {
        let seen = self.0.lock().take()?;
        seen.into_data().iter::<f64>().next()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn::tensor::{Device, Distribution};

    /// The greatest score of a query with itself and the `window` positions before.
    fn by_hand(q: &Tensor<4>, k: &Tensor<4>, scale: f64, window: usize) -> f64 {
        let [s, b, hq, d] = q.dims();
        let hkv = k.dims()[2];
        let read = |x: &Tensor<4>| x.to_data().iter::<f64>().collect::<Vec<_>>();
        let (queries, keys) = (read(q), read(k));
        let row = |at: usize, sample: usize, head: usize, heads: usize| ((at * b + sample) * heads + head) * d;
        let mut greatest = f64::NEG_INFINITY;
        for (at, sample) in (0..s).flat_map(|at| (0..b).map(move |sample| (at, sample))) {
            for (head, other) in
                (0..hq).flat_map(|head| (at.saturating_sub(window)..=at).map(move |other| (head, other)))
            {
                let (from, to) = (row(at, sample, head, hq), row(other, sample, head * hkv / hq, hkv));
                let score: f64 = (0..d).map(|i| queries[from + i] * keys[to + i]).sum();
                greatest = greatest.max(score * scale);
            }
        }
        greatest
    }

    #[test]
    fn the_greatest_score_that_a_query_sees() {
        let device = (&Device::flex(), DType::F64);
        let draw = |heads| Tensor::random([12, 2, heads, 8], Distribution::Normal(0.0, 3.0), device);
        let (logits, pass) = (AttentionLogits::default(), PassContext::default());
        assert_eq!(logits.take(), None);
        for window in [None, Some(3)] {
            let (q, k) = (draw(4), draw(2));
            let options = AttentionOptions { window, softcap: Some(1.0), ..AttentionOptions::causal(8) };
            logits.note(greatest((q.clone(), k.clone()), options, (None, None), &pass));
            let (found, wanted) = (logits.take().unwrap(), by_hand(&q, &k, options.scale, window.unwrap_or(12) - 1));
            assert!((found - wanted).abs() < 1e-9 * wanted.abs(), "{window:?}: {found}, not {wanted}");
        }
    }
}
