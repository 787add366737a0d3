//! Any box of any tensor, from any slices.

use std::ops::Range;

use layouts::shard::WeightSource;
use proptest::prelude::*;
use safetensors::Dtype;

use super::super::boxes::{self, Flaw};
use super::super::{Checkpoint, Kind, Saver, SaverOptions, Slice};
use super::round_trip::state;

/// A tensor's shape, the borders of a grid over it, and a box to read.
#[derive(Debug, Clone)]
struct Case {
    shape: Vec<usize>,
    borders: Vec<Vec<usize>>,
    wanted: Vec<Range<usize>>,
}

fn dimension() -> impl Strategy<Value = (usize, Vec<usize>, Range<usize>)> {
    (1..9usize).prop_flat_map(|size| {
        let borders = proptest::collection::btree_set(1..=size, 0..4);
        let range = (0..=size, 0..=size).prop_map(|(a, b)| a.min(b)..a.max(b));
        (Just(size), borders, range).prop_map(|(size, mut borders, range)| {
            borders.extend([0, size]);
            (size, borders.into_iter().collect(), range)
        })
    })
}

fn case() -> impl Strategy<Value = Case> {
    proptest::collection::vec(dimension(), 0..=4).prop_map(|dimensions| Case {
        shape: dimensions.iter().map(|(size, ..)| *size).collect(),
        borders: dimensions.iter().map(|(_, borders, _)| borders.clone()).collect(),
        wanted: dimensions.into_iter().map(|(.., range)| range).collect(),
    })
}

/// All boxes of a grid.
fn cells(borders: &[Vec<usize>]) -> Vec<Vec<Range<usize>>> {
    borders.iter().fold(vec![Vec::new()], |cells, borders| {
        let ranges = || borders.windows(2).map(|pair| pair[0]..pair[1]);
        cells.iter().flat_map(|cell| ranges().map(move |range| [&cell[..], &[range]].concat())).collect()
    })
}

/// The values of a box, element by element; a value is its global index.
fn values(shape: &[usize], ranges: &[Range<usize>]) -> Vec<u32> {
    shape.iter().zip(ranges).fold(vec![0], |starts, (size, range)| {
        starts.iter().flat_map(|start| range.clone().map(move |index| start * *size as u32 + index as u32)).collect()
    })
}

