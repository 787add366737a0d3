//! Linear layers whose exchanges run beside their products (Megatron-LM's `--tp-comm-overlap` and
//! `LinearWithGradAccumulationAndAsyncCommunication` in `megatron/core/tensor_parallel/layers.py`).
//!
//! Exchanges have a stream of their own. One that makes a product's rows is waited for by the product of these rows only;
//! one of a product's result starts behind that product and is waited for where the result is handed on, which in a
//! backward pass is behind the weight's gradient.

use burn::backend::{Cube, autodiff::grads::Gradients};
use burn::tensor::Shape;
use burn_cubecl::tensor::CubeTensor;

use super::{Float, columns, empty, linear, packed, rows};
use crate::comm::Group;
use crate::cuda::dense;
use crate::cuda::lt::{Onto, Operand, multiply, multiply_and_add_bias};
use crate::nccl::{connect, gpu_of};
use crate::ops::pieces::{Cut, Load};
use crate::ops::product::{self, Ends, Entry, Exit, Products, Weight, deliver_weight_grad};
use crate::ops::weight_grads;
use crate::overlap::{Pending, pieces};

impl Products for Cube {
    fn product(x: Float, w: Float, bias: Option<Float>, ends: &Ends) -> Float {
        let by_library = bias.as_ref().is_none_or(|bias| linear::adds_bias(&x, &w, bias));
        let (factor, [k, n]) = (Factor { w: w.clone(), transposed: true }, [columns(&x), w.meta.shape()[0]]);
        match (&ends.entry, &ends.exit) {
            (Entry::Gathered(group), Exit::Own) if ends.overlap && by_library && is_linked(&x, group) => {
                let cut = gather_cut(&x, n, group);
                if cut.pieces > 1 {
                    return gathered(x, &factor, bias, cut, group).1;
                }
            }
            (Entry::Own, Exit::Scattered(group)) if ends.overlap && bias.is_none() && can_scatter(&x, group) => {
                let cut = scatter_cut(&x, [k, n], 0.0, group);
                if cut.pieces > 1 {
                    return arrived(scattered(x, &factor, cut, group));
                }
            }
            (Entry::Own, Exit::Reduced(group)) if ends.overlap && bias.is_none() && is_linked(&x, group) => {
                let cut = reduce_cut(&x, [k, n], 0.0, group);
                if cut.pieces > 1 {
                    return arrived(reduced(x, &factor, cut, group));
                }
            }
            _ => {}
        }
        product::forward::<Self>(x, w, bias, ends)
    }

    fn product_grads(
        grad: Float,
        w: Option<Float>,
        weight: Option<Weight<Self>>,
        ends: &Ends,
        grads: &mut Gradients,
    ) -> Option<Float> {
        match (&ends.entry, &ends.exit, &w) {
            (Entry::Gathered(group), Exit::Own, Some(w)) if ends.overlap && can_scatter(&grad, group) => {
                Some(column_grads(grad, w.clone(), weight, ends, group, grads))
            }
            (Entry::Copied(group), Exit::Own, Some(w)) if ends.overlap && is_linked(&grad, group) => {
                Some(column_grads(grad, w.clone(), weight, ends, group, grads))
            }
            (Entry::Own, Exit::Scattered(group), Some(w)) if ends.overlap && is_linked(&grad, group) => {
                let cut = gather_cut(&grad, w.meta.shape()[1], group);
                if cut.pieces == 1 {
                    return product::backward::<Self>(grad, Some(w.clone()), weight, ends, grads);
                }
                let factor = Factor { w: w.clone(), transposed: false };
                let (grad, input_grad) = gathered(grad, &factor, None, cut, group);
                product::weight_grad::<Self>(grad, weight, &ends.entry, grads);
                Some(input_grad)
            }
            _ => product::backward::<Self>(grad, w, weight, ends, grads),
        }
    }
}

