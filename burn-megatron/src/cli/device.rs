//! The devices of a command's ranks.

use std::ops::Range;

use anyhow::{Context, Result, anyhow, bail};
use backend_dist::gpu::{self, GpuError};
use backend_dist::mesh::ParallelLayout;
use backend_dist::process::{Cluster, ProcessWorld, Processes};
use burn::tensor::Device;
use clap::ValueEnum;

/// What `--device` of a training command says.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum DeviceChoice {
    /// GPUs if this program is built for them and the machine has one, else the CPU
    #[default]
    Auto,
    /// Threads on the CPU
    Cpu,
    /// Rank r on GPU r
    #[value(alias = "gpu")]
    Cuda,
}

impl DeviceChoice {
    /// The kind of device; of `auto`, the one that this machine has.
    pub fn kind(self) -> DeviceKind {
        match self {
            Self::Cpu => DeviceKind::Cpu,
            Self::Cuda => DeviceKind::Cuda,
            Self::Auto if gpu::gpus().is_ok_and(|gpus| !gpus.is_empty()) => DeviceKind::Cuda,
            Self::Auto => DeviceKind::Cpu,
        }
    }
}

/// The kind of device that ranks run on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum DeviceKind {
    /// Threads on the CPU
    Cpu,
    /// Rank r on GPU r
    #[value(alias = "gpu")]
    Cuda,
}

impl DeviceKind {
    /// The number of ranks of a run that takes all there are, where one copy of its model takes so many: one for each
    /// GPU of all processes; on CPUs one for each process, and at least one copy. Fails if there is no GPU, or the
    /// environment makes no sense.
    pub(super) fn world_size(self, copy: usize) -> Result<usize, String> {
        let world = ProcessWorld::from_env().map_err(|error| error.to_string())?;
        let (processes, on_host) = world.map_or((1, 1), |world| (world.processes, world.on_host));
        match self {
            DeviceKind::Cpu => Ok(processes.max(copy)),
            DeviceKind::Cuda => {
                let gpus = gpu::gpus().map_err(|error| format!("--device cuda: {error}"))?;
                Ok(processes * gpus_each(gpus.len(), on_host))
            }
        }
    }

    /// A device for each rank of a layout. Fails if there are fewer GPUs than ranks (with the nearest layout that
    /// fits), or something that they need is missing.
    pub fn devices(self, layout: &ParallelLayout) -> Result<Vec<Device>> {
        let ranks = layout.world_size();
        match self {
            DeviceKind::Cpu => Ok(vec![Device::flex(); ranks]),
            DeviceKind::Cuda => {
                gpu::require(ranks).map_err(|error| refused(error, layout))?;
                (0..ranks).map(cuda).collect()
            }
        }
    }

    /// A cluster with a device for each of its ranks here. Fails if the ranks cannot be shared out over the processes,
    /// there are fewer GPUs than ranks, or something that they need is missing.
    pub fn of_cluster(self, layout: &ParallelLayout, cluster: &Cluster) -> Result<Cluster> {
        Ok(cluster.on(self.devices_in(layout, cluster)?))
    }

    /// A device for each rank of a layout in this process. Fails as [`of_cluster`](Self::of_cluster).
    pub(super) fn devices_in(self, layout: &ParallelLayout, cluster: &Cluster) -> Result<Vec<Device>> {
        let numbers = cluster.local_devices(layout)?;
        self.numbered(layout, numbers, (cluster.process(), cluster.count()))
    }

    /// A device for each rank of this process. Fails if this host has fewer GPUs than its processes have ranks, or
    /// something that they need is missing.
    pub fn devices_among(self, processes: &Processes) -> Result<Vec<Device>> {
        let (layout, numbers) = (processes.mesh().layout(), processes.local_devices());
        self.numbered(layout, numbers, (processes.process(), processes.count()))
    }

    /// Devices of the host, for one process of `count`.
    fn numbered(
        self,
        layout: &ParallelLayout,
        mut numbers: Range<usize>,
        (process, count): (usize, usize),
    ) -> Result<Vec<Device>> {
        let ranks = numbers.len();
        match self {
            _ if count == 1 => self.devices(layout),
            DeviceKind::Cpu => Ok(vec![Device::flex(); ranks]),
            DeviceKind::Cuda => {
                let context = || format!("--device cuda: process {process} of {count}");
                // A launcher may show every process its own GPUs only (CUDA_VISIBLE_DEVICES).
                if gpu::gpus().with_context(context)?.len() == ranks {
                    numbers = 0..ranks;
                }
                gpu::require(numbers.end).with_context(context)?;
                numbers.map(cuda).collect()
            }
        }
    }

    /// A cluster with all GPUs, or one CPU: layouts with more ranks than devices share them, and communicate through
    /// the host. Fails if there is no GPU, or something that it needs is missing; with GPUs, if there are several
    /// processes.
    pub fn shared(self, cluster: &Cluster) -> Result<Cluster> {
        if self == DeviceKind::Cuda && cluster.count() > 1 {
            bail!(
                "--share-gpus in {} processes: ranks of several processes meet in NCCL, which takes a GPU for one rank only; \
                 nearest legal: one process",
                cluster.count()
            );
        }
        Ok(cluster.on(self.all()?))
    }

