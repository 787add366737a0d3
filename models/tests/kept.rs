//! What a transformer block keeps between forward and backward, to the byte as far as tensors go, by an allocator that
//! counts.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::Mutex;
use std::sync::atomic::{AtomicIsize, Ordering};

use backend_dist::launch::{Rank, launch};
use backend_dist::mesh::{Axis, Mesh};
use backend_dist::ops::context::{ContextParallel, CpCommType, Documents};
use backend_dist::ops::{GeluKind, Tape};
use backend_dist::shard::Init;
use burn::tensor::{Device, Distribution, FloatDType, Tensor};
use models::MicroBatch;
use models::layers::{
    Activation, AttentionConfig, BlockConfig, DropoutKey, Ffn, LinearConfig, MlpConfig, NormKind, RopeConfig,
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

/// What a block is measured with.
#[derive(Clone, Copy)]
struct Sizes {
    seq: usize,
    hidden: usize,
    ffn: usize,
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
}

const BATCH: usize = 2;
const SMALL: Sizes = Sizes { seq: 64, hidden: 32, ffn: 88, heads: 4, kv_heads: 2, head_dim: 8 };
const LARGE: Sizes = Sizes { seq: 128, hidden: 64, ffn: 176, heads: 8, kv_heads: 4, head_dim: 8 };
/// Nodes of the graph, shapes and the like, per block.
const BOOKKEEPING: isize = 20_480;
/// By how much these differ from pass to pass: ranks do not allocate at the same time. The smallest tensor, a number
/// for each token, has 512 bytes more in the large block.
const JITTER: isize = 128;

fn block(sizes: Sizes, activation: Activation, norm: NormKind) -> BlockConfig {
    let linear = LinearConfig { bias: false, init: Init::Normal { std: 0.1 } };
    BlockConfig {
        attention: AttentionConfig {
            hidden: sizes.hidden,
            heads: sizes.heads,
            kv_heads: sizes.kv_heads,
            head_dim: sizes.head_dim,
            window: None,
            dropout: 0.0,
            head_norm_eps: None,
            input: linear,
            output: linear,
        },
        mlp: Ffn::Dense(MlpConfig {
            hidden: sizes.hidden,
            intermediate: sizes.ffn,
            activation,
            input: linear,
            output: linear,
        }),
        norm,
        norm_eps: 1e-5,
        dropout: 0.1,
    }
}

/// Bytes that live because of a forward pass that is to be followed by a backward pass, beyond its input: the median of
/// five.
fn kept(rank: &Rank, sizes: Sizes, config: &BlockConfig, modules: &[Module], documents: Option<&[usize]>) -> isize {
    let recompute = Recompute::selective(modules);
    let mut params = ParamBuilder::new(rank, FloatDType::F32, 1).with_recompute(&recompute);
    let layer = TransformerBlock::new(&mut params, "layers.0", config).unwrap();
    let parallel = params.parallel().clone();
    let device = rank.device.clone().autodiff();
    let rope = RotaryEmbedding::new(&RopeConfig { head_dim: sizes.head_dim, theta: 10_000.0, scaling: None });
    let context = Some(rank.group(Axis::Cp)).filter(|group| group.size() > 1);
    let own = sizes.seq / context.as_ref().map_or(1, |group| group.size());
    let rows = if parallel.sequence { own / parallel.size() } else { own };
    let x = Tensor::<3>::random([rows, BATCH, sizes.hidden], Distribution::Default, &device).require_grad();
    let batch = MicroBatch {
        context: context.map(|group| ContextParallel { group, comm: CpCommType::AllGather }),
        documents: documents.map(|starts| Documents::new(vec![starts.to_vec(); BATCH])),
        ..MicroBatch::with_dropout(Some(DropoutKey { seed: 1, first_sample: 0 }))
    };
    let forward = || {
        let angles = rope.angles(0..own, x.dtype(), &device);
        Tape::of(layer.forward(x.clone(), Some(&angles), &batch))
    };
    let upstream = x.clone().inner();
    let group = rank.group(Axis::World);
    let pass = || {
        group.barrier();
        let before = LIVE.load(Ordering::SeqCst);
        group.barrier();
        let tape = forward();
        group.barrier();
        let bytes = LIVE.load(Ordering::SeqCst) - before;
        group.barrier();
        drop(tape.pull_back(upstream.clone()));
        bytes
    };
    // In some passes, the first at least, a thread takes scratch memory for good.
    let mut bytes: Vec<isize> = (0..5).map(|_| pass()).collect();
    bytes.sort_unstable();
    bytes[2]
}

/// What is kept at each setting is the sum of these, in fp32 bytes over all `tp` ranks.
fn expected(sizes: Sizes, tp: isize, sequence: bool, gated: bool, modules: &[Module]) -> isize {
    let tokens = (sizes.seq * BATCH) as isize * 4;
    let Sizes { hidden, ffn, head_dim, heads, kv_heads, .. } = sizes;
    let [hidden, ffn, head, heads, kv_heads] = [hidden, ffn, head_dim, heads, kv_heads].map(|n| n as isize);
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

fn check(layout: &str, activation: Activation, norm: NormKind, documents: Option<&[usize]>) {
    let _alone = ALONE.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    let mesh = Mesh::new(layout.parse().unwrap()).unwrap();
    let choices: [&[Module]; 5] =
        [&[], &[CoreAttention], &[MlpActivation], &[Norms], &[CoreAttention, MlpActivation, Norms]];
    for modules in choices {
        let beyond = |sizes: Sizes| -> Vec<isize> {
            let config = block(sizes, activation, norm);
            let found =
                launch(&mesh, &[Device::flex()], |rank| Ok(kept(&rank, sizes, &config, modules, documents))).unwrap();
            let tp = mesh.layout().tp as isize;
            let expected = expected(sizes, tp, layout.contains("SP"), activation == Activation::SwiGlu, modules);
            found.iter().map(|bytes| bytes - expected).collect()
        };
        // Each rank counts the process. What is there besides tensors does not depend on their sizes.
        for (small, large) in beyond(SMALL).into_iter().zip(beyond(LARGE)) {
            let ranks = mesh.world_size() as isize;
            assert!(
                (0..ranks * BOOKKEEPING).contains(&small),
                "{layout} {modules:?}: {small} bytes more than expected"
            );
            assert!((large - small).abs() < ranks * JITTER, "{layout} {modules:?}: {small} bytes more, then {large}");
        }
    }
}

#[test]
fn a_llama_block_keeps_what_it_should() {
    check("TP1", Activation::SwiGlu, NormKind::Rms, None);
    check("TP2", Activation::SwiGlu, NormKind::Rms, None);
    check("TP2 SP", Activation::SwiGlu, NormKind::Rms, None);
}

#[test]
fn a_gpt_block_keeps_what_it_should() {
    check("TP1", Activation::Gelu(GeluKind::Tanh), NormKind::Layer, None);
    check("TP2 SP", Activation::Gelu(GeluKind::Tanh), NormKind::Layer, None);
}

/// Attention over ranks that share a sequence, or inside documents, keeps no more than elsewhere; the modules that are
/// made again are dropped as elsewhere.
#[test]
fn a_block_in_a_context_keeps_what_it_should() {
    check("CP2", Activation::SwiGlu, NormKind::Rms, None);
    check("TP1", Activation::SwiGlu, NormKind::Rms, Some(&[0, 7, 40]));
    check("TP2 SP CP2", Activation::SwiGlu, NormKind::Rms, Some(&[0, 7, 40]));
}