/// Gradients of a layer whose input is gathered or copied: the kept input is gathered again beside the product that gives
/// the input's gradient, and that gradient is summed up beside the product that gives the weight's.
fn column_grads(
    grad: Float,
    w: Float,
    weight: Option<Weight<Cube>>,
    ends: &Ends,
    group: &Group,
    grads: &mut Gradients,
) -> Float {
    let (late, now): (Option<_>, Option<_>) = match weight {
        Some(weight) if weight.is_leaf && weight_grads::is_deferring() => (Some(weight), None),
        weight => (None, weight),
    };
    if late.is_some() {
        product::weight_grad::<Cube>(grad.clone(), late, &ends.entry, grads);
    }
    let gathers = matches!(ends.entry, Entry::Gathered(_));
    let now = now.map(|Weight { id, input, .. }| match gathers {
        true => (id, regathered(input, group)),
        false => (id, (input, None)),
    });
    let [n, k] = [columns(&grad), w.meta.shape()[1]];
    let meanwhile = if now.is_some() { flops(rows(&grad), [n, k]) } else { 0.0 };
    let factor = Factor { w, transposed: false };
    let input_grad = match gathers {
        true => scattered(grad.clone(), &factor, scatter_cut(&grad, [n, k], meanwhile, group), group),
        false => reduced(grad.clone(), &factor, reduce_cut(&grad, [n, k], meanwhile, group), group),
    };
    if let Some((id, (input, gather))) = now {
        drop(gather);
        deliver_weight_grad::<Cube>(grads, id, grad, input);
    }
    arrived(input_grad)
}

/// The second factor of a product.
struct Factor {
    w: Float,
    transposed: bool,
}

impl Factor {
    /// Columns of the product.
    fn columns(&self) -> usize {
        self.w.meta.shape()[usize::from(!self.transposed)]
    }

    /// Writes `x · w`, or `x · wᵀ`, plus `bias` to `out`; both are `[batches, rows, columns]`.
    fn multiply(&self, x: CubeTensor, bias: Option<&Float>, out: &CubeTensor) {
        let shape = self.w.meta.shape();
        let shape = Shape::from([x.meta.shape()[0], shape[0], shape[1]]);
        let w = &self.w;
        let mut shared =
            CubeTensor::new_contiguous(w.client.clone(), w.device.clone(), shape, w.handle.clone(), w.dtype);
        // All batches have the same.
        shared.meta.strides_mut().copy_from_slice(&[0, w.meta.strides()[0], w.meta.strides()[1]]);
        let shared = Operand::batched(shared);
        let shared = if self.transposed { shared.transposed() } else { shared };
        match bias {
            None => multiply(Operand::batched(x), shared, out, Onto::Replace),
            Some(bias) => multiply_and_add_bias(Operand::batched(x), shared, bias.clone(), out),
        }
    }
}

/// The whole of all members' `part`s, and its product: of each piece as soon as its rows are there.
fn gathered(part: Float, factor: &Factor, bias: Option<Float>, cut: Cut, group: &Group) -> (Float, Float) {
    let (part, bias) = (dense(part), bias.map(packed));
    let whole = empty(&part, resized(&part, |first| first * cut.parts, columns(&part)), part.dtype);
    // All of them before any product: an exchange waits for what the compute stream has queued so far.
    let pieces: Vec<Pending> = (0..cut.pieces).map(|i| pieces::gather(&part, &whole, cut, i, group)).collect();
    let out = empty(&whole, resized(&whole, |first| first, factor.columns()), whole.dtype);
    for (i, piece) in pieces.into_iter().enumerate() {
        piece.wait();
        factor.multiply(piece_of(&whole, cut, i), bias.as_ref(), &piece_of(&out, cut, i));
    }
    (whole, out)
}

/// The whole of all members' `part`s, once it is there.
fn regathered(part: Float, group: &Group) -> (Float, Option<Pending>) {
    let part = dense(part);
    let whole = empty(&part, resized(&part, |first| first * group.size(), columns(&part)), part.dtype);
    let cut = Cut { rows: rows(&part), parts: group.size(), pieces: 1 };
    let pending = pieces::gather(&part, &whole, cut, 0, group);
    (whole, Some(pending))
}

/// This member's part of the sum of all members' products, once it is there: each piece is summed up behind its product.
fn scattered(x: Float, factor: &Factor, cut: Cut, group: &Group) -> (Float, Vec<Pending>) {
    let x = dense(x);
    let staged = empty(&x, resized(&x, |first| first, factor.columns()), x.dtype);
    let part = empty(&x, resized(&x, |first| first / cut.parts, factor.columns()), x.dtype);
    let pieces = (0..cut.pieces).map(|i| {
        let run = blocks(&staged, [cut.parts, cut.rows], cut.rows, cut.staged(i));
        factor.multiply(piece_of(&x, cut, i), None, &run);
        pieces::scatter(&staged, &part, cut, i, group)
    });
    let pieces = pieces.collect();
    (part, pieces)
}

