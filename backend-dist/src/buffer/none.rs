//! Buffers of a build without GPUs: there are none.

use super::{AdamWBuffers, AdamWStep};
use crate::comm::Group;
use burn::tensor::{DType, Device, Tensor};
use std::ops::Range;

/// A flat array in GPU memory; this build has none.
#[derive(Clone, Debug)]
pub enum Buffer {}

/// Where tensors in a buffer end.
#[derive(Debug)]
pub struct TensorTable(());

/// Ranges of a buffer.
#[derive(Debug)]
pub struct ChunkTable(());

/// A collective that runs.
#[derive(Debug)]
pub struct Wait(());

#[allow(missing_docs, reason = "documented on the buffers of GPUs")]
impl Buffer {
    pub fn fits(_: &Device, _: DType) -> bool {
        false
    }

    pub fn zeros(_: usize, _: &Device, _: DType) -> Option<Self> {
        None
    }

    pub fn part(&self, _: Range<usize>) -> Self {
        match *self {}
    }

    pub fn tensor(&self) -> Tensor<1> {
        match *self {}
    }

    pub fn put(&self, _: usize, _: Tensor<1>) {
        match *self {}
    }

    pub fn add(&self, _: usize, _: Tensor<1>) {
        match *self {}
    }

    pub fn clear(&self, _: Range<usize>) {
        match *self {}
    }

    pub fn all_reduce(&self, _: &Group) -> Wait {
        match *self {}
    }

    pub fn reduce_scatter(&self, _: &Buffer, _: &Group) -> Wait {
        match *self {}
    }

    pub fn all_gather(&self, _: &Buffer, _: &Group) -> Wait {
        match *self {}
    }
}

#[allow(missing_docs, reason = "documented on the buffers of GPUs")]
impl TensorTable {
    pub fn new(buffer: &Buffer, _: &[u32], _: &[bool]) -> Self {
        match *buffer {}
    }
}

#[allow(missing_docs, reason = "documented on the buffers of GPUs")]
impl ChunkTable {
    pub fn new(buffer: &Buffer, _: &[Range<usize>]) -> Self {
        match *buffer {}
    }
}

#[allow(missing_docs, reason = "documented on the buffers of GPUs")]
impl Wait {
    pub fn wait(self) {}
}

/// One step of AdamW.
pub fn adamw(buffers: AdamWBuffers, _: &AdamWStep) {
    match *buffers.master {}
}

/// Sums of squares, of nothing.
pub fn squares(_: &[(&Buffer, &ChunkTable)]) -> Vec<Vec<f64>> {
    Vec::new()
}
