//! Puts a rank's engine together.

use super::super::chunk::{Chunk, dtype_of};
use super::RankEngine;
use super::dynamic::DynamicGroups;
use super::experts::records;
use crate::engine::anomaly::AnomalyWatch;
use crate::engine::{EngineConfig, EngineError, GradientStats};
use crate::host_memory;
use crate::optim::{BucketSpec, LossScaler, Optimizer, Sharding};
use crate::trace::Recorder;
use backend_dist::collective::connect;
use backend_dist::gpu::buffer::Buffer;
use backend_dist::gpu::{self, release_memory};
use backend_dist::launch::{BoxError, Rank};
use backend_dist::mesh::{Axis, GridKind};
use backend_dist::ops::fp8::DelayedScaling;
use backend_dist::startup::{Phase, phase};
use burn::tensor::DType;
use models::layers::AttentionLogits;
use models::layout::ModelDims;
use models::{CausalLm, Part};
use std::collections::HashMap;

/// Share of the free host memory that optimizer states may take: their copies for a checkpoint take as much again.
const FILLED: f64 = 0.45;

/// Host memory that the optimizer states of a rank on a GPU may take: an equal part for each rank of its host. All ranks
/// look before any of them takes some.
fn host_bytes(rank: &Rank, config: &EngineConfig) -> usize {
    if config.optimizer.offload() == 0.0 || gpu::index(&rank.device).is_none() {
        return usize::MAX;
    }
    let free = host_memory::available();
    let hosts = rank.group(Axis::World).all_gather_host(host_memory::host());
    let ranks = hosts.iter().filter(|host| **host == hosts[rank.rank]).count();
    free.map_or(usize::MAX, |free| (FILLED * free as f64) as usize / ranks)
}

