//! A small sum, the residual addition and the norm that follow it in a decoder, by one kernel.

use super::{Communicator, collective_operation, elements};
use crate::comm::{DeviceOp, DeviceOpKind, Group, ReduceOp};
use crate::one_shot::NormedRows;
use crate::one_shot::layout::prefetched;
use burn_cubecl::tensor::CubeTensor;
use gpu::cuda::{dense, empty};
use gpu::profile;
use kernels_cubecl::pointwise::norm::Plan;
use std::sync::Arc;

/// A thread of the kernel loads 16 bytes at once.
const ALIGNMENT: u64 = 16;

/// `stream + Σ partial` over the members of `group`, and the RMSNorm of that with `weight`: the bits of the sum, the
/// addition and the norm apart, for half precision types by the kernel of `kernels_cubecl`. `None`, on all members alike,
/// where there is no kernel for it; [`one_shot_sums`](crate::collective::one_shot_sums) asks for it. What is read `next`, a
/// weight, comes to the cache meanwhile, or some of it.
pub fn normed_sum(
    partial: &CubeTensor,
    stream: &CubeTensor,
    weight: &CubeTensor,
    next: Option<&CubeTensor>,
    (eps, plus_one): (f64, bool),
    (group, link): (&Group, &Arc<Communicator>),
) -> Option<[CubeTensor; 2]> {
    let rows = NormedRows { plus_one, ..normed_rows(partial, link)? };
    let (dtype, shape) = (partial.dtype, partial.meta.shape().clone());
    let same = [stream, weight].iter().all(|x| x.dtype == dtype) && *stream.meta.shape() == shape;
    if !same || elements(weight) != rows.columns {
        return None;
    }
    let [partial, stream, weight] = [partial, stream, weight].map(|x| aligned(x.clone()));
    let [sum, normed] = [(); 2].map(|()| empty(&partial, shape.clone(), dtype));
    let next = next.filter(|x| x.is_contiguous() && is_aligned(x));
    let next_bytes = next.map_or(0, |x| prefetched(elements(x) * x.dtype.size()));
    let mut buffers = vec![&partial, &stream, &weight, &sum, &normed];
    buffers.extend(next);
    let op = DeviceOp::new(DeviceOpKind::AllReduce(ReduceOp::Sum), dtype, &shape);
    let noted = profile::operation(&partial, || {
        collective_operation(&op, rows.bytes(), group.size(), ", one-shot, normalised")
    });
    let sequence = group.issue(op.clone());
    link.queue_on(
        |call| call.compute(),
        (sequence, op),
        &buffers,
        move |call, buffers| {
            let one_shot = call.one_shot().ok_or("one-shot all-reduces are not set up")?;
            let next = (buffers.get(5).copied().unwrap_or(std::ptr::null_mut()), next_bytes);
            let buffers = std::array::from_fn(|at| buffers[at]);
            one_shot.launch_norm(call.compute(), buffers, next, rows, eps as f32)
        },
    );
    drop(noted);
    Some([sum, normed])
}

/// The sizes of such a call, if there is a kernel for it now.
pub(crate) fn normed_rows(partial: &CubeTensor, link: &Communicator) -> Option<NormedRows> {
    let columns = *partial.meta.shape().last()?;
    if columns == 0 || !columns.is_multiple_of(8) {
        return None;
    }
    let Plan { units, plane, vectors, .. } = Plan::of(&partial.client, columns, false);
    let (dtype, rows, threads) = (partial.dtype, elements(partial) / columns, units as usize);
    let rows = NormedRows { dtype, rows, columns, threads, vectors, plus_one: false };
    (plane == 32 && link.existing_one_shot()?.takes_norms(&rows)).then_some(rows)
}

fn aligned(x: CubeTensor) -> CubeTensor {
    let x = dense(x);
    if is_aligned(&x) { x } else { burn_cubecl::kernel::copy_contiguous(x) }
}

fn is_aligned(x: &CubeTensor) -> bool {
    x.handle.offset_start.unwrap_or(0).is_multiple_of(ALIGNMENT)
}
