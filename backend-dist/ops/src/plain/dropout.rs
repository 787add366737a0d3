//! Dropout with a mask drawn on the host.

use burn::backend::{Backend, TensorData, TensorMetadata, tensor::FloatTensor};

use super::dims;
use crate::dropout_mask::{DropoutMask, threshold};

pub fn apply<B: Backend>(x: FloatTensor<B>, p: f64, key: &DropoutMask) -> FloatTensor<B> {
    let shape = dims(&x);
    let (rows, first) = key.rows(&shape);
    let columns = shape[shape.len() - 1] as u32;
    let (limit, scale) = (threshold(p), 1.0 / (1.0 - p));
    let keep = |draw| if draw >= limit { scale } else { 0.0 };
    let mask: Vec<f64> =
        rows.iter().flat_map(|row| (first..first + columns).map(|column| keep(row.draw(column)))).collect();
    let mask = TensorData::new(mask, x.shape()).convert_dtype(x.dtype());
    B::float_mul(x.clone(), B::float_from_data(mask, &x.device()))
}
