//! Frozen parameters, which nothing but a model's own `TrainStep::optimize` changes: moving averages of other ones, for example.

use std::any::Any;
use std::collections::HashSet;

use backend_dist::paths::PathVisitor;
use burn::module::{Module, ModuleMapper, ModuleVisitor, Param, ParamId};
use burn::optim::GradientsParams;
use burn::tensor::{Bool, Device, Int, Tensor};
use burn::train::{Learner, LearnerModel};

use super::integers::{Changed, Integers};
use super::plain_fields::PlainFields;
use super::same::is_same;

/// Whether a model has parameters that nothing but its own `TrainStep::optimize` changes.
pub(super) fn has_untrained<M: Module>(model: &M) -> bool {
    let mut untrained = Untrained(false);
    model.visit(&mut untrained);
    untrained.0
}

struct Untrained(bool);

impl ModuleVisitor for Untrained {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        self.0 |= !param.is_require_grad();
    }

    fn visit_int<const D: usize>(&mut self, _: &Param<Tensor<D, Int>>) {
        self.0 = true;
    }

    fn visit_bool<const D: usize>(&mut self, _: &Param<Tensor<D, Bool>>) {
        self.0 = true;
    }
}

/// Those that an optimizer step has changed, by their place among all frozen ones.
pub(super) struct Changes {
    found: Vec<(usize, Box<dyn Any>)>,
    /// Of the first.
    path: String,
}

/// An optimizer step of a model in host memory. What else of it has changed than trained parameters.
///
/// # Panics
/// If plain fields have, as `watch` sees.
pub(super) fn optimizer_step<M: LearnerModel>(
    learner: &mut Learner<M>,
    grads: GradientsParams,
    watch: &mut PlainFields<M>,
) -> (Changes, Changed) {
    let model = learner.model();
    let (before, integers) = (Before::default().walk(&model), Integers::of(&model));
    watch.begin(&model);
    drop(model);
    learner.optimizer_step(grads);
    let Before { frozen, trained, are_trained } = before;
    let changes = Changes { found: Vec::new(), path: String::new() };
    let (before, are_trained) = (frozen.into_iter(), are_trained.into_iter());
    let compare = Compare { before, trained, are_trained, seen: HashSet::new(), at: 0, changes };
    let model = learner.model();
    let changed = (compare.walk(&model).changes, integers.changed_in(&model));
    // Of the same parameters, as that has found.
    watch.refuse_changed(model);
    changed
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
    /// Whether each is.
    are_trained: Vec<bool>,
}

impl PathVisitor for Before {
    fn visit<const D: usize>(&mut self, _: &str, param: &Param<Tensor<D>>) {
        self.are_trained.push(param.is_require_grad());
        if param.is_require_grad() {
            self.trained.insert(param.id);
        } else {
            self.frozen.push(Box::new(param.base()));
        }
    }
}

struct Compare<I, T> {
    before: I,
    trained: HashSet<ParamId>,
    are_trained: T,
    seen: HashSet<ParamId>,
    at: usize,
    changes: Changes,
}

impl<I: Iterator<Item = Box<dyn Any>>, T: Iterator<Item = bool>> PathVisitor for Compare<I, T> {
    fn visit<const D: usize>(&mut self, path: &str, param: &Param<Tensor<D>>) {
        assert!(
            self.are_trained.next() == Some(param.is_require_grad()),
            "`TrainStep::optimize` changes whether `{path}` is trained, which is decided before a training with ZeRO, tensor \
             parallelism, pipelines or overlap; nearest legal: `no_grad` or `require_grad` before it, or data parallelism without them"
        );
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
