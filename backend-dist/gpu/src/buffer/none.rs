//! Buffers of a build without GPUs: there are none.

use super::{AdamWBuffers, AdamWStep, Blocks, Map, MomentumBuffers, MomentumStep, Place};
use burn::tensor::{DType, Device, Tensor};
use std::ops::Range;

/// A flat array in GPU memory; this build has none.
///
/// Not an empty type: otherwise the compiler would report all code that uses one as unreachable.
#[derive(Clone, Debug)]
pub struct Buffer(());

/// The ends of a buffer's tensors.
#[derive(Debug)]
pub struct TensorTable(());

/// Ranges of a buffer.
#[derive(Debug)]
pub struct ChunkTable(());

/// Ranges of a buffer that are packed into another one.
#[derive(Debug)]
pub struct RangeTable(());

/// Functions of buffers, which there are none of.
macro_rules! none {
    ($($(#[$doc:meta])* pub fn $name:ident($($argument:tt)*) $(-> $result:ty)?;)*) => {
        $($(#[$doc])* pub fn $name($($argument)*) $(-> $result)? {
            unreachable!("a build without GPUs makes no buffers")
        })*
    };
}

#[allow(missing_docs, reason = "documented on the buffers of GPUs")]
impl Buffer {
    pub fn fits(_: &Device, _: DType) -> bool {
        false
    }

    pub fn zeros(_: usize, _: &Device, _: DType) -> Option<Self> {
        None
    }

    none! {
        pub fn part(&self, _: Range<usize>) -> Self;
        pub fn bytes(&self) -> usize;
        pub fn tensor(&self) -> Tensor<1>;
        pub fn put(&self, _: usize, _: Tensor<1>);
        pub fn add(&self, _: usize, _: Tensor<1>);
        pub fn clear(&self, _: Range<usize>);
    }
}

#[allow(missing_docs, reason = "documented on the buffers of GPUs")]
impl TensorTable {
    none! {
        pub fn new(_: &Buffer, _: &[u32], _: &[bool], _: &[Place]) -> Self;
    }
}

#[allow(missing_docs, reason = "documented on the buffers of GPUs")]
impl ChunkTable {
    none! {
        pub fn new(_: &Buffer, _: &[Range<usize>]) -> Self;
    }
}

#[allow(missing_docs, reason = "documented on the buffers of GPUs")]
impl RangeTable {
    none! {
        pub fn new(_: &Buffer, _: &[Range<usize>]) -> Self;
        pub fn len(&self) -> usize;
        pub fn is_empty(&self) -> bool;
        pub fn collect(&self, _: &Buffer, _: &Buffer);
        pub fn distribute(&self, _: &Buffer, _: &Buffer);
    }
}

none! {
    /// One step of AdamW.
    pub fn adamw(_: AdamWBuffers, _: &AdamWStep);
    /// The codes of a moment.
    pub fn encode_blocks(_: Tensor<1>, _: &Blocks, _: Map);
    /// One step of SGD or Lion.
    pub fn momentum(_: MomentumBuffers, _: &MomentumStep);
    /// Parameters as weights and remainders.
    pub fn split_masters(_: Tensor<1>, _: &Buffer, _: &Buffer);
    /// Parameters from weights and remainders.
    pub fn join_masters(_: &Buffer, _: &Buffer) -> Tensor<1>;
    /// Muon's momentum.
    pub fn muon_mix(_: &Buffer, _: &Buffer, _: &Buffer, _: f64, _: f64, _: bool);
    /// Muon's step.
    pub fn muon_step(_: Tensor<1>, _: &Buffer, _: f64, _: f64);
}

/// Sums of squares of no buffers.
pub fn squares(_: &[(&Buffer, &ChunkTable)], _: impl Fn(usize)) -> Vec<Vec<f64>> {
    Vec::new()
}
