//! `burn-megatron serve`: many texts at once, over HTTP.

mod adapted;
mod batch;
mod measure;
mod sizes;

use parking_lot::Mutex;
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Arc, OnceLock};

use anyhow::{Context, Result, anyhow, bail};
use backend_dist::launch::BoxError;
use backend_dist::mesh::{Mesh, ParallelLayout};
use models::layout::sequence_unit;
use models::lora::Adapter;
use models::{CausalLm, FamilyConfig, ModelConfig, ParamBuilder, WithModel};
use tokio::sync::oneshot;

use self::adapted::build_all;
use self::batch::BatchArgs;
use self::measure::Load;
use self::sizes::SizeArgs;
use super::chat::adapters;
use super::device::DeviceKind;
use super::forward::Precision;
use super::generate::tokenizer;
use super::processes::alone;
use super::sampling::suggested;
use super::{open_folder, say_reading};
use crate::console::{say, warn};
use crate::data::chat::ChatTokenizer;
use crate::forward::Settings;
use crate::hf::HfFolder;
use crate::serve::http::{App, Guides, Server};
use crate::serve::{Queue, Requests, SchedulerConfig, run_from as serve};

/// Arguments of `serve`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Folder with config.json, the weights and tokenizer.json
    #[arg(long, value_name = "DIR", required_unless_present = "preset")]
    hf: Option<PathBuf>,
    /// With --requests: measure a model with random weights, by the name of its preset
    #[arg(long, value_name = "NAME", conflicts_with = "hf", requires = "requests")]
    preset: Option<String>,
    /// Folder with adapter_config.json and adapter_model.safetensors, as peft writes them; its name, for the `model` of a
    /// request, is that of the folder if none is given. Models share the weights of --hf
    #[arg(long = "adapter", value_name = "[NAME=]DIR", requires = "hf")]
    adapters: Vec<String>,
    /// Name of the model of --hf. Default: the folder's
    #[arg(long, value_name = "NAME")]
    served_model_name: Option<String>,
    /// A Jinja template in place of the tokenizer's own
    #[arg(long, value_name = "FILE")]
    chat_template: Option<PathBuf>,
    /// Address to listen at
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1")]
    host: IpAddr,
    /// Port to listen at; 0 is a free one
    #[arg(long, value_name = "N", default_value_t = 8000)]
    port: u16,
    /// Layout of the ranks: tensor, sequence and expert parallelism, such as "TP2 SP"
    #[arg(long, value_name = "LAYOUT", default_value = "TP1")]
    layout: ParallelLayout,
    /// Precision of weights and computation
    #[arg(long, value_enum, default_value = "f32")]
    dtype: Precision,
    /// Where the ranks run
    #[arg(long, value_enum, default_value = "cpu")]
    device: DeviceKind,
    #[command(flatten)]
    sizes: SizeArgs,
    #[command(flatten)]
    load: Load,
    #[command(flatten)]
    batch: BatchArgs,
}

/// Answers requests until Ctrl-C, or measures how fast it would. Fails if the model, its tokenizer or an adapter cannot
/// be used, sizes do not fit or the port is taken; before anything is served.
pub fn run(args: Args) -> Result<ExitCode> {
    alone("serve")?;
    let batch = args.batch.open(args.hf.as_deref())?;
    let folder = args.hf.as_deref().map(|folder| open_folder(folder, None)).transpose()?;
    let config = match (&folder, &args.preset) {
        (Some(folder), _) => folder.config().clone(),
        (None, Some(name)) => preset(name)?,
        (None, None) => bail!("--hf DIR says what to serve"),
    };
    check_layout(&args.layout, &config)?;
    let (names, adapters) = adapters(&args.adapters, &config)?;
    let scheduler = args.sizes.resolve(&config, &adapters, args.device, args.dtype, args.layout.tp)?;
    let settings = Settings::new(args.device.devices(&args.layout)?, args.layout.clone(), args.dtype);
    let (requests, queue) = Requests::channel();
    let job = |ready: &(dyn Fn() + Sync)| {
        args.hf.iter().for_each(|dir| say_reading(dir, &config));
        config.visit(Job {
            mesh: Mesh::new(settings.layout.clone())?,
            folder: folder.as_ref(),
            settings: &settings,
            adapters: &adapters,
            scheduler,
            queue: Mutex::new(Some(queue)),
            ready,
        })
    };
    if args.load.is_asked() {
        let load = args.load.resolve(config.vocab_size(), &scheduler)?;
        return until(requests, job, move |requests| load.report(requests));
    }
    let Some(folder) = &folder else { bail!("--hf DIR says what to serve") };
    let app = Arc::new(app(&args, folder, requests, names, scheduler)?);
    if let Some(batch) = batch {
        // More than run, so that none waits for the next to be read.
        let at_once = 2 * scheduler.max_num_seqs;
        return until(app.requests.clone(), job, move |_| batch.answer(&app, at_once));
    }
    let server = Server::bind(SocketAddr::new(args.host, args.port)).with_context(|| {
        format!("--host {} --port {}: give another one, --port 0 takes a free one", args.host, args.port)
    })?;
    let address = server.address()?;
    let (ended, until) = oneshot::channel::<()>();
    let handlers = Arc::clone(&app);
    // Ready as well when the ranks have failed and the sender is gone.
    let http = std::thread::spawn(move || server.serve(handlers, async { drop(until.await) }));
    let served = job(&|| {
        app.ready.store(true, Ordering::Relaxed);
        if let Some(why) = config.unshared_prefixes() {
            say(format_args!("prefixes are not cached: {why}"));
        }
        let SchedulerConfig { max_num_seqs, max_model_len, num_blocks, block_size, .. } = scheduler;
        say(format_args!(
            "{} at http://{address}/v1: up to {max_num_seqs} sequences of {max_model_len} tokens, {num_blocks} blocks of {block_size}",
            app.models.join(", ")
        ));
    });
    drop(ended);
    let answered = http.join().map_err(|_| anyhow!("the HTTP server failed"))?;
    served?;
    answered?;
    Ok(ExitCode::SUCCESS)
}

