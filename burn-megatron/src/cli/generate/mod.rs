//! `burn-megatron generate`: continue a text with a trained model.

mod module;
mod source;
mod writer;

use parking_lot::Mutex;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result, anyhow, bail};
use backend_dist::gpu;
use backend_dist::launch::BoxError;
use backend_dist::mesh::{Mesh, ParallelLayout};
use backend_dist::process::Cluster;
use backend_dist::startup::{self, Phase, phase};
use models::{CausalLm, FamilyConfig, ModelConfig, WeightSource, WithModel};
use tokenizers::Tokenizer;

pub(super) use self::source::tokenizer;
use self::source::{Source, open};
use self::writer::Writer;
use super::device::DeviceKind;
use super::forward::Precision;
use super::refused;
use super::sampling::SamplingArgs;
use crate::config::decoder_of;
use crate::console::warn;
use crate::data::read_text;
use crate::forward::{Settings, build};
use crate::generate::{Ended, GenerateOptions, Generated, generate};
use crate::hf::{GenerationConfig, ModuleFolder, read_adapter};
use crate::host_memory;
use crate::refusal::Access;

/// Arguments of `generate`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Hugging Face folder with the model
    #[arg(long, value_name = "DIR")]
    hf: Option<PathBuf>,
    /// Folder with adapter_config.json and adapter_model.safetensors, as peft writes them, of the model of --hf
    #[arg(long, value_name = "DIR", requires = "hf")]
    adapter: Option<PathBuf>,
    /// Checkpoint with the model, or a folder of checkpoints: the latest
    #[arg(long, value_name = "DIR", conflicts_with = "hf")]
    checkpoint: Option<PathBuf>,
    /// Text to continue
    #[arg(long, value_name = "TEXT", required_unless_present_any = ["prompt_file", "tokens"])]
    prompt: Option<String>,
    /// File with the text to continue
    #[arg(long, value_name = "FILE", conflicts_with_all = ["prompt", "tokens"])]
    prompt_file: Option<PathBuf>,
    /// Token ids to continue; the new ids are printed. Needs no tokenizer
    #[arg(long, value_name = "ID,..", value_delimiter = ',', value_parser = token, conflicts_with = "prompt")]
    tokens: Option<Vec<i64>>,
    /// Image that the model sees, PNG or JPEG, in place of `<image>` in the prompt; may be given several times
    #[arg(long = "image", value_name = "FILE", requires = "hf")]
    images: Vec<PathBuf>,
    /// Most tokens to write. Default: 128, or as many as the model has positions for
    #[arg(long, alias = "max-tokens", value_name = "N")]
    max_new_tokens: Option<usize>,
    #[command(flatten)]
    sampling: SamplingArgs,
    /// Token that ends the text, by id or as the tokenizer writes it; may be given several times. Default: the model's
    #[arg(long = "stop-token", value_name = "TOKEN")]
    stop_tokens: Vec<String>,
    /// Let the text outgrow the model's positions: it sees at most so many tokens and resumes from the last half of
    /// them
    #[arg(long, value_name = "N")]
    window: Option<usize>,
    /// Precision of weights and computation
    #[arg(long, value_enum, default_value = "f32")]
    dtype: Precision,
    /// Where the ranks run
    #[arg(long, value_enum, default_value = "cpu")]
    pub(super) device: DeviceKind,
    /// Ranks that share each layer's matrices
    #[arg(long, alias = "tensor-model-parallel-size", value_name = "N", default_value_t = 1)]
    tensor_parallel: usize,
}

