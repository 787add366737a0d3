//! Activations in page-locked host memory.

use std::collections::VecDeque;
use std::fmt;
use std::mem::ManuallyDrop;
use std::sync::Arc;

use burn::backend::Cube;
use burn::tensor::{DType, Shape, Tensor};
use burn_cubecl::tensor::CubeTensor;
use cudarc::driver::{DriverError, result as driver, sys};

use super::LENT;
use super::pages::{Pages, told};
use crate::cuda::{self, PinnedBuffer};
use crate::failed;

const WAIT: sys::CUevent_wait_flags = sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;

/// Blocks of host memory, and what fills and reads them.
#[derive(Default)]
pub(super) struct Locked {
    engines: Option<Engines>,
    /// Blocks that no activation has.
    free: Vec<Arc<Block>>,
    /// Tensors whose copies the compute stream has not waited for yet.
    lent: VecDeque<(PinnedBuffer, Arc<Block>)>,
}

/// Streams and an event as integers, because they cross threads. They live as long as the process.
#[derive(Clone)]
struct Engines {
    /// Some tensor on the device.
    near: CubeTensor,
    loads: usize,
    stores: usize,
    /// Recorded behind what was launched before a load or a store.
    launched: usize,
}

/// Host memory of one activation, and events behind its last store and load.
struct Block {
    pages: ManuallyDrop<Pages>,
    stored: usize,
    loaded: usize,
}

/// An activation in host memory, or on its way there.
pub(super) struct LockedActivation {
    block: Arc<Block>,
    shape: Shape,
    dtype: DType,
}

/// An activation on its way back.
pub(super) struct Returning {
    block: Arc<Block>,
    to: PinnedBuffer,
}

/// The tensor as CubeCL has it, if it is on a GPU.
pub(super) fn on_gpu(x: &Tensor<3>) -> Option<CubeTensor> {
    let cube = x.clone().try_into_primitive::<Cube>().ok()?;
    matches!(cube.device, cubecl::Device::Cuda(_)).then(|| cuda::dense(cube))
}

fn event() -> Result<usize, String> {
    let flags = sys::CUevent_flags::CU_EVENT_DISABLE_TIMING;
    driver::event::create(flags).map(|event| event as usize).map_err(told)
}

/// Runs `queue(pointer, compute stream)` on CubeCL's thread.
fn submit(
    x: &CubeTensor,
    what: &'static str,
    queue: impl FnOnce(usize, sys::CUstream) -> Result<(), DriverError> + Send + 'static,
) {
    let index = x.client.service_id().device.index_id;
    cuda::submit(
        [x],
        move |[pointer], compute| queue(pointer as usize, compute).map_err(|error| format!("{what}: {error}")),
        failed::noting(index),
    );
}

impl Engines {
    fn new(x: &CubeTensor) -> Result<Self, String> {
        let stream = || {
            let stream = driver::stream::create(driver::stream::StreamKind::NonBlocking);
            stream.map(|stream| stream as usize).map_err(told)
        };
        let near = cuda::empty(x, Shape::from([1]), DType::F32);
        Ok(Self { near, loads: stream()?, stores: stream()?, launched: event()? })
    }
}

impl Block {
    fn new(gpu: usize, bytes: usize) -> Result<Self, String> {
        let pages = ManuallyDrop::new(Pages::new(gpu, bytes)?);
        Ok(Self { pages, stored: event()?, loaded: event()? })
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        // Copies are queued by closures that own the block, so all that use it are on their streams by now. A GPU whose
        // copies have not ended may still use the pages: better a leak.
        // SAFETY: the context and the events live as long as the process, and this is the end of the pages.
        unsafe {
            let ended = driver::ctx::set_current(self.pages.context as _)
                .and_then(|()| driver::event::synchronize(self.stored as _))
                .and_then(|()| driver::event::synchronize(self.loaded as _));
            if ended.is_ok() {
                ManuallyDrop::drop(&mut self.pages);
            }
        }
    }
}

