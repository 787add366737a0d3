//! Watches the GPU of a rank from threads of its own.

use std::cell::Cell;
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::time::Duration;

use backend_dist::gpu::idle::IdleWatch;
use backend_dist::gpu::{GpuInfo, gpus};
use burn::tensor::Device;
use parking_lot::Mutex;

use super::RankReading;

/// Between two questions to the driver.
const EVERY: Duration = Duration::from_millis(250);

/// Idle time of a rank's compute stream, and the driver's answers about its GPU. The driver is asked by a thread,
/// because its answers can take milliseconds.
pub(super) struct GpuWatch {
    idle: IdleWatch,
    gpu: Option<GpuInfo>,
    seen: Arc<Mutex<Seen>>,
    /// The answers before the last begin: a short step has none of its own.
    last: Cell<Seen>,
    /// Ends the thread when it is dropped.
    _end: Sender<()>,
}

/// Sums over the answers since the last begin.
#[derive(Clone, Copy, Default)]
struct Seen {
    memory: u64,
    utilisation: Mean,
    clock: Mean,
    power: Mean,
    temperature: Mean,
}

#[derive(Clone, Copy, Default)]
struct Mean {
    sum: f64,
    count: u32,
}

impl Mean {
    fn push(&mut self, value: Option<f64>) {
        self.sum += value.unwrap_or(0.0);
        self.count += u32::from(value.is_some());
    }

    fn get(&self) -> Option<f64> {
        (self.count > 0).then(|| self.sum / f64::from(self.count))
    }
}

impl Seen {
    fn ask(&mut self, gpu: &GpuInfo) {
        self.memory = self.memory.max(gpu.memory().map_or(0, |memory| memory.used()));
        let now = gpu.readings();
        self.utilisation.push(now.utilisation.map(f64::from));
        self.clock.push(now.clock.map(f64::from));
        self.power.push(now.power);
        self.temperature.push(now.temperature.map(f64::from));
    }

    /// One more answer.
    fn add(&mut self, now: &Self) {
        self.memory = self.memory.max(now.memory);
        let pairs = [
            (&mut self.utilisation, now.utilisation),
            (&mut self.clock, now.clock),
            (&mut self.power, now.power),
            (&mut self.temperature, now.temperature),
        ];
        for (sum, more) in pairs {
            *sum = Mean { sum: sum.sum + more.sum, count: sum.count + more.count };
        }
    }
}

impl GpuWatch {
    /// Watches what the calling thread does on `device`, if that is a GPU.
    pub fn start(device: &Device) -> Option<Self> {
        let idle = IdleWatch::start(device)?;
        let gpu = gpus().ok().and_then(|gpus| gpus.into_iter().find(|gpu| gpu.index == idle.gpu()));
        let (seen, (end, ended)) = (Arc::<Mutex<Seen>>::default(), channel());
        if let Some(gpu) = gpu.clone() {
            let seen = seen.clone();
            let ask = move || {
                while ended.recv_timeout(EVERY) == Err(RecvTimeoutError::Timeout) {
                    let mut now = Seen::default();
                    now.ask(&gpu);
                    seen.lock().add(&now);
                }
            };
            std::thread::Builder::new().name(format!("watch of GPU {}", idle.gpu())).spawn(ask).ok()?;
        }
        Some(Self { idle, gpu, seen, last: Cell::default(), _end: end })
    }

    /// Starts a new measurement.
    pub fn begin(&self) {
        self.idle.reset();
        let seen = std::mem::take(&mut *self.seen.lock());
        if seen.memory > 0 {
            self.last.set(seen);
        }
    }

    /// The reading since [`begin`](Self::begin), or before where the time was too short for an answer.
    pub fn read(&self) -> RankReading {
        let now = *self.seen.lock();
        let mut seen = if now.memory > 0 { now } else { self.last.get() };
        if let (0, Some(gpu)) = (seen.memory, &self.gpu) {
            seen.ask(gpu);
            self.last.set(seen);
        }
        RankReading {
            memory: (seen.memory > 0).then_some(seen.memory),
            idle: self.idle.share(),
            utilisation: seen.utilisation.get(),
            clock: seen.clock.get(),
            power: seen.power.get(),
            temperature: seen.temperature.get(),
            ..RankReading::default()
        }
    }
}
