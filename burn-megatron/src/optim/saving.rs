//! Weights and states of a bucket as boxes of global tensors: out to a checkpoint, and in from one of any layout.

use super::box_runs::box_runs;
use super::bucket::Bucket;
use super::flat::wide;
use super::gpu::Weights;
use super::layout::{Part, Unit};
use super::modules::{map, visit};
use super::optimizer::Optimizer;
use super::states::weight_of;
use crate::checkpoint::{Kind, Slice};
use backend_dist::buffer;
use backend_dist::shard::Section;
use burn::module::Module;
use burn::tensor::{DType, Tensor, TensorData};
use safetensors::Dtype;
use std::ops::Range;

/// Reads a box of a global tensor, given the section that it is part of, row-major.
pub type ReadBox<'a, E> = dyn FnMut(Kind, &Section, &[Range<usize>]) -> Result<Vec<f64>, E> + 'a;

impl Optimizer {
    /// This rank's share of a bucket's weights and states: every element of the model is on exactly one rank of the
    /// world. Under ZeRO 0 the data-parallel ranks divide the sections among themselves, else each writes its shard. Under ZeRO 3
    /// `model` is not looked at.
    pub fn snapshot<M: Module>(&self, bucket: usize, model: &M) -> Vec<Slice> {
        self.ready(bucket);
        let writes = self.writes(bucket);
        let bucket = &self.buckets[bucket];
        let mut slices = Vec::new();
        let parts = || bucket.parts.iter().enumerate().filter(|(index, _)| writes[*index]);
        let unit = |part: &Part| &bucket.layout.units[part.unit];

        let joined = bucket.weights.as_ref().and_then(Weights::masters);
        let values = joined.as_ref().or(bucket.values.as_ref());
        if bucket.zero == 3 {
            let values = values.expect("`shard` has taken the weights over");
            for (_, part) in parts() {
                let weights = bucket.narrow(values.part(part.at..part.at + part.range.len()));
                cut(&mut slices, Kind::Weight, unit(part), &part.range, weights);
            }
        } else {
            visit(model, &bucket.layout, |slot, param| {
                let start = bucket.layout.slots[slot].range.start;
                for (_, part) in parts().filter(|(_, part)| unit(part).slot == slot) {
                    let weights = param.clone().slice([part.range.start - start..part.range.end - start]);
                    cut(&mut slices, Kind::Weight, unit(part), &part.range, weights);
                }
            });
        }
        let narrow = wide(bucket.dtype) != bucket.dtype;
        let master = values.filter(|_| narrow);
        let of_masters = if bucket.split { Kind::Remainder } else { Kind::Master };
        let (first, second) = (bucket.first.as_ref(), bucket.second.as_ref());
        for (kind, buffer) in [(Kind::FirstMoment, first), (Kind::SecondMoment, second), (of_masters, master)] {
            for (index, part) in parts() {
                let at = if kind == Kind::SecondMoment { bucket.second_at[index] } else { Some(part.at) };
                if let (Some(buffer), Some(at)) = (buffer, at) {
                    cut(&mut slices, kind, unit(part), &part.range, buffer.part(at..at + part.range.len()));
                }
            }
        }
        slices
    }

    /// By part of the bucket, whether this rank writes it.
    fn writes(&self, bucket: usize) -> Vec<bool> {
        let shares = &self.buckets[bucket];
        let owned = |part: &Part| shares.layout.units[part.unit].section.is_owned();
        if shares.zero > 0 {
            return shares.parts.iter().map(owned).collect();
        }
        // To the data-parallel rank with the fewest elements so far, over this and all buckets before with the same data-parallel ranks.
        let (grid, dp_ranks) = (shares.spec.grid(), &shares.dp_ranks);
        let mut load = vec![0usize; dp_ranks.size()];
        let mut takes = |unit: &Unit| {
            let least = (0..load.len()).min_by_key(|&dp_rank| load[dp_rank]).expect("there is a data-parallel rank");
            if unit.section.is_owned() {
                load[least] += unit.range.len();
            }
            unit.section.is_owned() && least == dp_ranks.rank()
        };
        let before = self.buckets[..bucket].iter().filter(|bucket| bucket.spec.grid() == grid);
        before.flat_map(|bucket| &bucket.layout.units).for_each(|unit| {
            takes(unit);
        });
        // Without shards the parts are the units.
        shares.layout.units.iter().map(takes).collect()
    }

    /// The states that [`Optimizer::restore`] asks for: kind and section, without weights.
    pub fn kinds(&self, bucket: usize) -> Vec<(Kind, Section)> {
        let (of_matrices, of_others) = self.config.moments();
        let moments = |unit: &Unit| if unit.matrix { of_matrices } else { of_others };
        let kinds = |unit: &Unit| {
            let section = unit.section.clone();
            let kinds = [Kind::FirstMoment, Kind::SecondMoment].into_iter().take(moments(unit));
            kinds.map(move |kind| (kind, section.clone())).collect::<Vec<_>>()
        };
        self.buckets[bucket].layout.units.iter().flat_map(kinds).collect()
    }

