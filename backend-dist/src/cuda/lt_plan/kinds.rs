//! What kind of product it is: the types of its elements, how it is summed up, and where the result goes.

use burn::tensor::DType;
use cudarc::cublaslt::sys;
use kernels_cubecl::fp8::Format;

/// What happens to the elements of the result.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Onto {
    /// They are written.
    Replace,
    /// The product is added to them.
    Add,
}

/// Element types of a product, as the library names them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(in super::super) struct Kinds {
    pub(super) a: sys::cudaDataType,
    pub(super) b: sys::cudaDataType,
    pub(super) out: sys::cudaDataType,
}

impl Kinds {
    /// Bytes of an element of the result.
    pub(super) fn out_bytes(self) -> usize {
        match self.out {
            sys::cudaDataType::CUDA_R_64F => 8,
            sys::cudaDataType::CUDA_R_32F => 4,
            _ => 2,
        }
    }
}

/// The types of `a · b`, if they are among those that the crate uses.
pub(in super::super) fn kinds(a: DType, b: DType, out: DType) -> Option<Kinds> {
    let kind = |dtype| match dtype {
        DType::BF16 => Some(sys::cudaDataType::CUDA_R_16BF),
        DType::F16 => Some(sys::cudaDataType::CUDA_R_16F),
        DType::F32 | DType::Flex32 => Some(sys::cudaDataType::CUDA_R_32F),
        DType::F64 => Some(sys::cudaDataType::CUDA_R_64F),
        _ => None,
    };
    let (input, out) = (kind(a)?, kind(out)?);
    let half = matches!(a, DType::BF16 | DType::F16);
    let widened = half && out == sys::cudaDataType::CUDA_R_32F;
    (kind(b)? == input && (out == input || widened)).then_some(Kinds { a: input, b: input, out })
}

/// The types of a product of FP8 operands with a result of type `out`, if the library has it: not both e5m2, and a
/// result of 16 or 32 bits.
pub(in super::super) fn fp8_kinds(a: Format, b: Format, out: DType) -> Option<Kinds> {
    let kind = |format| match format {
        Format::E4m3 => sys::cudaDataType::CUDA_R_8F_E4M3,
        Format::E5m2 => sys::cudaDataType::CUDA_R_8F_E5M2,
    };
    let out = match out {
        DType::BF16 => sys::cudaDataType::CUDA_R_16BF,
        DType::F16 => sys::cudaDataType::CUDA_R_16F,
        DType::F32 => sys::cudaDataType::CUDA_R_32F,
        _ => return None,
    };
    let both = a == Format::E5m2 && b == Format::E5m2;
    (!both).then_some(Kinds { a: kind(a), b: kind(b), out })
}

/// How an FP8 product is summed up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Sums {
    /// In the tensor core's own accumulator, which has fewer bits than f32.
    Fast,
    /// In f32, to which the tensor core's sums are added every few steps.
    Exact,
}
