//! Linear layers whose activations are transferred by DMA copy engines, shard by shard, overlapped with their GEMMs.
//!
//! The local shard needs no transfer: its GEMM is the first one where shards are gathered, and the last one where sums
//! are scattered.

use burn::backend::{Cube, DType, TensorMetadata, autodiff::grads::Gradients};
use burn_cubecl::tensor::CubeTensor;
use half::{bf16, f16};
use kernels_cubecl::pointwise::reduce_slices;

use super::blocks::{blocks, resized};
use super::factors::{Factor, WeightGrad};
use super::{Float, columns, empty, launched, packed, rows, work};
use crate::tensor_parallel::gemm::Weight;
use crate::tensor_parallel::overlap_schedule::{self, MIN_COPY_BYTES, runs};
use gpu::cuda::dense;
use ranks::comm::Group;
use ranks::overlap::{Pending, dma};

/// Whether DMA copy engines transfer shards of this size between the members of `group`.
pub(super) fn uses_dma(shard_bytes: usize, x: &CubeTensor, group: &Group) -> bool {
    shard_bytes >= MIN_COPY_BYTES && dma::are_available_on(x, group)
}

/// The gathered shards, and their GEMM: of each shard as soon as it has arrived.
pub(super) fn gathered(shard: Float, factor: &Factor, bias: Option<Float>, group: &Group) -> (Float, Float) {
    let gather = Arriving::new(dense(shard), group);
    (gather.whole.clone(), gather.multiply(factor, bias.map(packed)))
}

/// Shards `[.., columns]` of all members that are gathered along the first dimension, on their way. Once it is dropped, later
/// work of the compute stream may read the whole.
pub struct Arriving {
    shard: Float,
    pub(super) whole: Float,
    /// Those of the following members one by one, then the local one.
    copies: Vec<Pending>,
    group: Group,
}

impl Arriving {
    /// Starts to gather; `shard` is contiguous.
    pub(super) fn new(shard: Float, group: &Group) -> Self {
        let whole = empty(&shard, resized(&shard, |first| first * group.size(), columns(&shard)), shard.dtype);
        let copies = dma::gather(&shard, &whole, group);
        Self { shard, whole, copies, group: group.clone() }
    }

    /// Bytes of the shards that this member copies.
    pub(super) fn received(&self) -> usize {
        bytes(&self.whole) - bytes(&self.shard)
    }

    /// The whole, for later work of the compute stream.
    pub(super) fn wait(self) -> Float {
        self.whole
    }

    /// The GEMM of the whole, of each shard as soon as it has arrived; `bias` is contiguous.
    pub(super) fn multiply(self, factor: &Factor, bias: Option<Float>) -> Float {
        let Self { shard, whole, copies: mut arriving, group } = self;
        let size = group.size();
        let out = empty(&whole, resized(&whole, |first| first, factor.columns()), whole.dtype);
        let (mut first, length) = (0, rows(&shard));
        for count in overlap_schedule::gathered(size, &factor.of(rows(&whole)), bytes(&shard)) {
            let alone = first == 0 && count == 1;
            // The copy of the local shard is the last one.
            let needed = if count == size { size } else { count - usize::from(alone) };
            arriving.drain(..needed).for_each(Pending::wait);
            for members in runs(group.rank(), first..first + count, size) {
                let [start, count] = [members.start, members.len()].map(|shards| shards * length);
                let x = if alone { run(&shard, 0, count) } else { run(&whole, start, count) };
                factor.multiply(x, bias.as_ref(), &run(&out, start, count), 0);
            }
            first += count;
        }
        arriving.into_iter().for_each(Pending::wait);
        out
    }
}

/// This member's shard of a sum of all members' GEMM outputs, in transfer.
pub(super) struct PendingSum {
    /// This member's GEMM outputs, from which the others copy their shards.
    staged: Float,
    /// The shards that this member has copied.
    arrived: Float,
    copies: Vec<Pending>,
    rank: usize,
}

