//! What a run is planned for.

use anyhow::{Result, anyhow, bail};

use crate::plan::gpus::{self, Hardware};

#[derive(Debug, clap::Args)]
#[command(next_help_heading = "Machine (with a CONFIG)")]
pub(super) struct MachineArgs {
    /// Look for the best layouts on this many GPUs; by default as many as the layout of CONFIG has ranks
    #[arg(long, value_name = "N", requires = "config")]
    pub gpus: Option<usize>,
    /// h100, h100-pcie, h200, b200, a100-80gb, a100-40gb, l40s or rtx-4090
    #[arg(long, value_name = "NAME", default_value = "h100")]
    gpu: String,
    /// Memory of a GPU that a run may use
    #[arg(long, value_name = "GIB", requires = "config")]
    memory: Option<f64>,
    /// Measured rate of large matrix products
    #[arg(long, value_name = "TFLOPS", requires = "config")]
    tflops: Option<f64>,
    /// Measured memory bandwidth
    #[arg(long, value_name = "GB/S", requires = "config")]
    bandwidth: Option<f64>,
    /// Measured bandwidth between GPUs of a host, one direction
    #[arg(long, value_name = "GB/S", requires = "config")]
    link: Option<f64>,
    /// Measured bandwidth to other hosts, one direction and per GPU
    #[arg(long, value_name = "GB/S", requires = "config")]
    network: Option<f64>,
    /// GPUs of a host
    #[arg(long, value_name = "N", default_value_t = 8)]
    gpus_per_host: usize,
    /// Exchanges with replicas wait for the passes instead of running beside them
    #[arg(long, requires = "config")]
    no_overlap: bool,
    /// Show the memory of every pipeline rank, not only of the fullest
    #[arg(long, requires = "config")]
    pub all_ranks: bool,
}

impl MachineArgs {
    /// Refuses what means nothing without a CONFIG.
    pub(super) fn refuse(&self) -> Result<()> {
        let numbers = [self.memory, self.tflops, self.bandwidth, self.link, self.network];
        let given = self.gpus.is_some() || numbers.iter().any(Option::is_some) || self.no_overlap || self.all_ranks;
        if given {
            bail!("a machine is planned for with a CONFIG only; without one leave out --gpus, --memory and the like");
        }
        Ok(())
    }

    /// What a GPU does, and what it is called, for weights of `element` bytes.
    pub(super) fn hardware(&self, element: u64) -> Result<(Hardware, &'static str)> {
        let gpu = gpus::find(&self.gpu).map_err(|error| anyhow!(error))?;
        let mut hardware = Hardware::of(gpu, element);
        let numbers = [
            ("memory", self.memory),
            ("tflops", self.tflops),
            ("bandwidth", self.bandwidth),
            ("link", self.link),
            ("network", self.network),
            ("gpus-per-host", Some(self.gpus_per_host as f64)),
            ("gpus", self.gpus.map(|gpus| gpus as f64)),
        ];
        if let Some((key, value)) =
            numbers.iter().find(|(_, value)| value.is_some_and(|value| value.is_nan() || value <= 0.0))
        {
            bail!("--{key} {} is not above 0", value.unwrap_or_default());
        }
        if let Some(gib) = self.memory {
            hardware.memory = (gib * (1u64 << 30) as f64) as u64;
        }
        if let Some(tflops) = self.tflops {
            hardware = hardware.with_products(tflops);
        }
        let rate = |given: Option<f64>, known: f64| given.map_or(known, |gigabytes| gigabytes * 1e9);
        hardware.bandwidth = rate(self.bandwidth, hardware.bandwidth);
        hardware.link = rate(self.link, hardware.link);
        hardware.network = rate(self.network, hardware.network);
        hardware.host = self.gpus_per_host;
        hardware.overlap = !self.no_overlap;
        Ok((hardware, gpu.name))
    }
}
