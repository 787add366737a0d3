//! Linear layers whose exchanges run beside their products (Megatron-LM's `--tp-comm-overlap` and
//! `LinearWithGradAccumulationAndAsyncCommunication` in `megatron/core/tensor_parallel/layers.py`).
//!
//! Exchanges have a stream of their own. One that makes a product's rows is waited for by the product of these rows
//! only; one of a product's result starts behind that product and is waited for where the result is handed on, which in
//! a backward pass is behind the weight's gradient.

use burn::backend::{Cube, autodiff::grads::Gradients};
use burn_cubecl::tensor::CubeTensor;

use super::blocks::{blocks, piece_of, resized};
use super::copied::{self, is_copied};
use super::factors::{Factor, WeightGrad};
use super::{Float, columns, empty, linear, packed, rows};
use crate::comm::Group;
use crate::cuda::dense;
use crate::cuda::lt::leaving;
use crate::nccl::{connect, gpu_of};
use crate::ops::pieces::{Cut, LEFT};
use crate::ops::product::{self, Ends, Entry, Exit, Products, Weight};
use crate::ops::{plain, weight_grads};
use crate::overlap::{Pending, pieces};

impl Products for Cube {
    fn product(x: Float, w: Float, bias: Option<Float>, ends: &Ends) -> Float {
        let by_library = bias.as_ref().is_none_or(|bias| linear::adds_bias(&x, &w, bias));
        let factor = Factor { w: w.clone(), transposed: true };
        match (&ends.entry, &ends.exit) {
            (Entry::Gathered(group), Exit::Own) if ends.overlap && by_library && is_linked(&x, group) => {
                if is_copied(bytes(&x), &x, group) {
                    return copied::gathered(x, &factor, bias, group).1;
                }
                let cut = gather_cut(&x, &factor, group);
                if cut.pieces() > 1 {
                    return gathered(x, &factor, bias, cut, group).1;
                }
            }
            (Entry::Own, Exit::Scattered(group)) if ends.overlap && can_scatter(&x, group) => {
                if is_copied(factor.bytes(rows(&x)) / group.size(), &x, group) {
                    return with_bias(copied::scattered(x, &factor, 0.0, group).wait(), bias);
                }
                let cut = scatter_cut(&x, &factor, group);
                if cut.pieces() > 1 {
                    return with_bias(arrived(scattered(x, &factor, cut, group)), bias);
                }
            }
            (Entry::Own, Exit::Reduced(group)) if ends.overlap && is_linked(&x, group) => {
                let cut = reduce_cut(&x, &factor, group);
                if cut.pieces() > 1 {
                    return with_bias(arrived(reduced(x, &factor, cut, group)), bias);
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
        let Some(factor) = w.as_ref().map(|w| Factor { w: w.clone(), transposed: false }).filter(|_| ends.overlap)
        else {
            return product::backward::<Self>(grad, w, weight, ends, grads);
        };
        match (&ends.entry, &ends.exit) {
            (Entry::Gathered(group), Exit::Own) if can_scatter(&grad, group) => {
                Some(column_grads(grad, &factor, weight, ends, group, grads))
            }
            (Entry::Copied(group), Exit::Own) if is_linked(&grad, group) => {
                Some(column_grads(grad, &factor, weight, ends, group, grads))
            }
            (Entry::Own, Exit::Scattered(group)) if is_linked(&grad, group) => {
                if is_copied(bytes(&grad), &grad, group) {
                    let (grad, input_grad) = copied::gathered(grad, &factor, None, group);
                    product::weight_grad::<Self>(grad, weight, &ends.entry, grads);
                    return Some(input_grad);
                }
                let cut = gather_cut(&grad, &factor, group);
                if cut.pieces() == 1 {
                    return product::backward::<Self>(grad, w, weight, ends, grads);
                }
                let (grad, input_grad) = gathered(grad, &factor, None, cut, group);
                product::weight_grad::<Self>(grad, weight, &ends.entry, grads);
                Some(input_grad)
            }
            _ => product::backward::<Self>(grad, w, weight, ends, grads),
        }
    }
}

/// Gradients of a layer whose input is gathered or copied: the kept input is gathered again beside the product that
/// gives the input's gradient, and that gradient is summed up beside the product that gives the weight's.
fn column_grads(
    grad: Float,
    factor: &Factor,
    weight: Option<Weight<Cube>>,
    ends: &Ends,
    group: &Group,
    grads: &mut Gradients,
) -> Float {
    let gathers = matches!(ends.entry, Entry::Gathered(_));
    let (now, late) = match weight {
        Some(weight) if weight.is_leaf && weight_grads::is_deferring() => (None, Some(weight)),
        weight => (weight, None),
    };
    let by_copies = gathers && is_copied(factor.bytes(rows(&grad)) / group.size(), &grad, group);
    let Some(weight) = now else {
        product::weight_grad::<Cube>(grad.clone(), late, &ends.entry, grads);
        if by_copies {
            return copied::scattered(grad, factor, 0.0, group).wait();
        }
        return arrived(match gathers {
            true => scattered(grad.clone(), factor, scatter_cut(&grad, factor, group), group),
            false => reduced(grad.clone(), factor, reduce_cut(&grad, factor, group), group),
        });
    };
    if by_copies {
        return copied::column_grads(grad, factor, weight, group, grads);
    }
    let (Weight { id, input, .. }, grad) = (weight, dense(grad));
    let (input, gather) = if gathers { regathered(input, group) } else { (input, None) };
    let sums = empty(&grad, resized(&grad, |first| first, factor.columns()), grad.dtype);
    let beside = gather.as_ref().map_or(0, |_| factor.of(rows(&grad)).beside(received(&input, group)));
    for (start, count, left) in in_two(rows(&grad), beside) {
        let block = |x| blocks(x, [1, count], count, start);
        leaving(left, || factor.multiply(block(&grad), None, &block(&sums)));
    }
    let (input_grad, sum, bytes) = match gathers {
        true => {
            let part = empty(&sums, resized(&sums, |first| first / group.size(), columns(&sums)), sums.dtype);
            let sum = pieces::scatter(&sums, &part, Cut::whole(rows(&part), group.size()), 0, group);
            (part, sum, received(&sums, group))
        }
        false => {
            let sum = pieces::reduce(&sums, Cut::whole(rows(&sums), 1), 0, group);
            let bytes = 2 * received(&sums, group);
            (sums, sum, bytes)
        }
    };
    drop(gather);
    let of_weight = WeightGrad::new(grad, input, id);
    let product = of_weight.product();
    of_weight.write(in_two(product.rows, product.beside(bytes)), grads);
    arrived((input_grad, vec![sum]))
}

/// The first `beside` of `all` rows, which leave multiprocessors to an exchange, and the others: start, number, what is
/// left.
fn in_two(all: usize, beside: usize) -> impl Iterator<Item = (usize, usize, usize)> {
    [(0, beside, LEFT), (beside, all - beside, 0)].into_iter().filter(|(_, count, _)| *count > 0)
}

/// The whole of all members' `part`s, and its product: of each piece as soon as its rows are there.
fn gathered(part: Float, factor: &Factor, bias: Option<Float>, cut: Cut, group: &Group) -> (Float, Float) {
    let (part, bias) = (dense(part), bias.map(packed));
    let whole = empty(&part, resized(&part, |first| first * cut.parts, columns(&part)), part.dtype);
    // All of them before any product: an exchange waits for what the compute stream has queued so far.
    let arriving: Vec<Pending> = (0..cut.pieces()).map(|i| pieces::gather(&part, &whole, cut, i, group)).collect();
    let out = empty(&whole, resized(&whole, |first| first, factor.columns()), whole.dtype);
    for (i, piece) in arriving.into_iter().enumerate() {
        piece.wait();
        let left = if i + 1 < cut.pieces() { LEFT } else { 0 };
        leaving(left, || factor.multiply(piece_of(&whole, cut, i), bias.as_ref(), &piece_of(&out, cut, i)));
    }
    (whole, out)
}

/// The whole of all members' `part`s, once it is there.
fn regathered(part: Float, group: &Group) -> (Float, Option<Pending>) {
    let part = dense(part);
    let whole = empty(&part, resized(&part, |first| first * group.size(), columns(&part)), part.dtype);
    let pending = pieces::gather(&part, &whole, Cut::whole(rows(&part), group.size()), 0, group);
    (whole, Some(pending))
}

/// This member's part of the sum of all members' products, once it is there: each piece is summed up behind its
/// product.
fn scattered(x: Float, factor: &Factor, cut: Cut, group: &Group) -> (Float, Vec<Pending>) {
    let x = dense(x);
    let staged = empty(&x, resized(&x, |first| first, factor.columns()), x.dtype);
    let part = empty(&x, resized(&x, |first| first / cut.parts, factor.columns()), x.dtype);
    let leaving_pieces = (0..cut.pieces()).map(|i| {
        let run = blocks(&staged, [cut.parts, cut.rows(i)], cut.rows(i), cut.staged(i));
        let left = if i > 0 { LEFT } else { 0 };
        leaving(left, || factor.multiply(piece_of(&x, cut, i), None, &run));
        pieces::scatter(&staged, &part, cut, i, group)
    });
    let pending = leaving_pieces.collect();
    (part, pending)
}

/// The sum of all members' products, once it is there: each piece is summed up behind its product.
fn reduced(x: Float, factor: &Factor, cut: Cut, group: &Group) -> (Float, Vec<Pending>) {
    let x = dense(x);
    let out = empty(&x, resized(&x, |first| first, factor.columns()), x.dtype);
    let leaving_pieces = (0..cut.pieces()).map(|i| {
        let left = if i > 0 { LEFT } else { 0 };
        leaving(left, || factor.multiply(piece_of(&x, cut, i), None, &piece_of(&out, cut, i)));
        pieces::reduce(&out, cut, i, group)
    });
    let pending = leaving_pieces.collect();
    (out, pending)
}

/// What the compute stream may use from here on.
fn arrived((result, pieces): (Float, Vec<Pending>)) -> Float {
    pieces.into_iter().for_each(Pending::wait);
    result
}

fn with_bias(y: Float, bias: Option<Float>) -> Float {
    match bias {
        Some(bias) => plain::linear::add_bias::<Cube>(y, bias),
        None => y,
    }
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

fn bytes(x: &CubeTensor) -> usize {
    rows(x) * columns(x) * x.dtype.size()
}

/// Bytes that a rank receives when `whole` is gathered or its sum scattered.
fn received(whole: &CubeTensor, group: &Group) -> usize {
    bytes_received(rows(whole), columns(whole), whole, group)
}

fn bytes_received(rows: usize, columns: usize, like: &CubeTensor, group: &Group) -> usize {
    rows * columns * like.dtype.size() / group.size() * (group.size() - 1)
}

/// For the product of the whole of the members' `part`s.
fn gather_cut(part: &CubeTensor, factor: &Factor, group: &Group) -> Cut {
    let all = rows(part) * group.size();
    Cut::gathered(group.size(), &factor.of(all), bytes_received(all, columns(part), part, group))
}

/// For the sum of the products of `x`, of which each member gets its part.
fn scatter_cut(x: &CubeTensor, factor: &Factor, group: &Group) -> Cut {
    Cut::scattered(group.size(), &factor.of(rows(x)), bytes_received(rows(x), factor.columns(), x, group))
}

/// For the sum of the products of `x`, which goes over the link twice.
fn reduce_cut(x: &CubeTensor, factor: &Factor, group: &Group) -> Cut {
    Cut::scattered(1, &factor.of(rows(x)), 2 * bytes_received(rows(x), factor.columns(), x, group))
}
