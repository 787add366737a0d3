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
    use crate::trace::{DeviceClock, DeviceTimes, Track, What};
    use backend_dist::timeline::{ExchangeKind, Exchanged, Read, Timeline};
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

        fn read(&mut self) -> DeviceTimes {
            let Read { stamps, exchanged, stalls } = self.0.read();
            let waits = stalls.into_iter().map(|[start, end]| (What::Wait, Track::Device, start, end));
            let exchanges = exchanged.iter().map(|one| {
                let (what, track) = named(one);
                (what, track, one.start, one.end)
            });
            DeviceTimes { stamps, others: waits.chain(exchanges).collect() }
        }
    }

    /// Groups have the names of their axes; blocks and pairs have more behind that.
    fn named(Exchanged { kind, group, .. }: &Exchanged) -> (What, Track) {
        let tensor_parallel = group.starts_with("tp");
        match kind {
            ExchangeKind::Send => (What::Send, Track::Sends),
            ExchangeKind::Receive => (What::Receive, Track::Receives),
            ExchangeKind::AllGather if tensor_parallel => (What::AllGather, Track::TensorParallel),
            ExchangeKind::ReduceScatter if tensor_parallel => (What::ReduceScatter, Track::TensorParallel),
            ExchangeKind::AllReduce if tensor_parallel => (What::AllReduce, Track::TensorParallel),
            ExchangeKind::AllGather => (What::GatherParameters, Track::Gathers),
            ExchangeKind::ReduceScatter | ExchangeKind::AllReduce => (What::ReduceGradients, Track::Sums),
            ExchangeKind::Other => (What::Exchange, Track::TensorParallel),
        }
    }
}
