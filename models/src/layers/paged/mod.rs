//! Keys and values of many sequences in blocks of positions, as in vLLM (Kwon et al., "Efficient Memory Management for
//! Large Language Model Serving with PagedAttention", 2023): a sequence takes blocks as it grows, and another one gets
//! them when it ends.

mod attend;
mod decode;
mod latent;
mod state;
mod step;
mod view;

use std::collections::{HashMap, HashSet};

use attend::Gather;
use backend_dist::gpu;
use backend_dist::ops::context::attention_with_sinks;
use backend_dist::ops::decode::{PagedAttention, paged_attention};
use backend_dist::ops::{AttentionOptions, PackedHeads, PassContext, attention, embedding};
use burn::tensor::{DType, Device, IndexingUpdateOp, Int, Tensor, TensorData};

pub(crate) use decode::Decode;
pub(crate) use latent::LatentHeads;
pub(crate) use state::RecurrentState;
pub use step::{Chunk, Outputs, Step};
use view::{View, block_table, most_blocks};

/// Keys and values of the positions of many sequences, on one rank and for every layer.
///
/// Which sequence has which blocks is the caller's to know: each [`Step`] says it. Memory for all blocks is allocated
/// with the first step.
#[derive(Debug)]
pub struct PagedKvCache {
    block_size: usize,
    num_blocks: usize,
    /// Of each layer keys and values, `[num_blocks block_size, kv_heads d]` each, or latents alone; nothing before its
    /// first step.
    layers: Vec<Vec<Tensor<2>>>,
    /// Of linear attention: by layer and the first block of a sequence.
    states: HashMap<(usize, u32), RecurrentState>,
    step: Prepared,
    /// Of single tokens on GPUs; `None` if nothing is recorded.
    decoders: Option<Vec<decode::Decoder>>,
}

/// What all layers of a step share.
#[derive(Debug, Default)]
struct Prepared {
    /// Where the keys and values of the new tokens are written.
    slots: Option<Tensor<1, Int>>,
    /// What chunks of one token read, by window and key-value heads.
    single: Vec<(Option<usize>, usize, Gather)>,
    /// The same for kernels, see [`PagedKvCache::table`].
    table: Option<[Tensor<1, Int>; 2]>,
    /// What longer chunks read, by chunk.
    long: Vec<(usize, Tensor<2, Int>)>,
}

impl PagedKvCache {
    /// A cache of `num_blocks` blocks of `block_size` positions.
    ///
    /// Steps of single tokens are computed by kernels that read all that changes on the GPU, and after some steps of a
    /// size they are launched as one CUDA graph, where the model has them (a dense decoder on one GPU, without sinks and
    /// softcaps, or on several that have a process each). The cache then belongs to one model with its weights in one place.
    pub fn new(num_blocks: usize, block_size: usize) -> Self {
        Self {
            block_size,
            num_blocks,
            layers: Vec::new(),
            states: HashMap::new(),
            step: Prepared::default(),
            decoders: Some(Vec::new()),
        }
    }

    /// Without CUDA graphs: for a cache that serves several models, or weights that move.
    pub fn eager(self) -> Self {
        Self { decoders: None, ..self }
    }

    /// Bytes of the blocks of all layers that have read a step.
    pub fn bytes(&self) -> usize {
        self.layers.iter().flatten().map(|pool| pool.dims().iter().product::<usize>() * pool.dtype().size()).sum()
    }

    /// Forgets what was prepared for the last step, before the first layer of `step`
    /// ([`extend_layer`](crate::CausalLm::extend_layer)).
    ///
    /// # Panics
    /// If a chunk of the step has too few blocks, or one that the cache has not.
    pub fn begin(&mut self, step: &Step) {
        step.check(self.num_blocks, self.block_size);
        self.step = Prepared::default();
        // A block in the middle of a sequence was the first one of a sequence that has ended.
        if !self.states.is_empty() {
            let inner: HashSet<u32> = step.chunks().iter().flat_map(|chunk| &chunk.blocks[1..]).copied().collect();
            self.states.retain(|(_, block), _| !inner.contains(block));
        }
    }

    /// Forgets the states of the sequences with these first blocks: they have ended, or their positions will be read again.
    /// Without it a state goes when its block belongs to another sequence.
    pub fn release(&mut self, first_blocks: &[u32]) {
        self.states.retain(|(_, block), _| !first_blocks.contains(block));
    }

