//! The GPUs of this process during some steps: every kernel with its times, and the operation that launched it.
//!
//! While a [`Session`] runs, operations are recorded when they are launched, with their minimal work. The record is a
//! mark on CubeCL's thread before and after everything that the operation launches; all of a rank's launches are on
//! that thread, in order, so those between the marks belong to the operation. With CUPTI (NVIDIA's profiling library)
//! the marks are external correlation ids, which are returned with every kernel. Without it they are events on the
//! compute stream, which time operations, but no kernels, and of collectives only the waits of the compute stream.

#[cfg(feature = "cuda")]
mod cupti;
#[cfg(feature = "cuda")]
mod events;
pub mod intervals;
mod kernel_name;
#[cfg(not(feature = "cuda"))]
mod none;
#[cfg(feature = "cuda")]
mod note;
#[cfg(any(feature = "cuda", test))]
mod record;
#[cfg(feature = "cuda")]
mod session;

#[cfg(not(feature = "cuda"))]
pub use none::Session;
#[cfg(feature = "cuda")]
pub use note::{Open, operation};
#[cfg(feature = "cuda")]
pub use session::Session;

pub use kernel_name::readable;
use std::borrow::Cow;

/// A launched operation.
#[cfg(feature = "cuda")]
struct Note {
    id: u64,
    /// The operation that contains it.
    parent: Option<u64>,
    noted: Noted,
}

/// The limiting resource of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Kind {
    /// A GEMM: arithmetic.
    Gemm,
    /// Attention, forward or backward: arithmetic.
    Attention,
    /// Memory bandwidth.
    Memory,
    /// The optimizer and the norm of gradients: memory bandwidth.
    Optimizer,
    /// Communication links between GPUs.
    Collective,
}

/// The element type of arithmetic.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Precision {
    /// 8 bits.
    Fp8,
    /// bf16 or f16.
    Half,
    /// f32.
    Single,
    /// f64.
    Double,
}

/// An operation and its minimal work.
#[derive(Clone, Debug, PartialEq)]
pub struct Operation {
    /// Operations of the same name share a line of the table.
    pub name: Cow<'static, str>,
    /// The limiting resource.
    pub kind: Kind,
    /// Element type of its arithmetic.
    pub precision: Precision,
    /// FLOPs; 0 if memory or links are the limit.
    pub flops: f64,
    /// Bytes read and written once each; for a collective, the bytes that this GPU sends.
    pub bytes: f64,
}

/// A launched operation.
#[derive(Clone, Debug, PartialEq)]
pub struct Noted {
    /// CUDA's index of the GPU.
    pub gpu: usize,
    /// The operation.
    pub operation: Operation,
}

/// A kernel, a copy or a fill.
#[derive(Clone, Debug, PartialEq)]
pub struct Span {
    /// CUDA's index of the GPU.
    pub gpu: usize,
    /// The library's name; [`readable`] shortens it.
    pub name: String,
    /// Nanoseconds on the profile's clock.
    pub start: u64,
    /// Nanoseconds on the profile's clock.
    pub end: u64,
    /// Bytes of a copy or a fill, else 0.
    pub bytes: u64,
    /// Index into [`Profile::operations`] of the operation that launched it.
    pub operation: Option<usize>,
}

/// The source of times.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    /// Every kernel, from CUPTI of this version (`CUPTI_API_VERSION`).
    Cupti {
        /// `CUPTI_API_VERSION`.
        version: u32,
    },
    /// Operations only, from events on the compute stream.
    Events {
        /// The reason why CUPTI is not available.
        why: String,
    },
}

/// A recorded profile.
#[derive(Clone, Debug, PartialEq)]
pub struct Profile {
    /// The source of times.
    pub source: Source,
    /// Nanoseconds between the two moments when all GPUs were idle.
    pub window: u64,
    /// The operations, in the order of launch on each GPU.
    pub operations: Vec<Noted>,
    /// Kernels, copies and fills.
    pub spans: Vec<Span>,
    /// Records that were lost because memory was short.
    pub dropped: usize,
}

#[cfg(feature = "cuda")]
impl Operation {
    /// Limited by memory: `bytes` are read and written.
    pub fn memory(name: &'static str, bytes: usize) -> Self {
        Self { name: name.into(), kind: Kind::Memory, precision: Precision::Single, flops: 0.0, bytes: bytes as f64 }
    }

    /// Of the optimizer: `bytes` are read and written.
    pub fn optimizer(name: &'static str, bytes: usize) -> Self {
        Self { kind: Kind::Optimizer, ..Self::memory(name, bytes) }
    }

    /// Between GPUs: each sends `bytes`.
    pub fn collective(name: impl Into<Cow<'static, str>>, bytes: usize) -> Self {
        Self { name: name.into(), kind: Kind::Collective, ..Self::memory("", bytes) }
    }

    /// Attention over `pairs` of a query and a visible key, with `gemms` GEMMs of `head_dim` each.
    pub fn attention(
        name: &'static str,
        precision: Precision,
        [pairs, head_dim, gemms]: [usize; 3],
        bytes: usize,
    ) -> Self {
        let flops = 2.0 * gemms as f64 * pairs as f64 * head_dim as f64;
        Self { kind: Kind::Attention, precision, flops, ..Self::memory(name, bytes) }
    }
}
