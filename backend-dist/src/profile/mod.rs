//! What the GPUs of this process did during some steps: every kernel with its times, and the operation that launched
//! it.
//!
//! While a [`Session`] runs, operations are noted where they are issued, with the work they have to do at least. A note
//! is a mark on CubeCL's thread before and after everything the operation issues; since a rank's launches all happen
//! there in the order of issue, what lies between belongs to the operation. With CUPTI (NVIDIA's profiling library) the
//! marks are external correlation ids, which come back with every kernel. Without it they are events on the compute
//! stream, which see the operations but no kernels, and of exchanges only what the compute stream waits for.

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
pub(crate) use note::{Open, operation};
#[cfg(feature = "cuda")]
pub use session::Session;

pub use kernel_name::readable;
use std::borrow::Cow;

/// What limits an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Kind {
    /// A matrix product: arithmetic.
    Product,
    /// Attention, forward or backward: arithmetic.
    Attention,
    /// Memory bandwidth.
    Memory,
    /// The optimizer and the norm of gradients: memory bandwidth.
    Optimizer,
    /// Links between GPUs.
    Exchange,
}

/// The element type that arithmetic is done on.
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

/// An operation and the work that cannot be avoided.
#[derive(Clone, Debug, PartialEq)]
pub struct Operation {
    /// Equal names are one row of a table.
    pub name: Cow<'static, str>,
    /// What limits it.
    pub kind: Kind,
    /// Element type of its arithmetic.
    pub precision: Precision,
    /// Additions and multiplications; 0 where memory or links are the limit.
    pub flops: f64,
    /// Bytes read and written once each; of an exchange the bytes that this GPU sends.
    pub bytes: f64,
}

/// An operation that was issued.
#[derive(Clone, Debug, PartialEq)]
pub struct Noted {
    /// CUDA's index of the GPU.
    pub gpu: usize,
    /// What it was.
    pub operation: Operation,
}

/// A kernel, a copy or a fill.
#[derive(Clone, Debug, PartialEq)]
pub struct Span {
    /// CUDA's index of the GPU.
    pub gpu: usize,
    /// As the library names it; [`readable`] shortens it.
    pub name: String,
    /// Nanoseconds on the profile's clock.
    pub start: u64,
    /// Nanoseconds on the profile's clock.
    pub end: u64,
    /// Bytes of a copy or a fill, else 0.
    pub bytes: u64,
    /// Index into [`Profile::operations`] of what launched it.
    pub operation: Option<usize>,
}

/// Where times come from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    /// Every kernel, from CUPTI of this version (`CUPTI_API_VERSION`).
    Cupti {
        /// `CUPTI_API_VERSION`.
        version: u32,
    },
    /// Operations only, from events on the compute stream.
    Events {
        /// What is wrong with CUPTI.
        why: String,
    },
}

/// What was seen.
#[derive(Clone, Debug, PartialEq)]
pub struct Profile {
    /// Where times come from.
    pub source: Source,
    /// Nanoseconds between the two moments when all GPUs were idle.
    pub window: u64,
    /// What was issued, in the order of issue on each GPU.
    pub operations: Vec<Noted>,
    /// What ran.
    pub spans: Vec<Span>,
    /// Records that were lost for want of memory.
    pub dropped: usize,
}

#[cfg(feature = "cuda")]
impl Operation {
    /// Limited by memory: `bytes` are read and written.
    pub(crate) fn memory(name: &'static str, bytes: usize) -> Self {
        Self { name: name.into(), kind: Kind::Memory, precision: Precision::Single, flops: 0.0, bytes: bytes as f64 }
    }

    /// Of the optimizer: `bytes` are read and written.
    pub(crate) fn optimizer(name: &'static str, bytes: usize) -> Self {
        Self { kind: Kind::Optimizer, ..Self::memory(name, bytes) }
    }

    /// Between GPUs: each sends `bytes`.
    pub(crate) fn exchange(name: impl Into<Cow<'static, str>>, bytes: usize) -> Self {
        Self { name: name.into(), kind: Kind::Exchange, ..Self::memory("", bytes) }
    }

    /// Attention over `pairs` of a query and a key that sees it, `products` products of `head_dim` each.
    pub(crate) fn attention(
        name: &'static str,
        precision: Precision,
        [pairs, head_dim, products]: [usize; 3],
        bytes: usize,
    ) -> Self {
        let flops = 2.0 * products as f64 * pairs as f64 * head_dim as f64;
        Self { kind: Kind::Attention, precision, flops, ..Self::memory(name, bytes) }
    }
}
