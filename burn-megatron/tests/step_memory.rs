//! What a training step allocates on each CPU rank, measured, beside what the plan says; and that activations live as
//! long as the schedule says.

use backend_dist::launch::{Rank, launch};
use backend_dist::memory::{RankAllocator, live, peak, reset_peak};
use backend_dist::mesh::Mesh;
use burn::tensor::{Device, FloatDType};
use burn_megatron::config::RunConfig;
use burn_megatron::engine::RankEngine;
use burn_megatron::plan::{Plan, gpus};
use burn_megatron::verify::{Candidate, Settings};
use models::{CausalLm, FamilyConfig, Llama, LlamaConfig, ModelConfig, ParamBuilder};

#[global_allocator]
static ALLOCATOR: RankAllocator = RankAllocator;

const SETTINGS: Settings = Settings { steps: 3, global_batch: 8, seq: 128, seed: 1, tolerance: 0.0 };

fn model() -> LlamaConfig {
    LlamaConfig {
        vocab_size: 512,
        hidden_size: 128,
        intermediate_size: 352,
        num_hidden_layers: 4,
        num_attention_heads: 8,
        num_key_value_heads: 4,
        head_dim: 16,
        ..LlamaConfig::tiny()
    }
}

/// By rank: bytes at the fullest moment of a step, and the most micro-batches in flight.
fn measure(candidate: &Candidate) -> Vec<(u64, usize)> {
    let (config, job) = (model(), SETTINGS.job(model().vocab_size));
    let engine = burn_megatron::engine::EngineConfig {
        micro_batch: SETTINGS.global_batch / candidate.layout.dp / candidate.accumulation,
        pipeline: candidate.pipeline.clone(),
        recompute: candidate.recompute.clone(),
        ..job.engine.clone()
    };
    let run = |rank: Rank| {
        let build = |part| {
            let params = ParamBuilder::new(&rank, FloatDType::F32, 1);
            Ok(Llama::build(&config, params.with_part(part).with_recompute(&candidate.recompute))?)
        };
        // Threads keep what matrix products pack their operands in, about a MiB whatever the model.
        RankEngine::new(&rank, &config.dims(), build, engine.clone())?.train_step(&job.batches[0])?;
        let before = live(rank.rank);
        let mut engine = RankEngine::new(&rank, &config.dims(), build, engine.clone())?;
        for batch in &job.batches {
            reset_peak(rank.rank);
            engine.train_step(batch)?;
        }
        Ok((peak(rank.rank) - before, engine.peak_in_flight()))
    };
    launch(&Mesh::new(candidate.layout.clone()).unwrap(), &[Device::flex()], run).unwrap()
}

fn plan(candidate: &Candidate) -> Plan {
    let mut config = RunConfig::parse("run.toml", "", &[]).unwrap();
    config.model.config = FamilyConfig::Llama(model());
    config.parallel = candidate.layout.clone();
    config.pipeline = candidate.pipeline.clone();
    config.recompute = candidate.recompute.clone();
    config.training.global_batch = SETTINGS.global_batch;
    config.training.micro_batch = SETTINGS.global_batch / candidate.layout.dp / candidate.accumulation;
    config.training.seq_length = SETTINGS.seq;
    Plan::new(config.job().unwrap(), &gpus::Hardware::of(gpus::find("h100").unwrap(), 1)).unwrap()
}

/// One test, because the counts are of the process.
#[test]
fn the_plan_knows_what_a_step_allocates() {
    let layouts = [
        "TP1",
        "x4",
        "x4 selective",
        "x4 uniform1",
        "x4 uniform2",
        "x4 block2",
        "TP2",
        "TP2 SP",
        "TP2 SP selective",
        "DP2 ZeRO1 x2",
        "DP2 ZeRO2 x2",
        "DP2 ZeRO3 x2",
        "PP2 x8 gpipe",
        "PP2 x8",
        "PP4 x8",
        "PP2 VPP2 x8",
        "PP2 x8 zb-h1",
        "PP2 VPP2 x8 zb-v",
        "PP2 x8 uniform1",
        "TP2 SP PP2 DP2 ZeRO1 x4 selective",
    ];
    let mut wrong = Vec::new();
    println!("{:<34} rank  measured MiB  planned MiB", "layout");
    for text in layouts {
        let candidate: Candidate = text.parse().unwrap();
        let (plan, ranks) = (plan(&candidate), measure(&candidate));
        let in_flight = plan.schedule.peak_activations(|_| 1);
        let stage = candidate.layout.tp * candidate.layout.dp;
        for (rank, (bytes, kept)) in ranks.into_iter().enumerate() {
            let planned = plan.memory[rank / stage].peak();
            let gap = bytes as f64 / planned as f64 - 1.0;
            let mib = |bytes: u64| bytes as f64 / (1 << 20) as f64;
            println!("{text:<34} {rank:>4} {:>13.3} {:>12.3} {:>+6.1} %", mib(bytes), mib(planned), 100.0 * gap);
            assert_eq!(kept as u64, in_flight[rank / stage], "{text}: micro-batches in flight on rank {rank}");
            if gap.abs() > 0.05 {
                wrong.push(format!("{text} rank {rank}: {:+.1} %", 100.0 * gap));
            }
        }
    }
    assert!(wrong.is_empty(), "more than 5 % beside the plan: {wrong:#?}");
}
