//! `burn-megatron chat`: a conversation with a trained model in the terminal.

mod conversation;
mod terminal;

use parking_lot::Mutex;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};

use anyhow::{Context, Result, anyhow, bail};
use backend_dist::launch::BoxError;
use backend_dist::mesh::{Axis, Mesh, ParallelLayout};
use models::lora::Adapter;
use models::{CausalLm, FamilyConfig, ModelConfig, WithModel};
use tokenizers::Tokenizer;

use self::conversation::Conversation;
use self::terminal::Terminal;
use super::device::DeviceKind;
use super::forward::Precision;
use super::generate::{cache_bytes, memory};
use super::processes::alone;
use super::sampling::SamplingArgs;
use super::{open_folder, say_reading};
use crate::console::warn;
use crate::data::chat::ChatTokenizer;
use crate::forward::{Settings, build_over};
use crate::generate::{GenerateOptions, Generated, TextStream, generate};
use crate::hf::{HfFolder, read_adapter};
use crate::refusal::{Access, advice};

/// The name of the model without an adapter.
const NO_ADAPTER: &str = "none";

/// Arguments of `chat`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Folder with config.json, the weights and a tokenizer with a chat template
    #[arg(long, value_name = "DIR")]
    hf: PathBuf,
    /// Folder with adapter_config.json and adapter_model.safetensors, as peft writes them; its name is that of the folder
    /// if none is given. The first of several answers first, `/adapter NAME` switches
    #[arg(long = "adapter", value_name = "[NAME=]DIR")]
    adapters: Vec<String>,
    /// A Jinja template in place of the tokenizer's own
    #[arg(long, value_name = "FILE")]
    chat_template: Option<PathBuf>,
    /// What the system message says
    #[arg(long, value_name = "TEXT")]
    system: Option<String>,
    /// Most tokens of an answer. Default: 512, or half of the model's positions
    #[arg(long, alias = "max-tokens", value_name = "N")]
    max_new_tokens: Option<usize>,
    #[command(flatten)]
    sampling: SamplingArgs,
    /// Precision of weights and computation
    #[arg(long, value_enum, default_value = "f32")]
    dtype: Precision,
    /// Where the ranks run
    #[arg(long, value_enum, default_value = "cpu")]
    device: DeviceKind,
    /// Ranks that share each layer's matrices
    #[arg(long, alias = "tensor-model-parallel-size", value_name = "N", default_value_t = 1)]
    tensor_parallel: usize,
}

/// Reads messages from standard input and writes answers to standard output until the input ends or `/quit`. Fails if
/// the model, its tokenizer or its chat template cannot be used; before the first message is read.
pub fn run(args: Args) -> Result<ExitCode> {
    alone("chat")?;
    let folder = open_folder(&args.hf, None)?;
    let tokenizer = ChatTokenizer::open(&args.hf, args.chat_template.as_deref())?;
    let positions = positions(folder.config());
    let usual = positions.map_or(512, |positions| (positions / 2).clamp(1, 512));
    let max_new_tokens = args.max_new_tokens.unwrap_or(usual);
    if max_new_tokens == 0 {
        bail!("--max-new-tokens 0: an answer has a token at least; nearest legal: 1");
    }
    if let Some(positions) = positions.filter(|positions| max_new_tokens >= *positions) {
        bail!(
            "--max-new-tokens {max_new_tokens}: an answer and what was said before have {positions} positions; nearest legal: {}",
            positions - 1
        );
    }
    let layout = ParallelLayout { tp: args.tensor_parallel, ..ParallelLayout::default() };
    layout.check()?;
    folder.config().dims().check_tp(layout.tp)?;
    let stop_tokens = folder.generation().stop_tokens(&args.hf, tokenizer.tokenizer())?;
    if stop_tokens.is_empty() {
        warn(format_args!("no end-of-sequence token is known: an answer ends after {max_new_tokens} tokens"));
    }
    let options = args.sampling.options(folder.generation(), max_new_tokens, stop_tokens);
    options.check(folder.config(), &[0])?;
    folder.generation().note().into_iter().for_each(warn);
    // A conversation may need all positions, as far as there is memory for their keys and values.
    let each = cache_bytes(folder.config(), args.device, args.dtype, args.tensor_parallel);
    let fitting =
        memory(args.device).and_then(|bytes| bytes.checked_div(each)).map_or(usize::MAX, |most| most as usize);
    let room = positions.unwrap_or(usize::MAX).min(fitting).saturating_sub(max_new_tokens);
    if room == 0 {
        bail!("--max-new-tokens {max_new_tokens}: there is memory for the keys and values of {fitting} tokens");
    }
    let settings = Settings::new(args.device.devices(&layout)?, layout, args.dtype);

    let (names, adapters) = adapters(&args.adapters, folder.config())?;
    // Ranks that wait for a message wait in no collective, which would end after a while.
    let (turns, ranks): (Vec<Sender<Turn>>, Vec<_>) = (0..settings.layout.world_size())
        .map(|_| channel())
        .map(|(send, receive)| (send, Mutex::new(Some(receive))))
        .unzip();
    let (answers, answered) = channel();
    let words = tokenizer.tokenizer().clone();
    let job = Job {
        mesh: Mesh::new(settings.layout.clone())?,
        folder: &folder,
        settings: &settings,
        adapters: &adapters,
        tokenizer: &words,
        options: &options,
        turns: &ranks,
        answers: Mutex::new(answers),
    };
    let conversation = Conversation::new(tokenizer, folder.config().vocab_size(), room, args.system.clone());
    // It is in a read of standard input for most of its life, and ends with the program.
    let (refused, refusal) = channel();
    std::thread::spawn(move || Terminal { conversation, turns, answered, adapters: names, refused }.run());
    say_reading(&args.hf, folder.config());
    folder.config().visit(job)?;
    refusal.try_recv().map_or(Ok(ExitCode::SUCCESS), |error| {
        Err(anyhow!("cannot read standard input: {error}{}", advice(Access::Read, &error)))
    })
}

