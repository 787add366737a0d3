//! What the checks on burn-nn's encoder share.

use burn::module::{ModuleMapper, ModuleVisitor, Param};
use burn::tensor::{DType, FloatDType, Tensor};

/// Prints how far `found` is from `expected`, and returns whether that is too far for `dtype`.
pub fn differs(what: &str, dtype: DType, found: &[f64], expected: &[f64]) -> bool {
    let bound = match dtype {
        DType::F64 => 1e-10,
        DType::F32 => 1e-4,
        _ => 1e-2,
    };
    let norm = |x: &mut dyn Iterator<Item = f64>| x.map(|x| x * x).sum::<f64>().sqrt();
    let difference = norm(&mut found.iter().zip(expected).map(|(a, b)| a - b));
    let relative = difference / norm(&mut expected.iter().copied());
    let right = relative <= bound && found.len() == expected.len();
    println!("{dtype:?} {what}: {relative:.1e} {}", if right { "ok" } else { "WRONG" });
    !right
}

/// Parameters in another number type.
pub struct To(pub DType);

impl ModuleMapper for To {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let device = param.lazy_device();
        param.map(|value| {
            let cast = value.inner().cast(FloatDType::from(self.0));
            Tensor::<D>::from_data(cast.into_data(), (&device, self.0)).require_grad()
        })
    }
}

/// The values of all parameters.
pub struct Values(pub Vec<f64>);

impl ModuleVisitor for Values {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        self.0.extend(param.val().into_data().iter::<f64>());
    }
}
