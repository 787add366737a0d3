//! Types of numbers that a strategy needs of a model.

use super::mesh::MeshStrategy;
use burn::module::{Module, ModuleVisitor, Param};
use burn::tensor::{DType, Tensor};

/// The first parameter of single precision.
#[derive(Default)]
struct Single(Option<Vec<usize>>);

impl ModuleVisitor for Single {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let value = param.val();
        if self.0.is_none() && value.dtype() == DType::F32 {
            self.0 = Some(value.dims().to_vec());
        }
    }
}

impl MeshStrategy {
    /// Refuses FP8 of what is multiplied in f32.
    pub(super) fn check_types<M: Module>(&self, model: &M) -> Result<(), String> {
        if !self.fp8 || self.autocast.is_some() {
            return Ok(());
        }
        let mut single = Single::default();
        model.visit(&mut single);
        single.0.map_or(Ok(()), |shape| {
            Err(format!(
                "fp8() and a parameter {shape:?} of f32: FP8 layers lie between others in half precision; nearest legal: \
                 .autocast(FloatDType::BF16).fp8()"
            ))
        })
    }
}