    /// The state of linear attention in front of the chunk; nothing at the beginning, whatever was read before.
    ///
    /// # Panics
    /// If the positions before were not read.
    pub(crate) fn take_state(&mut self, layer: usize, chunk: &Chunk) -> Option<RecurrentState> {
        let state = self.states.remove(&(layer, chunk.blocks[0]));
        (chunk.positions.start > 0).then(|| state.expect("the positions before the chunk were read"))
    }

    /// Keeps the state behind the chunk.
    pub(crate) fn put_state(&mut self, layer: usize, chunk: &Chunk, state: RecurrentState) {
        self.states.insert((layer, chunk.blocks[0]), state);
    }

    /// Writes keys and values of the step's tokens, `[n, 1, kv_heads, d]`, and attends with their queries
    /// `[n, 1, heads, d]`, each token to its own sequence; `sinks [heads]` as in [`attention_with_sinks`]. Returns
    /// `[n, 1, heads, dv]`.
    ///
    /// # Panics
    /// If the tensors record gradients.
    pub(crate) fn attend(
        &mut self,
        layer: usize,
        step: &Step,
        [q, k, v]: [Tensor<4>; 3],
        options: AttentionOptions,
        sinks: Option<Tensor<1>>,
    ) -> Tensor<4> {
        assert!(!k.is_autodiff(), "a cache needs a model that records no gradients: take `model.valid()`");
        let device = q.device();
        let [_, _, kv_heads, _] = k.dims();
        let pools = self.write(layer, step, [k.clone(), v.clone()]);
        let single = step.leading_single_tokens();
        let mut of = Vec::new();
        if single > 0 {
            let [q, k, v] = [&q, &k, &v].map(|x| x.clone().narrow(0, 0, single));
            of.push(match self.kernel([&q, &k, &v], options, sinks.as_ref()) {
                Some(call) => {
                    let [table, lengths] = self.table(&step.chunks()[..single], &device);
                    paged_attention(Tensor::cat(vec![q, k, v], 2), None, pools.each_ref(), [table, lengths], call)
                }
                None => {
                    let gather = self.gather_of_single_tokens(step, single, options.window, kv_heads, &q);
                    let read = pools.each_ref().map(|pool| gather.read(pool, kv_heads));
                    attend::single_tokens(q, read, gather.bias, options, sinks.as_ref())
                }
            });
        }
        let mut first = single;
        for (index, chunk) in step.chunks().iter().enumerate().skip(single) {
            let new = chunk.positions.len();
            let ids = self.ids_of_chunk(index, chunk, &device);
            let [k, v] = pools.clone().map(|pool| {
                let read = embedding(pool, ids.clone(), 0);
                let [positions, _, features] = read.dims();
                read.reshape([positions, 1, kv_heads, features / kv_heads])
            });
            let q = q.clone().narrow(0, first, new);
            of.push(match &sinks {
                Some(sinks) => {
                    attention_with_sinks([q, k, v], sinks.clone(), options, None, None, &PassContext::default())
                }
                None => attention(q, k, v, options),
            });
            first += new;
        }
        if of.len() == 1 { of.swap_remove(0) } else { Tensor::cat(of, 0) }
    }

    /// The kernels for single tokens with these heads, if there are some.
    fn kernel(
        &self,
        [q, k, v]: [&Tensor<4>; 3],
        options: AttentionOptions,
        sinks: Option<&Tensor<1>>,
    ) -> Option<PagedAttention> {
        let [[_, _, heads, head_dim], [_, _, kv_heads, _]] = [q.dims(), k.dims()];
        let heads = PackedHeads { heads, kv_heads };
        let call = PagedAttention { heads, head_dim, block_size: self.block_size, options };
        (sinks.is_none() && k.dims() == v.dims() && call.has_kernel(q.dtype(), &q.device())).then_some(call)
    }

    /// The block table of the chunks, one after the other, and the positions of each with the new ones, for kernels.
    fn table(&mut self, chunks: &[Chunk], device: &Device) -> [Tensor<1, Int>; 2] {
        let of_chunks = || {
            let table = block_table(chunks, most_blocks(chunks));
            let lengths: Vec<i32> = chunks.iter().map(|chunk| chunk.positions.end as i32).collect();
            [table, lengths].map(|values| {
                let count = values.len();
                Tensor::from_data(TensorData::new(values, [count]), (device, DType::I32))
            })
        };
        self.step.table.get_or_insert_with(of_chunks).clone()
    }

