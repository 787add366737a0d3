//! AdamW's states in host memory (Megatron-LM's `--optimizer-cpu-offload`): masters and moments of a share of the
//! buckets. A step loads them to the GPU in pieces, updates them there as it updates all others, and stores them, so
//! that every bit is that of states on the GPU, and loads, updates and stores of different pieces overlap.
//!
//! On CPU ranks device and host have the same memory; pieces are copied all the same.

mod choice;
mod saving;
mod step;

use super::super::blocks::Blocks;
use super::super::config::OptimizerConfig;
use super::super::flat::{Flat, wide};
use super::super::gpu::tensor_table;
use super::super::layout::Part;
use super::Bucket;
use crate::checkpoint::Kind;
use backend_dist::gpu::buffer::{BLOCK, Buffer, Map, TensorTable};
use backend_dist::gpu::host_copy::{OffloadMemory, PIECE, SLOTS, held};
use burn::tensor::{DType, Device, Tensor, TensorData};
use choice::choose;
use std::ops::Range;

/// Elements of a piece elsewhere.
const SMALL_PIECE: usize = 4 * BLOCK;

/// The host memory of a rank's states, and the GPU memory that pieces of them pass through.
pub struct Offload {
    memory: Memory,
    /// On GPUs.
    slots: Vec<Vec<Buffer>>,
    next: usize,
    bytes: usize,
}

enum Memory {
    /// 8 bytes each, so that every number is aligned.
    Plain(Vec<u64>),
    Locked(Box<OffloadMemory>),
}

/// Where a bucket's states lie in host memory.
pub struct Hosted {
    arrays: Vec<(Kind, Array)>,
    pieces: Vec<Piece>,
}

/// One state of a bucket's region.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Array {
    /// Its first byte.
    start: usize,
    dtype: DType,
    /// Elements of the region that have one number.
    per: usize,
}

/// Elements of a bucket's region that are loaded, updated and stored together.
struct Piece {
    range: Range<usize>,
    /// What the piece has of each unit; they begin in the piece.
    parts: Vec<Part>,
    /// On GPUs.
    tensors: Option<TensorTable>,
}

/// A piece in a slot.
struct Staged {
    slot: usize,
    kinds: Vec<Kind>,
    /// Where each buffer's bytes are in host memory.
    copies: Vec<(usize, Buffer)>,
}

impl Offload {
    /// Chooses buckets and reserves host memory, at most `most` bytes, before the buckets have states. `None` where all
    /// states stay on the device; and why they or some of them do, although they were not to.
    pub fn new(buckets: &mut [Bucket], config: &OptimizerConfig, most: usize) -> (Option<Self>, Option<String>) {
        let share = config.offload();
        if share == 0.0 {
            return (None, None);
        }
        let near = buckets.iter().find_map(|bucket| bucket.grads.buffer()).cloned();
        let all: Vec<Hosted> = buckets.iter().map(|bucket| Hosted::new(bucket, config)).collect();
        let sizes: Vec<usize> = buckets.iter().zip(&all).map(|(bucket, of)| of.bytes(bucket.region.len())).collect();
        let wanted = share * sizes.iter().sum::<usize>() as f64;
        let chosen = choose(&sizes, share, most);
        let (mut end, mut len) = (0, 0);
        for ((bucket, mut hosted), size) in
            buckets.iter_mut().zip(all).zip(sizes).zip(chosen).filter_map(|(of, takes)| takes.then_some(of))
        {
            hosted.arrays.iter_mut().for_each(|(_, array)| array.start += end);
            end += size;
            len = bucket.region.len().max(len);
            bucket.hosted = Some(hosted);
        }
        let gb = |bytes: f64| bytes / 1e9;
        let trouble = (wanted > most as f64).then(|| {
            let fits = (100.0 * share * most as f64 / wanted).floor() / 100.0;
            let nearest = match fits {
                0.0 => "optimizer.cpu-offload = false".to_string(),
                fits => format!("optimizer.offload-fraction = {fits}"),
            };
            let [wanted, most, end] = [wanted, most as f64, end as f64].map(gb);
            format!(
                "a rank's states of {wanted:.1} GB may take {most:.1} GB of host memory, {end:.1} GB of them are there; \
                 nearest legal: {nearest}"
            )
        });
        if end == 0 {
            return (None, trouble);
        }
        // Before the memory, whose first load waits for what was launched until then: zeros, too.
        let kinds = buckets.iter().find_map(|bucket| bucket.hosted.as_ref());
        let slots = match (&near, kinds) {
            (Some(near), Some(hosted)) => slots(&hosted.arrays, len.min(PIECE), &near.tensor().device()),
            _ => Vec::new(),
        };
        let memory = match near.as_ref().map(|near| OffloadMemory::new(near, end, SLOTS)) {
            Some(Ok(memory)) => Memory::Locked(Box::new(memory)),
            Some(Err(error)) => {
                buckets.iter_mut().for_each(|bucket| bucket.hosted = None);
                return (None, Some(format!("page-locking {:.1} GB of host memory: {error}", gb(end as f64))));
            }
            None => Memory::Plain(vec![0; end.div_ceil(8)]),
        };
        (Some(Self { memory, slots, next: 0, bytes: end }), trouble)
    }

