//! Weights in few bits on the CPU.

use std::sync::Arc;

use burn::backend::flex::FlexTensor;
use burn::backend::{DType, Flex, Shape};
use kernels_cubecl::blockwise::dequantize;

use super::{
    cast, compute_type,
    output::filled,
    parallel::{for_parts, parts},
    real::Real,
};
use crate::blockwise::{BlockwiseOps, Layout};

/// Rough cost of one element in picoseconds.
const COST: usize = 700;

impl BlockwiseOps for Flex {
    fn op_dequantize(bytes: FlexTensor, scales: FlexTensor, layout: Arc<Layout>, dtype: DType) -> FlexTensor {
        let bytes = bytes.as_slice::<u8>().expect("codes are dense bytes");
        let scales = f32::slice(&scales);
        let inner = compute_type(dtype);
        cast(by_real!(inner, E => matrix::<E>(bytes, scales, &layout)), dtype)
    }
}

fn matrix<E: Real>(bytes: &[u8], scales: &[f32], layout: &Layout) -> FlexTensor {
    let columns = layout.sections[0].sizes.columns;
    let rows: usize = layout.sections.iter().map(|section| section.sizes.rows).sum();
    let data = filled(rows * columns, |out| {
        for (section, range) in layout.rows() {
            let count = range.len();
            for_parts(count, parts(count, COST * columns), |_, own| {
                let mut row_values = vec![0.0f32; columns];
                for row in own {
                    dequantize(layout.format, bytes, scales, section, row..row + 1, &mut row_values);
                    let first = (range.start + row) * columns;
                    // SAFETY: every row is written by one part only.
                    let out = unsafe { out.slice(first..first + columns) };
                    out.iter_mut().zip(&row_values).for_each(|(out, x)| *out = E::of(f64::from(*x)));
                }
            });
        }
    });
    E::tensor(data, Shape::new([rows, columns]))
}