fn bytes(values: &[u32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

proptest! {
    #[test]
    fn a_box_is_put_together_from_the_cells_of_any_grid(case in case()) {
        let cells = cells(&case.borders);
        let mut read = vec![0; 4 * boxes::len(&case.wanted)];
        for cell in &cells {
            let from = bytes(&values(&case.shape, cell));
            for run in boxes::runs(cell, &case.wanted, 4) {
                read[run.to..][..run.bytes].copy_from_slice(&from[run.from..][..run.bytes]);
            }
        }
        prop_assert_eq!(read, bytes(&values(&case.shape, &case.wanted)));
    }

    #[test]
    fn cells_cover_a_tensor_and_with_one_changed_they_do_not(case in case(), pick in any::<prop::sample::Index>()) {
        let cells = cells(&case.borders);
        let mut all: Vec<&[Range<usize>]> = cells.iter().map(Vec::as_slice).collect();
        prop_assert_eq!(boxes::check_cover(&case.shape, &all), Ok(()));
        let picked = pick.index(all.len());
        all.push(all[picked]);
        prop_assert_eq!(boxes::check_cover(&case.shape, &all), Err(Flaw::Overlap(picked, all.len() - 1)));
        all.pop();
        all.remove(picked);
        let have = boxes::len(&boxes::whole(&case.shape)) - boxes::len(&cells[picked]);
        prop_assert_eq!(boxes::check_cover(&case.shape, &all), Err(Flaw::Missing(have)));
    }
}

proptest! {
    // Each case waits for the disk.
    #![proptest_config(ProptestConfig::with_cases(32))]

    #[test]
    fn a_checkpoint_returns_any_box_of_tensors_in_any_slices(
        cases in proptest::collection::vec(case(), 1..4),
        writers in 1..4usize,
    ) {
        let folder = tempfile::tempdir().unwrap();
        let saver = Saver::new(folder.path(), writers, SaverOptions::default()).unwrap();
        let mut shards = vec![Vec::new(); writers];
        for (tensor, case) in cases.iter().enumerate() {
            for (cell, ranges) in cells(&case.borders).into_iter().enumerate() {
                shards[cell % writers].push(Slice {
                    kind: Kind::SecondMoment,
                    name: format!("tensor.{tensor}"),
                    global_shape: case.shape.clone(),
                    data: bytes(&values(&case.shape, &ranges)).into(),
                    ranges,
                    dtype: Dtype::U32,
                });
            }
        }
        for (writer, slices) in shards.into_iter().enumerate() {
            saver.submit(writer, slices, &state(1)).unwrap();
        }
        let checkpoint = Checkpoint::open(folder.path()).unwrap();
        for (tensor, case) in cases.iter().enumerate() {
            let name = format!("tensor.{tensor}");
            let read = checkpoint.read(Kind::SecondMoment, &name, &case.shape, &case.wanted).unwrap();
            prop_assert_eq!(read, (Dtype::U32, bytes(&values(&case.shape, &case.wanted))));
        }
    }
}

#[test]
fn weights_come_from_the_most_precise_copy_in_any_float_type() {
    let folder = tempfile::tempdir().unwrap();
    let slice = |kind, name: &str, dtype, data: Vec<u8>| Slice {
        kind,
        name: name.into(),
        global_shape: vec![2],
        ranges: vec![0..2],
        dtype,
        data: data.into(),
    };
    let bf16 = |values: [f32; 2]| values.map(|value| half::bf16::from_f32(value).to_le_bytes()).concat();
    let f16 = |values: [f32; 2]| values.map(|value| half::f16::from_f32(value).to_le_bytes()).concat();
    let slices = vec![
        slice(Kind::Weight, "mixed", Dtype::BF16, bf16([1.0, 2.0])),
        slice(Kind::Master, "mixed", Dtype::F32, [1.001f32, 2.001].map(f32::to_le_bytes).concat()),
        slice(Kind::Weight, "bf16", Dtype::BF16, bf16([-3.0, 0.5])),
        slice(Kind::Weight, "f16", Dtype::F16, f16([-3.0, 0.5])),
        slice(Kind::Weight, "f64", Dtype::F64, [0.1f64, 1e300].map(f64::to_le_bytes).concat()),
        slice(Kind::Weight, "split", Dtype::BF16, bf16([1.0, 2.0])),
        slice(Kind::Remainder, "split", Dtype::I16, vec![1, 0, 0xff, 0xff]),
        slice(Kind::Weight, "half", Dtype::F16, f16([1.0, 2.0])),
        slice(Kind::Remainder, "half", Dtype::I16, vec![0; 4]),
        slice(Kind::Weight, "integers", Dtype::I16, vec![0; 4]),
    ];
    Saver::new(folder.path(), 1, SaverOptions::default()).unwrap().submit(0, slices, &state(1)).unwrap();
    let checkpoint = Checkpoint::open(folder.path()).unwrap();
    let read = |name: &str| WeightSource::read(&checkpoint, name, &[2], &[0..2]);
    assert_eq!(read("mixed").unwrap(), [f64::from(1.001f32), f64::from(2.001f32)]);
    assert_eq!(read("bf16").unwrap(), [-3.0, 0.5]);
    assert_eq!(read("f16").unwrap(), [-3.0, 0.5]);
    assert_eq!(read("f64").unwrap(), [0.1, 1e300]);
    let joined = [0x3f80_0001, 0x3fff_ffff].map(|bits| f64::from(f32::from_bits(bits)));
    assert_eq!(read("split").unwrap(), joined);
    assert_eq!(checkpoint.read(Kind::Master, "split", &[2], &[1..2]).unwrap().0, Dtype::F32);
    let error = read("half").unwrap_err().to_string();
    assert!(error.contains("holds `weight/half` in F16; remainders are of BF16 weights"), "{error}");
    let error = read("integers").unwrap_err().to_string();
    assert!(error.contains("weight/integers") && error.contains("I16"), "{error}");
}
