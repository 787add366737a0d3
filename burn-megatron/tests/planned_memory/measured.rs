//! The bytes that ranks allocate in a step, and that a model alone takes.

use std::ops::ControlFlow;
use std::path::Path;
use std::sync::Arc;

use backend_dist::launch::{BoxError, Rank, launch};
use backend_dist::memory::{live, peak, reset_peak};
use backend_dist::mesh::Mesh;
use burn::tensor::{Device, FloatDType};
use burn_megatron::config::RunConfig;
use burn_megatron::data::TopK;
use burn_megatron::engine::{RankEngine, Reference, Rollouts, Teacher, TokenBatch};
use burn_megatron::generate::{GenerateOptions, Sampling, generate_batch};
use burn_megatron::grpo::GrpoConfig;
use models::{CausalLm, FamilyConfig, ModelConfig, ParamBuilder, Part, WithModel};

/// Bytes of every rank in its second step, above what was there before the engine, and the most micro-batches whose
/// activations it kept.
pub struct Measured<'a>(pub &'a RunConfig);

impl WithModel for Measured<'_> {
    type Output = Vec<(u64, usize)>;

    fn with<M: CausalLm + 'static>(self, sizes: &M::Config) -> Self::Output {
        let config = self.0;
        let mesh = Mesh::new(config.parallel.clone()).unwrap();
        let (dtype, seq) = (FloatDType::from(config.training.dtype), config.training.seq_length);
        let lora = config.lora.plan(&config.model.config).unwrap().map(Arc::new);
        let run = |rank: backend_dist::launch::Rank| {
            let before = live(rank.rank);
            let build = |part| {
                let params = ParamBuilder::new(&rank, dtype, 1).with_part(part).with_recompute(&config.recompute);
                let params = params.with_frozen(&config.param_groups.frozen);
                Ok(match &lora {
                    Some(plan) => M::build(sizes, params.with_lora(plan, None).with_base(config.lora.base))?,
                    None => M::build(sizes, params)?,
                })
            };
            let mut engine = RankEngine::new(&rank, &sizes.dims(), build, config.engine())?;
            if let Some(sizes) = &self.0.distill.teacher.as_deref().map(teacher) {
                let part = engine.teacher_part(sizes.dims().layers);
                engine = engine.with_teacher(sizes.visit(BuildTeacher(&rank, part, dtype)));
            }
            if config.grpo.config().is_some_and(|grpo| grpo.beta > 0.0) {
                let stages = engine.stages().map(|stage| build(stage.part().clone()));
                let stages = stages.collect::<Result<_, BoxError>>()?;
                engine = engine.with_reference(Reference::Stages(stages));
            }
            let rows = config.training.global_batch;
            let tokens: Vec<i64> = (0..rows * (seq + 1)).map(|at| (at * 7919 % 1000) as i64).collect();
            let mut batch = TokenBatch::from_sequences(&tokens, seq);
            if config.distill.logits.is_some() {
                let (k, positions) = (4, rows * seq);
                batch.taught =
                    Some(TopK { k, ids: vec![1; positions * k], probabilities: vec![0.2; positions * (k + 1)] });
            }
            let mut step = || -> Result<(), BoxError> {
                let Some(grpo) = config.grpo.config() else { return Ok(engine.train_step(&batch).map(drop)?) };
                complete(&rank, &engine, &grpo, seq)?;
                let own: Vec<TokenBatch> =
                    engine.sequences_of_step().into_iter().map(|sequences| batch.slice(sequences)).collect();
                engine.reference_log_probabilities(&own)?;
                let rollouts =
                    |micro: &TokenBatch| Rollouts { advantages: vec![1.0; micro.sequences], ..Rollouts::default() };
                engine.train_rollouts(&own, &own.iter().map(rollouts).collect::<Vec<_>>())?;
                Ok(())
            };
            step()?;
            let other = live(rank.rank);
            reset_peak(rank.rank);
            step()?;
            assert!(peak(rank.rank) >= other);
            Ok((peak(rank.rank) - before, engine.peak_in_flight()))
        };
        launch(&mesh, &[Device::flex()], run).unwrap()
    }
}

/// The sizes of a teacher, by the `config.json` of its folder.
fn teacher(folder: &Path) -> FamilyConfig {
    let text = std::fs::read_to_string(folder.join("config.json")).unwrap();
    FamilyConfig::from_hf(&serde_json::from_str(&text).unwrap()).unwrap()
}

struct BuildTeacher<'a>(&'a Rank, Part, FloatDType);

impl WithModel for BuildTeacher<'_> {
    type Output = Teacher;

    fn with<M: CausalLm + 'static>(self, sizes: &M::Config) -> Teacher {
        let params = ParamBuilder::new(self.0, self.2, 2).without_autodiff().with_part(self.1);
        Teacher::new(M::build(sizes, params).unwrap(), &sizes.dims())
    }
}

/// Draws completions as a step of GRPO does, of the longest prompts; they share nothing, which is what is planned for.
fn complete<M: CausalLm>(rank: &Rank, engine: &RankEngine<M>, grpo: &GrpoConfig, seq: usize) -> Result<(), BoxError> {
    let longest = grpo.max_completion_length;
    let sequences: usize = engine.sequences_of_step().iter().map(|sequences| sequences.len()).sum();
    let prompt = |sequence: usize| (0..seq + 1 - longest).map(|at| ((at * 31 + sequence) % 1000) as i64).collect();
    let all: Vec<Vec<i64>> = (0..sequences).map(prompt).collect();
    let prompts: Vec<(&[i64], u64)> = all.iter().zip(0..).map(|(prompt, seed)| (prompt.as_slice(), seed)).collect();
    let sampling = Sampling { temperature: 1.0, ..Sampling::default() };
    let options = GenerateOptions { enforce_eager: true, ..GenerateOptions::new(longest, sampling) };
    let model = engine.stages().next().unwrap().valid();
    generate_batch(rank, &model, &prompts, &options, |_, _| ControlFlow::Continue(()))?;
    Ok(())
}

/// Bytes of a model on one rank, with adapters and without a step.
pub struct Held<'a>(pub &'a RunConfig);

impl WithModel for Held<'_> {
    type Output = u64;

    fn with<M: CausalLm + 'static>(self, sizes: &M::Config) -> u64 {
        let lora = self.0.lora.plan(&self.0.model.config).unwrap().map(Arc::new).unwrap();
        let run = |rank: backend_dist::launch::Rank| {
            let before = live(rank.rank);
            let params = ParamBuilder::new(&rank, FloatDType::F32, 1);
            let model = M::build(sizes, params.with_lora(&lora, None).with_base(self.0.lora.base))?;
            let held = live(rank.rank) - before;
            drop(model);
            Ok(held)
        };
        launch(&Mesh::new("TP1".parse().unwrap()).unwrap(), &[Device::flex()], run).unwrap()[0]
    }
}
