//! What a transformer block keeps between forward and backward, to the byte as far as tensors go, by an allocator that
//! counts.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::Mutex;
use std::sync::atomic::{AtomicIsize, Ordering};

use backend_dist::launch::{Rank, launch};
use backend_dist::mesh::Mesh;
use backend_dist::ops::{GeluKind, Tape};
use backend_dist::shard::Init;
use burn::tensor::{Device, Distribution, FloatDType, Tensor};
use models::MicroBatch;
use models::layers::{
    Activation, AttentionConfig, BlockConfig, DropoutKey, LinearConfig, MlpConfig, NormKind, RopeConfig,
    RotaryEmbedding, TransformerBlock,
};
use models::recompute::Module::{self, CoreAttention, MlpActivation, Norms};
use models::{ParamBuilder, Recompute};

struct Counting;

static LIVE: AtomicIsize = AtomicIsize::new(0);

// SAFETY: forwards to the system's allocator and only counts.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        LIVE.fetch_add(layout.size() as isize, Ordering::Relaxed);
        // SAFETY: the caller's promises are passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        LIVE.fetch_sub(layout.size() as isize, Ordering::Relaxed);
        // SAFETY: as above.
        unsafe { System.dealloc(block, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// The allocator counts the whole process: one test at a time.
static ALONE: Mutex<()> = Mutex::new(());

const SEQ: usize = 128;
const BATCH: usize = 2;
const HIDDEN: usize = 64;
const FFN: usize = 176;
const HEADS: usize = 8;
const KV_HEADS: usize = 4;
const HEAD_DIM: usize = 8;
/// Nodes of the graph, shapes and the like, per block; a tensor of `[s, b, h]` has 65,536 bytes in fp32.
const BOOKKEEPING: isize = 20_480;

fn block(activation: Activation, norm: NormKind) -> BlockConfig {
    let linear = LinearConfig { bias: false, init: Init::Normal { std: 0.1 } };
    BlockConfig {
        attention: AttentionConfig {
            hidden: HIDDEN,
            heads: HEADS,
            kv_heads: KV_HEADS,
            head_dim: HEAD_DIM,
            window: None,
            dropout: 0.0,
            head_norm_eps: None,
            input: linear,
            output: linear,
        },
        mlp: MlpConfig { hidden: HIDDEN, intermediate: FFN, activation, input: linear, output: linear },
        norm,
        norm_eps: 1e-5,
        dropout: 0.1,
    }
}

/// Bytes that live because of a forward pass that is to be followed by a backward pass, beyond its input.
fn kept(rank: &Rank, config: &BlockConfig, modules: &[Module]) -> isize {
    let recompute = Recompute::selective(modules);
    let mut params = ParamBuilder::new(rank, FloatDType::F32, 1).with_recompute(&recompute);
    let layer = TransformerBlock::new(&mut params, "layers.0", config).unwrap();
    let parallel = params.parallel().clone();
    let device = rank.device.clone().autodiff();
    let rope = RotaryEmbedding::new(&RopeConfig { head_dim: HEAD_DIM, theta: 10_000.0, scaling: None });
    let rows = if parallel.sequence { SEQ / parallel.size() } else { SEQ };
    let x = Tensor::<3>::random([rows, BATCH, HIDDEN], Distribution::Default, &device).require_grad();
    let batch = MicroBatch::with_dropout(Some(DropoutKey { seed: 1, first_sample: 0 }));
    let forward = || {
        let angles = rope.angles(0..SEQ, x.dtype(), &device);
        Tape::of(layer.forward(x.clone(), Some(&angles), &batch))
    };
    let upstream = x.clone().inner();
    // The first pass fills caches and the stacks of the thread pool.
    drop(forward().pull_back(upstream.clone()));
    let group = &parallel.group;
    group.barrier();
    let before = LIVE.load(Ordering::SeqCst);
    group.barrier();
    let tape = forward();
    group.barrier();
    let bytes = LIVE.load(Ordering::SeqCst) - before;
    group.barrier();
    drop(tape.pull_back(upstream));
    bytes
}

/// What is kept at each setting is the sum of these, in fp32 bytes over all `tp` ranks.
fn expected(tp: isize, sequence: bool, gated: bool, modules: &[Module]) -> isize {
    let tokens = (SEQ * BATCH) as isize * 4;
    let [hidden, ffn, head, heads, kv_heads] = [HIDDEN, FFN, HEAD_DIM, HEADS, KV_HEADS].map(|n| n as isize);
    // The residual stream and the norms' outputs are cut along the sequence or the same on every rank.
    let copies = if sequence { 1 } else { tp };
    let middle = tokens * hidden * copies;
    let norms = 2 * tokens * hidden * copies;
    let qkv = tokens * (heads + 2 * kv_heads) * head;
    let core = tokens * heads * (head + 1);
    let wide = tokens * ffn * if gated { 2 } else { 1 };
    let activation = tokens * ffn;
    let parts = [(CoreAttention, core), (MlpActivation, activation), (Norms, norms)];
    let rest: isize = parts.iter().filter(|(module, _)| !modules.contains(module)).map(|(_, bytes)| bytes).sum();
    middle + qkv + wide + rest
}

fn check(layout: &str, activation: Activation, norm: NormKind) {
    let _alone = ALONE.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    let mesh = Mesh::new(layout.parse().unwrap()).unwrap();
    let config = block(activation, norm);
    let choices: [&[Module]; 5] =
        [&[], &[CoreAttention], &[MlpActivation], &[Norms], &[CoreAttention, MlpActivation, Norms]];
    for modules in choices {
        let found = launch(&mesh, &[Device::flex()], |rank| Ok(kept(&rank, &config, modules))).unwrap();
        let tp = found.len() as isize;
        let expected = expected(tp, layout.contains("SP"), activation == Activation::SwiGlu, modules);
        // Each rank counts the process.
        for bytes in found {
            let off = bytes - expected;
            assert!((0..tp * BOOKKEEPING).contains(&off), "{layout} {modules:?}: {bytes} bytes, expected {expected}");
        }
    }
}

#[test]
fn a_llama_block_keeps_what_it_should() {
    check("TP1", Activation::SwiGlu, NormKind::Rms);
    check("TP2", Activation::SwiGlu, NormKind::Rms);
    check("TP2 SP", Activation::SwiGlu, NormKind::Rms);
}

#[test]
fn a_gpt_block_keeps_what_it_should() {
    check("TP1", Activation::Gelu(GeluKind::Tanh), NormKind::Layer);
    check("TP2 SP", Activation::Gelu(GeluKind::Tanh), NormKind::Layer);
}
