//! The plan's memory against what CPU ranks allocate: the most bytes of every rank in a training step; and activations
//! are kept for as long as the schedule says.

use backend_dist::launch::{BoxError, Rank, launch};
use backend_dist::memory::{RankAllocator, live, peak, reset_peak};
use backend_dist::mesh::Mesh;
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::Arc;

use burn::tensor::{Device, FloatDType};
use burn_megatron::config::RunConfig;
use burn_megatron::data::TopK;
use burn_megatron::engine::{RankEngine, Reference, Rollouts, Teacher, TokenBatch};
use burn_megatron::generate::{GenerateOptions, Sampling, generate_batch};
use burn_megatron::grpo::GrpoConfig;
use burn_megatron::plan::gpus::{self, Hardware};
use burn_megatron::plan::{Plan, RankMemory};
use models::{CausalLm, FamilyConfig, LlamaConfig, ModelConfig, ParamBuilder, Part, WithModel};

#[global_allocator]
static ALLOCATOR: RankAllocator = RankAllocator(std::alloc::System);

/// A run of one of the models below.
fn run_of(model: &str) -> String {
    format!(
        "[model]\nvocab-size = 1000\nhidden-size = 128\n{model}\
         [training]\nseq-length = 128\nmicro-batch = 2\nglobal-batch = 16\n"
    )
}

const LLAMA: &str = "
preset = \"tiny\"
intermediate-size = 384
num-hidden-layers = 4
head-dim = 16
make-vocab-size-divisible-by = 64
";

const GPT: &str = "
preset = \"gpt-tiny\"
intermediate-size = 512
num-hidden-layers = 4
";

const MIXTRAL: &str = "
preset = \"mixtral-tiny\"
intermediate-size = 256
num-hidden-layers = 4
head-dim = 16
num-experts = 4
";

const MAMBA2: &str = "
preset = \"mamba2-tiny\"
num-hidden-layers = 4
num-heads = 16
";

const NEMOTRON_H: &str = "
preset = \"nemotron-h-tiny\"
head-dim = 16
intermediate-size = 512
mamba-num-heads = 16
";

const DEEPSEEK: &str = "
preset = \"deepseek-tiny\"
num-hidden-layers = 4
intermediate-size = 384
moe-intermediate-size = 64
";

const QWEN3_NEXT: &str = "
preset = \"qwen3-next-tiny\"
moe-intermediate-size = 64
shared-expert-intermediate-size = 64
linear-key-head-dim = 16
linear-value-head-dim = 16
";

/// Bytes of every rank in its second step, above what was there before the engine, and the most micro-batches whose
/// activations it kept.
struct Measured<'a>(&'a RunConfig);

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
struct Held<'a>(&'a RunConfig);

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

/// Bytes that a frozen weight of a linear layer takes, given those of all other parameters.
fn bytes_of_a_weight(base: &str) -> f64 {
    let held = |base: &str| {
        let overrides = [("lora.rank", "8"), ("lora.base", base)].map(|(key, value)| (key.into(), value.into()));
        let config = RunConfig::parse("run.toml", &run_of(LLAMA), &overrides).unwrap();
        config.model.config.visit(Held(&config)) as f64
    };
    let layer = 256 * 128 + 128 * 128 + 768 * 128 + 128 * 384;
    4.0 - (held("none") - held(base)) / (4 * layer) as f64
}

/// Measured and planned, for the rank of each pipeline stage that has most.
fn compare(model: &str, flags: &str) -> Vec<(u64, RankMemory)> {
    let words: Vec<&str> = flags.split_whitespace().collect();
    let folder = tempfile::tempdir().unwrap();
    let wide = LlamaConfig {
        vocab_size: 1000,
        hidden_size: 256,
        intermediate_size: 512,
        num_hidden_layers: 6,
        ..LlamaConfig::tiny()
    };
    std::fs::write(folder.path().join("config.json"), wide.to_hf().to_string()).unwrap();
    let at = |word: &str| word.replace("TEACHER", &folder.path().display().to_string());
    let overrides: Vec<(String, String)> = words.chunks(2).map(|pair| (pair[0].into(), at(pair[1]))).collect();
    let config = RunConfig::parse("run.toml", &run_of(model), &overrides).unwrap();
    let job = config.job().unwrap();
    let hardware = Hardware::of(gpus::find("h100").unwrap(), job.element);
    let plan = Plan::new(job, &hardware).unwrap();
    let measured = config.model.config.visit(Measured(&config));
    let per_stage = measured.len() / plan.memory.len();
    let in_flight = plan.schedule.peak_activations(|_| 1);
    for (rank, (_, kept)) in measured.iter().enumerate() {
        assert_eq!(*kept as u64, in_flight[rank / per_stage], "`{flags}`: micro-batches in flight on rank {rank}");
    }
    let most = measured.chunks(per_stage).map(|ranks| ranks.iter().map(|(bytes, _)| *bytes).max().unwrap());
    most.zip(plan.memory).collect()
}

