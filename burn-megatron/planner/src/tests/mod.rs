//! Plans against papers, model cards and measurements.

mod draws;
mod dynamic;
mod measured;
mod memory;
mod search;
mod states;
mod traffic;

use layouts::mesh::ParallelLayout;
use layouts::recompute::{Granularity, Method, Module, Recompute};

use super::gpus::{self, Hardware};
use super::known::{deepseek_v3, llama3_1b, llama3_8b, mamba2, mamba2_130m, mixtral_8x7b, qwen3_30b_a3b};
use super::*;
use host::flops::AttentionCount;
use host::schedule::stages::Split;
use host::schedule::{ScheduleKind, bounds};

const ALL: [Module; 3] = [Module::CoreAttention, Module::MlpActivation, Module::Norms];

/// A GPT with 4 hidden² in the MLP, as the papers have it.
fn gpt() -> Decoder {
    Decoder {
        vocab: 50_257,
        hidden: 768,
        intermediate: 3072,
        layers: 12,
        heads: 12,
        kv_heads: 12,
        head_dim: 64,
        gated: false,
        norm_bias: true,
        attention_bias: [true; 2],
        mlp_bias: true,
        positions: Some(1024),
        tied: true,
        ..llama3_8b()
    }
}

fn job(decoder: Decoder, layout: &str, kind: ScheduleKind, micro_batches: usize) -> Job {
    let layout: ParallelLayout = layout.parse().unwrap();
    let spec = ScheduleSpec::new(kind, layout.pp, micro_batches).with_virtual_pipeline(layout.vpp);
    let stages = Split::equal(decoder.layers, spec.placement()).layout().unwrap();
    let gpu_model = *gpus::find("h200").unwrap();
    Job { micro_batch: 2, gpu: false, gpu_model, ..Job::new(decoder, layout, spec, stages, 1024) }
}

fn single(decoder: Decoder) -> Job {
    job(decoder, "TP1", ScheduleKind::NoPipeline, 1)
}

fn memory_of(job: &Job) -> Vec<RankMemory> {
    memory(job, &Schedule::new(job.schedule).unwrap())
}

fn h200() -> Hardware {
    Hardware::of(gpus::find("h200").unwrap(), 2)
}

fn traffic_of(job: &Job) -> Vec<Traffic> {
    traffic(job, &Schedule::new(job.schedule).unwrap())
}

/// LoRA of this rank on all linear layers.
fn all_linear(rank: u64) -> Adapters {
    let (qkv, up, expert_up) = ([0, 1, 2].map(Some), [0, 1].map(Some), [None; 2]);
    let (recurrent, recurrent_out) = ([None; 6], false);
    Adapters {
        rank,
        dora: false,
        qkv,
        out: true,
        recurrent,
        recurrent_out,
        up,
        down: true,
        expert_up,
        expert_down: false,
        base: None,
    }
}
