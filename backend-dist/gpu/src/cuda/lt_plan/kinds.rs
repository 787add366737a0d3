//! The kind of a GEMM: element types, accumulation, and whether the output is overwritten.

use burn::tensor::DType;
use cudarc::cublaslt::sys;
use kernels_cubecl::fp8::Format;

/// Whether a GEMM overwrites its output or adds to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Onto {
    /// The output is overwritten.
    Replace,
    /// The output is added to.
    Add,
}

/// A GEMM `alpha · a · b + beta · c` whose `c` is one of its operands.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Mixed {
    /// Of `a · b`.
    pub alpha: f64,
    /// Of what is added.
    pub beta: f64,
    /// `a` is added; else `b`.
    pub left: bool,
}

/// cuBLASLt's element types of a GEMM.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(in super::super) struct Kinds {
    pub(super) a: sys::cudaDataType,
    pub(super) b: sys::cudaDataType,
    pub(super) out: sys::cudaDataType,
}

/// The types of `a · b`, if the crate supports them.
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

/// The types of a GEMM of FP8 operands with an output of type `out`, if cuBLASLt supports it: not both e5m2, and an
/// output of 16 or 32 bits.
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

/// The accumulation of an FP8 GEMM.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Sums {
    /// In the tensor core's own accumulator, which has fewer bits than f32.
    Fast,
    /// In f32, to which the tensor core's partial sums are added every few steps.
    Exact,
}