/// One test, because the counts are of the process.
#[test]
fn planned_memory_is_what_ranks_allocate() {
    let mut off = Vec::new();
    for (model, flags) in [
        (LLAMA, ""),
        (LLAMA, "parallel.dp 2 parallel.zero 1"),
        (LLAMA, "parallel.dp 2 parallel.zero 2"),
        (LLAMA, "parallel.dp 2 parallel.zero 3"),
        (LLAMA, "parallel.dp 4 parallel.zero 1 parallel.zero-group 2"),
        (LLAMA, "parallel.dp 4 parallel.zero 3 parallel.zero-group 2"),
        (LLAMA, "parallel.tp 2"),
        (LLAMA, "parallel.tp 2 parallel.sp true"),
        (LLAMA, "parallel.pp 2"),
        (LLAMA, "parallel.pp 2 parallel.vpp 2"),
        (LLAMA, "parallel.pp 2 pipeline.schedule zb-h1"),
        (LLAMA, "parallel.pp 2 pipeline.schedule gpipe"),
        (LLAMA, "parallel.pp 2 pipeline.schedule zb-v"),
        (LLAMA, "parallel.pp 4"),
        (LLAMA, "recompute.granularity full recompute.method block recompute.num-layers 2"),
        (LLAMA, "recompute.granularity full"),
        (LLAMA, "recompute.granularity selective recompute.modules norms,mlp-activation,core-attention"),
        (LLAMA, "parallel.tp 2 parallel.sp true parallel.pp 2 parallel.dp 2 parallel.zero 1"),
        (LLAMA, "training.dtype f64"),
        (GPT, ""),
        (GPT, "parallel.dp 2 parallel.zero 2"),
        (GPT, "parallel.pp 2 parallel.tp 2"),
        (DEEPSEEK, ""),
        (DEEPSEEK, "parallel.tp 2 parallel.sp true"),
        (DEEPSEEK, "parallel.pp 2"),
        (MAMBA2, ""),
        (MAMBA2, "model.state-size 64"),
        (MAMBA2, "model.head-dim 64"),
        (MAMBA2, "model.num-heads 32 model.n-groups 8"),
        (MAMBA2, "model.n-groups 1 parallel.tp 2 parallel.sp true"),
        (MAMBA2, "parallel.cp 2"),
        (MAMBA2, "model.n-groups 1 parallel.cp 4"),
        (MAMBA2, "parallel.pp 2"),
        (MAMBA2, "recompute.granularity full"),
        (NEMOTRON_H, ""),
        (NEMOTRON_H, "model.hybrid-override-pattern *-*-"),
        (NEMOTRON_H, "model.hybrid-override-pattern MMM*-"),
        (NEMOTRON_H, "model.hybrid-override-pattern ME*E"),
        (NEMOTRON_H, "model.hybrid-override-pattern ME*E parallel.tp 2 parallel.sp true"),
        (NEMOTRON_H, "parallel.tp 2 parallel.sp true"),
        (NEMOTRON_H, "parallel.pp 2"),
        (NEMOTRON_H, "recompute.granularity full"),
        (QWEN3_NEXT, ""),
        (QWEN3_NEXT, "model.linear-key-head-dim 64"),
        (QWEN3_NEXT, "model.linear-value-head-dim 64"),
        (QWEN3_NEXT, "model.linear-num-value-heads 32"),
        (QWEN3_NEXT, "model.full-attention-interval 1"),
        (QWEN3_NEXT, "model.full-attention-interval 4"),
        (QWEN3_NEXT, "parallel.tp 2 parallel.sp true"),
        (QWEN3_NEXT, "parallel.cp 2"),
        (LLAMA, "training.seq-length 1024 training.micro-batch 1 training.global-batch 2"),
        (
            LLAMA,
            "training.seq-length 1024 training.micro-batch 1 training.global-batch 2 parallel.cp 2 parallel.zero 2",
        ),
        (LLAMA, "training.seq-length 1024 training.micro-batch 1 training.global-batch 2 recompute.granularity full"),
        (LLAMA, "lora.rank 8"),
        (LLAMA, "lora.rank 8 parallel.dp 2 parallel.zero 2"),
        (LLAMA, "lora.rank 8 parallel.tp 2 parallel.sp true"),
        (LLAMA, "lora.rank 8 parallel.pp 2"),
        (LLAMA, "lora.rank 8 recompute.granularity full"),
        (LLAMA, "lora.rank 16 lora.target-modules q_proj,v_proj"),
        (LLAMA, "lora.rank 8 lora.dora true"),
        (LLAMA, "lora.rank 8 lora.base nf4"),
        (LLAMA, "lora.rank 8 lora.base nf4 parallel.tp 2 recompute.granularity full"),
        (LLAMA, "lora.rank 8 lora.base fp8-block"),
        (LLAMA, "param-groups.frozen layers.0.*"),
        (LLAMA, "param-groups.frozen embed_tokens.*,layers.0.*,layers.1.*"),
        (LLAMA, "param-groups.frozen embed_tokens.*,layers.0.*,layers.1.*,layers.2.* parallel.dp 2 parallel.zero 2"),
        (LLAMA, "param-groups.frozen *.mlp.* parallel.pp 2 pipeline.schedule zb-h1"),
        (LLAMA, "param-groups.frozen *.attention.*,*norm* parallel.tp 2 parallel.sp true"),
        (LLAMA, "param-groups.frozen embed_tokens.* model.tie-word-embeddings true"),
        (GPT, "param-groups.frozen layers.0.*,layers.1.*,embed_tokens.*,embed_positions.* recompute.granularity full"),
        (MIXTRAL, "param-groups.frozen *.experts.*"),
        (LLAMA, "distill.teacher TEACHER"),
        (LLAMA, "distill.teacher TEACHER training.micro-batch 8"),
        (LLAMA, "distill.teacher TEACHER training.micro-batch 8 parallel.tp 2 parallel.sp true"),
        (LLAMA, "distill.teacher TEACHER parallel.pp 2"),
        (LLAMA, "distill.teacher TEACHER parallel.pp 2 pipeline.schedule gpipe"),
        (LLAMA, "distill.teacher TEACHER parallel.dp 2 parallel.zero 2 recompute.granularity full"),
        (LLAMA, "distill.logits x training.micro-batch 8"),
        (LLAMA, "distill.logits x training.micro-batch 8 parallel.pp 2 training.global-batch 64"),
        (LLAMA, "grpo.train x grpo.num-generations 2 grpo.beta 0.1 grpo.max-completion-length 16"),
        (
            LLAMA,
            "grpo.train x grpo.num-generations 2 grpo.beta 0.1 grpo.max-completion-length 120 training.global-batch 64",
        ),
        (
            LLAMA,
            "grpo.train x grpo.num-generations 2 grpo.max-completion-length 120 training.global-batch 64 parallel.tp 2",
        ),
        (
            LLAMA,
            "grpo.train x grpo.num-generations 2 grpo.max-completion-length 16 grpo.temperature 0.5 training.micro-batch 8",
        ),
        (MIXTRAL, ""),
        (MIXTRAL, "lora.rank 8"),
        (MIXTRAL, "lora.rank 8 lora.target-modules w1,w2,w3"),
        (MIXTRAL, "lora.rank 32 lora.target-modules q_proj,w1,w2,w3 recompute.granularity full"),
        (MIXTRAL, "lora.rank 8 lora.target-modules w1,w2,w3 lora.dora true"),
        (MIXTRAL, "lora.rank 8 lora.base nf4"),
        (MIXTRAL, "lora.rank 8 lora.base nf4 lora.target-modules all-linear,w1,w2,w3 recompute.granularity full"),
    ] {
        for (rank, (measured, planned)) in compare(model, flags).into_iter().enumerate() {
            let ratio = measured as f64 / planned.peak() as f64;
            println!("{:>5.1} %  {measured:>10}  {:>10}  rank {rank} `{flags}`", 100.0 * (ratio - 1.0), planned.peak());
            if (ratio - 1.0).abs() > 0.05 {
                let (planned, kinds) = (planned.peak(), planned.kinds());
                off.push(format!("`{flags}` rank {rank}: {measured} bytes, planned {planned}: {kinds:?}"));
            }
        }
    }
    assert!(off.is_empty(), "{}", off.join("\n"));
    // Half a byte, and a byte for 64 weights.
    let [nf4, fp8] = ["nf4", "fp8-block"].map(bytes_of_a_weight);
    assert!(nf4 < 0.53 && fp8 < 1.01, "{nf4} {fp8}");
}