    /// Bytes of host memory.
    pub fn bytes(&self) -> u64 {
        self.bytes as u64
    }

    /// Begins a step.
    pub fn begin(&self) {
        if let Memory::Locked(memory) = &self.memory {
            memory.begin();
        }
    }

    /// Loads a piece into the next slot.
    fn load(&mut self, hosted: &Hosted, range: &Range<usize>) -> Staged {
        let slot = self.next;
        self.next = (slot + 1) % SLOTS;
        let copy = |((_, array), buffer): (&(Kind, Array), &Buffer)| {
            let bytes = array.bytes(range);
            (bytes.start, buffer.part(0..bytes.len() / array.staged().size()))
        };
        let copies: Vec<_> = hosted.arrays.iter().zip(&self.slots[slot]).map(copy).collect();
        if let Memory::Locked(memory) = &self.memory {
            memory.load(slot, &copies);
        }
        Staged { slot, kinds: hosted.arrays.iter().map(|(kind, _)| *kind).collect(), copies }
    }

    fn store(&mut self, staged: &Staged) {
        if let Memory::Locked(memory) = &mut self.memory {
            memory.store(staged.slot, &staged.copies);
        }
    }

    fn all(&self) -> &[u8] {
        match &self.memory {
            Memory::Plain(words) => bytemuck::cast_slice(words),
            Memory::Locked(memory) => memory.bytes(),
        }
    }

    /// Replaces the bytes of elements from `at` on.
    fn put(&mut self, array: &Array, at: usize, bytes: &[u8]) {
        let start = array.bytes(&(at..at)).start;
        let all = match &mut self.memory {
            Memory::Plain(words) => bytemuck::cast_slice_mut(words),
            Memory::Locked(memory) => memory.bytes_mut(),
        };
        all[start..start + bytes.len()].copy_from_slice(bytes);
    }

    /// Elements on the device.
    fn flat(&self, array: &Array, range: &Range<usize>, device: &Device) -> Flat {
        let bytes = self.all()[array.bytes(range)].to_vec();
        let data = TensorData::from_bytes_vec(bytes, [range.len()], array.dtype);
        Flat::new(Tensor::from_data(data, (device, array.dtype)))
    }

    fn keep(&mut self, array: &Array, range: &Range<usize>, values: Flat) {
        self.put(array, range.start, values.into_tensor().into_data().bytes());
    }
}

impl Staged {
    fn get(&self, kind: Kind) -> Option<&Buffer> {
        let at = self.kinds.iter().position(|other| *other == kind)?;
        Some(&self.copies[at].1)
    }
}

impl Array {
    fn bytes(&self, range: &Range<usize>) -> Range<usize> {
        let at = |element: usize| self.start + element / self.per * self.dtype.size();
        at(range.start)..at(range.end)
    }

    /// The type of a slot's buffer: that of codes and remainders says nothing.
    fn staged(&self) -> DType {
        if matches!(self.dtype, DType::U8 | DType::I16) { DType::BF16 } else { self.dtype }
    }
}

/// GPU memory for pieces of so many elements.
fn slots(arrays: &[(Kind, Array)], len: usize, device: &Device) -> Vec<Vec<Buffer>> {
    let buffer = |(_, array): &(Kind, Array)| {
        let bytes = array.bytes(&(0..len)).len();
        Buffer::zeros(bytes / array.staged().size(), device, array.staged()).expect("the gradients are in one")
    };
    (0..SLOTS).map(|_| arrays.iter().map(buffer).collect()).collect()
}

