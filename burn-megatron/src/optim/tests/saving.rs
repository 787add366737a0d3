//! Checkpoints between layouts.

use super::*;
use backend_dist::gpu::buffer::Map;

pub(super) type Saved = BTreeMap<(Kind, String), HostTensor>;

/// Global tensors from the slices of all ranks; every element is in exactly one of them.
pub(super) fn collect(slices: impl IntoIterator<Item = Slice>) -> Saved {
    let mut saved = Saved::new();
    for slice in slices {
        let values: Vec<f64> = match slice.dtype {
            safetensors::Dtype::F64 => bytemuck::pod_collect_to_vec(&slice.data),
            safetensors::Dtype::F32 => {
                bytemuck::pod_collect_to_vec::<u8, f32>(&slice.data).into_iter().map(f64::from).collect()
            }
            safetensors::Dtype::BF16 => {
                slice.data.chunks(2).map(|b| half::bf16::from_le_bytes([b[0], b[1]]).to_f64()).collect()
            }
            safetensors::Dtype::U8 => slice.data.iter().map(|code| f64::from(*code)).collect(),
            safetensors::Dtype::I16 => {
                bytemuck::pod_collect_to_vec::<u8, u16>(&slice.data).into_iter().map(f64::from).collect()
            }
            other => panic!("{other}"),
        };
        let shape = slice.global_shape;
        let tensor = saved
            .entry((slice.kind, slice.name))
            .or_insert_with(|| HostTensor { data: vec![f64::NAN; shape.iter().product()], shape: shape.clone() });
        let mut places = vec![0];
        for (range, size) in slice.ranges.iter().zip(&shape) {
            places = places.iter().flat_map(|start| range.clone().map(move |index| start * size + index)).collect();
        }
        assert_eq!(places.len(), values.len());
        for (place, value) in places.into_iter().zip(values) {
            assert!(tensor.data[place].is_nan(), "element {place} is saved twice");
            tensor.data[place] = value;
        }
    }
    assert!(saved.values().all(|tensor| tensor.data.iter().all(|value| !value.is_nan())), "every element is saved");
    // As a checkpoint is read.
    let names: Vec<_> =
        saved.keys().filter(|(kind, _)| *kind == Kind::Remainder).map(|(_, name)| name.clone()).collect();
    for name in names {
        let mut masters = saved.remove(&(Kind::Remainder, name.clone())).expect("its name is there");
        for (master, weight) in masters.data.iter_mut().zip(&saved[&(Kind::Weight, name.clone())].data) {
            let weight = half::bf16::from_f64(*weight).to_bits();
            *master = backend_dist::gpu::buffer::join(weight, *master as u16).into();
        }
        saved.insert((Kind::Master, name), masters);
    }
    for (moment, scales, map) in
        [(Kind::FirstMoment, Kind::FirstScale, Map::Signed), (Kind::SecondMoment, Kind::SecondScale, Map::Unsigned)]
    {
        let names: Vec<_> = saved.keys().filter(|(kind, _)| *kind == scales).map(|(_, name)| name.clone()).collect();
        for name in names {
            let values = &saved[&(moment, name.clone())];
            let (len, shape) = (values.data.len(), values.shape.clone());
            let each = |i: usize, scales: &HostTensor| scales.data[i / (len / scales.data.len())];
            let known = &saved[&(scales, name.clone())];
            let known = HostTensor { data: (0..len).map(|i| each(i, known)).collect(), shape };
            let values = saved.get_mut(&(moment, name.clone())).expect("scales are of a moment");
            for (value, scale) in values.data.iter_mut().zip(&known.data) {
                *value = map.number(*value as u8, *scale as f32).into();
            }
            saved.insert((scales, name), known);
        }
    }
    saved
}

