//! Weights and states of a bucket as boxes of global tensors, for a checkpoint.

use super::blocks::scales_section;
use super::box_runs::box_runs;
use super::bucket::Bucket;
use super::flat::{Flat, wide};
use super::gpu::Weights;
use super::host::HostReserve;
use super::layout::{Part, Unit};
use super::modules::visit;
use super::optimizer::Optimizer;
use super::slices::{cut, read, read_blocks, stored};
use super::states::StateDtype;
use crate::checkpoint::{self, Kind, Slice, SliceData};
use backend_dist::gpu::buffer::{BLOCK, Buffer};
use backend_dist::gpu::host_copy::{HostBytes, HostCopy, held};
use burn::module::Module;
use burn::tensor::DType;
use std::io;
use std::ops::Range;
use std::sync::Arc;

impl Optimizer {
    /// Reserves page-locked host memory on the GPU of this index for what [`snapshot`](Self::snapshot) gives of all
    /// buckets, while the caller continues.
    ///
    /// # Errors
    /// If the system gives no more threads.
    pub fn reserve_host_memory(&mut self, gpu: usize) -> io::Result<()> {
        let bytes = self.copied_bytes();
        if bytes > 0 {
            self.host = HostReserve::begin(gpu, bytes)?;
        }
        Ok(())
    }

    /// Bytes of page-locked host memory that copies of all buckets take; zero on CPUs.
    pub fn copied_bytes(&self) -> usize {
        let of = |bucket| self.copies(bucket).unwrap_or_default();
        let sources = (0..self.buckets.len()).flat_map(of);
        sources.map(|source| held(source.buffer.bytes())).sum()
    }

