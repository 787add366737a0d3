//! Weights and states of a bucket from boxes of global tensors, of a checkpoint of any layout.

use super::box_runs::box_runs;
use super::bucket::{Bucket, Hosted};
use super::flat::wide;
use super::layout::{Layout, Unit, overlap};
use super::modules::map;
use super::optimizer::Optimizer;
use crate::checkpoint::Kind;
use backend_dist::shard::{Element, HostFloats, Section, element, into_data};
use burn::module::Module;
use burn::tensor::{DType, Tensor};
use std::ops::Range;

/// Reads a box of a global tensor, given the section that it is part of, row-major.
pub type ReadBox<'a, E> = dyn FnMut(Kind, &Section, &[Range<usize>]) -> Result<HostFloats, E> + 'a;

impl Optimizer {
    /// The states that [`Optimizer::restore`] asks for: kind and section, without weights.
    pub fn kinds(&self, bucket: usize) -> Vec<(Kind, Section)> {
        let (of_matrices, of_others) = self.config.moments();
        let moments = |unit: &Unit| if unit.matrix { of_matrices } else { of_others };
        let kinds = |unit: &Unit| {
            let section = unit.section.clone();
            let kinds = [Kind::FirstMoment, Kind::SecondMoment].into_iter().take(moments(unit));
            let average = self.average.map(|_| Kind::Average);
            kinds.chain(average).map(move |kind| (kind, section.clone())).collect::<Vec<_>>()
        };
        self.buckets[bucket].layout.units.iter().flat_map(kinds).collect()
    }

    /// Takes a bucket's weights, and its moments if `moments` says so, from `read`, which is asked for boxes of
    /// [`Kind::Weight`] (to give the most precise weights there are), [`Kind::FirstMoment`], [`Kind::SecondMoment`] and
    /// [`Kind::Average`]; where moments are in 8 bits also of their scales, of each element, to give zeros where there are
    /// none.
    /// The module's weights are replaced; under ZeRO 3 the module is left as it is until the next
    /// [`Optimizer::gather`]. All data-parallel ranks call it in the same order of buckets.
    ///
    /// # Errors
    /// The first of `read`; then nothing has changed.
    pub fn restore<M: Module, E>(
        &mut self,
        bucket: usize,
        model: M,
        moments: bool,
        read: &mut ReadBox<'_, E>,
    ) -> (M, Result<(), E>) {
        self.host.protect();
        self.forget_gathered();
        let bucket = &mut self.buckets[bucket];
        let values = match read_bucket(bucket, moments, read) {
            Ok(values) => values,
            Err(error) => return (model, Err(error)),
        };
        let Values { weights, mut first, mut second, average, mut moments } = values;
        let mut hosted = bucket.hosted.as_ref().zip(self.offload.as_mut());
        if let Some((hosted, offload)) = &mut hosted {
            for (kind, parts) in [(Kind::FirstMoment, &mut first), (Kind::SecondMoment, &mut second)] {
                parts.drain(..).for_each(|(at, values)| hosted.put_floats(offload, kind, at, values));
            }
            hosted.put_moments(offload, std::mem::take(&mut moments), &self.device);
        }
        for (blocks, (values, scales)) in bucket.blocks.iter_mut().flatten().zip(moments) {
            blocks.set(values.into_f32(), &scales.into_f32(), &self.device);
        }
        if let Some(kept) = &mut bucket.values {
            for (range, values) in &weights {
                let own = overlap(range, &bucket.region);
                if !own.is_empty() {
                    let values = values.part(own.start - range.start..own.end - range.start);
                    kept.put_floats(own.start - bucket.region.start, values);
                }
            }
        }
        let states = [(&mut bucket.first, first), (&mut bucket.second, second), (&mut bucket.average, average)];
        for (buffer, parts) in states {
            for (at, values) in parts {
                buffer.as_mut().expect("only states that are kept were read").put_floats(at, values);
            }
        }
        let hosted = hosted.filter(|(hosted, _)| hosted.has_masters());
        let masters = || {
            let mut masters = HostFloats::zeros(Element::F32, bucket.region.len());
            for (range, values) in &weights {
                let own = overlap(range, &bucket.region);
                if !own.is_empty() {
                    let from = own.start - range.start..own.end - range.start;
                    masters.put(own.start - bucket.region.start, values, from);
                }
            }
            masters
        };
        let is_hosted = hosted.is_some();
        if let Some((hosted, offload)) = hosted {
            hosted.put_masters(offload, masters(), bucket.weights.as_ref(), &self.device);
        }
        if let Some(buffer) = bucket.weights.as_ref().filter(|_| bucket.split || is_hosted) {
            if !is_hosted {
                buffer.set_masters(masters(), &self.device);
            }
            if matches!(bucket.sharding.zero, 1 | 2) {
                buffer.collective(&bucket.sharding.shards);
            }
            return (model, Ok(()));
        }
        // As after a step.
        if let (Some(buffer), Some(values)) = (&bucket.weights, &bucket.values) {
            buffer.set_own(values);
            if matches!(bucket.sharding.zero, 1 | 2) {
                buffer.collective(&bucket.sharding.shards);
            }
            return (model, Ok(()));
        }
        if bucket.sharding.zero == 3 {
            return (model, Ok(()));
        }
        let model = map(model, &bucket.layout, |slot, old| {
            let dtype = if bucket.split { DType::F32 } else { bucket.dtype };
            let values = into_data(slot_values(&bucket.layout, slot, &weights, element(dtype)));
            bucket.narrow(Tensor::from_data(values, (&old.device(), dtype)))
        });
        (model, Ok(()))
    }
}

