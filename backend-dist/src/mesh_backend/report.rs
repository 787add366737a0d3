//! What a logical device has done: how often it communicated, and which operations ran whole.

use std::collections::BTreeMap;
use std::fmt;

/// How often, and how many bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Count {
    /// Number of times.
    pub times: usize,
    /// Bytes of the logical tensors.
    pub bytes: usize,
}

impl Count {
    pub(super) fn add(&mut self, bytes: usize) {
        self.times += 1;
        self.bytes += bytes;
    }
}

/// What a logical device has done on this rank since it was made: see [`explain`](super::explain).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// Number of operations.
    pub operations: usize,
    /// Number of tensors that exist.
    pub tensors: usize,
    /// Tensors that a collective moved, by the collective's name; bytes are those of the whole tensor.
    pub collectives: BTreeMap<&'static str, Count>,
    /// How operations ran on the rank's device, where they are [fused](super::LogicalOptions::fusion): fused kernels, GEMMs,
    /// and others by name.
    pub kernels: BTreeMap<&'static str, usize>,
    /// Operations that every rank ran whole although an input was sharded, because there is no rule for them, or none
    /// for these shapes; bytes are those of the gathered inputs.
    pub fallbacks: BTreeMap<String, Count>,
    /// Shapes of activations, and of their gradients, that sequence parallelism left whole, because the ranks divide neither the
    /// samples nor the sequence; bytes are those of the sums. Not those in the shape of a parameter, which may be its gradient.
    pub whole: BTreeMap<Vec<usize>, Count>,
}

impl Report {
    pub(super) fn collective(&mut self, name: &'static str, bytes: usize) {
        self.collectives.entry(name).or_default().add(bytes);
    }

    pub(super) fn fallback(&mut self, operation: String, bytes: usize) {
        self.fallbacks.entry(operation).or_default().add(bytes);
    }

    pub(super) fn whole(&mut self, shape: &[usize], bytes: usize) {
        self.whole.entry(shape.to_vec()).or_default().add(bytes);
    }

    /// How often a collective ran: `all-reduce`, `all-gather`, `reduce-scatter` or `all-to-all`.
    pub fn times(&self, collective: &str) -> usize {
        self.collectives.get(collective).map_or(0, |count| count.times)
    }

    /// What happened after `earlier` was taken from the same device.
    pub fn since(&self, earlier: &Report) -> Report {
        fn left<K: Ord + Clone>(now: &BTreeMap<K, Count>, then: &BTreeMap<K, Count>) -> BTreeMap<K, Count> {
            let subtract = |(key, now): (&K, &Count)| {
                let then = then.get(key).copied().unwrap_or_default();
                let count = Count { times: now.times - then.times, bytes: now.bytes - then.bytes };
                (count.times > 0).then(|| (key.clone(), count))
            };
            now.iter().filter_map(subtract).collect()
        }
        Report {
            operations: self.operations - earlier.operations,
            tensors: self.tensors,
            collectives: left(&self.collectives, &earlier.collectives),
            kernels: self
                .kernels
                .iter()
                .map(|(&name, n)| (name, n - earlier.kernels.get(name).unwrap_or(&0)))
                .collect(),
            fallbacks: left(&self.fallbacks, &earlier.fallbacks),
            whole: left(&self.whole, &earlier.whole),
        }
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{} operations", self.operations)?;
        for (name, times) in &self.kernels {
            writeln!(f, "{name}: {times}")?;
        }
        for (name, Count { times, bytes }) in &self.collectives {
            writeln!(f, "{name}: {times}, {bytes} bytes")?;
        }
        for (name, Count { times, bytes }) in &self.fallbacks {
            writeln!(f, "{name} ran whole on every rank: {times}, {bytes} bytes gathered")?;
        }
        for (shape, Count { times, bytes }) in &self.whole {
            let why = "the ranks divide neither samples nor sequence";
            writeln!(f, "{shape:?} stayed whole under sequence parallelism, because {why}: {times}, {bytes} bytes")?;
        }
        Ok(())
    }
}