    /// All GPUs, or one CPU. Fails if there is no GPU, or something that it needs is missing.
    pub(super) fn all(self) -> Result<Vec<Device>> {
        match self {
            DeviceKind::Cpu => Ok(vec![Device::flex()]),
            DeviceKind::Cuda => {
                let gpus = gpu::gpus()?.len();
                gpu::require(gpus)?;
                (0..gpus).map(cuda).collect()
            }
        }
    }
}

/// GPUs of each process of a host. A launcher may show every process its own only (CUDA_VISIBLE_DEVICES).
fn gpus_each(visible: usize, processes: usize) -> usize {
    if visible < processes { visible } else { visible / processes }
}

#[cfg(feature = "cuda")]
fn cuda(index: usize) -> Result<Device> {
    Ok(Device::cuda(index))
}

#[cfg(not(feature = "cuda"))]
fn cuda(_: usize) -> Result<Device> {
    Err(GpuError::NotBuilt.into())
}

/// The error in terms of the layout.
fn refused(error: GpuError, layout: &ParallelLayout) -> anyhow::Error {
    match &error {
        GpuError::TooFew { present, .. } => {
            anyhow!(
                "--device cuda: layout {layout}: {error}; the nearest layout that fits is {}",
                nearest(layout, *present)
            )
        }
        _ => anyhow::Error::new(error).context("--device cuda"),
    }
}

/// The layout of the most ranks, up to `ranks`, whose sizes divide those of `layout`. Of several, the one that keeps
/// most tensor, then most pipeline parallelism: these make a model fit, while data parallelism makes it fast.
fn nearest(layout: &ParallelLayout, ranks: usize) -> ParallelLayout {
    let divisors = |size: usize| (1..=size).filter(move |part| size.is_multiple_of(*part));
    let mut best = ParallelLayout::default();
    for tp in divisors(layout.tp) {
        for pp in divisors(layout.pp) {
            for dp in divisors(layout.dp) {
                let key = |l: &ParallelLayout| (l.world_size(), l.tp, l.pp);
                let vpp = if pp > 1 { layout.vpp } else { 1 };
                let zero = if dp > 1 { layout.zero } else { 0 };
                let smaller = ParallelLayout { tp, pp, dp, vpp, zero, sp: layout.sp && tp > 1, ..Default::default() };
                if smaller.world_size() <= ranks && key(&smaller) >= key(&best) {
                    best = smaller;
                }
            }
        }
    }
    best
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_nearest_layout_keeps_what_makes_a_model_fit() {
        for (layout, ranks, expected) in [
            ("TP2 SP PP2 DP2 ZeRO1", 4, "TP2 SP PP2"),
            ("TP2 SP DP4 ZeRO1", 4, "TP2 SP DP2 ZeRO1"),
            ("TP8 SP", 6, "TP4 SP"),
            ("PP4 VPP2 DP2", 3, "PP2 VPP2"),
            ("DP6", 4, "DP3"),
            ("TP4 SP", 1, "TP1"),
        ] {
            assert_eq!(nearest(&layout.parse().unwrap(), ranks).to_string(), expected, "{layout} on {ranks}");
        }
    }

    #[test]
    fn a_gpu_is_not_taken_for_a_misspelt_cpu() {
        assert_eq!(DeviceChoice::from_str("gpu", false), Ok(DeviceChoice::Cuda));
        assert_eq!(DeviceKind::from_str("gpu", false), Ok(DeviceKind::Cuda));
    }

    #[test]
    fn processes_of_a_host_share_its_gpus_unless_each_sees_its_own() {
        let shares = [(8, 1, 8), (8, 8, 1), (8, 2, 4), (1, 8, 1), (2, 4, 2)];
        assert!(shares.iter().all(|&(visible, processes, each)| gpus_each(visible, processes) == each));
    }

    #[test]
    fn auto_is_what_this_machine_has() {
        let has_gpu = gpu::gpus().is_ok_and(|gpus| !gpus.is_empty());
        assert_eq!(DeviceChoice::default().kind() == DeviceKind::Cuda, has_gpu);
        assert_eq!(
            [DeviceChoice::Cpu, DeviceChoice::Cuda].map(DeviceChoice::kind),
            [DeviceKind::Cpu, DeviceKind::Cuda]
        );
    }

    #[test]
    fn too_few_gpus_are_said_in_terms_of_the_layout() {
        let error = GpuError::TooFew { asked: 8, present: 2, visible: None };
        let text = refused(error, &"TP2 SP PP2 DP2".parse().unwrap()).to_string();
        says!(text, "layout TP2 SP PP2 DP2: 8 ranks need a GPU each, this machine has 2");
        assert!(text.ends_with("the nearest layout that fits is TP2 SP"), "{text}");
    }

    #[cfg(not(feature = "cuda"))]
    #[test]
    fn without_the_feature_the_error_says_how_to_build() {
        let error = DeviceKind::Cuda.devices(&ParallelLayout::default()).unwrap_err();
        assert!(format!("{error:#}").contains("--device cuda: this program was built without GPUs"), "{error:#}");
    }
}