/// What was read of a bucket, in the type that sums are kept in.
#[derive(Default)]
struct Values {
    /// Where this rank has whole weights on the host of all of the bucket, else of the region, by elements of the bucket.
    weights: Vec<(Range<usize>, HostFloats)>,
    /// By start in the buffer.
    first: Vec<(usize, HostFloats)>,
    second: Vec<(usize, HostFloats)>,
    average: Vec<(usize, HostFloats)>,
    /// In 8 bits: values and scales of all of the region.
    moments: Vec<(HostFloats, HostFloats)>,
}

fn read_bucket<E>(bucket: &Bucket, moments: bool, read: &mut ReadBox<'_, E>) -> Result<Values, E> {
    let (layout, dtype) = (&bucket.layout, element(wide(bucket.dtype)));
    let whole;
    // Data-parallel ranks with GPUs gather each other's regions.
    let parts = if bucket.sharding.zero == 3 || bucket.weights.is_some() {
        &bucket.parts
    } else {
        whole = layout.parts(&(0..layout.len));
        &whole
    };
    let mut values = Values::default();
    for part in parts {
        let weights = read_part(Kind::Weight, &layout.units[part.unit], &part.range, dtype, read)?;
        values.weights.push((part.range.clone(), weights));
    }
    for part in bucket.parts.iter().filter(|_| bucket.average.is_some()) {
        let average = read_part(Kind::Average, &layout.units[part.unit], &part.range, dtype, read)?;
        values.average.push((part.at, average));
    }
    if !moments {
        return Ok(values);
    }
    let in_blocks = bucket.blocks.is_some() || bucket.hosted.as_ref().is_some_and(Hosted::in_blocks);
    for (part, second_at) in bucket.parts.iter().zip(&bucket.second_at) {
        let unit = &layout.units[part.unit];
        if in_blocks {
            continue;
        }
        if bucket.first.is_some() || bucket.hosted.is_some() {
            values.first.push((part.at, read_part(Kind::FirstMoment, unit, &part.range, dtype, read)?));
        }
        if let Some(at) = second_at {
            values.second.push((*at, read_part(Kind::SecondMoment, unit, &part.range, dtype, read)?));
        }
    }
    for kind in [Kind::FirstMoment, Kind::SecondMoment].into_iter().filter(|_| in_blocks) {
        let of_scales = kind.scales().expect("moments have scales");
        let region = || HostFloats::zeros(dtype, bucket.region.len());
        let (mut moment, mut scales) = (region(), region());
        for part in &bucket.parts {
            for (kind, to) in [(kind, &mut moment), (of_scales, &mut scales)] {
                let found = read_part(kind, &layout.units[part.unit], &part.range, dtype, read)?;
                to.put(part.at, &found, 0..found.len());
            }
        }
        values.moments.push((moment, scales));
    }
    Ok(values)
}

/// The values of a part of a unit, padding included.
fn read_part<E>(
    kind: Kind,
    unit: &Unit,
    range: &Range<usize>,
    dtype: Element,
    read: &mut ReadBox<'_, E>,
) -> Result<HostFloats, E> {
    let start = range.start - unit.range.start;
    let boxes = box_runs(&unit.section, start..range.end - unit.range.start);
    if let [piece] = &boxes[..]
        && piece.runs == [start..start + range.len()]
    {
        return Ok(read(kind, &unit.section, &piece.ranges)?.convert(dtype));
    }
    let mut values = HostFloats::zeros(dtype, range.len());
    for piece in boxes {
        let inside = read(kind, &unit.section, &piece.ranges)?.convert(dtype);
        let mut taken = 0;
        for run in piece.runs {
            values.put(run.start - start, &inside, taken..taken + run.len());
            taken += run.len();
        }
    }
    Ok(values)
}

/// The values of one parameter of the module, in its type.
fn slot_values(layout: &Layout, slot: usize, weights: &[(Range<usize>, HostFloats)], dtype: Element) -> HostFloats {
    let slot = &layout.slots[slot].range;
    let inside = || weights.iter().filter(|(range, _)| slot.start <= range.start && range.end <= slot.end);
    let wide = inside().next().map_or(dtype, |(_, values)| values.element());
    let mut all = HostFloats::zeros(wide, slot.len());
    for (range, values) in inside() {
        all.put(range.start - slot.start, values, 0..range.len());
    }
    all.convert(dtype)
}
