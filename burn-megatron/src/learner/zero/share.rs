//! The updated parameters, from their owners to everyone.

use std::collections::{HashMap, HashSet};

use backend_dist::collective::broadcast;
use backend_dist::comm::Group;
use backend_dist::gradients::{dtypes, part};
use backend_dist::local::{Placements, to_local};
use burn::module::{Module, ModuleMapper, ModuleVisitor, Param, ParamId};
use burn::optim::GradientsParams;
use burn::tensor::{DType, Device, Tensor};

use super::Owners;

/// `model` with the values that the owners' `stepped` models hold.
///
/// Every rank passes the model of before the step, equal on all, and its own stepped model, of which only the
/// parameters it owns count. Parameters that are not trained stay as they are in `model`.
pub(in crate::learner) fn share_parameters<M: Module>(model: M, stepped: &M, owners: &Owners, group: &Group) -> M {
    let mut slots = Slots { owners, seen: HashSet::new(), slots: Vec::new() };
    model.visit(&mut slots);
    let Some(device) = slots.slots.first().map(|slot| slot.device.clone()) else { return model };
    let is_own = |id| owners.owner(id) == Some(group.rank());
    if group.size() == 1 {
        return with_stepped(model, stepped, &device, is_own);
    }
    let own = own_values(&model, stepped, &device, &is_own);

    let mut values = HashMap::new();
    for dtype in dtypes(slots.slots.iter().map(|slot| slot.dtype)) {
        for owner in 0..group.size() {
            let slots: Vec<&Slot> =
                slots.slots.iter().filter(|slot| slot.dtype == dtype && slot.owner == owner).collect();
            if slots.is_empty() {
                continue;
            }
            let length: usize = slots.iter().map(|slot| slot.length).sum();
            let bucket = if owner == group.rank() {
                Tensor::cat(slots.iter().map(|slot| own[&slot.id].clone()).collect(), 0)
            } else {
                Tensor::empty([length], (&slots[0].device, dtype))
            };
            let bucket = broadcast(bucket, owner, group);
            if owner == group.rank() {
                // The stepped model's own tensors serve: a second copy would take memory.
                continue;
            }
            let mut start = 0;
            for slot in slots {
                values.insert(slot.id, part(&bucket, start, slot.length));
                start += slot.length;
            }
        }
    }
    with_stepped(model.map(&mut Replace { values }), stepped, &device, is_own)
}

/// `model` with the values of `stepped` on `device` of those trained parameters that are `own`.
pub(in crate::learner) fn with_stepped<M: Module>(
    model: M,
    stepped: &M,
    device: &Device,
    own: impl Fn(ParamId) -> bool,
) -> M {
    let mut trained = Trained(HashSet::new());
    stepped.visit(&mut trained);
    let is_own = |id| trained.0.contains(&id) && own(id);
    let mut values = Stepped { is_own: &is_own, device: device.clone().inner(), values: GradientsParams::new() };
    stepped.visit(&mut values);
    model.map(&mut Take { values: values.values })
}

/// The parameters that some field trains. Burn's optimizers step the first of several fields that hold one, also where that
/// one is frozen, so the first counts.
struct Trained(HashSet<ParamId>);

impl ModuleVisitor for Trained {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if param.is_require_grad() {
            self.0.insert(param.id);
        }
    }
}

/// The owned values of a stepped model.
struct Stepped<'a> {
    is_own: &'a dyn Fn(ParamId) -> bool,
    device: Device,
    /// Of any rank, which is what Burn has these for.
    values: GradientsParams,
}

impl ModuleVisitor for Stepped<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if (self.is_own)(param.id) && self.values.get::<D>(param.id).is_none() {
            // One that no step has used so far is where the learner keeps what it does not step.
            self.values.register::<D>(param.id, param.val().inner().to_device(&self.device));
        }
    }
}

/// Gives parameters new values.
struct Take {
    values: GradientsParams,
}

impl ModuleMapper for Take {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let Some(value) = self.values.remove::<D>(param.id) else { return param };
        param.map(|old| {
            let value = Placements::of(&old).replaced_by(value);
            as_leaf(value, &old)
        })
    }
}

/// A new leaf under the tape of the old one, as after Burn's own optimizer step.
fn as_leaf<const D: usize>(value: Tensor<D>, old: &Tensor<D>) -> Tensor<D> {
    let mut new = Tensor::from_inner(value);
    if let Some(strategy) = old.gradient_checkpointing_strategy() {
        new = new.with_gradient_checkpointing_strategy(strategy);
    }
    if old.is_require_grad() { new.require_grad() } else { new }
}

/// What this rank holds of the owned values of `stepped`, placed as those of `model`, flat.
fn own_values<M: Module>(
    model: &M,
    stepped: &M,
    device: &Device,
    is_own: &dyn Fn(ParamId) -> bool,
) -> HashMap<ParamId, Tensor<1>> {
    let mut places = Places { is_own, places: HashMap::new() };
    model.visit(&mut places);
    let mut own = Own { is_own, places: places.places, device: device.clone(), values: HashMap::new() };
    stepped.visit(&mut own);
    own.values
}

/// Where the owned parameters are.
struct Places<'a> {
    is_own: &'a dyn Fn(ParamId) -> bool,
    places: HashMap<ParamId, Placements>,
}

impl ModuleVisitor for Places<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if (self.is_own)(param.id) {
            self.places.entry(param.id).or_insert_with(|| Placements::of(&param.base()));
        }
    }
}

/// The owned values of a stepped model, flat.
struct Own<'a> {
    is_own: &'a dyn Fn(ParamId) -> bool,
    places: HashMap<ParamId, Placements>,
    device: Device,
    values: HashMap<ParamId, Tensor<1>>,
}

impl ModuleVisitor for Own<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if (self.is_own)(param.id) && !self.values.contains_key(&param.id) {
            // One that no step has used so far is where the learner keeps what it does not step.
            let value = param.val().inner().to_device(&self.device);
            let value = match self.places.get(&param.id) {
                Some(place) => to_local(place.moved(value)),
                None => value,
            };
            let length = value.shape().num_elements();
            self.values.insert(param.id, value.reshape([length]));
        }
    }
}

/// Where a parameter's values lie in a bucket.
struct Slot {
    id: ParamId,
    owner: usize,
    dtype: DType,
    length: usize,
    device: Device,
}

struct Slots<'a> {
    owners: &'a Owners,
    seen: HashSet<ParamId>,
    slots: Vec<Slot>,
}

impl ModuleVisitor for Slots<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let Some(owner) = self.owners.owner(param.id) else { return };
        if self.seen.insert(param.id) {
            let value = param.val();
            let length = Placements::of(&value).local_shape(value.shape()).num_elements();
            let dtype = value.dtype();
            self.slots.push(Slot { id: param.id, owner, dtype, length, device: value.device().inner() });
        }
    }
}

/// Gives parameters and states new values: what the rank holds of them, flat.
pub(in crate::learner) struct Replace {
    pub values: HashMap<ParamId, Tensor<1>>,
}

impl ModuleMapper for Replace {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let Some(value) = self.values.remove(&param.id) else { return param };
        param.map(|old| {
            let placements = Placements::of(&old);
            as_leaf(placements.from_local(value.reshape(placements.local_shape(old.shape()))), &old)
        })
    }
}
