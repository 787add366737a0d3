//! The bytes that a transformer block saves for the backward pass, exact for tensors, by an allocator that counts.

use parking_lot::Mutex;
use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicIsize, Ordering};

use backend_dist::launch::{Rank, launch};
use backend_dist::mesh::{Axis, Mesh};
use backend_dist::ops::context::{ContextParallel, CpCommType, Documents};
use backend_dist::ops::{GeluKind, Tape};
use backend_dist::shard::Init;
use burn::tensor::{Device, Distribution, FloatDType, Tensor};
use models::MicroBatch;
use models::layers::{
    Activation, AttentionConfig, BlockConfig, DropoutKey, Ffn, LinearConfig, Mixer, MlpConfig, NormKind, NormPlacement,
    RopeConfig, RotaryEmbedding, TransformerBlock,
};
use models::recompute::Module::{self, CoreAttention, MlpActivation, Norms};
use models::{CausalLm, DeepSeekV3, DeepSeekV3Config, ParamBuilder, Part, Recompute};

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

/// The sizes of a measured block.
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
/// Nodes of the graph, what they know of the pass, shapes and the like, per block.
const BOOKKEEPING: isize = 24_576;
/// The same of a block with latent attention, which has more nodes.
const LATENT_BOOKKEEPING: isize = 40_960;
/// By how much these differ from pass to pass: ranks do not allocate at the same time. The smallest tensor, a number
/// for each token, has 512 bytes more in the large block.
const JITTER: isize = 128;

fn block(sizes: Sizes, activation: Activation, norm: NormKind) -> BlockConfig {
    let linear = LinearConfig { bias: false, init: Init::Normal { std: 0.1 } };
    BlockConfig {
        mixer: Some(Mixer::Attention(AttentionConfig::new(
            sizes.hidden,
            [sizes.heads, sizes.kv_heads],
            sizes.head_dim,
            [linear; 2],
        ))),
        mlp: Some(Ffn::Dense(MlpConfig {
            hidden: sizes.hidden,
            intermediate: sizes.ffn,
            activation,
            input: linear,
            output: linear,
        })),
        norm,
        placement: NormPlacement::Before,
        norm_eps: 1e-5,
        dropout: 0.1,
    }
}

/// A layer's forward pass.
type Layer = Box<dyn Fn(Tensor<3>, &MicroBatch) -> Tensor<3>>;

/// A block with whole keys and values.
fn transformer(config: &BlockConfig, mut params: ParamBuilder, sizes: Sizes, own: usize) -> Layer {
    let layer = TransformerBlock::new(&mut params, "layers.0", config).unwrap();
    let rope = RotaryEmbedding::new(&RopeConfig { head_dim: sizes.head_dim, theta: 10_000.0, scaling: None });
    Box::new(move |x, batch| {
        let angles = rope.angles(0..own, x.dtype(), &x.device());
        layer.forward(x, Some(&angles), batch)
    })
}

/// Features of the latents of queries and of keys and values, of a head's rotated and other part, and of a value.
const LATENT: [usize; 5] = [24, 16, 4, 8, 6];

/// A DeepSeek-V3's first block, which has no experts.
fn latent(params: ParamBuilder, sizes: Sizes) -> Layer {
    let [queries, keys, rotated, unrotated, value] = LATENT;
    let config = models::sized! { DeepSeekV3Config::tiny();
        hidden_size: sizes.hidden, intermediate_size: sizes.ffn, num_hidden_layers: 1, first_k_dense_replace: 1,
        num_attention_heads: sizes.heads, q_lora_rank: Some(queries), kv_lora_rank: keys, qk_rope_head_dim: rotated,
        qk_nope_head_dim: unrotated, v_head_dim: value, num_nextn_predict_layers: 0
    };
    let part = Part { layers: 0..1, embedding: false, head: false };
    let model = DeepSeekV3::build(&config, params.with_part(part)).unwrap();
    Box::new(move |x, batch| model.layer(0, x, batch))
}

