//! Plans against papers, model cards and measurements.

mod dynamic;
mod flops;
mod memory;
mod search;
mod traffic;

use backend_dist::mesh::ParallelLayout;
use backend_dist::ops::LOGITS_AT_ONCE;
use models::layers::NormPlacement;
use models::recompute::{Granularity, Method, Module, Recompute};
use models::{DeepSeekV3Config, FamilyConfig, LlamaConfig, Mamba2Config, MixtralConfig};

use super::gpus::{self, Hardware};
use super::*;
use crate::flops::AttentionCount;
use crate::schedule::stages::Split;
use crate::schedule::{ScheduleKind, bounds};

const ALL: [Module; 3] = [Module::CoreAttention, Module::MlpActivation, Module::Norms];

fn llama3_8b() -> Decoder {
    Decoder {
        vocab: 128_256,
        vocab_multiple: 128,
        hidden: 4096,
        intermediate: 14_336,
        experts: None,
        layers: 32,
        heads: 32,
        kv_heads: 8,
        head_dim: 128,
        latent: None,
        linear: None,
        mamba: None,
        lone_mlps: None,
        mtp: 0,
        window: None,
        windowed_layers: 0,
        gated: true,
        query_key_norm: None,
        norms: NormPlacement::Before,
        norm_bias: false,
        softcap: false,
        sinks: false,
        output_gate: false,
        attention_bias: [false; 2],
        mlp_bias: false,
        positions: None,
        rope: true,
        tied: false,
    }
}

/// Mixtral 8x7B.
fn mixtral() -> Decoder {
    let experts = Experts {
        count: 8,
        top_k: 2,
        intermediate: 14_336,
        shared: 0,
        shared_gate: false,
        biases: false,
        dense_layers: Vec::new(),
    };
    Decoder { vocab: 32_000, experts: Some(experts), ..llama3_8b() }
}

/// With one module of multi-token prediction.
fn deepseek_v3() -> Decoder {
    Decoder::from(&FamilyConfig::DeepSeekV3(DeepSeekV3Config::deepseek_v3()))
}

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
    Job {
        stages: Split::equal(decoder.layers, spec.placement()).layout().unwrap(),
        decoder,
        layout,
        schedule: spec,
        passes: None,
        micro_batch: 2,
        seq: 1024,
        element: 2,
        moments: Moments::ADAMW,
        state_bytes: StateBytes::F32,
        offload: 0.0,
        newton_schulz: None,
        recompute: Recompute::default(),
        fp8: 0..0,
        fp8_weights: true,
        fp8_experts: true,
        gpu: false,
        overlap: true,
        documents: None,
        gpu_model: *gpus::find("h200").unwrap(),
        expert_chunks: None,
        dynamic: None,
        logits_at_once: LOGITS_AT_ONCE,
        adapters: None,
        post_training: PostTraining::default(),
    }
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
