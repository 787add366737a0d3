//! Rotate-half position embedding; reads strided heads in place.

use burn::backend::flex::FlexTensor;

use super::{
    lanes::vectorized,
    output::filled,
    parallel::{for_parts, parts},
    real::Real,
};
use crate::options::Rotation;

vectorized! {
    /// All heads of one position, of which the first `heads` are rotated. `at` is the first element in `x`, `strides`
    /// those of batch and head, `sizes` the number of batches and heads and the head size.
    fn turn<E>(
        x: &[E],
        at: isize,
        strides: [isize; 2],
        sizes: [usize; 3],
        heads: usize,
        cos: &[E],
        sin: &[E],
        sign: E,
        out: &mut [E],
    ) {
        let ([b, h, d], half) = (sizes, cos.len());
        let sin = &sin[..half];
        for (i, out) in out.chunks_exact_mut(d).take(b * h).enumerate() {
            let at = at + (i / h) as isize * strides[0] + (i % h) as isize * strides[1];
            let x = &x[at as usize..][..d];
            if i % h >= heads {
                out.copy_from_slice(x);
                continue;
            }
            let (a, rest) = x.split_at(half);
            let (b, rest) = rest.split_at(half);
            let (out_a, out_rest) = out.split_at_mut(half);
            let (out_b, out_rest) = out_rest.split_at_mut(half);
            for i in 0..half {
                let sin = sign * sin[i];
                out_a[i] = a[i] * cos[i] - b[i] * sin;
                out_b[i] = b[i] * cos[i] + a[i] * sin;
            }
            out_rest.copy_from_slice(rest);
        }
    }
}

/// Rough cost of one element in picoseconds.
const COST: usize = 300;

pub(super) fn apply<E: Real>(
    x: &FlexTensor,
    cos: &FlexTensor,
    sin: &FlexTensor,
    heads: usize,
    rotation: Rotation,
) -> FlexTensor {
    let dense;
    let x = if x.layout().strides()[3] == 1 {
        x
    } else {
        dense = x.to_contiguous();
        &dense
    };
    let layout = x.layout();
    let (shape, strides) = (layout.shape().clone(), layout.strides());
    let [s, b, h, d] = [shape[0], shape[1], shape[2], shape[3]];
    let half = cos.layout().shape()[1];
    let (source, cos, sin) = (E::buffer(x), E::slice(cos), E::slice(sin));
    let sign = if rotation == Rotation::Forward { E::ONE } else { -E::ONE };
    let position = b * h * d;
    let data = filled(s * position, |out| {
        for_parts(s, parts(s, position * COST), |_, rows| {
            for i in rows {
                // SAFETY: each part has its own positions.
                let out = unsafe { out.slice(i * position..(i + 1) * position) };
                let at = layout.start_offset() as isize + i as isize * strides[0];
                let angles = i * half..(i + 1) * half;
                let (cos, sin) = (&cos[angles.clone()], &sin[angles]);
                turn(source, at, [strides[1], strides[2]], [b, h, d], heads, cos, sin, sign, out);
            }
        });
    });
    E::tensor(data, shape)
}
