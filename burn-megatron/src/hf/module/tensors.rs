//! The parameters of a module as Hugging Face stores them.

use std::collections::BTreeMap;

use backend_dist::shard::HostTensor;
use burn::module::{ModuleVisitor, Param};
use burn::tensor::{Gradients, Tensor};
use models::hf::{ForeignParam, HfModule, ModuleNames};

/// Where a walk through a module is.
#[derive(Default)]
pub(super) struct At {
    /// Names of fields, and the types that have them.
    pub fields: Vec<(String, String)>,
}

impl At {
    pub fn enter(&mut self, name: &str, container: &str) {
        self.fields.push((name.into(), container.rsplit(':').next().unwrap_or(container).into()));
    }

    fn path(&self) -> String {
        self.fields.iter().map(|(name, _)| name.as_str()).collect::<Vec<_>>().join(".")
    }

    /// The place of the parameter. Panics if the module's table of names lacks it, which its tests find.
    pub fn foreign(&self, names: &ModuleNames) -> ForeignParam {
        let (path, layer) = (self.path(), self.fields.last().map_or("", |(_, container)| container));
        names.foreign(&path, layer).unwrap_or_else(|| panic!("{path} has no name in Hugging Face's model"))
    }
}

/// Which numbers of a parameter are wanted.
#[derive(Clone, Copy)]
pub(crate) enum Wanted<'a> {
    Weights,
    /// Zeros for a parameter that has none.
    Gradients(&'a Gradients),
}

/// Numbers of every parameter of `module` under Hugging Face's names, as it stores them.
pub(crate) fn named_tensors<M: HfModule>(module: &M, wanted: Wanted) -> BTreeMap<String, HostTensor> {
    let mut collect = Collect { names: M::NAMES, wanted, at: At::default(), found: BTreeMap::new() };
    module.visit(&mut collect);
    collect.found
}

struct Collect<'a> {
    names: ModuleNames,
    wanted: Wanted<'a>,
    at: At,
    found: BTreeMap<String, HostTensor>,
}

impl ModuleVisitor for Collect<'_> {
    fn enter_module(&mut self, name: &str, container: &str) {
        self.at.enter(name, container);
    }

    fn exit_module(&mut self, _: &str, _: &str) {
        self.at.fields.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let foreign = self.at.foreign(&self.names);
        let (tensor, shape) = (param.val(), param.lazy_shape().dims::<D>());
        let tensor = match self.wanted {
            Wanted::Weights => Some(tensor),
            Wanted::Gradients(gradients) => tensor.grad(gradients),
        };
        let zeros = || vec![0.0; shape.iter().product()];
        let data = tensor.map_or_else(zeros, |tensor| tensor.into_data().iter::<f64>().collect());
        let data = if foreign.transposed { transposed(&data, shape[1]) } else { data };
        self.found.insert(foreign.name, HostTensor { shape: turned(&shape, foreign.transposed), data });
    }
}

/// The shape, or that of the transposed matrix.
pub(super) fn turned(shape: &[usize], transposed: bool) -> Vec<usize> {
    let mut shape = shape.to_vec();
    if transposed {
        shape.reverse();
    }
    shape
}

/// A matrix transposed, which then has `rows` rows.
pub(super) fn transposed(values: &[f64], rows: usize) -> Vec<f64> {
    let columns = values.len() / rows;
    (0..rows).flat_map(|row| (0..columns).map(move |column| values[column * rows + row])).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_matrix_is_turned() {
        assert_eq!(transposed(&[1.0, 2.0, 3.0, 4.0, 5.0, 6.0], 3), [1.0, 4.0, 2.0, 5.0, 3.0, 6.0]);
        assert_eq!((turned(&[2, 3], true), turned(&[2, 3], false)), (vec![3, 2], vec![2, 3]));
    }
}