/// Saved after two steps by one layout, read by another, the third step ends with the bits of an uninterrupted run; and
/// what the other layout saves is what it has read.
#[test]
fn any_layout_goes_on_where_any_other_stopped() {
    let case = |tp, dp, zero| Case { tp, dp, zero, ..Case::SINGLE };
    let grouped = |tp, dp, zero| Case { group: Some(2), ..case(tp, dp, zero) };
    let pairs = [
        (Case::SINGLE, case(2, 3, 3)),
        (case(2, 2, 1), Case::SINGLE),
        (case(1, 3, 2), case(2, 2, 0)),
        (case(2, 2, 3), case(1, 4, 1)),
        (case(2, 2, 0), case(1, 2, 3)),
        (grouped(1, 4, 1), case(1, 4, 2)),
        (case(1, 4, 1), grouped(2, 4, 3)),
        (grouped(1, 4, 3), grouped(1, 6, 2)),
    ];
    let narrow = [(states::in_16_bits(), 1), (states::in_8_bits(), 256)];
    for (config, width) in kinds().map(|config| (config, 1)).into_iter().chain(narrow) {
        for dtype in [DType::F64, DType::BF16] {
            for (before, after) in pairs.map(|(a, b)| (Case { width, ..a }, Case { width, ..b })) {
                let mut parts = before.run(|rank| {
                    let mut worker = Worker::<Net>::new(rank, before, &config, dtype);
                    worker.step(0, SAMPLES, exact);
                    worker.step(1, SAMPLES, exact);
                    let saved = worker.save();
                    worker.step(2, SAMPLES, exact);
                    Ok((saved, worker.weights()))
                });
                let saved = collect(parts.iter_mut().flat_map(|(saved, _)| std::mem::take(saved)));
                assert_eq!(saved.contains_key(&(Kind::Master, "q".into())), dtype == DType::BF16);
                let kept: Vec<_> = parts.into_iter().map(|(_, weights)| weights).collect();

                let resumed = after.run(|rank| {
                    let mut worker = Worker::<Net>::new(rank, after, &config, dtype);
                    worker.resume(&saved, 2, dtype);
                    let kinds = [0, 1].map(|bucket| worker.optimizer.kinds(bucket));
                    assert!(
                        kinds.into_iter().flatten().all(|(kind, section)| saved.contains_key(&(kind, section.name)))
                    );
                    let again = worker.save();
                    worker.step(2, SAMPLES, exact);
                    Ok((again, worker.weights()))
                });
                let (again, resumed): (Vec<_>, Vec<_>) = resumed.into_iter().unzip();
                assert_eq!(collect(again.into_iter().flatten()), saved, "{before:?} {after:?} {config:?}");
                assert_eq!(
                    assemble::<Net>(after, &resumed),
                    assemble::<Net>(before, &kept),
                    "{before:?} {after:?} {config:?}"
                );
            }
        }
    }
}

/// Without shards whole sections are saved, and data-parallel ranks share them.
#[test]
fn dp_ranks_share_the_work() {
    let case = Case { tp: 1, dp: 2, zero: 0, ..Case::SINGLE };
    let bytes = case.run(|rank| {
        let mut worker = Worker::<Net>::new(rank, case, &OptimizerConfig::default(), DType::F64);
        worker.step(0, SAMPLES, exact);
        let slices = worker.save();
        let whole =
            |slice: &Slice| slice.ranges.iter().zip(&slice.global_shape).all(|(range, size)| *range == (0..*size));
        assert!(slices.iter().all(whole));
        Ok(slices.iter().map(|slice| slice.data.len()).sum::<usize>())
    });
    assert!(bytes.iter().all(|bytes| *bytes > 1200), "{bytes:?}");
}

#[test]
fn an_error_while_reading_changes_nothing() {
    let step = |rank| {
        let mut worker = Worker::<Net>::new(rank, Case::SINGLE, &OptimizerConfig::default(), DType::F64);
        worker.step(0, SAMPLES, exact);
        let saved = (worker.save(), worker.weights());
        let mut read = |kind: Kind, _: &Section, ranges: &[Range<usize>]| match kind {
            Kind::SecondMoment => Err("no second moment"),
            _ => Ok(vec![9.0; ranges.iter().map(ExactSizeIterator::len).product()].into()),
        };
        let (net, result) = worker.optimizer.restore(1, worker.net, true, &mut read);
        worker.net = net;
        assert_eq!(result, Err("no second moment"));
        assert_eq!((worker.save(), worker.weights()), saved);
        Ok(())
    };
    Case::SINGLE.run(step);
}
