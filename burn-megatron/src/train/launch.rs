//! From a model's family to its training.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use backend_dist::gpu::gpus;
use backend_dist::launch::{BoxError, Rank};
use backend_dist::mesh::{Axis, Mesh};
use backend_dist::ops::LOGITS_AT_ONCE;
use backend_dist::process::Processes;
use burn::tensor::{Device, FloatDType};
use models::lora::Adapter;
use models::{CausalLm, ModelConfig, ParamBuilder, Part, WeightSource, WithModel};
use serde_json::Value;

use super::fp8::{of_host, possible};
use super::teach::BuildTeacher;
use super::{Plan, RunData, TrainError, resume as saving, same_weights, tasks};
use crate::checkpoint::Checkpoint;
use crate::config::{RunConfig, TrainingSection};
use crate::flops::AttentionCount;
use crate::hf::{Companions, HfFolder, companions_of, keep_companions};
use crate::learner::{Description, ExitOptions, LogOptions, Pretraining, RestartOptions, Resume, loss_over};
use crate::metrics::{FlopsPerToken, RunInfo, TokenLoss, on_gpu, peak};

/// Exit code of a program whose training was stopped before its last step, by a signal or a key: `EX_TEMPFAIL` of
/// sysexits.h. The same command resumes the run.
pub const STOPPED: u8 = 75;

/// How a training ended.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TrainReport {
    /// Loss over test data, or validation data where there is no test data; `None` where none was asked for.
    pub last: Option<TokenLoss>,
    /// A signal or a key has stopped it before its last step; the same in all processes.
    pub stopped: bool,
    /// `training.exit-duration-in-mins` or `training.exit-interval` has ended it before its last step; the same in all
    /// processes.
    pub exited: bool,
    /// Wall time of building the model and training it.
    pub seconds: f64,
}

/// A run with everything that it needs, waiting for its model's type.
pub(super) struct Launch<'a> {
    pub plan: &'a Plan,
    /// Where there are several.
    pub processes: Option<Processes>,
    pub devices: Vec<Device>,
    pub data: RunData,
}

impl WithModel for Launch<'_> {
    type Output = Result<TrainReport, TrainError>;

    fn with<M: CausalLm + 'static>(self, sizes: &M::Config) -> Self::Output {
        let Self { plan, processes, devices, data } = self;
        let (config, weights, start) = (plan.config(), plan.weights(), Instant::now());
        let (training, evaluation) = (&config.training, &config.evaluation);
        let (dims, engine) = (sizes.dims(), config.engine());
        let build = stage_builder::<M>(sizes, config, weights, plan.adapter().cloned());
        let peak = devices.first().and_then(|device| peak(device, training.dtype.bytes()));
        let mesh = Mesh::new(config.parallel.clone())?;
        let json = |part: Result<Value, serde_json::Error>| part.expect("configurations are plain data");
        let mut description = Description {
            model: json(serde_json::to_value(&config.model.config)),
            config: json(serde_json::to_value(config)),
            begun_from: plan.start.as_ref().and_then(|start| start.begun_from),
        };
        // What came with a model goes with its checkpoints, also where the run no longer names its folder.
        let before = plan.start.as_ref().map(|start| Checkpoint::open(&start.path)).transpose()?;
        let companions = match (plan.folder(), &before) {
            (Some(folder), _) => folder.companions().clone(),
            (None, Some(before)) => companions_of(before)?,
            (None, None) => Companions::default(),
        };
        if !companions.is_empty() {
            keep_companions(&mut description.config, &companions);
        }
        same_weights::keep(&mut description.config, &plan.read_again()).map_err(TrainError::Weights)?;
        let tokenizer = data.tokenizer.or_else(|| before.and_then(|before| before.tokenizer()));
        let resume = plan.start.as_ref().map_or(Resume::Never, |start| Resume::From(start.path.clone()));
        let mut run = Pretraining::new(mesh, engine, training.steps, (data.train, data.valid), dims, build)
            .devices(devices)
            .directory(&config.output.directory)
            .logs(logs(config, peak))
            .evaluate(evaluation.every, evaluation.batches)
            .resume(resume)
            .other_data(plan.other_data())
            .inject(plan.faults.clone())
            .restarts(RestartOptions {
                max_restarts: training.max_restarts,
                copy_every: config.checkpoint.non_persistent_every,
                min_data_parallel: training.min_data_parallel,
            })
            .timeout(minutes(training.distributed_timeout_minutes))
            .exit(exit(training))
            .describe(description);
        if let Some(tasks) = tasks::open(config)? {
            run = run.tasks(tasks);
        }
        if let Some(teacher) = plan.teacher() {
            let dtype = FloatDType::from(training.dtype);
            run = run.teacher(move |rank, part| {
                let part = part(teacher.config().dims().layers);
                teacher.config().visit(BuildTeacher { rank, part: Some(part), dtype, weights: &teacher })
            });
        }
        if let Some(grpo) = data.grpo {
            run = run.grpo(grpo);
        }
        // Without adapters there is nothing to switch off, and those of DoRA cannot be: new ones change nothing, and let
        // the base be stored as the policy's.
        if config.grpo.is_used() && (config.lora.rank.is_none() || config.lora.dora) {
            run = run.reference(stage_builder::<M>(sizes, config, plan.weights(), None));
        }
        if let Some(processes) = processes {
            run = run.processes(processes);
        }
        if let Some(options) = saving::options(config, tokenizer)? {
            if let Some(local) = saving::local_copies(config, &options) {
                run = run.local_copies(local);
            }
            run = run.checkpoints(options);
        }
        let (exited, all) = (run.exit_flag(), training.steps as u64);
        let run = run.finish(move |_, engine| {
            // A run that ends to be continued, or because it was told to, has no time for the last evaluation.
            let is_done = engine.steps() >= all && !exited.load(Ordering::Relaxed);
            let last = data.last.as_ref().filter(|_| is_done);
            let last = last.map(|last| loss_over(engine, last)).transpose()?;
            Ok((last, engine.steps()))
        });
        let (supervised, learner) = run.supervised();
        let result = supervised.launch(learner);
        let failed = result.error.is_some();
        drop(result); // Gives the terminal back.
        match run.finished().filter(|_| !failed) {
            Some((last, steps)) => {
                let (early, exited) = (steps < training.steps as u64, run.exited());
                let (stopped, seconds) = (early && !exited, start.elapsed().as_secs_f64());
                Ok(TrainReport { last, stopped, exited, seconds })
            }
            None => Err(TrainError::Failed),
        }
    }
}

