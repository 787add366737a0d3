//! Decode steps on GPUs: every sequence has one new token, and all that changes between steps is read on the device. So
//! the kernels of a step are recorded once and launched together afterwards (CUDA graphs).

use backend_dist::gpu::{self, Recording};
use backend_dist::ops::decode::{PagedAttention, paged_attention};
use backend_dist::ops::{AttentionOptions, PackedHeads, embedding};
use burn::tensor::{DType, Device, Int, Tensor};

use super::view::{block_table, most_blocks};
use super::{Chunk, PagedKvCache, Step};
use crate::layers::rope::{Angles, RotaryEmbedding};

/// Steps of a size before it is recorded, which takes about as long as ten of them.
const WORTH_RECORDING: usize = 8;

/// A decode step of up to a number of sequences, each with up to a number of blocks.
pub(crate) struct Decode<'a> {
    inputs: &'a Inputs,
    cache: &'a PagedKvCache,
}

/// What changes from step to step. All but the table lies in one buffer, which one copy fills: a step waits for each.
#[derive(Debug)]
struct Inputs {
    sequences: usize,
    max_blocks: usize,
    buffer: Tensor<1, Int>,
    /// `[sequences]`: the new token of each, its position, and the positions of its sequence with it; 0 if there is none.
    tokens: Tensor<1, Int>,
    positions: Tensor<1, Int>,
    lengths: Tensor<1, Int>,
    /// `[sequences max_blocks]`, and its values.
    table: Tensor<1, Int>,
    blocks: Vec<i32>,
}

/// Numbers of the buffer for each of tokens, positions and lengths: multiples of 512 bytes, where tensors begin.
fn stride(sequences: usize) -> usize {
    sequences.next_multiple_of(128)
}

/// The decode steps of one size.
#[derive(Debug)]
pub(super) struct Decoder {
    inputs: Inputs,
    /// Steps so far.
    steps: usize,
    recorded: Option<(Recording, Tensor<2>)>,
}

impl Inputs {
    /// `None` on a CPU.
    fn new([sequences, max_blocks]: [usize; 2], device: &Device) -> Option<Self> {
        let zeros = |len| Tensor::zeros([len], (device, DType::I32));
        let stride = stride(sequences);
        let buffer = zeros(3 * stride);
        let of = |nth: usize| gpu::part(&buffer, nth * stride..nth * stride + sequences);
        let (tokens, positions, lengths) = (of(0)?, of(1)?, of(2)?);
        let (table, blocks) = (zeros(sequences * max_blocks), Vec::new());
        Some(Self { sequences, max_blocks, buffer, tokens, positions, lengths, table, blocks })
    }

    fn fill(&mut self, chunks: &[Chunk]) {
        let values: [fn(&Chunk) -> usize; 3] =
            [|chunk| chunk.tokens[0] as usize, |chunk| chunk.positions.start, |chunk| chunk.positions.end];
        let of_each = |value: fn(&Chunk) -> usize| {
            let values = chunks.iter().map(move |chunk| value(chunk) as i32);
            values.chain(std::iter::repeat(0)).take(stride(self.sequences))
        };
        gpu::overwrite(&self.buffer, &values.into_iter().flat_map(of_each).collect::<Vec<_>>());
        let mut blocks = block_table(chunks, self.max_blocks);
        blocks.resize(self.sequences * self.max_blocks, 0);
        if blocks != self.blocks {
            gpu::overwrite(&self.table, &blocks);
            self.blocks = blocks;
        }
    }
}

/// The next size for so many: sizes are powers of two, so that few steps are recorded.
fn sizes(chunks: &[Chunk]) -> [usize; 2] {
    [chunks.len().next_power_of_two(), most_blocks(chunks).next_power_of_two()]
}