/// Writes the text to standard output as it comes and the speed to standard error. Fails if the model or its tokenizer
/// cannot be read, or cannot do what is asked for; before anything is written.
pub fn run(args: Args, cluster: &Cluster) -> Result<ExitCode> {
    if let Some(dir) = &args.hf
        && ModuleFolder::is_one(dir)?
    {
        return module::run(&args, dir, cluster);
    }
    if let Some(image) = args.images.first() {
        bail!("--image {}: the model reads no images; nearest legal: none", image.display());
    }
    let source = open(&args, cluster)?;
    let (tokens, writer) = match read_prompt(&args)? {
        Prompt::Tokens(tokens) => (tokens, Writer::ids()),
        Prompt::Text(text) => {
            let lacking = "the model comes without a tokenizer.json: give token ids, --tokens 1,2,3, or copy its tokenizer.json into the folder";
            let tokenizer = source.tokenizer.as_ref().context(lacking)?;
            let tokens = encode(&text, tokenizer)?;
            let writer = Writer::text(tokenizer, text, &tokens);
            (tokens, writer)
        }
    };
    let options = options(&args, &source, tokens.len())?;
    options.check(&source.config, &tokens)?;
    let layout = ParallelLayout { tp: args.tensor_parallel, ..ParallelLayout::default() };
    layout.check()?;
    source.config.dims().check_tp(layout.tp)?;
    let each = cache_bytes(&source.config, args.device, args.dtype, args.tensor_parallel);
    let fits = memory(args.device).map_or(Ok(()), |available| options.check_memory(tokens.len(), each, available));
    match decoder_of(&source.config).latent {
        Some(latent) => fits.with_context(|| format!("latents of kv_lora_rank {}", latent.keys))?,
        None => fits?,
    }
    let note = beyond_positions(&source.config, tokens.len(), &options).filter(|_| cluster.is_first());
    let keys = source.generation.note().filter(|_| cluster.is_first());
    keys.into_iter().chain(note).for_each(warn);

    let writer = Mutex::new(writer);
    let settings = Settings {
        adapter: args.adapter.as_deref().map(|path| read_adapter(path, &source.config)).transpose()?,
        ..Settings::new(args.device.of_cluster(&layout, cluster)?, layout, args.dtype)
    };
    let job = Job {
        mesh: Mesh::new(settings.layout.clone())?,
        settings: &settings,
        weights: source.weights.as_ref(),
        prompt: &tokens,
        options: &options,
        writer: &writer,
    };
    let generated = source.config.visit(job)?;
    if cluster.is_first() {
        writer.into_inner().finish()?;
        warn(format_args!("{}", speed(tokens.len(), &generated)));
    }
    Ok(ExitCode::SUCCESS)
}

/// Bytes that a position takes in the cache, in the memory that one rank or, on the CPU, all ranks have.
pub(super) fn cache_bytes(config: &FamilyConfig, device: DeviceKind, dtype: Precision, tp: usize) -> u64 {
    let (decoder, tp) = (decoder_of(config), tp.max(1));
    let ranks = if device == DeviceKind::Cuda { 1 } else { tp };
    let layers = (0..decoder.layers).filter(|layer| decoder.has_keys(*layer)).count();
    let sizes = [layers, ranks, decoder.cached_features(tp), dtype.bytes()];
    sizes.iter().fold(1, |bytes: u64, &size| bytes.saturating_mul(size as u64))
}

/// Bytes of memory on a device, or available on the host, if they are known.
pub(super) fn memory(device: DeviceKind) -> Option<u64> {
    match device {
        DeviceKind::Cpu => host_memory::available(),
        DeviceKind::Cuda => gpu::gpus().ok()?.iter().map(|gpu| gpu.total).min(),
    }
}

/// What is to be continued.
enum Prompt {
    Text(String),
    Tokens(Vec<i64>),
}

/// One of the ids of `--tokens`.
fn token(text: &str) -> Result<i64, String> {
    text.trim().parse().map_err(|_| format!("`{text}` is no token id; write ids with commas, as 1,2,3"))
}

fn read_prompt(args: &Args) -> Result<Prompt> {
    Ok(match (&args.tokens, &args.prompt, &args.prompt_file) {
        (Some(tokens), ..) => Prompt::Tokens(tokens.clone()),
        (_, Some(text), _) => Prompt::Text(text.clone()),
        (.., Some(file)) => Prompt::Text(read_text(file).map_err(refused(Access::Read, file))?),
        _ => bail!("--prompt TEXT, --prompt-file FILE or --tokens ID,.. says what to continue"),
    })
}

/// With the tokens that the tokenizer puts around every text, as transformers does.
fn encode(text: &str, tokenizer: &Tokenizer) -> Result<Vec<i64>> {
    let encoded =
        tokenizer.encode_fast(text, true).map_err(|error| anyhow!("the prompt cannot be encoded: {error}"))?;
    Ok(encoded.get_ids().iter().map(|id| i64::from(*id)).collect())
}