    /// Takes a bucket's weights, and its moments if `moments` says so, from `read`, which is asked for boxes of
    /// [`Kind::Weight`] (to give the most precise weights there are), [`Kind::FirstMoment`] and [`Kind::SecondMoment`].
    /// The module's weights are replaced; under ZeRO 3 the module is left as it is until the next
    /// [`Optimizer::gather`].
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
        self.forget_gathered();
        let bucket = &mut self.buckets[bucket];
        let values = match read_bucket(bucket, moments, read) {
            Ok(values) => values,
            Err(error) => return (model, Err(error)),
        };
        let Values { mut weights, first, second } = values;
        if let Some(kept) = &mut bucket.values {
            kept.put_values(0, weights[bucket.region.clone()].to_vec());
        }
        if let Some(weights_there) = &bucket.weights {
            weights_there.set_masters(weights[bucket.region.clone()].to_vec(), &self.device);
        }
        if bucket.split {
            weights.iter_mut().for_each(|weight| *weight = weight_of(*weight as f32).to_f64());
        }
        for (buffer, parts) in [(&mut bucket.first, first), (&mut bucket.second, second)] {
            for (at, values) in parts {
                buffer.as_mut().expect("only moments that are kept were read").put_values(at, values);
            }
        }
        if bucket.zero == 3 {
            if let (Some(weights), Some(values)) = (&bucket.weights, &bucket.values) {
                weights.set_own(values);
            }
            return (model, Ok(()));
        }
        if let Some(buffer) = &bucket.weights {
            let data = TensorData::new(weights, [bucket.layout.len]);
            buffer.put(0, Tensor::from_data(data, (&self.device, bucket.dtype)));
            return (model, Ok(()));
        }
        let model = map(model, &bucket.layout, |slot, old| {
            let values = weights[bucket.layout.slots[slot].range.clone()].to_vec();
            let len = values.len();
            Tensor::from_data(TensorData::new(values, [len]), (&old.device(), old.dtype()))
        });
        (model, Ok(()))
    }
}

/// Adds the boxes of a part of a unit, given the part's values; of remainders the masters'.
fn cut(slices: &mut Vec<Slice>, kind: Kind, unit: &Unit, range: &Range<usize>, values: Tensor<1>) {
    let data = values.into_data();
    let remainders: Vec<u8>;
    let (dtype, width, bytes): (Dtype, usize, &[u8]) = if kind == Kind::Remainder {
        remainders = data.iter::<f32>().flat_map(|master| buffer::split(master).1.to_le_bytes()).collect();
        (Dtype::I16, 2, &remainders)
    } else {
        (stored(data.dtype()), data.dtype().size(), data.bytes())
    };
    let start = range.start - unit.range.start;
    for piece in box_runs(&unit.section, start..range.end - unit.range.start) {
        let runs = piece.runs.iter().map(|run| &bytes[(run.start - start) * width..(run.end - start) * width]);
        slices.push(Slice {
            kind,
            name: unit.section.name.clone(),
            global_shape: unit.section.global_shape.clone(),
            ranges: piece.ranges,
            dtype,
            data: runs.collect::<Vec<_>>().concat(),
        });
    }
}

/// The type's name in a safetensors file.
fn stored(dtype: DType) -> Dtype {
    match dtype {
        DType::F64 => Dtype::F64,
        DType::F32 | DType::Flex32 => Dtype::F32,
        DType::F16 => Dtype::F16,
        DType::BF16 => Dtype::BF16,
        other => unreachable!("parameters are floats, not {other:?}"),
    }
}

/// What was read of a bucket.
struct Values {
    /// The whole bucket, or under ZeRO 3 only the region's elements of it; the rest is zero.
    weights: Vec<f64>,
    /// By start in the buffer.
    first: Vec<(usize, Vec<f64>)>,
    second: Vec<(usize, Vec<f64>)>,
}

fn read_bucket<E>(bucket: &Bucket, moments: bool, read: &mut ReadBox<'_, E>) -> Result<Values, E> {
    let layout = &bucket.layout;
    let whole;
    let parts = if bucket.zero == 3 {
        &bucket.parts
    } else {
        whole = layout.parts(&(0..layout.len));
        &whole
    };
    let mut values = Values { weights: vec![0.0; layout.len], first: Vec::new(), second: Vec::new() };
    for part in parts {
        let weights = read_part(Kind::Weight, &layout.units[part.unit], &part.range, read)?;
        values.weights[part.range.clone()].copy_from_slice(&weights);
    }
    if !moments {
        return Ok(values);
    }
    for (part, second_at) in bucket.parts.iter().zip(&bucket.second_at) {
        let unit = &layout.units[part.unit];
        if bucket.first.is_some() {
            values.first.push((part.at, read_part(Kind::FirstMoment, unit, &part.range, read)?));
        }
        if let Some(at) = second_at {
            values.second.push((*at, read_part(Kind::SecondMoment, unit, &part.range, read)?));
        }
    }
    Ok(values)
}

/// The values of a part of a unit, padding included.
fn read_part<E>(kind: Kind, unit: &Unit, range: &Range<usize>, read: &mut ReadBox<'_, E>) -> Result<Vec<f64>, E> {
    let start = range.start - unit.range.start;
    let mut values = vec![0.0; range.len()];
    for piece in box_runs(&unit.section, start..range.end - unit.range.start) {
        let inside = read(kind, &unit.section, &piece.ranges)?;
        let mut rest = inside.as_slice();
        for run in piece.runs {
            let (part, tail) = rest.split_at(run.len());
            values[run.start - start..run.end - start].copy_from_slice(part);
            rest = tail;
        }
    }
    Ok(values)
}
