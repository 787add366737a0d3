//! Which operation on a GPU the watchdog looks at.

/// Operations that were queued and are not known to have ended. An event tells when the recorded one has ended; those that
/// follow it are not recorded each, which would cost the host a call for every operation.
#[derive(Debug)]
pub(crate) struct Watched<O> {
    /// The one behind which the event was recorded last.
    recorded: Option<O>,
    /// The newest of those that were queued since: the host may wait for it and queue no other.
    newest: Option<O>,
}

impl<O: Clone> Watched<O> {
    /// Nothing was queued yet.
    pub(crate) fn new() -> Self {
        Self { recorded: None, newest: None }
    }

    /// Notes an operation that was queued, and records the event behind it if that is free.
    pub(crate) fn note<E>(&mut self, queued: O, record: impl FnOnce(&O) -> Result<(), E>) -> Result<(), E> {
        if self.recorded.is_some() {
            self.newest = Some(queued);
            return Ok(());
        }
        record(&queued)?;
        (self.recorded, self.newest) = (Some(queued), None);
        Ok(())
    }

    /// The operation that is under way, if one is known to be. Once the recorded one `has_ended`, the event is recorded behind
    /// the newest, if `record` can do so now.
    pub(crate) fn check<E>(
        &mut self,
        has_ended: impl FnOnce() -> Result<bool, E>,
        record: impl FnOnce(&O) -> Result<bool, E>,
    ) -> Result<Option<O>, E> {
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
    use std::convert::Infallible;

    /// A host that queues all operations of a step at once and then waits for the GPU queues nothing that the watchdog could
    /// look at instead.
    #[test]
    fn the_last_operation_is_watched_too() {
        let mut watched = Watched::new();
        let mut recorded = Vec::new();
        for operation in 1..=3 {
            let record = |operation: &i32| -> Result<(), Infallible> {
                recorded.push(*operation);
                Ok(())
            };
            watched.note(operation, record).unwrap();
        }
        assert_eq!(recorded, [1]);
        let mut under_way = |ended: bool, records: bool| watched.check::<Infallible>(|| Ok(ended), |_| Ok(records));
        assert_eq!(under_way(false, true), Ok(Some(1)));
        assert_eq!(under_way(true, false), Ok(None), "the stream is recorded for a graph");
        assert_eq!(under_way(true, true), Ok(None));
        assert_eq!(under_way(false, true), Ok(Some(3)), "the second is before it on its stream");
        assert_eq!(under_way(true, true), Ok(None));
        assert_eq!(under_way(false, true), Ok(None), "nothing is left");
    }
}
