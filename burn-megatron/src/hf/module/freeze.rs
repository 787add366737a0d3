//! Parameters that are not trained, by Hugging Face's names.

use burn::module::{ModuleMapper, ModuleVisitor, Param};
use burn::tensor::Tensor;
use models::hf::{HfModule, ModuleNames};
use models::names::fits;

use super::tensors::At;

/// The names of the parameters of a module, which are not made if they are not yet.
pub(crate) fn names<M: HfModule>(module: &M) -> Vec<String> {
    let mut collect = Collect { names: M::NAMES, at: At::default(), found: Vec::new() };
    module.visit(&mut collect);
    collect.found
}

/// The module without gradients of the parameters whose names one of the patterns fits.
pub(crate) fn freeze<M: HfModule>(module: M, patterns: &[String]) -> M {
    module.map(&mut Freeze { names: M::NAMES, at: At::default(), patterns })
}

struct Collect {
    names: ModuleNames,
    at: At,
    found: Vec<String>,
}

impl ModuleVisitor for Collect {
    fn enter_module(&mut self, name: &str, container: &str) {
        self.at.enter(name, container);
    }

    fn exit_module(&mut self, _: &str, _: &str) {
        self.at.fields.pop();
    }

    fn visit_float<const D: usize>(&mut self, _: &Param<Tensor<D>>) {
        self.found.push(self.at.foreign(&self.names).name);
    }
}

struct Freeze<'a> {
    names: ModuleNames,
    at: At,
    patterns: &'a [String],
}

impl ModuleMapper for Freeze<'_> {
    fn enter_module(&mut self, name: &str, container: &str) {
        self.at.enter(name, container);
    }

    fn exit_module(&mut self, _: &str, _: &str) {
        self.at.fields.pop();
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let name = self.at.foreign(&self.names).name;
        let is_frozen = self.patterns.iter().any(|pattern| fits(pattern, &name));
        if is_frozen { param.set_require_grad(false) } else { param }
    }
}
