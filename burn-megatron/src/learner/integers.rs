//! Parameters of integers and booleans, which nothing but a model's own `TrainStep::optimize` changes: a count of its steps, for
//! example.

use std::any::Any;

use backend_dist::comm::Group;
use burn::module::{Module, ModuleMapper, ModuleVisitor, Param};
use burn::tensor::kind::Autodiff;
use burn::tensor::{Bool, Int, Tensor, TensorData};

use super::same::{OnFlex, is_same};

/// Their values, in the order of a module, whose memory they share.
pub(super) struct Integers(Vec<Box<dyn Any>>);

/// Those that a step of the optimizer has changed, by their place among all; `None` of a module that has none at all.
pub(super) struct Changed(Option<Vec<(usize, TensorData)>>);

impl Integers {
    /// Of a module in host memory.
    pub fn of<M: Module>(module: &M) -> Self {
        let mut found = Found(Vec::new());
        module.visit(&mut found);
        Self(found.0)
    }

    /// What `module` has other than this, which is of the same module before.
    pub fn changed_in<M: Module>(self, module: &M) -> Changed {
        if self.0.is_empty() {
            return Changed(None);
        }
        let mut compare = Compare { before: self.0.into_iter(), at: 0, changes: Vec::new() };
        module.visit(&mut compare);
        Changed(Some(compare.changes))
    }
}

impl Changed {
    /// `model`, that of this rank, with the changes. Every rank of the groups must call it, also one that has changed nothing:
    /// it does not know of the others.
    ///
    /// Changes that follow from what a rank alone has, such as its parameters, are wrong. They are noticed only where ranks come
    /// to different values: a count of large weights may be equal on all by chance.
    ///
    /// # Panics
    /// If changes differ between ranks.
    pub fn made_in<M: Module>(self, model: M, groups: &[&Group]) -> M {
        let Some(changes) = self.0 else { return model };
        for group in groups.iter().filter(|group| group.size() > 1) {
            assert!(
                group.all_gather_host(changes.clone()).iter().all(|others| *others == changes),
                "`TrainStep::optimize` changes integers or booleans of the model, and on each rank to other values: with ZeRO, \
                 tensor parallelism or pipelines the optimizer of a rank does not have all parameters, and with overlap or running \
                 statistics each rank steps a model of its own; nearest legal: changes that depend neither on parameters nor on \
                 random numbers, or data parallelism without these"
            );
        }
        if changes.is_empty() { model } else { model.map(&mut Make { changes, at: 0 }) }
    }
}

struct Found(Vec<Box<dyn Any>>);

impl ModuleVisitor for Found {
    fn visit_int<const D: usize>(&mut self, param: &Param<Tensor<D, Int>>) {
        self.0.push(Box::new(param.val()));
    }

    fn visit_bool<const D: usize>(&mut self, param: &Param<Tensor<D, Bool>>) {
        self.0.push(Box::new(param.val()));
    }
}

struct Compare<I> {
    before: I,
    at: usize,
    changes: Vec<(usize, TensorData)>,
}

impl<I: Iterator<Item = Box<dyn Any>>> Compare<I> {
    fn next<const D: usize, K: Autodiff + OnFlex + 'static>(&mut self, after: Tensor<D, K>) {
        let before = self.before.next().and_then(|before| before.downcast::<Tensor<D, K>>().ok());
        if !before.is_some_and(|before| is_same(&before, &after)) {
            self.changes.push((self.at, after.into_data()));
        }
        self.at += 1;
    }
}

impl<I: Iterator<Item = Box<dyn Any>>> ModuleVisitor for Compare<I> {
    fn visit_int<const D: usize>(&mut self, param: &Param<Tensor<D, Int>>) {
        self.next(param.val());
    }

    fn visit_bool<const D: usize>(&mut self, param: &Param<Tensor<D, Bool>>) {
        self.next(param.val());
    }
}

struct Make {
    changes: Vec<(usize, TensorData)>,
    at: usize,
}

impl Make {
    /// The new value of the next parameter, if it has one.
    fn next(&mut self) -> Option<TensorData> {
        let found = self.changes.iter().find(|(at, _)| *at == self.at).map(|(_, data)| data.clone());
        self.at += 1;
        found
    }
}

impl ModuleMapper for Make {
    fn map_int<const D: usize>(&mut self, param: Param<Tensor<D, Int>>) -> Param<Tensor<D, Int>> {
        let Some(data) = self.next() else { return param };
        param.map(|old| Tensor::from_data(data, (&old.device(), old.dtype())))
    }

    fn map_bool<const D: usize>(&mut self, param: Param<Tensor<D, Bool>>) -> Param<Tensor<D, Bool>> {
        let Some(data) = self.next() else { return param };
        param.map(|old| Tensor::from_data(data, &old.device()))
    }
}