    /// A copy of GPU memory to the host, to be made while training continues: for [`snapshot`](Self::snapshot). `None`
    /// on CPUs, without host memory, and while bytes of the copy before are held.
    pub fn begin_copy(&self) -> Option<HostCopy<'_>> {
        self.host.memory()?.begin()
    }

    /// Why there is no page-locked host memory although it was asked for, once.
    pub fn take_host_trouble(&self) -> Option<String> {
        self.host.take_trouble()
    }

    /// Bytes of what [`snapshot`](Self::snapshot) gives of all buckets on the ranks that hold the same parameters: on the
    /// first of them, zero on the others.
    pub fn snapshot_bytes(&self) -> u64 {
        let states = self.config.states();
        let (of_matrices, of_others) = self.config.moments();
        let of_bucket = |bucket: &Bucket| {
            let (dtype, wide) = (bucket.dtype, wide(bucket.dtype));
            let main_params = match (wide != dtype, bucket.split) {
                (false, _) => 0,
                (true, false) => wide.size(),
                (true, true) => states.main_params.bytes(),
            };
            let average = self.average.map_or(0, |_| wide.size());
            let of_unit = |unit: &Unit| {
                let count = if unit.matrix { of_matrices } else { of_others };
                // A block has one scale where it is whole, else one for each element.
                let is_whole = scales_section(&unit.section).is_some() && unit.range.start.is_multiple_of(BLOCK);
                let moment = |state: StateDtype| match states.in_blocks(dtype) {
                    true if is_whole => state.block_bytes(),
                    true => BLOCK * (1 + size_of::<f32>()),
                    false => BLOCK * state.with(dtype).size(),
                };
                let moments: usize = [states.exp_avg, states.exp_avg_sq].into_iter().take(count).map(moment).sum();
                let elements: usize = unit.section.ranges().iter().map(ExactSizeIterator::len).product();
                (elements as u64 * (BLOCK * (dtype.size() + main_params + average) + moments) as u64)
                    .div_ceil(BLOCK as u64)
            };
            bucket.layout.units.iter().filter(|unit| unit.section.is_owned()).map(of_unit).sum::<u64>()
        };
        let is_first = |bucket: &&Bucket| bucket.sharding.shards.rank() + bucket.sharding.same_shard.rank() == 0;
        self.buckets.iter().filter(is_first).map(of_bucket).sum()
    }

    /// This rank's share of a bucket's weights and states: every element of the model is on exactly one rank of the
    /// world. The ranks that hold the same shard, which under ZeRO 0 is everything, divide its sections among themselves. Under ZeRO 3
    /// `model` is not looked at. With `copy` the bytes arrive later.
    pub fn snapshot<M: Module>(&self, bucket: usize, model: &M, copy: Option<&mut HostCopy<'_>>) -> Vec<Slice> {
        self.ready(bucket);
        if let Some(slices) = copy.and_then(|copy| self.copied(bucket, copy)) {
            return slices;
        }
        let writes = self.writes(bucket);
        let bucket = &self.buckets[bucket];
        let mut slices = Vec::new();
        let parts = || bucket.parts.iter().enumerate().filter(|(index, _)| writes[*index]);
        let unit = |part: &Part| &bucket.layout.units[part.unit];

        let joined = bucket.weights.as_ref().and_then(Weights::masters);
        let values = joined.as_ref().or(bucket.values.as_ref());
        if bucket.sharding.zero == 3 {
            for (_, part) in parts() {
                let here = part.at..part.at + part.range.len();
                let weights = match (values, &bucket.weights) {
                    (Some(values), _) => bucket.narrow(values.part(here)),
                    (None, weights) => weights.as_ref().expect("masters in host memory").own().part(here).tensor(),
                };
                read(&mut slices, Kind::Weight, unit(part), &part.range, weights);
            }
        } else {
            visit(model, &bucket.layout, |slot, param| {
                let start = bucket.layout.slots[slot].range.start;
                for (_, part) in parts().filter(|(_, part)| unit(part).slot == slot) {
                    let weights = param.clone().slice([part.range.start - start..part.range.end - start]);
                    read(&mut slices, Kind::Weight, unit(part), &part.range, weights);
                }
            });
        }
        let narrow = wide(bucket.dtype) != bucket.dtype;
        let master = values.filter(|_| narrow);
        let of_masters = if bucket.split { Kind::Remainder } else { Kind::Master };
        let (first, second) = (bucket.first.as_ref(), bucket.second.as_ref());
        let states = [(Kind::FirstMoment, first), (Kind::SecondMoment, second), (of_masters, master)];
        for (kind, buffer) in states.into_iter().chain([(Kind::Average, bucket.average.as_ref())]) {
            for (index, part) in parts() {
                let at = if kind == Kind::SecondMoment { bucket.second_at[index] } else { Some(part.at) };
                if let (Some(buffer), Some(at)) = (buffer, at) {
                    read(&mut slices, kind, unit(part), &part.range, buffer.part(at..at + part.range.len()));
                }
            }
        }
        let kinds = [Kind::FirstMoment, Kind::SecondMoment];
        for (blocks, kind) in bucket.blocks.iter().flatten().zip(kinds) {
            read_blocks(&mut slices, kind, blocks, parts().map(|(_, part)| (unit(part), part)));
        }
        if let (Some(hosted), Some(offload)) = (&bucket.hosted, &self.offload) {
            hosted.read(&mut slices, bucket, offload, parts().map(|(_, part)| part));
        }
        slices
    }

    /// The slices of a bucket on a GPU, as parts of a copy; `None` where not all of them can be.
    fn copied(&self, bucket: usize, copy: &mut HostCopy<'_>) -> Option<Vec<Slice>> {
        let mut slices = Vec::new();
        for Source { kind, unit, range, dtype, buffer } in self.copies(bucket)? {
            let (bytes, width) = (copy.add(&buffer)?, dtype.size());
            cut(&mut slices, kind, unit, &range, stored(dtype), |runs| {
                SliceData::Copied(Arc::new(Copied(bytes.part(runs[0].start * width..runs[0].end * width))))
            });
        }
        Some(slices)
    }

    /// What this rank writes of a bucket on a GPU; `None` on CPUs, where padding is between the elements of a slice, and
    /// where master weights are put together first, moments are in 8 bits, or states are in host memory.
    fn copies(&self, bucket: usize) -> Option<Vec<Source<'_>>> {
        let writes = self.writes(bucket);
        let bucket = &self.buckets[bucket];
        let is_plain = !bucket.split && bucket.blocks.is_none() && bucket.hosted.is_none();
        let own = bucket.weights.as_ref().filter(|_| is_plain)?.own();
        let narrow = wide(bucket.dtype) != bucket.dtype;
        let kept = |flat: &'_ Option<Flat>| flat.as_ref().map(|flat| (flat.buffer().cloned(), flat.dtype()));
        let mut sources = Vec::new();
        for (index, part) in bucket.parts.iter().enumerate().filter(|(index, _)| writes[*index]) {
            let (unit, range) = (&bucket.layout.units[part.unit], part.range.clone());
            let start = range.start - unit.range.start;
            if box_runs(&unit.section, start..start + range.len()).iter().any(|piece| piece.runs.len() > 1) {
                return None;
            }
            let mut add = |kind, dtype, buffer: &Buffer, at: usize| {
                let (range, buffer) = (range.clone(), buffer.part(at..at + range.len()));
                sources.push(Source { kind, unit, range, dtype, buffer });
            };
            add(Kind::Weight, bucket.dtype, own, part.at);
            for (kind, flat, at) in [
                (Kind::FirstMoment, kept(&bucket.first), Some(part.at)),
                (Kind::SecondMoment, kept(&bucket.second), bucket.second_at[index]),
                (Kind::Master, kept(&bucket.values).filter(|_| narrow), Some(part.at)),
                (Kind::Average, kept(&bucket.average), Some(part.at)),
            ] {
                if let (Some((buffer, dtype)), Some(at)) = (flat, at) {
                    add(kind, dtype, &buffer?, at);
                }
            }
        }
        Some(sources)
    }

    /// By part of the bucket, whether this rank writes it.
    fn writes(&self, bucket: usize) -> Vec<bool> {
        let shares = &self.buckets[bucket];
        // To the rank with the fewest elements so far, over this and all buckets before of the same ranks.
        let (grid, same_shard) = (shares.spec.grid(), &shares.sharding.same_shard);
        let mut load = vec![0usize; same_shard.size()];
        let mut takes = |bucket: &Bucket, part: &Part| {
            let least = (0..load.len()).min_by_key(|&rank| load[rank]).expect("this rank is one of them");
            let is_owned = bucket.layout.units[part.unit].section.is_owned();
            if is_owned {
                load[least] += part.range.len();
            }
            is_owned && least == same_shard.rank()
        };
        for bucket in self.buckets[..bucket].iter().filter(|bucket| bucket.spec.grid() == grid) {
            bucket.parts.iter().for_each(|part| _ = takes(bucket, part));
        }
        shares.parts.iter().map(|part| takes(shares, part)).collect()
    }
}

/// Values of a part of a unit in GPU memory.
struct Source<'a> {
    kind: Kind,
    unit: &'a Unit,
    range: Range<usize>,
    dtype: DType,
    buffer: Buffer,
}

/// Bytes of a copy of GPU memory.
#[derive(Debug)]
struct Copied(HostBytes);

impl checkpoint::Copied for Copied {
    fn count(&self) -> usize {
        self.0.len()
    }

    fn wait(&self) -> Result<(), String> {
        self.0.wait()
    }

    fn bytes(&self) -> &[u8] {
        self.0.bytes()
    }
}
