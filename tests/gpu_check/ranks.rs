//! Ranks with a GPU each.

use crate::numbers::most;
use backend_dist::comm::RunError;
use backend_dist::launch::{BoxError, Rank};
use backend_dist::mesh::{Mesh, ParallelLayout};
use backend_dist::process::Processes;
use burn::tensor::Device;

/// Runs `f` on every rank of this process: all of the layout's, but under torchrun.
pub fn on_gpus<T: Send>(
    layout: &ParallelLayout,
    f: impl Fn(&Rank) -> Result<T, BoxError> + Sync,
) -> Result<Vec<T>, RunError> {
    let processes = Processes::from_env(&mesh(layout), &[]).expect("the processes find each other");
    let devices: Vec<Device> = processes.local_devices().map(Device::cuda).collect();
    processes.launch(&devices, |rank| f(&rank))
}

pub fn mesh(layout: &ParallelLayout) -> Mesh {
    Mesh::new(layout.clone()).expect("a legal layout")
}

/// All ranks in tensor parallel.
pub fn tensor_parallel(ranks: usize) -> ParallelLayout {
    ParallelLayout { tp: ranks, ..Default::default() }
}

/// All ranks in data parallel.
pub fn data_parallel(ranks: usize) -> ParallelLayout {
    ParallelLayout { dp: ranks, ..Default::default() }
}

/// The most that a rank takes.
pub fn slowest<T>(ranks: &[T], seconds: impl Fn(&T) -> f64) -> f64 {
    most(ranks.iter().map(seconds))
}