impl Hosted {
    /// All states of a bucket, from byte 0 on.
    fn new(bucket: &Bucket, config: &OptimizerConfig) -> Self {
        let (states, dtype, gpu) = (config.states(), bucket.dtype, bucket.grads.buffer());
        let mut kinds = match states.in_blocks(dtype) {
            true => vec![
                (Kind::FirstMoment, DType::U8, 1),
                (Kind::SecondMoment, DType::U8, 1),
                (Kind::FirstScale, DType::F32, BLOCK),
                (Kind::SecondScale, DType::F32, BLOCK),
            ],
            false => vec![
                (Kind::FirstMoment, states.exp_avg.with(dtype), 1),
                (Kind::SecondMoment, states.exp_avg_sq.with(dtype), 1),
            ],
        };
        // CPU ranks gather the weights of ZeRO 3 from the masters.
        let has_masters = wide(dtype) != dtype && (gpu.is_some() || bucket.sharding.zero < 3);
        if has_masters {
            let remainder = gpu.is_some() && bucket.split;
            kinds.push(if remainder { (Kind::Remainder, DType::I16, 1) } else { (Kind::Master, wide(dtype), 1) });
        }
        let (mut arrays, mut end) = (Vec::new(), 0);
        for (kind, dtype, per) in kinds {
            let array = Array { start: end, dtype, per };
            arrays.push((kind, array));
            end += held(array.bytes(&(0..bucket.region.len())).len());
        }
        let size = if gpu.is_some() { PIECE } else { SMALL_PIECE };
        let piece = |start: usize| {
            let range = start..(start + size).min(bucket.region.len());
            let parts = bucket.layout.parts(&(bucket.region.start + range.start..bucket.region.start + range.end));
            let sum = gpu.map(|sum| sum.part(range.clone()));
            let tensors = sum.and_then(|sum| tensor_table(&sum, (&bucket.layout, &parts), range.len(), config));
            Piece { range, parts, tensors }
        };
        let pieces = (0..bucket.region.len()).step_by(size).map(piece).filter(|piece| !piece.parts.is_empty());
        Self { arrays, pieces: pieces.collect() }
    }

    /// Bytes of all states of a region of so many elements.
    fn bytes(&self, len: usize) -> usize {
        self.arrays.iter().map(|(_, array)| held(array.bytes(&(0..len)).len())).sum()
    }

    fn array(&self, kind: Kind) -> Option<&Array> {
        self.arrays.iter().find(|(other, _)| *other == kind).map(|(_, array)| array)
    }

    /// Whether masters are here too.
    pub fn has_masters(&self) -> bool {
        self.array(Kind::Master).or(self.array(Kind::Remainder)).is_some()
    }

    /// Whether moments are in 8 bits.
    pub fn in_blocks(&self) -> bool {
        self.array(Kind::FirstScale).is_some()
    }

    /// Codes and scales of some elements' moments, where they are in 8 bits.
    fn blocks(&self, offload: &Offload, range: &Range<usize>) -> Option<[Blocks; 2]> {
        let of = |kind: Kind, map: Map| {
            let bytes = |kind| Some(&offload.all()[self.array(kind)?.bytes(range)]);
            let scales = bytes(kind.scales()?)?;
            Some(Blocks::new(map, bytes(kind)?.to_vec(), bytemuck::pod_collect_to_vec(scales)))
        };
        Some([of(Kind::FirstMoment, Map::Signed)?, of(Kind::SecondMoment, Map::Unsigned)?])
    }

    fn keep_blocks(&self, offload: &mut Offload, at: usize, blocks: &[Blocks; 2]) {
        for (kind, blocks) in [Kind::FirstMoment, Kind::SecondMoment].into_iter().zip(blocks) {
            let (codes, scales) = blocks.data();
            let states: [(_, &[u8]); 2] = [(Some(kind), &codes), (kind.scales(), bytemuck::cast_slice(&scales))];
            for (kind, bytes) in states {
                let array = kind.and_then(|kind| self.array(kind)).expect("moments in 8 bits have codes and scales");
                offload.put(array, at, bytes);
            }
        }
    }
}
