//! Dropout: the mask is drawn where it is applied and never stored.

use burn::backend::flex::FlexTensor;

use super::{lanes::vectorized, output::filled_rows, real::Real};
use crate::dropout_mask::{DropoutMask, RowKey, threshold};

vectorized! {
    fn drop_rows<E>(x: &[E], keys: &[RowKey], first: u32, limit: u32, scale: E, out: &mut [E]) {
        let columns = x.len() / keys.len();
        for ((x, out), key) in x.chunks_exact(columns).zip(out.chunks_exact_mut(columns)).zip(keys) {
            for (i, (&x, out)) in x.iter().zip(out).enumerate() {
                *out = if key.draw(first + i as u32) >= limit { x * scale } else { E::ZERO };
            }
        }
    }
}

/// Rough cost of one element in picoseconds.
const COST: usize = 400;

pub(super) fn apply<E: Real>(x: &FlexTensor, p: f64, key: &DropoutMask) -> FlexTensor {
    let shape = x.layout().shape().clone();
    let (keys, first) = key.rows(&shape.to_vec());
    let x = E::slice(x);
    let columns = x.len() / keys.len().max(1);
    let (limit, scale) = (threshold(p), E::of(1.0 / (1.0 - p)));
    let data = filled_rows([keys.len(), columns], columns * COST, |rows, span, out| {
        drop_rows(&x[span], &keys[rows], first, limit, scale, out);
    });
    E::tensor(data, shape)
}
