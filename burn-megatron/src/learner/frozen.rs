//! Frozen parameters, which nothing but a model's own `TrainStep::optimize` changes: moving averages of other ones, for example.

use std::any::Any;
use std::collections::HashSet;
use std::sync::Arc;

use backend_dist::paths::PathVisitor;
use burn::backend::Flex;
use burn::module::{Module, ModuleMapper, Param, ParamId};
use burn::optim::GradientsParams;
use burn::tensor::{Device, Tensor};
use burn::train::{Learner, LearnerModel};

/// Those that an optimizer step has changed, by their place among all frozen ones.
pub(super) struct Changes {
    found: Vec<(usize, Box<dyn Any>)>,
    /// Of the first.
    path: String,
}

/// An optimizer step.
pub(super) fn optimizer_step<M: LearnerModel>(learner: &mut Learner<M>, grads: GradientsParams) -> Changes {
    let Before { frozen, trained } = Before::default().walk(&learner.model());
    learner.optimizer_step(grads);
    let changes = Changes { found: Vec::new(), path: String::new() };
    let compare = Compare { before: frozen.into_iter(), trained, seen: HashSet::new(), at: 0, changes };
    compare.walk(&learner.model()).changes
}

impl Changes {
    /// For ranks that do not have all parameters.
    ///
    /// # Panics
    /// If there are any.
    pub fn refuse(self) {
        assert!(
            self.found.is_empty(),
            "`TrainStep::optimize` changes `{}`, which is frozen: with ZeRO, tensor parallelism or pipelines the optimizer of a \
             rank does not have all parameters; nearest legal: data parallelism without them",
            self.path
        );
    }

    /// `model` with the changes.
    pub fn made_in<M: Module>(self, model: M, device: &Device) -> M {
        if self.found.is_empty() {
            return model;
        }
        model.map(&mut Make { found: self.found, at: 0, device: device.clone().inner() })
    }
}

/// The values of frozen parameters, in the order of the module, and the ids of others.
#[derive(Default)]
struct Before {
    frozen: Vec<Box<dyn Any>>,
    trained: HashSet<ParamId>,
}

impl PathVisitor for Before {
    fn visit<const D: usize>(&mut self, _: &str, param: &Param<Tensor<D>>) {
        if param.is_require_grad() {
            self.trained.insert(param.id);
        } else {
            self.frozen.push(Box::new(param.base()));
        }
    }
}

struct Compare<I> {
    before: I,
    trained: HashSet<ParamId>,
    seen: HashSet<ParamId>,
    at: usize,
    changes: Changes,
}

impl<I: Iterator<Item = Box<dyn Any>>> PathVisitor for Compare<I> {
    fn visit<const D: usize>(&mut self, path: &str, param: &Param<Tensor<D>>) {
        // Burn's optimizers step the first of the fields that hold a parameter, also where it is the one that is frozen.
        let is_stepped = self.seen.insert(param.id) && self.trained.contains(&param.id);
        if param.is_require_grad() {
            return;
        }
        let (before, after) = (self.before.next(), param.base());
        let before = before.and_then(|before| before.downcast::<Tensor<D>>().ok());
        if !is_stepped && !before.is_some_and(|before| is_same(&before, &after)) {
            if self.changes.found.is_empty() {
                self.changes.path = path.into();
            }
            self.changes.found.push((self.at, Box::new(after)));
        }
        self.at += 1;
    }
}

/// Mostly it is the same memory of the host.
fn is_same<const D: usize>(before: &Tensor<D>, after: &Tensor<D>) -> bool {
    let memory = |x: &Tensor<D>| {
        let x = x.clone().without_autodiff().try_into_primitive::<Flex>().ok()?;
        Some(x.data_arc())
    };
    let [here, there] = [before, after].map(memory);
    let is_shared = here.zip(there).is_some_and(|(here, there)| Arc::ptr_eq(&here, &there));
    is_shared || before.to_data() == after.to_data()
}

struct Make {
    found: Vec<(usize, Box<dyn Any>)>,
    at: usize,
    device: Device,
}

impl ModuleMapper for Make {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        if param.is_require_grad() {
            return param;
        }
        let found = self.found.iter().find(|(at, _)| *at == self.at);
        self.at += 1;
        let Some(value) = found.and_then(|(_, value)| value.downcast_ref::<Tensor<D>>()) else { return param };
        let value = value.clone().without_autodiff().to_device(&self.device);
        param.map(|old| if old.is_autodiff() { Tensor::from_inner(value) } else { value })
    }
}