/// When the run ends before its last step.
fn exit(training: &TrainingSection) -> ExitOptions {
    ExitOptions { duration: training.exit_duration_in_mins.map(minutes), interval: training.exit_interval }
}

/// More seconds than a duration has are no limit.
fn minutes(minutes: f64) -> Duration {
    Duration::try_from_secs_f64(minutes * 60.0).unwrap_or(Duration::MAX)
}

/// What makes a rank's stages of a model: random, or read from a folder.
pub(crate) fn stage_builder<M: CausalLm>(
    sizes: &M::Config,
    config: &RunConfig,
    weights: Option<Arc<HfFolder>>,
    adapter: Option<Adapter>,
) -> impl Fn(&Rank, Part) -> Result<M, BoxError> + Send + Sync + 'static
where
    M::Config: 'static,
{
    let (sizes, recompute, fp8) = (sizes.clone(), config.recompute.clone(), config.fp8.clone());
    let layers = sizes.dims().layers;
    let (precision, seed) = (config.training.dtype, config.training.seed);
    let performance = config.performance.clone();
    let lora = config.lora.plan(&config.model.config).ok().flatten().map(Arc::new);
    let (base, frozen) = (config.lora.base, config.param_groups.frozen.clone());
    move |rank, part| {
        let dtype = FloatDType::from(precision);
        let gpus = if fp8.format.is_some() && on_gpu(&rank.device) { gpus()? } else { vec![] };
        possible(&fp8, precision, &gpus.iter().map(of_host).collect::<Vec<_>>())?;
        let params = ParamBuilder::new(rank, dtype, seed)
            .with_part(part)
            .with_recompute(&recompute)
            .with_tp_comm_overlap(performance.tp_comm_overlap)
            .with_moe_comm_overlap(performance.moe_comm_overlap, performance.moe_comm_chunks)
            .with_forced_load_balancing(performance.moe_router_force_load_balancing)
            .with_logits_at_once(performance.logits_at_once.unwrap_or(LOGITS_AT_ONCE))
            .with_fp8(&fp8, layers)
            .with_frozen(&frozen)
            .with_dp_ranks(rank.group(Axis::DpCp));
        let params = if let Some(weights) = &weights { params.with_source(&**weights) } else { params };
        let Some(plan) = &lora else { return Ok(M::build(&sizes, params)?) };
        let source = adapter.as_ref().map(|adapter| &adapter.tensors as &dyn WeightSource);
        let model = M::build(&sizes, params.with_lora(plan, source).with_base(base))?;
        plan.check(model.registry())?;
        Ok(model)
    }
}

/// What the run logs.
fn logs(config: &RunConfig, peak: Option<f64>) -> LogOptions {
    let shape = config.flop_shape(config.training.seq_length);
    let [causal, full] = [AttentionCount::Causal, AttentionCount::Full].map(|count| shape.per_token(count));
    LogOptions {
        jsonl: config.log.jsonl.clone(),
        tensorboard: config.log.tensorboard.clone(),
        wandb: config.log.wandb.clone(),
        mlflow: config.log.mlflow.clone(),
        run: RunInfo {
            name: config.output.directory.file_name().unwrap_or_default().to_string_lossy().into_owned(),
            config: serde_json::to_value(config).unwrap_or_default(),
        },
        trace: config.log.trace.clone(),
        stragglers: config.log.straggler,
        flops: Some(FlopsPerToken { causal, full, peak }),
    }
}
