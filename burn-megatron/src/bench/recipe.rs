//! Named runs to measure, and how a run is spread over a number of ranks.

use anyhow::{Context, Result, bail};

use crate::config::RunConfig;
use crate::plan::ladder;

/// A run that is measured often enough to have a name.
#[derive(Clone, Copy, Debug)]
pub struct Recipe {
    /// As it is written on the command line.
    pub name: &'static str,
    /// What it is.
    pub about: &'static str,
    /// Its keys, as a configuration file.
    pub toml: &'static str,
}

/// Llama's optimizer; a learning rate that does not decay within the measurement; no held-out loss, no checkpoints.
macro_rules! recipe {
    ($name:literal, $about:literal, $model:literal) => {
        Recipe {
            name: $name,
            about: $about,
            toml: concat!(
                $model,
                "[lr]\nmax = 3e-5\nmin = 3e-5\nform = \"constant\"\n",
                "[optimizer]\nbeta2 = 0.95\nweight-decay = 0.1\n",
                "[evaluation]\nbatches = 0\nfinal-batches = 0\n"
            ),
        }
    };
}

/// All recipes.
pub const RECIPES: [Recipe; 3] = [
    recipe!(
        "llama3-8b",
        "Llama 3 8B in bf16, rows of 8192 tokens, one a micro-batch",
        "[model]\npreset = \"llama3-8b\"\n[training]\nseq-length = 8192\nmicro-batch = 1\ndtype = \"bf16\"\nclip = 1.0\n"
    ),
    recipe!(
        "llama3-1b",
        "Llama 3.2 1B in bf16, rows of 4096 tokens, four a micro-batch",
        "[model]\npreset = \"llama3-1b\"\n[training]\nseq-length = 4096\nmicro-batch = 4\ndtype = \"bf16\"\nclip = 1.0\n"
    ),
    recipe!(
        "tiny",
        "a Llama of 0.1 million parameters in fp32, for CPU ranks",
        "[model]\npreset = \"tiny\"\n[training]\nseq-length = 64\nmicro-batch = 2\ndtype = \"f32\"\nclip = 1.0\n"
    ),
];

/// The recipe of a name.
///
/// # Errors
/// Names all recipes.
pub fn find(name: &str) -> Result<Recipe> {
    let Some(recipe) = RECIPES.iter().find(|recipe| recipe.name == name) else {
        let names: Vec<&str> = RECIPES.iter().map(|recipe| recipe.name).collect();
        bail!("there is no recipe and no file `{name}`; recipes: {}", names.join(", "));
    };
    Ok(*recipe)
}

type Overrides = [(String, String)];

fn given(overrides: &Overrides, path: &str) -> bool {
    overrides.iter().any(|(key, _)| key == path)
}

/// The recipe on `ranks` ranks for `steps` steps, with `overrides` on top. Where they do not say otherwise, the ranks that
/// tensor and pipeline parallelism leave are replicas; a replica takes one micro-batch per step, four per stage in a
/// pipeline; and ZeRO and recomputation are the first of the [`ladder`] that fits into `memory` bytes.
///
/// # Errors
/// Keys that contradict each other, or a model that does not fit however it is cut.
pub fn resolve(
    recipe: &Recipe,
    overrides: &Overrides,
    ranks: usize,
    steps: usize,
    memory: Option<u64>,
) -> Result<RunConfig> {
    let mut keys = vec![("training.steps".to_string(), steps.to_string())];
    let load = |keys: &[(String, String)]| RunConfig::parse(recipe.name, recipe.toml, &[keys, overrides].concat());
    let first = load(&keys)?;
    let layout = &first.parallel;
    if !given(overrides, "parallel.data-parallel") {
        let model = layout.tp * layout.pp * layout.cp;
        if !ranks.is_multiple_of(model.max(1)) {
            bail!("{ranks} ranks cannot be divided into replicas of {model}: change --gpus or the layout");
        }
        keys.push(("parallel.data-parallel".into(), (ranks / model.max(1)).to_string()));
    }
    if !given(overrides, "training.global-batch") {
        let layout = load(&keys)?.parallel;
        let micro_batches = if layout.pp > 1 { 4 * layout.pp } else { 1 };
        let rows = first.training.micro_batch * layout.dp * micro_batches;
        keys.push(("training.global-batch".into(), rows.to_string()));
    }
    let chosen = |(key, _): &(String, String)| key == "parallel.zero" || key.starts_with("recompute.");
    let (false, Some(memory)) = (overrides.iter().any(chosen), memory) else { return Ok(load(&keys)?) };
    let config = load(&keys)?;
    let job = ladder::first_that_fits(&config.job()?.on_gpus(), None, memory).with_context(|| {
        format!(
            "{} does not fit into {:.1} GiB on {} ranks, whatever is cut and computed again: take more GPUs or a \
             smaller --training.micro-batch or --training.seq-length",
            recipe.name,
            memory as f64 / (1u64 << 30) as f64,
            config.parallel.world_size()
        )
    })?;
    keys.push(("parallel.zero".into(), job.layout.zero.to_string()));
    Ok(RunConfig { recompute: job.recompute, ..load(&keys)? })
}
