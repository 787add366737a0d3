//! The parameters of a module by path.

use burn::module::{Module, ModuleVisitor, Param};
use burn::tensor::Tensor;

/// A visitor of float parameters and running states that is told where they are.
pub trait PathVisitor: Sized {
    /// A parameter, and the names of the fields on the way to it, joined by dots.
    fn visit<const D: usize>(&mut self, path: &str, param: &Param<Tensor<D>>);

    /// This visitor after all parameters of `module`, in its order.
    fn walk<M: Module>(self, module: &M) -> Self {
        let mut walk = Walk { path: Vec::new(), visitor: self };
        module.visit(&mut walk);
        walk.visitor
    }
}

struct Walk<V> {
    path: Vec<String>,
    visitor: V,
}

impl<V: PathVisitor> ModuleVisitor for Walk<V> {
    fn enter_module(&mut self, name: &str, _container_type: &str) {
        self.path.push(name.to_string());
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        self.visitor.visit(&self.path.join("."), param);
    }
}