/// Runs the ranks until `work` has asked them, which begins when the weights are there, and prints what it says.
fn until(
    requests: Requests,
    job: impl FnOnce(&(dyn Fn() + Sync)) -> Result<()>,
    work: impl FnOnce(&Requests) -> Result<String> + Send + 'static,
) -> Result<ExitCode> {
    let (start, started) = channel();
    let worker = std::thread::spawn(move || {
        let Finish(requests) = &Finish(requests);
        started.recv().map_err(|_| anyhow!("the ranks have failed"))?;
        work(requests)
    });
    job(&|| {
        // Without a receiver the work has ended.
        let _ = start.send(());
    })?;
    drop(start);
    super::print(&worker.join().map_err(|_| anyhow!("the requests failed"))??)?;
    Ok(ExitCode::SUCCESS)
}

/// Ends the ranks when it is dropped, so also if who asks them panics.
struct Finish(Requests);

impl Drop for Finish {
    fn drop(&mut self) {
        self.0.finish();
    }
}

fn app(
    args: &Args,
    folder: &HfFolder,
    requests: Requests,
    mut models: Vec<String>,
    scheduler: SchedulerConfig,
) -> Result<App> {
    let dir = args.hf.as_deref().unwrap_or(Path::new("."));
    let path =
        folder.tokenizer_path().with_context(|| format!("{}: no tokenizer.json or other tokenizer", dir.display()))?;
    let tokenizer = tokenizer(&path)?;
    let chat = match ChatTokenizer::open(dir, args.chat_template.as_deref()) {
        Ok(chat) => Some(chat),
        Err(error) if args.chat_template.is_some() => return Err(error.into()),
        Err(error) => {
            warn(format_args!("no chat: {error}"));
            None
        }
    };
    let defaults = suggested(folder.generation());
    defaults.check().with_context(|| format!("{}: generation_config.json", dir.display()))?;
    folder.generation().note().into_iter().for_each(warn);
    let stop_tokens = folder.generation().stop_tokens(dir, &tokenizer)?;
    let of_folder = || dir.canonicalize().ok()?.file_name().map(|name| name.to_string_lossy().into_owned());
    let name = args.served_model_name.clone().or_else(of_folder).unwrap_or_else(|| "model".into());
    if models[1..].contains(&name) {
        bail!("--adapter {name}: the model itself has this name; give the adapter another one, --adapter NAME=DIR");
    }
    models[0] = name;
    Ok(App {
        requests,
        models,
        longest_token: tokenizer.get_vocab(true).keys().map(String::len).max().unwrap_or(1),
        tokenizer,
        chat,
        defaults,
        processors: folder.generation().processors.clone(),
        stop_tokens,
        vocab_size: folder.config().vocab_size(),
        guides: Guides::default(),
        token_texts: OnceLock::new(),
        max_model_len: scheduler.max_model_len,
        ready: AtomicBool::new(false),
        count: AtomicU64::new(0),
    })
}

fn preset(name: &str) -> Result<FamilyConfig> {
    let presets = FamilyConfig::presets();
    let names = || presets.iter().map(|(name, _)| *name).collect::<Vec<_>>().join(", ");
    let found = presets.iter().find(|(of, _)| *of == name).map(|(_, config)| config.clone());
    found.with_context(|| format!("--preset {name}: there is no such preset; presets: {}", names()))
}

/// A rank serves with its part of each layer; whole copies of a model are several servers.
fn check_layout(layout: &ParallelLayout, config: &FamilyConfig) -> Result<()> {
    layout.check()?;
    for (name, size) in [("PP", layout.pp), ("CP", layout.cp), ("DP", layout.dp)] {
        if size > 1 {
            bail!(
                "--layout {layout}: {name}{size} is not served, only tensor, sequence and expert parallelism; nearest legal: TP{}",
                layout.tp
            );
        }
    }
    Ok(config.dims().check(layout, sequence_unit(layout))?)
}

/// The ranks of a server, ready for the model's family.
struct Job<'a> {
    mesh: Mesh,
    /// Without one weights are random.
    folder: Option<&'a HfFolder>,
    settings: &'a Settings,
    /// By number; the first is none.
    adapters: &'a [Option<Adapter>],
    scheduler: SchedulerConfig,
    queue: Mutex<Option<Queue>>,
    /// Called when the weights are there, and the memory of the cache.
    ready: &'a (dyn Fn() + Sync),
}

impl WithModel for Job<'_> {
    type Output = Result<()>;

    fn with<M: CausalLm + 'static>(self, config: &M::Config) -> Result<()> {
        self.settings
            .cluster
            .launch(&self.mesh, |rank| {
                let models: Vec<M> = match self.folder {
                    Some(folder) => build_all(&rank, config, folder, self.settings, self.adapters)?,
                    None => {
                        let params = ParamBuilder::new(&rank, self.settings.dtype, 1).with_fp32_norms();
                        vec![M::build(config, params.without_autodiff())?]
                    }
                };
                let queue = match rank.rank {
                    0 => self.queue.lock().take(),
                    _ => None,
                };
                let ready = || {
                    if rank.rank == 0 {
                        (self.ready)();
                    }
                };
                Ok::<_, BoxError>(serve(&rank, &models, self.scheduler, queue, ready)?)
            })
            .map(drop)
            .context("the ranks ended")
    }
}
