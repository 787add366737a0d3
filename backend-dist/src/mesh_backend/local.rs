//! A rank's share of a logical tensor as a tensor, and collectives of it with ranks that have other tensors.

use super::across::{Across, Part};
use super::command::{self, Command};
use super::follow::Message;
use super::formula::AdamWStep;
use super::live::{Live, live};
use crate::logical::{Placement, TensorState};
use burn::backend::TensorMetadata;
use burn::backend::ops::{AttentionBackward, FloatTensorOps, IntTensorOps, ModuleOps};
use burn::backend::tensor::FloatTensor;
use burn::module::{Module, ModuleVisitor, Param};
use burn::optim::GradientsParams;
use burn::tensor::ops::AttentionModuleOptions;
use burn::tensor::{DType, Device, Shape, Tensor};
use burn_group::GroupBackend;
use burn_ir::{TensorId, TensorIr, TensorStatus};
use ranks::collective_ops::{Collective, OnGroups};
use std::collections::HashSet;

/// A tensor of a logical device.
pub(crate) type LogicalTensor = FloatTensor<GroupBackend>;

/// Where a tensor of a logical device of several ranks is, and among how many along each of its axes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Known {
    state: TensorState,
    ranks: Vec<usize>,
}

impl Known {
    /// Of a tensor, if it is on such a device.
    pub fn of<const D: usize>(x: &Tensor<D>) -> Option<Self> {
        logical(x).map(|x| Self::of_logical(&x))
    }

    fn of_logical(x: &LogicalTensor) -> Self {
        let Live { client, ranks, .. } = live_of(x);
        Self { state: client.state(name(x)), ranks }
    }

    #[cfg(test)]
    pub fn is_weight(&self) -> bool {
        self.state.weight
    }

    /// What a rank holds of a tensor of this shape.
    pub fn local_shape(&self, shape: Shape) -> Shape {
        self.scaled(shape, |size, ranks| size / ranks)
    }

    /// Whether `other` becomes this by a sum over the ranks of an axis, and by nothing else.
    pub fn is_sum_of(&self, other: &Self) -> bool {
        let pairs = self.state.at.iter().zip(&other.state.at);
        let changed = pairs.filter(|(to, from)| to != from).collect::<Vec<_>>();
        matches!(changed[..], [(Placement::Replicate, Placement::Partial)])
    }

    /// `x` in these placements.
    pub fn moved_to(&self, x: LogicalTensor) -> LogicalTensor {
        let here = Self::of_logical(&x).state;
        self.moved_along(x, self.axes_from(&here))
    }

    /// `x` in the place of the parameter that this is of.
    pub fn replaced_by(&self, x: LogicalTensor) -> LogicalTensor {
        let here = Self::of_logical(&x).state;
        let axes = self.axes_from(&here);
        // To be known as a parameter it moves to where it is.
        let is_known = here.weight == self.state.weight || !axes.is_empty();
        self.moved_along(x, if is_known { axes } else { vec![0] })
    }

    /// The axes along which a tensor is elsewhere.
    fn axes_from(&self, here: &TensorState) -> Vec<usize> {
        (0..here.at.len()).filter(|&axis| here.at[axis] != self.state.at[axis]).collect()
    }

    fn moved_along(&self, mut x: LogicalTensor, axes: Vec<usize>) -> LogicalTensor {
        for axis in axes {
            let command = Command::Move { axis, to: self.state.at[axis], weight: self.state.weight };
            x = command::send(command, || GroupBackend::float_mul_scalar(x, 1.into())).0;
        }
        x
    }

    /// The tensor of which every rank's share is its own `local`.
    pub fn global_of(&self, local: LogicalTensor) -> LogicalTensor {
        let shape = self.scaled(local.shape(), |size, ranks| size * ranks);
        renamed(&local, shape, self.state.clone())
    }

    fn scaled(&self, mut shape: Shape, scale: impl Fn(usize, usize) -> usize) -> Shape {
        for (at, &ranks) in self.state.at.iter().zip(&self.ranks) {
            if let Some(dim) = at.dim() {
                shape[dim] = scale(shape[dim], ranks);
            }
        }
        shape
    }
}