/// The sum of all members' products, once it is there: each piece is summed up behind its product.
fn reduced(x: Float, factor: &Factor, cut: Cut, group: &Group) -> (Float, Vec<Pending>) {
    let x = dense(x);
    let out = empty(&x, resized(&x, |first| first, factor.columns()), x.dtype);
    let pieces = (0..cut.pieces).map(|i| {
        factor.multiply(piece_of(&x, cut, i), None, &piece_of(&out, cut, i));
        pieces::reduce(&out, cut, i, group)
    });
    let pieces = pieces.collect();
    (out, pieces)
}

/// What the compute stream may use from here on.
fn arrived((result, pieces): (Float, Vec<Pending>)) -> Float {
    pieces.into_iter().for_each(Pending::wait);
    result
}

/// Piece `i` of the matrix `x`, which has no gaps.
fn piece_of(x: &CubeTensor, cut: Cut, i: usize) -> CubeTensor {
    blocks(x, [cut.parts, cut.rows], cut.part(), cut.first(i))
}

/// `parts` blocks of `rows` rows of the matrix `x`, which has no gaps, where they lie: `[parts, rows, columns]`. They start
/// `stride` rows apart, the first at row `first`. Blocks that touch are one: a single product is quicker than a batch.
fn blocks(x: &CubeTensor, [parts, rows]: [usize; 2], stride: usize, first: usize) -> CubeTensor {
    let columns = columns(x);
    let [parts, rows] = if stride == rows { [1, parts * rows] } else { [parts, rows] };
    let start = (first * columns * x.dtype.size()) as u64;
    let (shape, handle) = (Shape::from([parts, rows, columns]), x.handle.clone().offset_start(start));
    let mut view = CubeTensor::new_contiguous(x.client.clone(), x.device.clone(), shape, handle, x.dtype);
    if parts > 1 {
        view.meta.strides_mut()[0] = stride * columns;
    }
    view
}

/// The shape of `x` with another first and another last dimension.
fn resized(x: &CubeTensor, first: impl Fn(usize) -> usize, last: usize) -> Shape {
    let mut shape = x.meta.shape().to_vec();
    let end = shape.len() - 1;
    shape[end] = last;
    shape[0] = first(shape[0]);
    Shape::from(shape)
}

/// Whether NCCL carries the exchanges of `group`; its first call is collective.
fn is_linked(x: &CubeTensor, group: &Group) -> bool {
    let is_matrix = x.meta.shape().len() >= 2 && x.meta.shape().num_elements() > 0;
    is_matrix && group.size() > 1 && connect(group, gpu_of(&x.device)).is_some()
}

/// Whether the rows of `x` can be cut into the parts of the members besides.
fn can_scatter(x: &CubeTensor, group: &Group) -> bool {
    is_linked(x, group) && x.meta.shape()[0].is_multiple_of(group.size())
}

fn flops(rows: usize, [inputs, outputs]: [usize; 2]) -> f64 {
    2.0 * rows as f64 * inputs as f64 * outputs as f64
}

/// Of `rows` rows, of which `bytes` of each go over the link.
fn load(x: &CubeTensor, rows: usize, bytes: usize, sizes: [usize; 2], meanwhile: f64, group: &Group) -> Load {
    let bytes = rows * bytes / group.size() * (group.size() - 1);
    Load { bytes, flops: flops(rows, sizes), meanwhile, element: x.dtype.size() }
}

/// For the product of the whole of the members' `part`s with as many columns.
fn gather_cut(part: &CubeTensor, outputs: usize, group: &Group) -> Cut {
    let (inputs, own) = (columns(part), rows(part));
    let load = load(part, own * group.size(), inputs * part.dtype.size(), [inputs, outputs], 0.0, group);
    Cut::quickest(own, group.size(), &load)
}

/// For the sum of the products of `x`, of which each member gets its part.
fn scatter_cut(x: &CubeTensor, sizes: [usize; 2], meanwhile: f64, group: &Group) -> Cut {
    let load = load(x, rows(x), sizes[1] * x.dtype.size(), sizes, meanwhile, group);
    Cut::quickest(rows(x) / group.size(), group.size(), &load)
}

/// For the sum of the products of `x`, which goes over the link twice.
fn reduce_cut(x: &CubeTensor, sizes: [usize; 2], meanwhile: f64, group: &Group) -> Cut {
    let load = load(x, rows(x), 2 * sizes[1] * x.dtype.size(), sizes, meanwhile, group);
    Cut::quickest(rows(x), 1, &load)
}