impl Locked {
    /// Queues the copy of a tensor to the host.
    ///
    /// # Errors
    /// If no more memory can be locked.
    pub fn store(&mut self, x: CubeTensor) -> Result<LockedActivation, String> {
        let (shape, dtype) = (x.meta.shape().clone(), x.dtype);
        let bytes = shape.num_elements() * dtype.size();
        let block = match self.free.iter().position(|block| block.pages.len() == bytes) {
            Some(at) => self.free.swap_remove(at),
            None => {
                let gpu = x.client.service_id().device.index_id;
                // A context must be current before the events are made.
                let block = Arc::new(Block::new(gpu.into(), bytes)?);
                if self.engines.is_none() {
                    self.engines = Some(Engines::new(&x)?);
                }
                block
            }
        };
        let Engines { stores, launched, .. } = *self.engines();
        let to = block.clone();
        submit(&x, "copying an activation to the host", move |from, compute| {
            // SAFETY: stream and event live as long as the process. Both sides have so many bytes: the tensor is lent until
            // the compute stream has waited for `stored`, the block belongs to this closure and then to the activation.
            // The compute stream has waited for the load from the block before.
            unsafe {
                driver::event::record(launched as _, compute)?;
                driver::stream::wait_event(stores as _, launched as _, WAIT)?;
                sys::cuMemcpyDtoHAsync_v2(to.pages.address as _, from as u64, bytes, stores as _).result()?;
                driver::event::record(to.stored as _, stores as _)
            }
        });
        self.lent.push_back((PinnedBuffer::new(x), block.clone()));
        while self.lent.len() > LENT {
            self.take_back();
        }
        Ok(LockedActivation { block, shape, dtype })
    }

    /// Queues the copy of an activation to a new tensor.
    pub fn load(&mut self, LockedActivation { block, shape, dtype }: LockedActivation) -> Returning {
        // The first load follows the last store of a pass.
        while !self.lent.is_empty() {
            self.take_back();
        }
        let Engines { near, loads, launched, .. } = self.engines();
        let (loads, launched, bytes) = (*loads, *launched, shape.num_elements() * dtype.size());
        let (to, from) = (cuda::empty(near, shape, dtype), block.clone());
        submit(&to, "copying an activation back", move |to, compute| {
            // SAFETY: as above; the tensor's memory is free behind `launched`, and read only behind `loaded`.
            unsafe {
                driver::event::record(launched as _, compute)?;
                driver::stream::wait_event(loads as _, launched as _, WAIT)?;
                driver::stream::wait_event(loads as _, from.stored as _, WAIT)?;
                sys::cuMemcpyHtoDAsync_v2(to as u64, from.pages.address as _, bytes, loads as _).result()?;
                driver::event::record(from.loaded as _, loads as _)
            }
        });
        Returning { block, to: PinnedBuffer::new(to) }
    }

    /// The tensor; what the thread launches from here on waits for its copy.
    pub fn take(&mut self, Returning { block, to }: Returning) -> Tensor<3> {
        let loaded = block.loaded;
        self.wait(&to, loaded);
        self.free.push(block);
        Tensor::from_primitive::<Cube>(to.tensor.clone())
    }

    /// The first tensor that was lent may be overwritten by what is launched from here on.
    fn take_back(&mut self) {
        if let Some((tensor, block)) = self.lent.pop_front() {
            self.wait(&tensor, block.stored);
        }
    }

    fn wait(&self, tensor: &PinnedBuffer, event: usize) {
        submit(&tensor.tensor, "waiting for the copy of an activation", move |_, compute| {
            // SAFETY: the event lives as long as the process, and was recorded on this thread.
            unsafe { driver::stream::wait_event(compute, event as _, WAIT) }
        });
    }

    fn engines(&self) -> &Engines {
        self.engines.as_ref().expect("they are made for the first block")
    }
}

impl fmt::Debug for Locked {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "Locked({} free blocks, {} lent tensors)", self.free.len(), self.lent.len())
    }
}

impl fmt::Debug for LockedActivation {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "LockedActivation({:?}, {:?})", self.shape, self.dtype)
    }
}

impl fmt::Debug for Returning {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "Returning({} bytes)", self.block.pages.len())
    }
}

impl Drop for Locked {
    fn drop(&mut self) {
        // Nobody waits for these copies any more: their tensors stay until the GPU has come to rest.
        self.lent.drain(..).for_each(|(tensor, _)| tensor.abandon());
    }
}
