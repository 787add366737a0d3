//! Linear layers whose activations copy engines exchange beside their products, part by part.
//!
//! The rows of a rank need no exchange: they are multiplied first where the others' rows come, and last where sums go.

use burn::backend::{Cube, DType, TensorMetadata, autodiff::grads::Gradients};
use burn_cubecl::tensor::CubeTensor;
use half::{bf16, f16};
use kernels_cubecl::pointwise::slices;

use super::blocks::{blocks, resized};
use super::factors::{Factor, WeightGrad};
use super::{Float, columns, empty, launched, packed, rows, work};
use crate::comm::Group;
use crate::cuda::dense;
use crate::ops::product::Weight;
use crate::ops::turns::{self, LEAST, runs};
use crate::overlap::{Pending, copies};

/// Whether copy engines exchange parts of `part`'s size between the members of `group`.
pub(super) fn is_copied(part_bytes: usize, x: &CubeTensor, group: &Group) -> bool {
    part_bytes >= LEAST && copies::carry_from(x, group)
}

/// The whole of all members' `part`s, and its product: of each part as soon as it is there.
pub(super) fn gathered(part: Float, factor: &Factor, bias: Option<Float>, group: &Group) -> (Float, Float) {
    let (part, bias, size) = (dense(part), bias.map(packed), group.size());
    let (whole, mut arriving) = whole_of(&part, group);
    let out = empty(&whole, resized(&whole, |first| first, factor.columns()), whole.dtype);
    let (mut first, length) = (0, rows(&part));
    for count in turns::gathered(size, &factor.of(rows(&whole)), bytes(&part)) {
        let alone = first == 0 && count == 1;
        // The own part is copied last.
        let needed = if count == size { size } else { count - usize::from(alone) };
        arriving.drain(..needed).for_each(Pending::wait);
        for members in runs(group.rank(), first..first + count, size) {
            let [start, count] = [members.start, members.len()].map(|parts| parts * length);
            let x = if alone { run(&part, 0, count) } else { run(&whole, start, count) };
            factor.multiply(x, bias.as_ref(), &run(&out, start, count));
        }
        first += count;
    }
    arriving.into_iter().for_each(Pending::wait);
    (whole, out)
}

/// The whole of all members' `part`s, which comes part by part, this member's own last.
fn whole_of(part: &CubeTensor, group: &Group) -> (Float, Vec<Pending>) {
    let whole = empty(part, resized(part, |first| first * group.size(), columns(part)), part.dtype);
    let arriving = copies::gather(part, &whole, group);
    (whole, arriving)
}

/// This member's part of a sum of all members' products, on its way.
pub(super) struct Arriving {
    /// This member's products, of which the others copy theirs.
    staged: Float,
    /// What this member has copied.
    arrived: Float,
    copies: Vec<Pending>,
    rank: usize,
}

/// Starts to sum up the members' products, while what does not need the sum takes `after` seconds.
pub(super) fn scattered(x: Float, factor: &Factor, after: f64, group: &Group) -> Arriving {
    let (x, size) = (dense(x), group.size());
    let staged = empty(&x, resized(&x, |first| first, factor.columns()), x.dtype);
    let arrived = empty(&x, resized(&x, |first| first / size * (size - 1), factor.columns()), x.dtype);
    let length = rows(&x) / size;
    let (mut first, mut copied) = (1, Vec::new());
    for count in turns::scattered(size, &factor.of(rows(&x)), bytes(&staged) / size, after) {
        let offsets = first..first + count;
        for members in runs(group.rank(), offsets.clone(), size) {
            let [start, count] = [members.start, members.len()].map(|parts| parts * length);
            factor.multiply(run(&x, start, count), None, &run(&staged, start, count));
        }
        // At an offset of as many as there are members stands the member itself.
        let others = offsets.start..offsets.end.min(size);
        if !others.is_empty() {
            copied.extend(copies::collect(&staged, &arrived, others, group));
        }
        first += count;
    }
    Arriving { staged, arrived, copies: copied, rank: group.rank() }
}

impl Arriving {
    /// The sum, for what the compute stream does from here on.
    pub(super) fn wait(self) -> Float {
        let Self { staged, arrived, copies, rank } = self;
        copies.into_iter().for_each(Pending::wait);
        let (length, count) = (rows(&staged) - rows(&arrived), rows(&arrived) / (rows(&staged) - rows(&arrived)));
        let out = empty(&staged, resized(&staged, |first| first / (count + 1), columns(&staged)), staged.dtype);
        let _noted = work::memory("sum of parts", &staged, |bytes| bytes + bytes / (count + 1));
        let own = run(&staged, rank * length, length);
        let (client, len, buffers) = (&out.client, length * columns(&out), [&own.handle, &arrived.handle, &out.handle]);
        let done = match out.dtype() {
            DType::BF16 => slices::sum::<bf16, f32>(client, buffers, count, len),
            DType::F16 => slices::sum::<f16, f32>(client, buffers, count, len),
            DType::F32 | DType::Flex32 => slices::sum::<f32, f32>(client, buffers, count, len),
            DType::F64 => slices::sum::<f64, f64>(client, buffers, count, len),
            other => panic!("a linear layer in {other:?}"),
        };
        launched("sum of parts", done);
        out
    }
}

/// Gradients of a layer whose input is gathered: the kept input comes again beside the product that gives the input's
/// gradient, and that gradient is summed up beside the product that gives the weight's.
pub(super) fn column_grads(
    grad: Float,
    factor: &Factor,
    Weight { id, input, .. }: Weight<Cube>,
    group: &Group,
    grads: &mut Gradients,
) -> Float {
    let (grad, part) = (dense(grad), dense(input));
    let (input, coming) = whole_of(&part, group);
    let of_weight = WeightGrad::new(grad.clone(), input, id);
    let product = of_weight.product();
    let sum = scattered(grad, factor, product.seconds(product.rows, 1, 0), group);
    coming.into_iter().for_each(Pending::wait);
    of_weight.write([(0, product.rows, 0)], grads);
    sum.wait()
}

/// `count` rows from row `start` on.
fn run(x: &CubeTensor, start: usize, count: usize) -> CubeTensor {
    blocks(x, [1, count], count, start)
}

fn bytes(x: &CubeTensor) -> usize {
    rows(x) * columns(x) * x.dtype.size()
}