/// Starts to sum the members' GEMM outputs with their biases, which are contiguous, while work that does not need the sum
/// takes `after` seconds.
pub(super) fn scattered(x: Float, (factor, bias): (&Factor, Option<&Float>), after: f64, group: &Group) -> PendingSum {
    let (x, size) = (dense(x), group.size());
    let staged = empty(&x, resized(&x, |first| first, factor.columns()), x.dtype);
    let arrived = empty(&x, resized(&x, |first| first / size * (size - 1), factor.columns()), x.dtype);
    let length = rows(&x) / size;
    let (mut first, mut copied) = (1, Vec::new());
    for count in overlap_schedule::scattered(size, &factor.of(rows(&x)), bytes(&staged) / size, after) {
        let offsets = first..first + count;
        for members in runs(group.rank(), offsets.clone(), size) {
            let [start, count] = [members.start, members.len()].map(|shards| shards * length);
            factor.multiply(run(&x, start, count), bias, &run(&staged, start, count), 0);
        }
        // The offset `size` is the member itself.
        let others = offsets.start..offsets.end.min(size);
        if !others.is_empty() {
            copied.extend(dma::collect(&staged, &arrived, others, group));
        }
        first += count;
    }
    PendingSum { staged, arrived, copies: copied, rank: group.rank() }
}

impl PendingSum {
    /// Starts to sum the members' `staged`, which is contiguous.
    pub(super) fn new(staged: Float, group: &Group) -> Self {
        let size = group.size();
        let arrived =
            empty(&staged, resized(&staged, |first| first / size * (size - 1), columns(&staged)), staged.dtype);
        let copies = dma::collect(&staged, &arrived, 1..size, group).into_iter().collect();
        Self { staged, arrived, copies, rank: group.rank() }
    }

    /// Bytes of the shards that this member copies.
    pub(super) fn received(&self) -> usize {
        bytes(&self.arrived)
    }

    /// The sum, for later work of the compute stream.
    pub(super) fn wait(self) -> Float {
        let Self { staged, arrived, copies, rank } = self;
        copies.into_iter().for_each(Pending::wait);
        let (length, count) = (rows(&staged) - rows(&arrived), rows(&arrived) / (rows(&staged) - rows(&arrived)));
        let out = empty(&staged, resized(&staged, |first| first / (count + 1), columns(&staged)), staged.dtype);
        let _noted = work::memory("sum of shards", &staged, |bytes| bytes + bytes / (count + 1));
        let local = run(&staged, rank * length, length);
        let (client, len, buffers) =
            (&out.client, length * columns(&out), [&local.handle, &arrived.handle, &out.handle]);
        let done = match out.dtype() {
            DType::BF16 => reduce_slices::sum::<bf16, f32>(client, buffers, count, len),
            DType::F16 => reduce_slices::sum::<f16, f32>(client, buffers, count, len),
            DType::F32 | DType::Flex32 => reduce_slices::sum::<f32, f32>(client, buffers, count, len),
            DType::F64 => reduce_slices::sum::<f64, f64>(client, buffers, count, len),
            other => panic!("a linear layer in {other:?}"),
        };
        launched("sum of shards", done);
        out
    }
}

/// Gradients of a layer whose input is gathered. Gathering the saved input again overlaps the GEMM of the input
/// gradient, and summing the input gradient overlaps the GEMM of the weight gradient.
pub(super) fn column_grads(
    grad: Float,
    factor: &Factor,
    Weight { id, input, .. }: Weight<Cube>,
    group: &Group,
    grads: &mut Gradients,
) -> Float {
    let (grad, shard) = (dense(grad), dense(input));
    let input = Arriving::new(shard, group);
    let of_weight = WeightGrad::new(grad.clone(), input.whole.clone(), id);
    let gemm = of_weight.gemm();
    let sum = scattered(grad, (factor, None), gemm.seconds(gemm.rows, 1, 0), group);
    drop(input);
    of_weight.write([(0, gemm.rows, 0)], grads);
    sum.wait()
}

/// `count` rows from row `start` on.
fn run(x: &CubeTensor, start: usize, count: usize) -> CubeTensor {
    blocks(x, [1, count], count, start)
}

fn bytes(x: &CubeTensor) -> usize {
    rows(x) * columns(x) * x.dtype.size()
}
