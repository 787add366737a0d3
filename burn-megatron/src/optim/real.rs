//! The float types that optimizer states are kept in on the host.

use burn::backend::flex::FlexTensor;
use burn::tensor::{Element, ElementConversion};
use half::bf16;
use std::ops::{Add, Div, Mul, Sub};

/// `f32`, `f64` or `bf16`: arithmetic, and access to the storage of a CPU tensor of that type.
pub trait Real:
    Element
    + ElementConversion
    + bytemuck::Pod
    + Add<Output = Self>
    + Sub<Output = Self>
    + Mul<Output = Self>
    + Div<Output = Self>
    + PartialOrd
{
    /// The square root.
    fn sqrt(self) -> Self;
    /// Rounds to this type.
    fn of(value: f64) -> Self;
    /// Widens to `f64`.
    fn wide(self) -> f64;
    /// The elements of a contiguous tensor of this type, in row-major order; `None` for a strided view.
    fn read(tensor: &FlexTensor) -> Option<&[Self]>;
    /// The whole storage, to write; copied first where another tensor shares it.
    fn write(tensor: &mut FlexTensor) -> &mut [Self];
}

macro_rules! real {
    ($float:ty, $x:ident: $sqrt:expr, $of:expr, $wide:expr) => {
        impl Real for $float {
            fn sqrt(self) -> Self {
                let $x = self;
                $sqrt
            }
            fn of($x: f64) -> Self {
                $of
            }
            fn wide(self) -> f64 {
                let $x = self;
                $wide
            }
            fn read(tensor: &FlexTensor) -> Option<&[Self]> {
                tensor.as_slice()
            }
            fn write(tensor: &mut FlexTensor) -> &mut [Self] {
                tensor.storage_mut()
            }
        }
    };
}

real!(f32, x: x.sqrt(), x as f32, f64::from(x));
real!(f64, x: x.sqrt(), x, x);
// For moments; arithmetic rounds to nearest.
real!(bf16, x: bf16::from_f32(x.to_f32().sqrt()), bf16::from_f64(x), x.to_f64());
