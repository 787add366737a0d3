//! Rotate-half position embedding; reads strided heads in place.

use burn::backend::flex::FlexTensor;

use super::{
    lanes::vectorized,
    output::filled,
    parallel::{for_parts, parts},
    real::Real,
};
use crate::ops::options::Rotation;

vectorized! {
    /// One head: the first `2 cos.len()` elements turned, the rest copied.
    fn turn<E>(x: &[E], cos: &[E], sin: &[E], sign: E, out: &mut [E]) {
        let half = cos.len();
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

pub(super) fn apply<E: Real>(
    x: &FlexTensor,
    cos: &FlexTensor,
    sin: &FlexTensor,
    heads: usize,
    rotation: Rotation,
) -> FlexTensor {
    let dense;
    let x = if x.layout().strides()[3] == 1 || x.layout().shape()[3] == 1 {
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
    let data = filled(s * b * h * d, |out| {
        for_parts(s, parts(s, b * h * d * COST), |_, rows| {
            // SAFETY: each part has its own positions.
            let out = unsafe { out.slice(rows.start * b * h * d..rows.end * b * h * d) };
            let mut out = out.chunks_exact_mut(d);
            for i in rows {
                let (cos, sin) = (&cos[i * half..(i + 1) * half], &sin[i * half..(i + 1) * half]);
                for j in 0..b {
                    let at = i as isize * strides[0] + j as isize * strides[1];
                    for head in 0..h {
                        let at = layout.start_offset() as isize + at + head as isize * strides[2];
                        let x = &source[at as usize..at as usize + d];
                        let out = out.next().expect("the output has as many heads");
                        if head < heads {
                            turn(x, cos, sin, sign, out);
                        } else {
                            out.copy_from_slice(x);
                        }
                    }
                }
            }
        });
    });
    E::tensor(data, shape)
}

/// A guess at the time of one element in picoseconds.
const COST: usize = 400;
