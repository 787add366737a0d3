//! Routing of tokens on NVIDIA GPUs: tables that stay on the device. `None` if there is no kernel.

use burn::backend::{Cube, DType};
use burn::tensor::{Device, Int, Shape, Tensor};
use burn_cubecl::tensor::CubeTensor;
use kernels_cubecl::decode::MOST_COPIES;
use kernels_cubecl::decode::copies::{CopyTables, order};
use kernels_cubecl::pointwise::moe::count::{self, CountShape};
use kernels_cubecl::pointwise::moe::offsets::{self, OffsetsShape};
use kernels_cubecl::pointwise::moe::permute::{self, PermuteShape, PermuteTables};
use kernels_cubecl::pointwise::moe::topk::{self, Selection as Kernel};

use super::{empty, ids, is_here, launched, packed, work};
use crate::moe::RowMap;
use crate::moe::routing::tables::{OrderedCopies, RowOrder, RowStarts, Run, Selection, TokenCounts, table};
use gpu::cuda;

/// Alignment, in elements, of a table in a shared buffer: 256 bytes, as CubeCL aligns its own.
const APART: usize = 64;

/// The tensor's primitive if it is on an NVIDIA GPU.
fn float<const D: usize>(x: &Tensor<D>) -> Option<CubeTensor> {
    x.clone().try_into_primitive::<Cube>().ok().filter(is_here)
}

fn int<const D: usize>(x: &Tensor<D, Int>) -> Option<CubeTensor> {
    x.clone().try_into_primitive::<Cube>().ok().filter(is_here).map(ids)
}

fn tensor<const D: usize>(x: CubeTensor) -> Tensor<D, Int> {
    Tensor::from_primitive::<Cube>(x)
}

/// Number of rows and columns.
fn sizes(x: &CubeTensor) -> [usize; 2] {
    let shape = x.meta.shape();
    [shape[0], shape[1]]
}

pub fn choose(
    scores: &Tensor<2>,
    bias: Option<&Tensor<1>>,
    valid: usize,
    selection: Selection,
) -> Option<Tensor<2, Int>> {
    let scores = float(scores).filter(|scores| scores.dtype == DType::F32)?;
    let bias = match bias {
        Some(bias) => Some(packed(float(bias).filter(|bias| bias.dtype == DType::F32)?)),
        None => None,
    };
    let [tokens, experts] = sizes(&scores);
    let [groups, top_groups] = selection.groups.unwrap_or([1, 1]);
    let kernel = Kernel {
        experts: u32::try_from(experts).ok()?,
        top_k: u32::try_from(selection.top_k).ok()?,
        groups: u32::try_from(groups).ok()?,
        top_groups: u32::try_from(top_groups).ok()?,
        biased: bias.is_some(),
    };
    if !kernel.has_kernel() {
        return None;
    }
    let _noted = work::memory("choice of experts", &scores, |bytes| bytes);
    let scores = packed(scores);
    let choice = empty(&scores, [tokens, selection.top_k], DType::I32);
    // Without a bias the kernel reads none.
    let bias = &bias.as_ref().unwrap_or(&scores).handle;
    launched(
        "choice",
        topk::select_experts(&scores.client, [&scores.handle, bias], &choice.handle, [tokens, valid], kernel),
    );
    Some(tensor(choice))
}

pub fn spread(choice: &Tensor<2, Int>, experts: usize) -> Option<Tensor<2, Int>> {
    let choice = int(choice)?;
    let [tokens, top_k] = sizes(&choice);
    let mask = empty(&choice, [tokens, experts], DType::I32);
    let _noted = work::memory("mask of experts", &mask, |bytes| bytes);
    launched("mask", topk::mask(&choice.client, &choice.handle, &mask.handle, tokens, [experts, top_k]));
    Some(tensor(mask))
}

pub fn count(choice: &Tensor<2, Int>, experts: usize, samples: usize) -> Option<(Tensor<2, Int>, Tensor<1, Int>)> {
    let choice = int(choice)?;
    let [tokens, top_k] = sizes(&choice);
    let shape = CountShape { tokens, samples, experts, top_k };
    if !shape.has_kernel() {
        return None;
    }
    let _noted = work::memory("counts of experts", &choice, |bytes| bytes);
    let before = empty(&choice, [shape.chunks(), shape.width()], DType::I32);
    let totals = empty(&choice, [shape.width()], DType::I32);
    launched("counts", count::count(&choice.client, &choice.handle, &before.handle, &totals.handle, shape));
    Some((tensor(before), tensor(totals)))
}

