//! The device's side of a timeline.

use crate::trace::DeviceClock;
use burn::tensor::Device;
use std::time::Instant;

/// The clock of a GPU, whose times count from `origin`; `None` for devices that do their work while the host waits.
#[cfg(feature = "cuda")]
pub(super) fn device_clock(device: &Device, origin: Instant) -> Option<Box<dyn DeviceClock>> {
    gpu::Clock::start(device, origin).map(|clock| Box::new(clock) as Box<dyn DeviceClock>)
}

/// The clock of a GPU; this build has none.
#[cfg(not(feature = "cuda"))]
pub(super) fn device_clock(_: &Device, _: Instant) -> Option<Box<dyn DeviceClock>> {
    None
}

#[cfg(feature = "cuda")]
mod gpu {
    use crate::trace::{DeviceClock, What};
    use backend_dist::timeline::{Exchanged, Timeline};
    use burn::tensor::Device;
    use std::time::Instant;

    pub(super) struct Clock(Timeline);

    impl Clock {
        pub(super) fn start(device: &Device, origin: Instant) -> Option<Self> {
            Timeline::start(device, origin).map(Self)
        }
    }

    impl DeviceClock for Clock {
        fn stamp(&mut self) -> usize {
            self.0.stamp()
        }

        fn read(&mut self) -> (Vec<u64>, Vec<(What, u64, u64)>) {
            let (times, exchanged) = self.0.read();
            let span = |Exchanged { gathers, start, end }| {
                (if gathers { What::GatherParameters } else { What::ReduceGradients }, start, end)
            };
            (times, exchanged.into_iter().map(span).collect())
        }
    }
}
