//! Named runs to measure, and their distribution over a number of ranks.

use anyhow::{Context, Result, bail};

use crate::config::{RANKS, RunConfig};
use crate::plan::{Job, ladder};
use crate::schedule::AUTO;

/// A named run.
#[derive(Clone, Copy, Debug)]
pub struct Recipe {
    /// Its name on the command line.
    pub name: &'static str,
    /// Its keys, as a configuration file.
    pub toml: &'static str,
    /// Sequences of a step per rank, without pipeline parallelism.
    pub sequences: usize,
}

/// Llama's optimizer; a learning rate that does not decay within the measurement; no held-out loss, no checkpoints.
macro_rules! recipe {
    ($name:literal, $sequences:literal, $model:literal) => {
        Recipe {
            name: $name,
            sequences: $sequences,
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
    // Llama 3 8B in bf16, sequence length 8192, two sequences per GPU and step.
    recipe!(
        "llama3-8b",
        2,
        "[model]\npreset = \"llama3-8b\"\n[training]\nseq-length = 8192\nmicro-batch = 2\ndtype = \"bf16\"\nclip = 1.0\n"
    ),
    // Llama 3.2 1B in bf16, sequence length 4096, four sequences per GPU and step.
    recipe!(
        "llama3-1b",
        4,
        "[model]\npreset = \"llama3-1b\"\n[training]\nseq-length = 4096\nmicro-batch = 4\ndtype = \"bf16\"\nclip = 1.0\n"
    ),
    // A Llama of 0.1 million parameters in fp32, for CPU ranks.
    recipe!(
        "tiny",
        2,
        "[model]\npreset = \"tiny\"\n[training]\nseq-length = 64\nmicro-batch = 2\ndtype = \"f32\"\nclip = 1.0\n"
    ),
];

/// The recipe of a name. The error names all recipes.
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

/// The recipe on `ranks` ranks for `steps` steps, with `overrides` on top. Unless they say otherwise, the ranks
/// that tensor and pipeline parallelism leave are data parallel; a step has the recipe's sequences per rank, in a
/// pipeline four micro-batches per stage, and stages are balanced by cost. Micro-batch, ZeRO stage and recomputation
/// are the first on the [`ladder`] that fit into `memory` bytes: the recipe's micro-batch if it needs no recomputation
/// that half of it would avoid, and so on.
///
/// # Errors
/// Keys that contradict each other, or a model that does not fit in any case.
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
    first.check_limits()?;
    if ranks as u64 > RANKS {
        bail!("{ranks} ranks are more than can be trained on; nearest legal: {RANKS}");
    }
    if !given(overrides, "parallel.data-parallel") {
        let model = first.parallel.tp * first.parallel.pp * first.parallel.cp;
        if !ranks.is_multiple_of(model.max(1)) {
            bail!("{ranks} ranks are not a multiple of the {model} that hold a model: change --gpus or the layout");
        }
        keys.push(("parallel.data-parallel".into(), (ranks / model.max(1)).to_string()));
    }
    let layout = load(&keys)?.parallel;
    let divided = ["layout", "first-layers", "last-layers", "count-embedding", "count-loss"];
    if layout.pp > 1 && !divided.iter().any(|key| given(overrides, &format!("pipeline.{key}"))) {
        keys.push(("pipeline.layout".into(), AUTO.into()));
    }
    let with = |micro: usize| -> Result<RunConfig> {
        let parts = (micro * layout.dp).max(1);
        let count =
            if layout.pp > 1 { 4 * layout.pp } else { (recipe.sequences * layout.world_size()).div_ceil(parts) };
        let set = |key: &str, value: usize| (key.to_string(), value.to_string());
        let batch = [set("training.micro-batch", micro), set("training.global-batch", count * parts)];
        Ok(load(&[keys.clone(), batch.to_vec()].concat())?)
    };
    let largest = first.training.micro_batch;
    let mut configs = vec![with(largest)?];
    if !given(overrides, "training.micro-batch") {
        let halves = std::iter::successors(Some(largest / 2), |half| Some(half / 2)).take_while(|half| *half > 0);
        configs.extend(halves.map(with).collect::<Result<Vec<_>>>()?);
        // A batch that was given may divide into small micro-batches only.
        let whole = configs.iter().position(|config| {
            config.training.global_batch.is_multiple_of(config.training.micro_batch * config.parallel.dp)
        });
        configs.drain(..whole.unwrap_or_default());
    }
    let Some(memory) = memory else { return Ok(configs.swap_remove(0)) };
    let jobs = configs.iter().map(|config| Ok(config.job()?.on_gpus())).collect::<Result<Vec<Job>>>()?;
    if overrides.iter().any(|(key, _)| key == "parallel.zero" || key.starts_with("recompute.")) {
        let fits = jobs.iter().position(|job| ladder::fits(job, memory));
        return Ok(configs.swap_remove(fits.unwrap_or(jobs.len() - 1)));
    }
    let (index, job) = ladder::first_of(&jobs, memory).with_context(|| {
        let small = jobs.iter().find_map(|job| ladder::with_small_states(job, memory));
        let other = small.map_or(String::new(), |(_, keys)| format!(", or {keys}"));
        format!(
            "{} does not fit into {:.1} GiB on {} ranks, with any ZeRO stage and recomputation: take more GPUs or a \
             smaller --training.micro-batch or --training.seq-length{other}",
            recipe.name,
            memory as f64 / (1u64 << 30) as f64,
            layout.world_size()
        )
    })?;
    let mut config = configs.swap_remove(index);
    config.parallel = job.layout;
    config.recompute = job.recompute;
    Ok(config)
}