/// Counts on an NVIDIA GPU.
pub struct Totals(Vec<CubeTensor>);

impl Totals {
    pub fn of<'a>(totals: impl Iterator<Item = &'a Tensor<1, Int>>) -> Option<Self> {
        totals.map(int).collect::<Option<_>>().map(Self)
    }

    /// The copy to the host is queued before the launches of `meanwhile`. CubeCL submits work to the device 32 commands
    /// at a time: without the flush the last ones would start only when the host has read the counts and launches more.
    pub fn read<T>(self, meanwhile: impl FnOnce() -> T) -> (Vec<Vec<i32>>, T) {
        let client = self.0[0].client.clone();
        let reading = client.read_async(self.0.iter().map(|totals| totals.handle.clone()).collect());
        let made = meanwhile();
        cuda::flush(&self.0[0]);
        let all = cubecl::future::block_on(reading);
        let all = all.unwrap_or_else(|error| panic!("counts of experts on CUDA: {error:?}"));
        let number = |bytes: &[u8]| i32::from_le_bytes(bytes.try_into().expect("four bytes"));
        let lengths = self.0.iter().map(|totals| 4 * totals.meta.shape().num_elements());
        let counts = all.iter().zip(lengths).map(|(all, len)| all[..len].chunks_exact(4).map(number).collect());
        (counts.collect(), made)
    }
}

pub fn place(choice: &Tensor<2, Int>, before: &Tensor<2, Int>, starts: &RowStarts) -> Option<(RowMap, RowMap)> {
    let device = choice.device();
    let (choice, before) = (int(choice)?, int(before)?);
    let RowStarts { ref rows, shards, each, capacity, count } = *starts;
    let ([tokens, top_k], experts) = (sizes(&choice), sizes(&before)[1]);
    let capacity = capacity.unwrap_or(usize::MAX);
    let shape = PermuteShape { tokens, experts, top_k, shards, experts_per_rank: each, capacity, rows: count };
    if !shape.has_kernel() {
        return None;
    }
    let starts = rows.iter().map(|row| row.map_or(-1, |row| row as i32)).collect();
    Some(placed([&choice, &before, &int(&table(starts, [shards, experts], &device))?], shape))
}

pub fn place_in_order(choice: &Tensor<2, Int>, counted: &TokenCounts, order: &RowOrder) -> Option<(RowMap, RowMap)> {
    let (choice, before, totals) = (int(choice)?, int(&counted.before)?, int(&counted.totals)?);
    let RowOrder { shards, each, chunks, count } = *order;
    let ([tokens, top_k], experts) = (sizes(&choice), sizes(&before)[1]);
    let shape =
        PermuteShape { tokens, experts, top_k, shards, experts_per_rank: each, capacity: usize::MAX, rows: count };
    let in_order = OffsetsShape { experts, experts_per_rank: each, shards, chunks };
    if !shape.has_kernel() || !in_order.has_kernel() {
        return None;
    }
    let starts = empty(&choice, [shards, experts], DType::I32);
    launched("starts of experts", offsets::starts(&choice.client, &totals.handle, &starts.handle, in_order));
    Some(placed([&choice, &before, &starts], shape))
}

pub fn in_order(choice: &Tensor<2, Int>, weights: &Tensor<2>, softmax: bool) -> Option<OrderedCopies> {
    let (choice, weights) = (int(choice)?, packed(float(weights).filter(|weights| weights.dtype == DType::F32)?));
    let ([tokens, top_k], [_, experts]) = (sizes(&choice), sizes(&weights));
    let count = tokens * top_k;
    if count > MOST_COPIES {
        return None;
    }
    let _noted = work::memory("order of copies", &weights, |bytes| bytes);
    let table = |shape: [usize; 2]| empty(&choice, shape, DType::I32);
    let (slots, of_row, rows) = (table([count, 1]), table([count, 1]), table([tokens, top_k]));
    let probabilities = empty(&choice, [count], DType::F32);
    let (slots_on, tokens_on, rows_on) = (&slots.handle, &of_row.handle, &rows.handle);
    let tables = CopyTables { slots: slots_on, tokens: tokens_on, rows: rows_on, probabilities: &probabilities.handle };
    let inputs = [&choice.handle, &weights.handle];
    launched("order of copies", order(&choice.client, [tokens, top_k, experts], inputs, tables, softmax));
    let map = RowMap::of_tables(tensor(of_row), tensor(rows));
    Some(OrderedCopies { map, slots: tensor(slots), probabilities: Tensor::from_primitive::<Cube>(probabilities) })
}

