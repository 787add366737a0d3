//! The fraction of time in which a GPU is idle.

use burn::backend::Cube;
use burn::tensor::{Device, Tensor};
use cudarc::driver::{result as driver, sys};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::mpsc;
use std::thread::JoinHandle;
use std::time::Duration;

/// The polling interval: a training step has thousands of these, and each poll costs about a microsecond.
const EVERY: Duration = Duration::from_micros(200);

/// Polls whether a rank's compute stream has finished all queued work.
///
/// If it has, it is idle: its GPU waits for the host. A stream that waits for another one, for example for a collective
/// over NCCL, is busy. Work on other streams alone does not make the rank busy.
pub struct IdleWatch {
    gpu: usize,
    counts: Arc<Counts>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Default)]
struct Counts {
    stop: AtomicBool,
    looks: AtomicU64,
    idle: AtomicU64,
}

impl IdleWatch {
    /// Watches the compute stream of the calling thread on `device`; `None` for other devices than CUDA's.
    pub fn start(device: &Device) -> Option<Self> {
        let anchor = Tensor::<1>::zeros([1], &device.clone().without_autodiff()).try_into_primitive::<Cube>().ok()?;
        let cubecl::Device::Cuda(device) = &anchor.device else { return None };
        let (index, (send, receive)) = (device.index, mpsc::channel());
        let tell =
            move |_: [_; 1], stream: sys::CUstream| send.send(stream as usize).map_err(|error| error.to_string());
        crate::cuda::submit([&anchor], tell, |_| ());
        crate::cuda::flush(&anchor);
        let stream = receive.recv().ok()?;
        let counts = Arc::<Counts>::default();
        let watched = counts.clone();
        let builder = std::thread::Builder::new().name(format!("idle watch, GPU {index}"));
        let thread = builder.spawn(move || watch(index, stream, &watched)).ok()?;
        Some(Self { gpu: index, counts, thread: Some(thread) })
    }

    /// CUDA's index of the GPU.
    pub fn gpu(&self) -> usize {
        self.gpu
    }

    /// Resets the counts.
    pub fn reset(&self) {
        self.counts.looks.store(0, Relaxed);
        self.counts.idle.store(0, Relaxed);
    }

    /// The fraction of polls since the last [`reset`](Self::reset) that found the stream idle; `None` before the first.
    pub fn share(&self) -> Option<f64> {
        let (looks, idle) = (self.counts.looks.load(Relaxed), self.counts.idle.load(Relaxed));
        (looks > 0).then(|| idle.min(looks) as f64 / looks as f64)
    }
}

impl Drop for IdleWatch {
    fn drop(&mut self) {
        self.counts.stop.store(true, Relaxed);
        if let Some(thread) = self.thread.take() {
            // It only ends; a panic would have been printed.
            let _ = thread.join();
        }
    }
}

/// Polls until it is stopped or the device fails, which other calls report.
fn watch(index: usize, stream: usize, counts: &Counts) {
    // SAFETY: the context is the device's primary one, which CubeCL retains for the life of the process.
    let current =
        unsafe { driver::primary_ctx::retain(index as i32).and_then(|context| driver::ctx::set_current(context)) };
    while current.is_ok() && !counts.stop.load(Relaxed) {
        // SAFETY: CubeCL's streams live as long as the process, and this one belongs to the current context.
        let idle = match unsafe { sys::cuStreamQuery(stream as sys::CUstream) } {
            sys::CUresult::CUDA_SUCCESS => 1,
            sys::CUresult::CUDA_ERROR_NOT_READY => 0,
            _ => return,
        };
        counts.idle.fetch_add(idle, Relaxed);
        counts.looks.fetch_add(1, Relaxed);
        std::thread::sleep(EVERY);
    }
}