impl Decode<'_> {
    /// `[sequences, 1]`.
    pub fn tokens(&self) -> Tensor<2, Int> {
        self.inputs.tokens.clone().unsqueeze_dim(1)
    }

    /// The angles of the new tokens' positions.
    pub fn angles(&self, rope: &RotaryEmbedding, dtype: DType) -> Angles {
        let positions = self.inputs.max_blocks * self.cache.block_size;
        let table = rope.angles(0..positions, dtype, &self.inputs.positions.device());
        let of = |table: Tensor<2>| {
            let half = table.dims()[1];
            embedding(table, self.inputs.positions.clone().unsqueeze_dim(1), 0).reshape([self.inputs.sequences, half])
        };
        Angles { cos: of(table.cos), sin: of(table.sin) }
    }

    /// Attention of the packed projection `[sequences, 1, heads + 2 kv_heads, d]`, rotated by `angles`, over the cache,
    /// into which it writes the new keys and values: `[sequences, 1, heads, d]`.
    pub fn attend(
        &self,
        layer: usize,
        qkv: Tensor<4>,
        angles: Option<&Angles>,
        of: (PackedHeads, AttentionOptions),
    ) -> Tensor<4> {
        let (call, [keys, values]) = self.cache.call(layer, of).expect("a layer of a prompt that was read");
        let Inputs { table, lengths, .. } = self.inputs;
        let angles = angles.map(|Angles { cos, sin }| [cos.clone(), sin.clone()]);
        paged_attention(qkv, angles, [keys, values], [table.clone(), lengths.clone()], call)
    }
}

impl PagedKvCache {
    fn call(
        &self,
        layer: usize,
        (heads, options): (PackedHeads, AttentionOptions),
    ) -> Option<(PagedAttention, [&Tensor<2>; 2])> {
        let [keys, values] = self.layers.get(layer)?.as_slice() else { return None };
        let head_dim = keys.dims()[1] / heads.kv_heads;
        Some((PagedAttention { heads, head_dim, block_size: self.block_size, options }, [keys, values]))
    }

    /// Tokens that a decode step computes, some of which may be padding.
    pub(crate) fn decoded_tokens(step: &Step) -> usize {
        sizes(step.chunks())[0]
    }

    /// Whether decode steps have a kernel for a layer of which this is the attention.
    pub(crate) fn has_kernel(&self, layer: usize, of: (PackedHeads, AttentionOptions)) -> bool {
        self.call(layer, of).is_some_and(|(call, [keys, _])| call.has_kernel(keys.dtype(), &keys.device()))
    }

    /// The logits `[outputs, vocab]` of a step of single tokens, which `run` computes for all of a [`Decode`]'s sequences;
    /// `None` if the step is another one.
    ///
    /// # Panics
    /// If the GPU refuses the recorded work.
    pub(crate) fn decode(
        &mut self,
        step: &Step,
        device: &Device,
        run: impl Fn(&Decode) -> Tensor<2>,
    ) -> Option<Tensor<2>> {
        let chunks = step.chunks();
        if step.leading_single_tokens() < chunks.len() || gpu::index(device).is_none() {
            return None;
        }
        let sizes = sizes(chunks);
        let decoders = self.decoders.as_mut()?;
        let known = decoders.iter().position(|of| [of.inputs.sequences, of.inputs.max_blocks] == sizes);
        let mut decoder = match known {
            Some(index) => decoders.swap_remove(index),
            None => Decoder { inputs: Inputs::new(sizes, device)?, steps: 0, recorded: None },
        };
        decoder.inputs.fill(chunks);
        let logits = match &decoder.recorded {
            Some((recording, logits)) => {
                recording.replay().unwrap_or_else(|error| panic!("a recorded decode step: {error}"));
                logits.clone()
            }
            None => {
                let decode = Decode { inputs: &decoder.inputs, cache: self };
                // The first step compiles kernels, and its result is right whether or not it can be recorded.
                let logits = run(&decode);
                decoder.steps += 1;
                if decoder.steps == WORTH_RECORDING {
                    let recorded = Recording::new(&decoder.inputs.tokens, || run(&decode));
                    let recorded = recorded.unwrap_or_else(|error| panic!("recording a decode step: {error}"));
                    recorded.0.replay().unwrap_or_else(|error| panic!("a recorded decode step: {error}"));
                    decoder.recorded = Some(recorded);
                }
                logits
            }
        };
        self.decoders.as_mut()?.push(decoder);
        let [_, vocab] = logits.dims();
        Some(logits.slice([0..chunks.len(), 0..vocab]))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layers::paged::Outputs;

    #[test]
    fn few_sizes_hold_all_steps() {
        let chunk = |blocks: u32| {
            let blocks = (0..blocks).collect();
            Chunk { tokens: vec![0], positions: 0..1, blocks, outputs: Outputs::Last }
        };
        assert_eq!(sizes(&[chunk(1)]), [1, 1]);
        assert_eq!(sizes(&[chunk(3), chunk(9), chunk(1)]), [4, 16]);
    }
}