    /// A layer's pools with what is `new` of the step's tokens, `[n, 1, heads, d]` each.
    fn write<const N: usize>(&mut self, layer: usize, step: &Step, new: [Tensor<4>; N]) -> [Tensor<2>; N] {
        let (block_size, device) = (self.block_size, new[0].device());
        let slots = self.step.slots.get_or_insert_with(|| {
            let slots: Vec<i64> = step.chunks().iter().flat_map(|chunk| chunk.new_slots(block_size)).collect();
            let count = slots.len();
            Tensor::from_data(TensorData::new(slots, [count]), (&device, DType::I64))
        });
        if self.layers.len() <= layer {
            self.layers.resize(layer + 1, Vec::new());
        }
        let rows = self.num_blocks * block_size;
        // Taken out, so that nothing else holds them and they are written in place.
        let mut pools = std::mem::take(&mut self.layers[layer]).into_iter();
        let pools = new.map(|new| {
            let [count, _, heads, head_dim] = new.dims();
            let empty = || Tensor::zeros([rows, heads * head_dim], (&device, new.dtype()));
            let pool: Tensor<2> = pools.next().unwrap_or_else(empty);
            write(pool, slots.clone(), new.reshape([count, heads * head_dim]))
        });
        self.layers[layer] = pools.to_vec();
        pools
    }

    fn gather_of_single_tokens(
        &mut self,
        step: &Step,
        count: usize,
        window: Option<usize>,
        kv_heads: usize,
        like: &Tensor<4>,
    ) -> Gather {
        let known = self.step.single.iter().find(|(of, heads, _)| (*of, *heads) == (window, kv_heads));
        if let Some((.., gather)) = known {
            return gather.clone();
        }
        let View { positions, slots, seen } =
            View::of_last_positions(&step.chunks()[..count], window, self.num_blocks, self.block_size);
        let device = like.device();
        let slots = Tensor::<3, Int>::from_data(TensorData::new(slots, [count, 1, positions]), (&device, DType::I64));
        let heads: Vec<i64> = (0..kv_heads as i64).collect();
        let heads = Tensor::<3, Int>::from_data(TensorData::new(heads, [1, kv_heads, 1]), (&device, DType::I64));
        let bias: Vec<f32> = seen.iter().map(|seen| if *seen { 0.0 } else { f32::NEG_INFINITY }).collect();
        let bias = TensorData::new(bias, [count, 1, positions]);
        let gather = Gather {
            ids: slots.mul_scalar(kv_heads as i64).add(heads).reshape([count * kv_heads, positions]),
            bias: Tensor::from_data(bias, (&device, attend::of_scores(like.dtype()))),
        };
        self.step.single.push((window, kv_heads, gather.clone()));
        gather
    }

    /// The slots of all positions of a chunk's sequence so far, `[t, 1]`.
    fn ids_of_chunk(&mut self, index: usize, chunk: &Chunk, device: &Device) -> Tensor<2, Int> {
        if let Some((_, ids)) = self.step.long.iter().find(|(of, _)| *of == index) {
            return ids.clone();
        }
        let slots: Vec<i64> = chunk.slots(0..chunk.positions.end, self.block_size).collect();
        let data = TensorData::new(slots, [chunk.positions.end, 1]);
        let ids = Tensor::from_data(data, (device, DType::I64));
        self.step.long.push((index, ids.clone()));
        ids
    }
}

/// `pool` with `new [n, features]` at `slots [n]`, in place.
fn write(pool: Tensor<2>, slots: Tensor<1, Int>, new: Tensor<2>) -> Tensor<2> {
    // Burn's two operations of this differ: one copies the pool on the CPU, the other goes through the slots one by one
    // on a GPU.
    match gpu::index(&pool.device()) {
        Some(_) => pool.scatter_nd(slots.unsqueeze_dim::<2>(1), new, IndexingUpdateOp::Assign),
        None => pool.select_assign(0, slots, new, IndexingUpdateOp::Assign),
    }
}

/// Tokens as ids of one sequence, `[n, 1]`.
pub(crate) fn column(tokens: &[i64], device: &Device) -> Tensor<2, Int> {
    Tensor::from_data(TensorData::new(tokens.to_vec(), [tokens.len(), 1]), (device, DType::I64))
}