/// Those of the flags, or else the model's.
fn stop_tokens(
    args: &Args,
    generation: &GenerationConfig,
    vocabulary: Option<usize>,
    tokenizer: Option<&Tokenizer>,
) -> Result<Vec<i64>> {
    match args.stop_tokens.is_empty() {
        true => Ok(generation.eos_token_id.iter().map(|id| i64::from(*id)).collect()),
        false => args.stop_tokens.iter().map(|text| token_id(text, vocabulary, tokenizer)).collect(),
    }
}

fn options(args: &Args, source: &Source, prompt: usize) -> Result<GenerateOptions> {
    let vocabulary = Some(source.config.vocab_size());
    let stop_tokens = stop_tokens(args, &source.generation, vocabulary, source.tokenizer.as_ref())?;
    let positions = source.config.cached_positions().filter(|_| args.window.is_none());
    let room = positions.map_or(128, |positions| (positions + 1).saturating_sub(prompt).clamp(1, 128));
    let max_new_tokens = args.max_new_tokens.unwrap_or(room);
    let options = args.sampling.options(&source.generation, max_new_tokens, stop_tokens);
    Ok(GenerateOptions { window: args.window, ..options })
}

/// A note if the text may outgrow the positions that a model with rotary angles was trained with.
fn beyond_positions(config: &FamilyConfig, prompt: usize, options: &GenerateOptions) -> Option<String> {
    let sizes = serde_json::to_value(config).ok()?;
    let positions = sizes["max_position_embeddings"].as_u64()? as usize;
    let most = prompt.saturating_add(options.max_new_tokens);
    (options.window.is_none() && most > positions + 1).then(|| {
        format!("note: the model is made for {positions} positions, this may become {most}; --window {positions} stays within")
    })
}

fn token_id(text: &str, vocabulary: Option<usize>, tokenizer: Option<&Tokenizer>) -> Result<i64> {
    if let Ok(id) = text.parse::<i64>() {
        if let Some(most) = vocabulary.map(|size| size as i64 - 1).filter(|most| !(0..=*most).contains(&id)) {
            warn(format_args!("note: --stop-token {id} never comes: the model's tokens are 0 to {most}"));
        }
        return Ok(id);
    }
    let id = tokenizer.and_then(|tokenizer| tokenizer.token_to_id(text));
    id.map(i64::from).with_context(|| format!("--stop-token {text}: the model's tokenizer has no such token"))
}

fn speed(prompt: usize, generated: &Generated) -> String {
    let new = generated.tokens.len();
    let rate = |tokens: usize, seconds: f64| if seconds > 0.0 { tokens as f64 / seconds } else { 0.0 };
    let ended = match generated.ended {
        Ended::Length => "as many as asked for".to_string(),
        Ended::StopToken => format!("stop token {}", generated.tokens[new - 1]),
        Ended::Reader => "the output was closed".to_string(),
    };
    format!(
        "prompt: {prompt} tokens, {:.1} tokens/s; text: {new} tokens, {:.1} tokens/s; ended: {ended}",
        rate(prompt, generated.prompt_seconds),
        rate(new.saturating_sub(1), generated.decode_seconds),
    )
}

/// A generation, ready for the model's family.
struct Job<'a, 'w> {
    mesh: Mesh,
    settings: &'a Settings,
    weights: &'a dyn WeightSource,
    prompt: &'a [i64],
    options: &'a GenerateOptions,
    writer: &'a Mutex<Writer<'w>>,
}

impl WithModel for Job<'_, '_> {
    type Output = Result<Generated>;

    fn with<M: CausalLm + 'static>(self, config: &M::Config) -> Result<Generated> {
        let ranks = self.settings.cluster.launch(&self.mesh, |rank| {
            let model = phase(Phase::Weights, || -> Result<_, BoxError> {
                let model = build::<M>(&rank, config, self.weights, self.settings)?;
                rank.device.sync()?;
                Ok(model)
            })?;
            let on_token = |token| {
                if let Some(started) = startup::end().filter(|_| rank.rank == 0) {
                    warn(started);
                }
                self.writer.lock().push(token)
            };
            let generate = || generate(&rank, &model, self.prompt, self.options, on_token);
            Ok(phase(Phase::Step, generate)?)
        })?;
        ranks.into_iter().next().context("a mesh has a rank")
    }
}