impl<M: CausalLm> RankEngine<M> {
    /// An engine before its first step. `build` makes the stages that this rank holds of a model of size `dims`.
    ///
    /// # Errors
    /// Where batch sizes or layers do not divide, the learning rate contradicts itself, `build` fails, or a stage holds
    /// other parameters than its registry says.
    pub fn new(
        rank: &Rank,
        dims: &ModelDims,
        build: impl Fn(Part) -> Result<M, BoxError>,
        config: EngineConfig,
    ) -> Result<Self, EngineError> {
        let layout = rank.mesh.layout();
        rank.use_copy_engines(config.copy_engines);
        // A device's work is waited for where a phase ends, or the next one would be blamed for it.
        let ready = || rank.device.sync().map_err(|error| EngineError::Model(error.to_string().into()));
        phase(Phase::Device, ready)?;
        let plan = config.plan_at(0, layout.dp)?;
        config.context.check(layout, dims)?;
        let lr = config.lr.schedule(config.batch_sizes())?;
        let weight_decay = config.weight_decay.schedule(config.optimizer.weight_decay(), config.batch_sizes())?;
        let (spec, division) = config.pipeline.resolve(layout, dims.layers, plan.accumulation)?;
        config.check_ramp(layout, dims.layers)?;
        if config.optimizer.offload() > 0.0 && config.ema_decay.is_some() {
            return Err(EngineError::AverageOffload);
        }
        let pipeline = config.pipeline.schedule(spec)?;
        let (stages, dp_ranks) = (rank.group(Axis::Pp), rank.group(Axis::DpCp));
        let placement = pipeline.placement();
        connect(&stages, &rank.device);

        let (mut chunks, mut buckets) = (Vec::new(), Vec::new());
        for chunk in 0..placement.chunks() {
            let stage = &division.stages()[placement.stage(stages.rank(), chunk)];
            let part = Part { layers: stage.layers.clone(), embedding: stage.embedding, head: stage.loss };
            let model = phase(Phase::Weights, || {
                let model = build(part).map_err(|error| EngineError::Model(error.to_string().into()));
                model.and_then(|model| ready().map(|()| model))
            })?;
            let in_place = dtype_of(&model).is_some_and(|dtype| Buffer::fits(&rank.device, dtype));
            let zero = model.registry().iter().map(|spec| layout.zero_stage(spec.unit.grid())).max().unwrap_or(0);
            let passes = (&config.recompute, zero, in_place);
            let chunk = Chunk::new(model, dims.layers, passes, &config.groups, &mut buckets);
            chunks.push(chunk.map_err(|error| EngineError::Model(error.into()))?);
        }
        let fp8 = DelayedScaling::new(chunks.iter().map(|chunk| chunk.model().registry().fp8()));
        // A stage without parameters learns the type from the others.
        let own = chunks.iter().find_map(|chunk: &Chunk<M>| dtype_of(chunk.model()));
        let dtype = stages.all_gather_host(own).into_iter().flatten().next().unwrap_or(DType::F32);
        let grids = [GridKind::Dense, GridKind::Expert];
        let has = |grid| buckets.iter().any(|bucket: &BucketSpec| bucket.grid() == grid);
        let anywhere = stages.all_gather_host(grids.map(has)).concat();
        let used = grids.into_iter().filter(|grid| anywhere.chunks(2).any(|of| of[*grid as usize]));
        let model_parallel: Vec<_> = used.map(|grid| (grid, rank.group(grid.model_parallel()))).collect();
        let neighbours = |grid: GridKind, size| rank.subgroup(grid.tensor_parallel(), size);
        let optimizer = phase(Phase::Buffers, || {
            let device = &rank.device;
            let sharding = |grid: GridKind| Sharding::of(rank, grid);
            let (of, host_bytes) = ((device, dtype), host_bytes(rank, &config));
            let mut optimizer = Optimizer::new(&config.optimizer, buckets, sharding, neighbours, of, host_bytes)
                .with_average(config.ema_decay);
            for chunk in &mut chunks {
                let own: Vec<usize> = chunk.buckets.iter().map(|(_, bucket)| *bucket).collect();
                let registry = chunk.model().registry();
                let untrained: Vec<u64> = registry.iter().filter(|spec| !spec.trained).map(|spec| spec.id).collect();
                optimizer.check(chunk.model(), &own, &untrained)?;
                chunk.for_buckets(|bucket, model| optimizer.shard(bucket, model));
            }
            // The memory that the parameters were built in.
            release_memory(device);
            ready().map(|()| optimizer)
        })?;
        let dynamic = DynamicGroups::of(rank, &config, dims)?;
        let mut engine = Self {
            chunks,
            optimizer,
            actions: pipeline.posted().ranks.swap_remove(stages.rank()),
            fp8,
            pipeline,
            lr,
            weight_decay,
            scaler: (dtype == DType::F16).then(|| LossScaler::new(config.loss_scale)),
            anomalies: AnomalyWatch::default(),
            plan,
            dp_ranks,
            model_parallel,
            routers: records(config.router_statistics),
            attention_logits: config.max_attention_logit.then(AttentionLogits::default),
            config,
            loads: Vec::new(),
            gradients: GradientStats::default(),
            checkpoint_bytes: 0,
            stages,
            dynamic,
            context: (layout.cp > 1).then(|| rank.group(Axis::Cp)),
            ends: rank.ends(Axis::Pp),
            dtype,
            runs_ahead: Buffer::fits(&rank.device, DType::F32),
            hidden: dims.hidden,
            is_moe: dims.experts.is_some(),
            vocabulary: dims.vocab,
            rank: rank.clone(),
            recorder: Recorder::off(),
            peak_in_flight: 0,
            warm: false,
            step: 0,
            attempts: 0,
            consumed: 0,
            skipped: 0,
            grad_scale: 1.0,
            poisoned: false,
            token_factors: HashMap::new(),
            reference: None,
            teacher: None,
            heard: HashMap::new(),
            taught: HashMap::new(),
        };
        let own = engine.optimizer.snapshot_bytes() + engine.untrained_bytes();
        engine.checkpoint_bytes = rank.group(Axis::World).all_gather_host(own).into_iter().sum();
        engine.all_weights_changed();
        Ok(engine)
    }
}