/// Positions that a model is made for. `None` is no limit: states alone (Mamba-2) are as large at every length, and
/// transformers' configuration of such a model has no `max_position_embeddings`.
pub(super) fn positions(config: &FamilyConfig) -> Option<usize> {
    let sizes = serde_json::to_value(config).unwrap_or_default();
    let trained = sizes["max_position_embeddings"].as_u64().map(|positions| positions as usize);
    trained.into_iter().chain(config.cached_positions()).min().map(|positions| positions.max(2))
}

/// The adapters of the command line with their names; the first is none.
pub(super) fn adapters(given: &[String], config: &FamilyConfig) -> Result<(Vec<String>, Vec<Option<Adapter>>)> {
    let (mut names, mut all) = (vec![NO_ADAPTER.to_string()], vec![None]);
    for text in given {
        let own =
            |path: &str| Path::new(path).file_name().map_or(path.into(), |name| name.to_string_lossy().into_owned());
        let (name, path) = match text.split_once('=').filter(|(name, _)| !name.contains('/')) {
            Some((name, path)) => (name.to_string(), path),
            None => (own(text), text.as_str()),
        };
        if name.is_empty() || path.is_empty() {
            bail!("--adapter {text}: a name or its folder is missing; write --adapter NAME=DIR, or --adapter DIR");
        }
        if names.contains(&name) {
            bail!(
                "--adapter {text}: there is an adapter `{name}` already; give it another name, --adapter NAME={path}"
            );
        }
        all.push(Some(read_adapter(Path::new(path), config)?));
        names.push(name);
    }
    Ok((names, all))
}

/// What is asked of all ranks.
#[derive(Clone)]
pub(super) enum Turn {
    /// An answer to all that was said, as tokens.
    Say(Arc<[i64]>),
    /// Another adapter, by its number.
    Adapter(usize),
}

/// What the first rank did with a turn.
pub(super) struct Answer {
    /// What it wrote.
    pub text: String,
    /// How long it took.
    pub generated: Generated,
}

struct Job<'a> {
    mesh: Mesh,
    folder: &'a HfFolder,
    settings: &'a Settings,
    /// By number.
    adapters: &'a [Option<Adapter>],
    tokenizer: &'a Tokenizer,
    options: &'a GenerateOptions,
    /// By rank.
    turns: &'a [Mutex<Option<Receiver<Turn>>>],
    answers: Mutex<Sender<Option<Answer>>>,
}

impl WithModel for Job<'_> {
    type Output = Result<()>;

    fn with<M: CausalLm + 'static>(self, config: &M::Config) -> Result<()> {
        self.settings
            .cluster
            .launch(&self.mesh, |rank| {
                let with = |number: usize, base: Option<&M>| {
                    let settings = Settings { adapter: self.adapters[number].clone(), ..self.settings.clone() };
                    build_over::<M>(&rank, config, self.folder, &settings, base)
                };
                let mut model = with(self.adapters.len().min(2) - 1, None)?;
                let turns = self.turns[rank.rank].lock().take().ok_or("a rank runs once")?;
                let first = rank.group(Axis::Tp).rank() == 0;
                let tell = |answer| self.answers.lock().send(answer).ok();
                // The weights are there.
                if first {
                    tell(None);
                }
                for turn in turns {
                    let turn = match turn {
                        Turn::Say(tokens) => tokens,
                        Turn::Adapter(number) => {
                            model = with(number, Some(&model))?;
                            if first {
                                tell(None);
                            }
                            continue;
                        }
                    };
                    let (mut stream, mut text, mut closed) =
                        (TextStream::after(self.tokenizer, &turn), String::new(), false);
                    let mut say = |new: String| {
                        closed |= super::write_now(&new).is_err();
                        text += &new;
                        closed
                    };
                    let generated = generate(&rank, &model, &turn, self.options, |token| {
                        let is_end = self.options.stop_tokens.contains(&token);
                        let new = if is_end { String::new() } else { stream.push(token).unwrap_or_default() };
                        if say(new) { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
                    })?;
                    if first {
                        say(stream.rest().unwrap_or_default());
                        tell(Some(Answer { text, generated }));
                    }
                }
                Ok::<_, BoxError>(())
            })
            .map(drop)
            .context("the conversation ended")
    }
}
