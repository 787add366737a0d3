//! Batches in the order of the steps, whatever the layout.

use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::vec::IntoIter;

use burn::data::dataloader::{DataLoader, DataLoaderIterator, Progress};
use burn::data::dataset::DatasetError;
use burn::tensor::Device;

/// The batch of some samples.
pub(crate) type ReadBatch<B> = Arc<dyn Fn(Range<usize>, &Device) -> Result<B, String> + Send + Sync>;

/// The steps of a training. burn-train's epochs are what lies between two evaluations.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Steps {
    /// Of all.
    pub all: usize,
    /// Of an epoch; the last may have fewer.
    pub epoch: usize,
    /// Samples of a step.
    pub samples: usize,
}

/// Batches of samples by number.
pub(super) struct Loader<B> {
    read: ReadBatch<B>,
    batch: usize,
    /// A part of those of an epoch.
    items: Range<usize>,
    /// Of training; without them every pass has the same samples.
    steps: Option<Steps>,
    /// Those that began.
    epochs: AtomicUsize,
    device: Device,
}

impl<B: 'static> Loader<B> {
    /// Of training after some epochs: data-parallel ranks, which take equal parts of an epoch's items, share out the samples of
    /// each step, so that a step has the same ones in every layout.
    pub fn training(read: ReadBatch<B>, batch: usize, steps: Steps, epochs: usize) -> Arc<dyn DataLoader<B>> {
        let items = 0..steps.epoch * steps.samples;
        Arc::new(Self { read, batch, items, steps: Some(steps), epochs: epochs.into(), device: Device::flex() })
    }

    /// The first samples, in each pass.
    pub fn first(read: ReadBatch<B>, batch: usize, samples: usize) -> Arc<dyn DataLoader<B>> {
        let (items, epochs, device) = (0..samples, AtomicUsize::new(0), Device::flex());
        Arc::new(Self { read, batch, items, steps: None, epochs, device })
    }

    fn with(&self, items: Range<usize>, device: Device) -> Arc<dyn DataLoader<B>> {
        let (read, epochs) = (self.read.clone(), self.epochs.load(Ordering::Relaxed).into());
        Arc::new(Self { read, batch: self.batch, items, steps: self.steps, epochs, device })
    }

    fn batches(&self) -> Vec<Range<usize>> {
        let of = |items: Range<usize>| {
            let end = items.end;
            items.step_by(self.batch).map(move |start| start..(start + self.batch).min(end)).collect::<Vec<_>>()
        };
        let Some(steps) = self.steps else { return of(self.items.clone()) };
        let first = self.epochs.fetch_add(1, Ordering::Relaxed) * steps.epoch;
        let count = self.items.len();
        let ranks = (steps.epoch * steps.samples).checked_div(count).unwrap_or(1).max(1);
        let (rank, share) = (self.items.start.checked_div(count).unwrap_or(0), steps.samples / ranks);
        let of_step = |step: usize| {
            let start = step * steps.samples + rank * share;
            of(start..start + share)
        };
        (first..(first + steps.epoch).min(steps.all)).flat_map(of_step).collect()
    }
}

impl<B: 'static> DataLoader<B> for Loader<B> {
    fn iter<'a>(&'a self) -> Box<dyn DataLoaderIterator<B> + 'a> {
        let batches = self.batches();
        let total = batches.iter().map(Range::len).sum();
        Box::new(Batches { loader: self, batches: batches.into_iter(), done: 0, total })
    }

    fn num_items(&self) -> usize {
        self.items.len()
    }

    fn to_device(&self, device: &Device) -> Arc<dyn DataLoader<B>> {
        self.with(self.items.clone(), device.clone())
    }

    fn slice(&self, start: usize, end: usize) -> Arc<dyn DataLoader<B>> {
        self.with(self.items.start + start..self.items.start + end, self.device.clone())
    }
}

struct Batches<'a, B> {
    loader: &'a Loader<B>,
    batches: IntoIter<Range<usize>>,
    done: usize,
    total: usize,
}

impl<B> Iterator for Batches<'_, B> {
    type Item = Result<B, DatasetError>;

    fn next(&mut self) -> Option<Self::Item> {
        let samples = self.batches.next()?;
        self.done += samples.len();
        Some((self.loader.read)(samples, &self.loader.device).map_err(|what| DatasetError::new(io::Error::other(what))))
    }
}

impl<B> DataLoaderIterator<B> for Batches<'_, B> {
    fn progress(&self) -> Progress {
        Progress::new(self.done, self.total, None)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn samples(loader: &Arc<dyn DataLoader<Range<usize>>>) -> Vec<Range<usize>> {
        loader.iter().map(Result::unwrap).collect()
    }

    #[test]
    fn ranks_share_out_the_samples_of_each_step() {
        let read: ReadBatch<Range<usize>> = Arc::new(|samples, _| Ok(samples));
        let steps = Steps { all: 5, epoch: 2, samples: 8 };
        let whole = Loader::training(read.clone(), 4, steps, 1);
        assert_eq!(samples(&whole), [16..20, 20..24, 24..28, 28..32]);
        assert_eq!(samples(&whole), [32..36, 36..40], "the last epoch has one step");
        let ranks = [0, 1].map(|rank| Loader::training(read.clone(), 2, steps, 0).slice(rank * 8, rank * 8 + 8));
        assert_eq!(samples(&ranks[0]), [0..2, 2..4, 8..10, 10..12]);
        assert_eq!(samples(&ranks[1]), [4..6, 6..8, 12..14, 14..16]);
        let held_out = Loader::first(read, 4, 10).slice(2, 8);
        assert_eq!((samples(&held_out), samples(&held_out)), (vec![2..6, 6..8], vec![2..6, 6..8]));
    }
}
