//! The parameters of a module: their paths, shapes, and the types that contain them.

use burn::module::{Module, ModuleVisitor, Param};
use burn::tensor::Tensor;

/// One float parameter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Parameter {
    /// Names of the fields, from the module inwards, each with the type that has it: `("query",
    /// "MultiHeadAttention")`.
    pub fields: Vec<Field>,
    /// Its shape.
    pub shape: Vec<usize>,
}

/// A field of a module.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Field {
    pub name: String,
    /// The type that has it, without `Struct:`.
    pub container: String,
}

impl Parameter {
    /// `layers.0.mha.query.weight`.
    pub fn path(&self) -> String {
        join(&self.fields)
    }

    /// Whether it belongs to a reparameterization, such as an adapter, of the parameter before it.
    pub fn is_of_reparameterization(&self) -> bool {
        self.fields.iter().any(|field| field.container == "Reparameterization")
    }

    /// The field `back` levels above the parameter.
    pub fn above(&self, back: usize) -> Option<&Field> {
        self.fields.iter().rev().nth(back)
    }
}

pub(super) fn join(fields: &[Field]) -> String {
    fields.iter().map(|field| field.name.as_str()).collect::<Vec<_>>().join(".")
}

pub(super) fn field(name: &str, container: &str) -> Field {
    Field { name: name.into(), container: container.rsplit(':').next().unwrap_or(container).into() }
}

/// All float parameters, in the module's order. Those that are not initialized yet remain so.
pub(super) fn parameters<M: Module>(module: &M) -> Vec<Parameter> {
    let mut collect = Collect::default();
    module.visit(&mut collect);
    collect.found
}

#[derive(Default)]
struct Collect {
    fields: Vec<Field>,
    found: Vec<Parameter>,
}

impl ModuleVisitor for Collect {
    fn enter_module(&mut self, name: &str, container: &str) {
        self.fields.push(field(name, container));
    }

    fn exit_module(&mut self, _: &str, _: &str) {
        self.fields.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        self.found.push(Parameter { fields: self.fields.clone(), shape: param.lazy_shape().to_vec() });
    }
}
