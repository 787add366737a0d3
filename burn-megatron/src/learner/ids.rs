//! The ids of parameters. Every process makes a model of its own, with ids of its own, and groups of an optimizer may name
//! parameters by them. So a process keeps its ids, and what leaves it has those of the first process.

use std::collections::HashMap;
use std::sync::Arc;

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param, ParamId};
use burn::store::RecordError;
use burn::tensor::{Bool, Bytes, Int, Tensor};
use serde::{Deserialize, Serialize};

use super::zero::records::renamed;

/// The ids of a model, in its order.
#[derive(Clone, Default, Serialize, Deserialize)]
pub(super) struct Ids(Vec<ParamId>);

impl Ids {
    pub fn of<M: Module>(model: &M) -> Self {
        let mut ids = Self::default();
        model.visit(&mut ids);
        ids
    }

    /// `model` with these ids; running states keep theirs.
    pub fn given_to<M: Module>(&self, model: M) -> M {
        model.map(&mut Give(self.0.iter().copied()))
    }
}

macro_rules! visit {
    ($($method:ident $kind:ty),*) => {
        impl ModuleVisitor for Ids {
            $(fn $method<const D: usize>(&mut self, param: &Param<Tensor<D, $kind>>) {
                self.0.push(param.id);
            })*
        }
    };
}

visit!(visit_float burn::tensor::Float, visit_int Int, visit_bool Bool);

struct Give<I>(I);

macro_rules! give {
    ($($method:ident $kind:ty),*) => {
        impl<I: Iterator<Item = ParamId>> ModuleMapper for Give<I> {
            $(fn $method<const D: usize>(&mut self, mut param: Param<Tensor<D, $kind>>) -> Param<Tensor<D, $kind>> {
                param.id = self.0.next().expect("the model has as many parameters");
                param
            })*
        }
    };
}

give!(map_float burn::tensor::Float, map_int Int, map_bool Bool);

/// The ids of the first process, by those of this one.
#[derive(Clone, Default)]
pub(super) struct FirstIds(Arc<HashMap<ParamId, ParamId>>);

impl FirstIds {
    /// Of models that are equal but for their ids: this process's, and the first's.
    pub fn new(here: Ids, first: Ids) -> Self {
        Self(Arc::new(here.0.into_iter().zip(first.0).collect()))
    }

    fn of(&self, id: ParamId) -> ParamId {
        self.0.get(&id).copied().unwrap_or(id)
    }

    /// Values of parameters for the first process.
    pub fn of_values<T>(&self, values: HashMap<ParamId, T>) -> HashMap<ParamId, T> {
        values.into_iter().map(|(id, value)| (self.of(id), value)).collect()
    }

    /// The states of an optimizer for the first process.
    pub fn of_states(&self, states: Bytes) -> Result<Bytes, RecordError> {
        if self.0.is_empty() { Ok(states) } else { renamed(states, |id| self.of(id)) }
    }
}
