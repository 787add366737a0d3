//! The run to measure, and its data.

use std::path::Path;
use std::sync::Arc;

use anyhow::{Result, bail};
use backend_dist::comm::RunError;
use backend_dist::gpu::GpuInfo;
use backend_dist::process::{Cluster, host_name};
use models::ModelConfig;

use crate::bench::{DocumentLengths, SyntheticTokens, Timing, recipe};
use crate::cli::preprocess::Display;
use crate::config::RunConfig;
use crate::data::TokenDataset;
use crate::train::RunData;

/// The ranks that a recipe has if nothing names their number.
#[derive(Clone, Copy)]
pub(super) struct Ranks {
    count: usize,
    /// Bytes of the smallest GPU.
    memory: Option<u64>,
}

impl Ranks {
    /// One for each GPU of all processes, which share those of a host unless each sees its own only; two CPU ranks, or
    /// one for each process. Fails if a process is gone.
    pub fn of(cluster: &Cluster, gpus: &[GpuInfo]) -> Result<Self, RunError> {
        let all = cluster.all_gather((host_name(), gpus.len(), gpus.iter().map(|gpu| gpu.total).min()))?;
        let here = host_name();
        let neighbours = all.iter().filter(|(host, ..)| *host == here).count();
        let each = if gpus.len() < neighbours { gpus.len() } else { gpus.len() / neighbours };
        let count = match cluster.all_gather(each)?.into_iter().min() {
            Some(each @ 1..) => each * cluster.count(),
            _ => cluster.count().max(2),
        };
        Ok(Self { count, memory: all.iter().filter_map(|(.., memory)| *memory).min() })
    }
}

/// The run of a file, or a recipe distributed over the ranks.
pub(super) fn config(
    what: &str,
    overrides: &[(String, String)],
    ranks: Option<usize>,
    timing: Timing,
    here: Ranks,
) -> Result<RunConfig> {
    let path = Path::new(what);
    let config = if path.is_file() {
        RunConfig::load_on(Some(path), overrides, &|copy| Ok(here.count.max(copy)))?
    } else {
        recipe::resolve(&recipe::find(what)?, overrides, ranks.unwrap_or(here.count), timing.total(), here.memory)?
    };
    config.job()?;
    Ok(config)
}

/// The data that the run names, or random tokens; and their description. The first process tokenizes a text before the
/// others look at it.
pub(super) fn data(
    config: &RunConfig,
    timing: Timing,
    documents: Option<DocumentLengths>,
    cluster: &Cluster,
) -> Result<(Arc<dyn TokenDataset>, String)> {
    let is_random = config.data.text.is_empty() && config.data.prefixes.is_empty() && !config.has_conversations();
    if documents.is_some() {
        if !is_random {
            bail!("--document-lengths divides random tokens: leave data.text and data.prefixes out");
        }
        if !(config.data.reset_attention_mask && config.data.reset_position_ids) {
            bail!(
                "--document-lengths has an effect with --data.reset-attention-mask true and --data.reset-position-ids true \
                 only"
            );
        }
    }
    if is_random {
        let (training, vocabulary) = (&config.training, config.model.config.vocab_size());
        let rows = timing.total() * training.global_batch;
        let tokens = SyntheticTokens::new(vocabulary, training.seq_length, rows).with_documents(documents);
        let of = documents.map_or(String::new(), |lengths| format!(" in documents of {lengths}"));
        return Ok((Arc::new(tokens), format!("random tokens{of}")));
    }
    config.check()?;
    let mut display = Display::new();
    let data = RunData::open_among(config, cluster, &mut |progress| display.show(progress));
    display.clear();
    Ok((data?.train, "tokens of a text".into()))
}
