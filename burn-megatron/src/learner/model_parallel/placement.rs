//! Where the ranks of a process are, and the smaller world that continues when devices are lost for good.

use std::collections::BTreeSet;
use std::sync::mpsc::channel;
use std::thread;
use std::time::Duration;

use backend_dist::mesh::{Mesh, ParallelLayout};
use burn::tensor::{Device, Tensor};

use crate::metrics::on_gpu;

/// How long a device may take for a small sum.
const PATIENCE: Duration = Duration::from_secs(30);

/// The ranks of a run, and the devices that it has.
#[derive(Clone, Debug)]
pub(super) struct Placement {
    pub mesh: Mesh,
    /// Those of the ranks, and behind them those without a rank.
    devices: Vec<Device>,
}

impl Placement {
    /// Rank `r` is on `devices[r % devices.len()]`.
    pub fn new(mesh: Mesh, devices: &[Device]) -> Self {
        let devices = devices.iter().cycle().take(mesh.world_size()).cloned().collect();
        Self { mesh, devices }
    }

    /// The device of each rank.
    pub fn devices(&self) -> &[Device] {
        &self.devices[..self.mesh.world_size().min(self.devices.len())]
    }

    /// The devices, by index, that do not compute any more: of ranks, and those that would be given to ranks next.
    pub fn dead(&self) -> BTreeSet<usize> {
        let mut dead: Vec<&Device> = Vec::new();
        for (index, device) in self.devices.iter().enumerate() {
            if on_gpu(device) && !self.devices[..index].contains(device) && !computes(device) {
                dead.push(device);
            }
        }
        let all = self.devices.iter().enumerate().filter(|(_, device)| dead.contains(device));
        all.map(|(index, _)| index).collect()
    }

    /// The world that continues without the devices of `lost` ranks: it has the largest data-parallel size, at least `least`,
    /// for which devices are left and whose layout `runs`. What shards the model stays.
    ///
    /// # Errors
    /// If there is none, with the largest size below `least` if that would run.
    pub fn without(
        &self,
        lost: &BTreeSet<usize>,
        least: usize,
        runs: impl Fn(&ParallelLayout) -> bool,
    ) -> Result<Self, String> {
        let devices = self.devices.iter().enumerate().filter(|(rank, _)| !lost.contains(rank));
        let devices: Vec<Device> = devices.map(|(_, device)| device.clone()).collect();
        let layout = self.mesh.layout();
        let most = layout.dp.min(devices.len() / with_data_parallel(layout, 1).world_size());
        let smaller = (1..=most).rev().map(|dp| with_data_parallel(layout, dp)).find(|smaller| runs(smaller));
        match smaller {
            Some(smaller) if smaller.dp >= least => {
                let mesh = self.mesh.resized(smaller).map_err(|error| error.to_string())?;
                Ok(Self { mesh, devices })
            }
            smaller => {
                let nearest = smaller.map_or("none".into(), |smaller| smaller.dp.to_string());
                let (left, all) = (devices.len(), self.devices.len());
                Err(format!(
                    "with {left} of {all} devices training.min-data-parallel = {least} does not run; nearest legal: {nearest}"
                ))
            }
        }
    }
}

/// The same layout with another data-parallel size. Groups of ZeRO that would not be smaller than all ranks are dropped.
fn with_data_parallel(layout: &ParallelLayout, dp: usize) -> ParallelLayout {
    let zero_group = layout.zero_group.filter(|group| *group < dp * layout.cp);
    ParallelLayout { dp, zero_group, ..layout.clone() }
}

/// Whether a device computes a small sum in time.
fn computes(device: &Device) -> bool {
    let (done, sum) = channel();
    let device = device.clone();
    let work = move || {
        let sum = Tensor::<1>::ones([32], &device).sum().into_scalar::<f32>();
        let _ = done.send(sum);
    };
    // One that panics sends nothing; one that hangs is left alone.
    let started = thread::Builder::new().name("device check".into()).spawn(work);
    started.is_ok() && sum.recv_timeout(PATIENCE) == Ok(32.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn without(layout: &str, lost: &[usize], least: usize, batch: usize) -> Result<String, String> {
        let placement = Placement::new(Mesh::new(layout.parse().unwrap()).unwrap(), &[Device::flex()]);
        assert!(placement.dead().is_empty());
        let runs = |layout: &ParallelLayout| layout.check().is_ok() && batch.is_multiple_of(layout.dp);
        let smaller = placement.without(&lost.iter().copied().collect(), least, runs)?;
        assert_eq!(smaller.devices().len(), smaller.mesh.world_size());
        Ok(format!("{} of {}", smaller.mesh.layout(), smaller.devices.len()))
    }

    #[test]
    fn the_largest_data_parallel_size_that_fits_goes_on() {
        for (layout, lost, batch, expected) in [
            ("DP4", &[3][..], 8, "DP2 of 3"),
            ("DP4 ZeRO3", &[0], 12, "DP3 ZeRO3 of 3"),
            ("TP2 SP DP2 ZeRO1", &[0], 8, "TP2 SP ZeRO1 of 3"),
            // Whole copies of the model are as many as there are devices for, wherever the lost ones were.
            ("TP2 DP4", &[1, 4], 12, "TP2 DP3 of 6"),
            ("PP2 DP2", &[3], 8, "PP2 of 3"),
            ("DP4 ZeRO3 Group2", &[2], 8, "DP2 ZeRO3 of 3"),
            ("DP8 ZeRO3 Group2", &[2], 16, "DP4 ZeRO3 Group2 of 7"),
            // Experts over data-parallel ranks.
            ("EP2 DP4", &[2], 12, "EP2 DP2 of 3"),
        ] {
            assert_eq!(without(layout, lost, 1, batch).as_deref(), Ok(expected), "{layout}");
        }
    }

    #[test]
    fn a_world_that_is_too_small_is_refused_with_what_would_run() {
        for (layout, lost, left, nearest) in [
            ("DP4", &[1][..], "3 of 4", "2"),
            ("TP2 DP4", &[0, 2, 4, 6], "4 of 8", "2"),
            ("TP4", &[1], "3 of 4", "none"),
        ] {
            let said =
                format!("with {left} devices training.min-data-parallel = 3 does not run; nearest legal: {nearest}");
            assert_eq!(without(layout, lost, 3, 8), Err(said));
        }
    }
}
