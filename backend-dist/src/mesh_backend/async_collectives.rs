//! Collectives with ranks that have other tensors, which continue while the device computes.

use super::across::{Across, Part};
use super::command::{self, Command};
use super::follow::Message;
use super::live::live;
use super::local::{LogicalTensor, name};
use burn::backend::TensorMetadata;
use burn::backend::ops::FloatTensorOps;
use burn::tensor::{Device, Shape, Tensor};
use burn_group::GroupBackend;
use burn_ir::{TensorId, TensorIr, TensorStatus};
use ranks::collective_ops::Collective;
use ranks::comm::Group;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// What a rank has for a collective: `length` elements, or one of a tensor that it receives.
pub(crate) struct Held {
    pub tensor: Tensor<1>,
    pub length: usize,
    pub what: Collective,
    /// Whether GEMMs read the result: then half precision is enough under autocast.
    pub for_gemms: bool,
}

/// Begins collectives over `group`, of at least one tensor, together. With `mean`, sums are divided by the number of
/// members. The results must not be used before [`Work::wait`]. `Err` if the tensors are on no
/// logical device, or the group has one member.
pub(crate) fn begin(held: Vec<Held>, mean: bool, group: &Group) -> Result<(Vec<Tensor<1>>, Arc<Work>), Vec<Held>> {
    let device = held[0].tensor.device();
    let Some(live) = live(&device).filter(|_| group.size() > 1) else { return Err(held) };
    let client = live.client;
    let on_device = |held: Held| {
        let x = held.tensor.try_into_primitive::<GroupBackend>().expect("a logical device is a group");
        let (id, out, shape) = (name(&x), client.new_id(), Shape::from([held.length]));
        let ir = TensorIr { id, shape: x.shape(), status: TensorStatus::ReadOnly, dtype: x.dtype() };
        // It exists until the device has been told.
        (x, Part { x: ir, out, shape, what: held.what, half: held.for_gemms })
    };
    let (tensors, parts): (Vec<_>, Vec<_>) = held.into_iter().map(on_device).unzip();
    let across = Across { parts, group: group.name().into(), mean, is_async: true };
    client.across(across.clone());
    let adopt = |(x, part): (LogicalTensor, &Part)| {
        let empty = || GroupBackend::float_empty(part.shape.clone(), &x.device(), x.dtype().into());
        Tensor::from_primitive::<GroupBackend>(command::send(Command::Adopt(part.out), empty).0)
    };
    let work = Work { device, first: across.parts[0].out, was_waited_for: AtomicBool::new(false) };
    Ok((tensors.into_iter().zip(&across.parts).map(adopt).collect(), Arc::new(work)))
}

/// Collectives that have begun, as PyTorch's `Work`.
pub(crate) struct Work {
    device: Device,
    first: TensorId,
    was_waited_for: AtomicBool,
}

impl Work {
    /// What the device is told from now on comes after the collectives.
    pub fn wait(&self) {
        if self.was_waited_for.swap(true, Ordering::Relaxed) {
            return;
        }
        if let Some(live) = live(&self.device) {
            live.client.everywhere(Message::Wait(self.first));
        }
    }
}
