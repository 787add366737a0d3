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
    use crate::trace::{DeviceClock, DeviceTimes, SpanKind, Track};
    use backend_dist::timeline::{CollectiveKind, Read, TimedCollective, Timeline};
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
            let Read { stamps, collectives, stalls } = self.0.read();
            let waits = stalls.into_iter().map(|[start, end]| (SpanKind::Wait, Track::Device, start, end));
            let collectives = collectives.iter().map(|one| {
                let (what, track) = named(one);
                (what, track, one.start, one.end)
            });
            DeviceTimes { stamps, others: waits.chain(collectives).collect() }
        }
    }

    /// Groups have the names of their axes; blocks and pairs have a suffix.
    fn named(TimedCollective { kind, group, .. }: &TimedCollective) -> (SpanKind, Track) {
        let tensor_parallel = group.starts_with("tp");
        match kind {
            CollectiveKind::Send => (SpanKind::Send, Track::Sends),
            CollectiveKind::Receive => (SpanKind::Receive, Track::Receives),
            CollectiveKind::AllGather if tensor_parallel => (SpanKind::AllGather, Track::TensorParallel),
            CollectiveKind::ReduceScatter if tensor_parallel => (SpanKind::ReduceScatter, Track::TensorParallel),
            CollectiveKind::AllReduce if tensor_parallel => (SpanKind::AllReduce, Track::TensorParallel),
            CollectiveKind::AllGather => (SpanKind::GatherParameters, Track::Gathers),
            CollectiveKind::ReduceScatter | CollectiveKind::AllReduce => (SpanKind::ReduceGradients, Track::Sums),
            CollectiveKind::Other => (SpanKind::Collective, Track::TensorParallel),
        }
    }
}