/// Bytes that live because of a forward pass that is to be followed by a backward pass, beyond its input: the median of
/// five. `build` gets the number of the rank's positions.
fn saved(
    rank: &Rank,
    sizes: Sizes,
    modules: &[Module],
    documents: Option<&[usize]>,
    build: impl FnOnce(ParamBuilder, usize) -> Layer,
) -> isize {
    let recompute = Recompute::selective(modules);
    let params = ParamBuilder::new(rank, FloatDType::F32, 1).with_recompute(&recompute);
    let parallel = params.parallel().clone();
    let device = rank.device.clone().autodiff();
    let context = Some(rank.group(Axis::Cp)).filter(|group| group.size() > 1);
    let own = sizes.seq / context.as_ref().map_or(1, |group| group.size());
    let layer = build(params, own);
    let positions = if parallel.sequence { own / parallel.size() } else { own };
    let x = Tensor::<3>::random([positions, BATCH, sizes.hidden], Distribution::Default, &device).require_grad();
    let batch = MicroBatch {
        context: context.map(|group| ContextParallel { group, comm: CpCommType::AllGather }),
        documents: documents.map(|starts| Documents::new(vec![starts.to_vec(); BATCH])),
        ..MicroBatch::with_dropout(Some(DropoutKey { seed: 1, first_sample: 0 }))
    };
    let forward = || Tape::of(layer(x.clone(), &batch));
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

/// The bytes that are saved under each setting, in fp32 over all `tp` ranks.
fn expected(sizes: Sizes, tp: isize, sequence: bool, gated: bool, modules: &[Module]) -> isize {
    let tokens = (sizes.seq * BATCH) as isize * 4;
    let Sizes { hidden, ffn, head_dim, heads, kv_heads, .. } = sizes;
    let [hidden, ffn, head, heads, kv_heads] = [hidden, ffn, head_dim, heads, kv_heads].map(|n| n as isize);
    // The residual stream and the norms' outputs are sharded along the sequence or the same on every rank.
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

/// The same of a block with latent attention: latents, the rotated key that all heads share, and norms are on every
/// rank, for all positions or for its own.
fn expected_latent(sizes: Sizes, tp: isize, sequence: bool, modules: &[Module]) -> isize {
    let tokens = (sizes.seq * BATCH) as isize * 4;
    let [hidden, ffn, heads] = [sizes.hidden, sizes.ffn, sizes.heads].map(|n| n as isize);
    let [queries, keys, rotated, unrotated, value] = LATENT.map(|n| n as isize);
    let copies = if sequence { 1 } else { tp };
    let middle = tokens * hidden * copies;
    let latents = tokens * (queries + keys + rotated) * copies;
    let norms = tokens * (2 * hidden + queries + keys) * copies;
    let qkv = tokens * heads * (2 * (rotated + unrotated) + unrotated + value);
    let core = tokens * heads * (value + 1);
    let parts = [(CoreAttention, core), (MlpActivation, tokens * ffn), (Norms, norms)];
    let rest: isize = parts.iter().filter(|(module, _)| !modules.contains(module)).map(|(_, bytes)| bytes).sum();
    middle + latents + qkv + tokens * 2 * ffn + rest
}

fn check(layout: &str, activation: Activation, norm: NormKind, documents: Option<&[usize]>) {
    check_block(
        layout,
        documents,
        BOOKKEEPING,
        |params, sizes, own| transformer(&block(sizes, activation, norm), params, sizes, own),
        |sizes, tp, modules| expected(sizes, tp, layout.contains("SP"), activation == Activation::SwiGlu, modules),
    );
}

/// Compares the bytes that a block saves with those that it should save on a number of tensor parallel ranks.
fn check_block(
    layout: &str,
    documents: Option<&[usize]>,
    bookkeeping: isize,
    build: impl Fn(ParamBuilder, Sizes, usize) -> Layer + Sync,
    expected: impl Fn(Sizes, isize, &[Module]) -> isize,
) {
    let _alone = ALONE.lock();
    let mesh = Mesh::new(layout.parse().unwrap()).unwrap();
    let choices: [&[Module]; 5] =
        [&[], &[CoreAttention], &[MlpActivation], &[Norms], &[CoreAttention, MlpActivation, Norms]];
    for modules in choices {
        let beyond = |sizes: Sizes| -> Vec<isize> {
            let on_rank =
                |rank: Rank| Ok(saved(&rank, sizes, modules, documents, |params, own| build(params, sizes, own)));
            let found = launch(&mesh, &[Device::flex()], on_rank).unwrap();
            let expected = expected(sizes, mesh.layout().tp as isize, modules);
            found.iter().map(|bytes| bytes - expected).collect()
        };
        // Each rank counts the process. What is there besides tensors does not depend on their sizes.
        for (small, large) in beyond(SMALL).into_iter().zip(beyond(LARGE)) {
            let ranks = mesh.world_size() as isize;
            assert!(
                (0..ranks * bookkeeping).contains(&small),
                "{layout} {modules:?}: {small} bytes more than expected"
            );
            assert!((large - small).abs() < ranks * JITTER, "{layout} {modules:?}: {small} bytes more, then {large}");
        }
    }
}

#[test]
fn a_llama_block_saves_what_it_should() {
    check("TP1", Activation::SwiGlu, NormKind::Rms, None);
    check("TP2", Activation::SwiGlu, NormKind::Rms, None);
    check("TP2 SP", Activation::SwiGlu, NormKind::Rms, None);
}

#[test]
fn a_gpt_block_saves_what_it_should() {
    check("TP1", Activation::Gelu(GeluKind::Tanh), NormKind::Layer, None);
    check("TP2 SP", Activation::Gelu(GeluKind::Tanh), NormKind::Layer, None);
}

/// Attention over ranks that share a sequence, or inside documents, saves no more than elsewhere; recomputed modules are
/// dropped as elsewhere.
#[test]
fn a_block_in_a_context_saves_what_it_should() {
    check("CP2", Activation::SwiGlu, NormKind::Rms, None);
    check("TP1", Activation::SwiGlu, NormKind::Rms, Some(&[0, 7, 40]));
    check("TP2 SP CP2", Activation::SwiGlu, NormKind::Rms, Some(&[0, 7, 40]));
}

/// Latent attention, alone and over ranks that share a sequence.
#[test]
fn a_deepseek_block_saves_what_it_should() {
    for (layout, documents) in [("TP1", None), ("TP2", None), ("TP2 SP", None), ("CP2", Some(&[0, 7, 40][..]))] {
        check_block(
            layout,
            documents,
            LATENT_BOOKKEEPING,
            |params, sizes, _| latent(params, sizes),
            |sizes, tp, modules| expected_latent(sizes, tp, layout.contains("SP"), modules),
        );
    }
}
