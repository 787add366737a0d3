//! The machine that a run is planned for.

use anyhow::{Result, anyhow, bail};

use crate::config::RANKS;
use crate::plan::gpus::{self, GpuModel, Hardware};

#[derive(Debug, clap::Args)]
#[command(next_help_heading = "Machine (with a CONFIG or --hf)")]
pub(super) struct MachineArgs {
    /// Search the best layouts on this many GPUs; by default as many as the layout of CONFIG has ranks
    #[arg(long, value_name = "N")]
    pub gpus: Option<usize>,
    /// GPU: h100, h100-pcie, h200, b200, a100-80gb, a100-40gb, l40s or rtx-4090 [default: h100]
    #[arg(long, value_name = "NAME")]
    gpu: Option<String>,
    /// GPU memory that a run may use
    #[arg(long, value_name = "GIB")]
    memory: Option<f64>,
    /// Measured rate of large GEMMs, in TFLOP/s
    #[arg(long, value_name = "TFLOPS")]
    tflops: Option<f64>,
    /// Measured memory bandwidth
    #[arg(long, value_name = "GB/S")]
    bandwidth: Option<f64>,
    /// Measured bandwidth between GPUs of a host, one direction
    #[arg(long, value_name = "GB/S")]
    link: Option<f64>,
    /// Measured bandwidth to other hosts, one direction and per GPU
    #[arg(long, value_name = "GB/S")]
    network: Option<f64>,
    /// GPUs per host [default: 8]
    #[arg(long, value_name = "N")]
    gpus_per_host: Option<usize>,
    /// Average document length, for attention within documents (data.reset-attention-mask)
    #[arg(long, value_name = "TOKENS")]
    pub documents: Option<usize>,
    /// Do not overlap data-parallel communication with the passes
    #[arg(long)]
    no_overlap: bool,
    /// Show the memory of every pipeline rank, not only the fullest
    #[arg(long)]
    pub all_ranks: bool,
}

impl MachineArgs {
    /// Refuses flags that have no meaning without a configuration.
    pub(super) fn refuse_without_config(&self) -> Result<()> {
        let others = [("gpu", self.gpu.is_some()), ("no-overlap", self.no_overlap), ("all-ranks", self.all_ranks)];
        let numbers = self.numbers().map(|(flag, value)| (flag, value.is_some()));
        match numbers.into_iter().chain(others).find(|(_, given)| *given) {
            Some((flag, _)) => bail!("--{flag} is for a run: name its CONFIG, the TOML file, or --hf"),
            None => Ok(()),
        }
    }

    /// The flags that take a number.
    fn numbers(&self) -> [(&'static str, Option<f64>); 8] {
        [
            ("memory", self.memory),
            ("tflops", self.tflops),
            ("bandwidth", self.bandwidth),
            ("link", self.link),
            ("network", self.network),
            ("gpus-per-host", self.gpus_per_host.map(|gpus| gpus as f64)),
            ("gpus", self.gpus.map(|gpus| gpus as f64)),
            ("documents", self.documents.map(|tokens| tokens as f64)),
        ]
    }

    pub(super) fn gpu(&self) -> Result<&'static GpuModel> {
        gpus::find(self.gpu.as_deref().unwrap_or("h100")).map_err(|error| anyhow!(error))
    }

    /// Rates and memory of a GPU, and its name, for weights of `element` bytes.
    pub(super) fn hardware(&self, element: u64) -> Result<(Hardware, &'static str)> {
        let gpu = self.gpu()?;
        if let Some(gpus) = self.gpus.filter(|gpus| *gpus as u64 > RANKS) {
            bail!("--gpus {gpus} is more than can be planned; nearest legal: {RANKS}");
        }
        let mut hardware = Hardware::of(gpu, element);
        let is_wrong = |value: &f64| !value.is_finite() || *value <= 0.0;
        if let Some((key, value)) = self.numbers().iter().find(|(_, value)| value.as_ref().is_some_and(is_wrong)) {
            bail!("--{key} {} is not a number above 0", value.unwrap_or_default());
        }
        if let Some(gib) = self.memory {
            hardware.memory = (gib * (1u64 << 30) as f64) as u64;
        }
        if let Some(tflops) = self.tflops {
            hardware = hardware.with_gemms(tflops);
        }
        let rate = |given: Option<f64>, known: f64| given.map_or(known, |gigabytes| gigabytes * 1e9);
        hardware.bandwidth = rate(self.bandwidth, hardware.bandwidth);
        hardware.link = rate(self.link, hardware.link);
        hardware.network = rate(self.network, hardware.network);
        hardware.host = self.gpus_per_host.unwrap_or(8);
        hardware.overlap = !self.no_overlap;
        Ok((hardware, gpu.name))
    }
}
