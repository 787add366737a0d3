//! Host memory of a build without GPUs: there is none.

use std::marker::PhantomData;
use std::ops::Range;

use crate::buffer::Buffer;

/// Page-locked host memory of a rank; this build has none.
///
/// Not an empty type: otherwise the compiler would report all code that uses one as unreachable.
#[derive(Debug)]
pub struct HostMemory(());

/// A copy that is being queued.
#[derive(Debug)]
pub struct HostCopy<'a>(PhantomData<&'a ()>);

/// Bytes of a copy.
#[derive(Clone, Debug)]
pub struct HostBytes(());

/// Page-locked host memory that optimizer states live in; this build has none.
#[derive(Debug)]
pub struct OffloadMemory(());

#[allow(missing_docs, reason = "documented on the host memory of GPUs")]
impl OffloadMemory {
    pub fn new(_: &Buffer, _: usize, _: usize) -> Result<Self, String> {
        Err("this program was built without GPUs".into())
    }

    pub fn begin(&self) {}

    pub fn load(&self, _: usize, _: &[(usize, Buffer)]) {}

    pub fn store(&mut self, _: usize, _: &[(usize, Buffer)]) {}

    pub fn bytes(&self) -> &[u8] {
        &[]
    }

    pub fn bytes_mut(&mut self) -> &mut [u8] {
        &mut []
    }
}

#[allow(missing_docs, reason = "documented on the host memory of GPUs")]
impl HostMemory {
    pub fn new(_: usize, _: usize) -> Result<Self, String> {
        Err("this program was built without GPUs".into())
    }

    pub fn begin(&self) -> Option<HostCopy<'_>> {
        None
    }

    pub fn protect(&self) {}
}

#[allow(missing_docs, reason = "documented on the host memory of GPUs")]
impl HostCopy<'_> {
    pub fn add(&mut self, _: &Buffer) -> Option<HostBytes> {
        None
    }

    pub fn end(self) {}
}

#[allow(missing_docs, reason = "documented on the host memory of GPUs")]
impl HostBytes {
    pub fn wait(&self) -> Result<(), String> {
        Ok(())
    }

    pub fn len(&self) -> usize {
        0
    }

    pub fn is_empty(&self) -> bool {
        true
    }

    pub fn part(&self, _: Range<usize>) -> Self {
        self.clone()
    }

    pub fn bytes(&self) -> &[u8] {
        &[]
    }
}