/// Runs `f` on a tensor of a logical device of several ranks, without autodiff; any other is its own share, and returned.
pub(crate) fn on_logical<const D: usize>(x: Tensor<D>, f: impl FnOnce(LogicalTensor) -> LogicalTensor) -> Tensor<D> {
    match logical(&x) {
        Some(logical) => {
            drop(x);
            Tensor::from_primitive::<GroupBackend>(f(logical))
        }
        None => x,
    }
}

/// Weight and moments after `step`, of weight, moments and gradient of one shape on a logical device, without autodiff.
///
/// # Panics
/// If they are on another device.
pub(crate) fn stepped<const D: usize>(step: AdamWStep, tensors: [Tensor<D>; 4]) -> [Tensor<D>; 3] {
    let logical = |x: Tensor<D>| x.try_into_primitive::<GroupBackend>().expect("tensors of a logical device");
    let [weight, moment_1, moment_2, gradient] = tensors.map(logical);
    // The operation of Burn that has as many inputs and outputs.
    let carrier = || {
        let (again, last) = (gradient.clone(), gradient.clone());
        let options = AttentionModuleOptions::default();
        GroupBackend::attention_backward(weight, moment_1, moment_2, again, last, gradient, options)
    };
    let outs: AttentionBackward<GroupBackend> = command::send(Command::Step(step), carrier).0;
    [outs.query_grad, outs.key_grad, outs.value_grad].map(Tensor::from_primitive::<GroupBackend>)
}

/// Whether a device is logical.
pub(crate) fn is_logical(device: &Device) -> bool {
    live(device).is_some()
}

/// The rank's share of `x`.
pub(crate) fn local_of(x: LogicalTensor) -> LogicalTensor {
    let known = Known::of_logical(&x);
    let state = TensorState { at: vec![Placement::Varying; known.ranks.len()], weight: false };
    let shape = known.local_shape(x.shape());
    renamed(&x, shape, state)
}

fn logical<const D: usize>(x: &Tensor<D>) -> Option<LogicalTensor> {
    let x = x.clone().without_autodiff().try_into_primitive::<GroupBackend>().ok()?;
    let live = live(&Device::new(x.device()))?;
    live.ranks.iter().any(|&ranks| ranks > 1).then_some(x)
}

fn live_of(x: &LogicalTensor) -> Live {
    live(&Device::new(x.device())).expect("a device group is a logical device")
}

/// What the device calls `x`.
pub(super) fn name(x: &LogicalTensor) -> TensorId {
    command::send(Command::Name, || GroupBackend::float_mul_scalar(x.clone(), 1.into())).1
}

/// What every rank holds of `x` as its share of a tensor of this shape, in this state.
fn renamed(x: &LogicalTensor, shape: Shape, state: TensorState) -> LogicalTensor {
    let client = live_of(x).client;
    let out = client.new_id();
    client.everywhere(Message::Alias { x: name(x), out, state });
    let (device, dtype) = (x.device(), x.dtype());
    command::send(Command::Adopt(out), || GroupBackend::float_empty(shape, &device, dtype.into())).0
}

/// The shape of what a member of `ranks` gets of a tensor of this shape.
fn shape_after(mut shape: Shape, what: &Collective, ranks: usize) -> Shape {
    match what {
        Collective::Identity | Collective::AllReduce(_) | Collective::Broadcast(_) | Collective::Reduce(_) => {}
        Collective::AllGather(dim) => shape[*dim] *= ranks,
        Collective::ReduceScatter(dim) | Collective::Slice(dim) => shape[*dim] /= ranks,
        Collective::AllToAll { receive, .. } => shape[0] = receive.iter().sum(),
    }
    shape
}

