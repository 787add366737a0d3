//! Which operation the watchdog waits for.

use crate::comm::DeviceOp;
use std::time::Instant;

/// An operation and its time.
#[derive(Clone, Debug)]
pub(super) struct Mark {
    pub since: Instant,
    pub op: DeviceOp,
    pub sequence: u64,
    /// The CUDA stream that it is queued on.
    pub stream: usize,
}

/// Operations that were queued and are not known to have ended. An event tells when the recorded one has ended; those that
/// follow it are not recorded each, which would cost the host a call for every operation.
#[derive(Debug, Default)]
pub(super) struct Watched {
    /// The one behind which the event was recorded last.
    recorded: Option<Mark>,
    /// The newest of those that were queued since: the host may wait for it and queue no other.
    newest: Option<Mark>,
}

impl Watched {
    /// Notes an operation that was queued, and records the event behind it if that is free.
    pub fn note<E>(&mut self, mark: Mark, record: impl FnOnce(&Mark) -> Result<(), E>) -> Result<(), E> {
        match &self.recorded {
            Some(_) => self.newest = Some(mark),
            None => {
                record(&mark)?;
                (self.recorded, self.newest) = (Some(mark), None);
            }
        }
        Ok(())
    }

    /// The operation that is under way, if one is known to be. Once the recorded one `has_ended`, the event is recorded behind
    /// the newest, if `record` can do so now.
    pub fn check<E>(
        &mut self,
        has_ended: impl FnOnce() -> Result<bool, E>,
        record: impl FnOnce(&Mark) -> Result<bool, E>,
    ) -> Result<Option<Mark>, E> {
        if self.recorded.is_some() && !has_ended()? {
            return Ok(self.recorded.clone());
        }
        self.recorded = None;
        if let Some(newest) = self.newest.take() {
            match record(&newest)? {
                true => self.recorded = Some(newest),
                false => self.newest = Some(newest),
            }
        }
        Ok(None)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::comm::DeviceOpKind;
    use std::convert::Infallible;

    fn mark(sequence: u64) -> Mark {
        let op = DeviceOp::new(DeviceOpKind::AllGather, burn::tensor::DType::F32, &[1]);
        Mark { since: Instant::now(), op, sequence, stream: 0 }
    }

    /// A host that queues all operations of a step at once and then waits for the GPU queues nothing that the watchdog could
    /// look at instead.
    #[test]
    fn the_last_operation_is_watched_too() {
        let mut watched = Watched::default();
        let mut recorded = Vec::new();
        for sequence in 1..=3 {
            let record = |mark: &Mark| -> Result<(), Infallible> { Ok(recorded.push(mark.sequence)) };
            watched.note(mark(sequence), record).unwrap();
        }
        assert_eq!(recorded, [1]);
        let under_way = |watched: &mut Watched, ended: bool, records: bool| {
            let found = watched.check::<Infallible>(|| Ok(ended), |_| Ok(records)).unwrap();
            found.map(|mark| mark.sequence)
        };
        assert_eq!(under_way(&mut watched, false, true), Some(1));
        assert_eq!(under_way(&mut watched, true, false), None, "the stream is recorded for a graph");
        assert_eq!(under_way(&mut watched, true, true), None);
        assert_eq!(under_way(&mut watched, false, true), Some(3), "the second is before it on its stream");
        assert_eq!(under_way(&mut watched, true, true), None);
        assert_eq!(under_way(&mut watched, false, true), None, "nothing is left");
    }
}
