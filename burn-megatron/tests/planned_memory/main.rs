//! The plan's memory against what CPU ranks allocate: the most bytes of every rank in a training step; and activations
//! are kept for as long as the schedule says.

mod measured;

use backend_dist::memory::RankAllocator;
use burn_megatron::config::RunConfig;
use burn_megatron::plan::gpus::{self, Hardware};
use burn_megatron::plan::{Plan, RankMemory};
use models::LlamaConfig;

use measured::{Held, Measured};

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
    let wide = models::sized! { LlamaConfig::tiny();
        vocab_size: 1000, hidden_size: 256, intermediate_size: 512, num_hidden_layers: 6
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
        (LLAMA, "lora.rank 64 model.variant phi3"),
        (LLAMA, "lora.rank 64 model.variant glm4 parallel.tp 2 parallel.sp true"),
        (LLAMA, "lora.rank 8 lora.base nf4"),
        (LLAMA, "lora.rank 8 lora.base nf4 parallel.tp 2 recompute.granularity full"),
        (LLAMA, "lora.rank 8 lora.base fp8-block"),
        (MAMBA2, "lora.rank 8"),
        (NEMOTRON_H, "lora.rank 8"),
        (NEMOTRON_H, "lora.rank 64 parallel.tp 2 parallel.sp true"),
        (NEMOTRON_H, "model.hybrid-override-pattern ME*E lora.rank 8"),
        (QWEN3_NEXT, "lora.rank 64"),
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