macro_rules! across {
    ($x:expr, $what:expr, $group:expr, $carrier:ident, $empty:ident) => {{
        let (x, what, group) = ($x, $what, $group);
        if group.size() == 1 {
            return x;
        }
        let (device, shape, dtype): (_, Shape, DType) = (x.device(), x.shape(), x.dtype());
        let carrier = || GroupBackend::$carrier(x.clone(), 1.into());
        let id = command::send(Command::Name, carrier).1;
        let x_ir = TensorIr { id, shape: shape.clone(), status: TensorStatus::ReadOnly, dtype };
        // Not within an operation, where the device group would be locked: other ranks may free tensors of this one.
        let client = live(&Device::new(device)).expect("a device group is a logical device").client;
        let out = client.new_id();
        let part = Part { x: x_ir, out, shape: shape.clone(), what: what.clone(), half: false };
        client.across(Across { parts: vec![part], group: group.name().into(), mean: false, is_async: false });
        let shape = shape_after(shape, &what, group.size());
        command::send(Command::Adopt(out), || GroupBackend::$empty(shape, &device, dtype.into())).0
    }};
}

/// Collectives with ranks that are not of the tensor's device.
pub(super) const COLLECTIVES: OnGroups = OnGroups {
    float: |x, what, group| across!(x, what, group, float_mul_scalar, float_empty),
    int: |x, what, group| across!(x, what, group, int_mul_scalar, int_empty),
};

/// The tensors of a logical device that did not exist at some time.
pub(crate) struct Recent(Option<(Live, TensorId)>);

impl Recent {
    /// Those that come from now on.
    pub fn on(device: &Device) -> Self {
        let live = live(device).filter(|live| live.ranks.iter().any(|&ranks| ranks > 1));
        Self(live.map(|live| {
            let next = live.client.new_id();
            (live, next)
        }))
    }

    /// Makes all of them whole on every rank but those of `grads`, which are gradients of the module's parameters.
    pub fn make_whole<M: Module>(self, module: &M, grads: &GradientsParams) {
        let Some((live, first)) = self.0 else { return };
        let mut gradients = Gradients { grads, ids: HashSet::new() };
        module.visit(&mut gradients);
        let tensors = live.client.worker().ask(move |interpreter| interpreter.distributed_since(first));
        let mut others: Vec<_> = tensors.into_iter().filter(|x| !gradients.ids.contains(&x.id)).collect();
        others.sort_by_key(|x| x.id);
        others.into_iter().for_each(|x| live.client.everywhere(Message::Whole(x)));
    }
}

/// What the device calls the gradients of a module.
struct Gradients<'a> {
    grads: &'a GradientsParams,
    ids: HashSet<TensorId>,
}

impl ModuleVisitor for Gradients<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let gradient = self.grads.get::<D>(param.id).and_then(|gradient| logical(&gradient));
        self.ids.extend(gradient.map(|gradient| name(&gradient)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mesh_backend::{LogicalDevice, LogicalOptions, explain};
    use burn::tensor::FloatDType;
    use ranks::launch::launch;
    use ranks::mesh::{Axis, Mesh};

    #[test]
    fn one_tensor_under_two_names_has_one_copy_in_half_precision() {
        launch(&Mesh::new("TP2".parse().unwrap()).unwrap(), &[Device::flex()], |rank| {
            let options = LogicalOptions { autocast: Some(FloatDType::BF16), fusion: Some(true), ..Default::default() };
            let device = rank.logical_device_with(&[Axis::Tp], options);
            let tensor = |x: f32| Tensor::<2>::from_data([[x, 2.0], [3.0, 4.0]], (&device, DType::F32));
            let (weight, x) = (tensor(1.0), tensor(5.0));
            let known = Known::of(&weight).unwrap();
            let twin = on_logical(weight.clone(), |x| known.global_of(local_of(x)));
            let casts = || explain(&device).kernels.get("cast").copied().unwrap_or(0);
            let expected = x.clone().matmul(weight).into_data();
            let before = casts();
            assert_eq!(x.matmul(twin).into_data(), expected);
            assert_eq!((before, casts()), (2, 2));
            Ok(())
        })
        .unwrap();
    }

    #[test]
    fn shapes_after_collectives() {
        let after = |what| shape_after(Shape::from([4, 6]), &what, 2).to_vec();
        assert_eq!(after(Collective::AllGather(1)), [4, 12]);
        assert_eq!(after(Collective::ReduceScatter(0)), [2, 6]);
        assert_eq!(after(Collective::AllToAll { send: vec![1, 3], receive: vec![2, 5] }), [7, 6]);
        assert_eq!(after(Collective::Broadcast(1)), [4, 6]);
    }
}