/// The maps of copies of tokens and of their slots, from the choice, the counts before each chunk, and the starts.
fn placed(inputs: [&CubeTensor; 3], shape: PermuteShape) -> (RowMap, RowMap) {
    let (choice, PermuteShape { tokens, experts, top_k, shards, rows, .. }) = (inputs[0], shape);
    let all = empties(choice, [[rows, 1], [rows, 1], [tokens, top_k * shards], [tokens * experts, shards]]);
    let _noted = work::memory("places of copies", &all[3], |bytes| bytes);
    let places = PermuteTables {
        token_of_row: &all[0].handle,
        slot_of_row: &all[1].handle,
        rows_of_token: &all[2].handle,
        rows_of_slot: &all[3].handle,
    };
    launched("places", permute::permute(&choice.client, inputs.map(|x| &x.handle), places, shape));
    // The device may wait for this.
    cuda::flush(choice);
    let [tokens_of, slots_of, of_tokens, of_slots] = all.map(tensor);
    (RowMap::of_tables(tokens_of, of_tokens), RowMap::of_tables(slots_of, of_slots))
}

/// Tables of -1 in one buffer, filled by one command.
fn empties<const N: usize>(near: &CubeTensor, shapes: [[usize; 2]; N]) -> [CubeTensor; N] {
    let all = empty(near, [shapes.iter().copied().map(reserved).sum::<usize>()], DType::I32);
    cuda::fill(&all, 0xff);
    let mut start = 0;
    shapes.map(|shape| table_at(&all, &mut start, shape))
}

/// Elements reserved for a table in a shared buffer.
fn reserved([rows, columns]: [usize; 2]) -> usize {
    (rows * columns).next_multiple_of(APART)
}

/// The table of this shape at element `start` of a shared buffer; advances `start` to the next one.
fn table_at(all: &CubeTensor, start: &mut usize, shape: [usize; 2]) -> CubeTensor {
    let handle = all.handle.clone().offset_start((4 * *start) as u64);
    *start += reserved(shape);
    CubeTensor::new_contiguous(all.client.clone(), all.device.clone(), Shape::from(shape), handle, DType::I32)
}

/// `[rows, 1]` of each of `tables`, given by its ranges, sorted by their first row, and its number of rows: one copy to
/// the device, one buffer and one launch for all.
pub fn runs(tables: &[(Vec<Run>, usize)], device: &Device) -> Option<Vec<Tensor<2, Int>>> {
    let rows = |tables: &[(Vec<Run>, usize)]| tables.iter().map(|(_, rows)| reserved([*rows, 1])).sum::<usize>();
    let moved = |(at, (runs, _)): (usize, &(Vec<Run>, usize))| {
        let first = rows(&tables[..at]);
        runs.iter().map(move |run| Run { to: first + run.to, ..*run }).collect::<Vec<_>>()
    };
    let all: Vec<Run> = tables.iter().enumerate().flat_map(moved).collect();
    let (count, len) = (all.len(), rows(tables));
    if count == 0 || len > i32::MAX as usize {
        return None;
    }
    let column = |of: fn(&Run) -> usize| all.iter().map(move |run| of(run) as i32);
    let values = column(|run| run.to).chain(column(|run| run.from)).chain(column(|run| run.len)).collect();
    let numbers = int(&table(values, [3, count], device))?;
    let out = empty(&numbers, [len], DType::I32);
    launched("runs", permute::runs(&numbers.client, &numbers.handle, &out.handle, [count, len]));
    let mut start = 0;
    Some(tables.iter().map(|(_, rows)| tensor(table_at(&out, &mut start, [*rows, 1]))).collect())
}
