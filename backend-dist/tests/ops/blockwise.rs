//! Weights in few bits: bitsandbytes' own, bit for bit, and linear layers that compute them again in the backward pass.

use crate::compare::{leaf, numbers, values};
use backend_dist::ops::blockwise::{Format, QuantizedWeight, Section, Sizes, fp8, nf4, tables};
use backend_dist::ops::{LinearOptions, Prologue, linear_with};
use burn::tensor::{DType, Device};
use safetensors::SafeTensors;
use std::path::Path;

const ROWS: usize = 100;
const COLUMNS: usize = 192;

/// The matrix of `tests/golden/bitsandbytes`.
fn matrix() -> Vec<f32> {
    let element = |at: u64| {
        let hash = (at * 2_654_435_761 + 12_345) % (1 << 32);
        let uniform = (hash >> 8) as f32 / (1 << 24) as f32;
        (uniform - 0.5) * (0.02 + (at / COLUMNS as u64) as f32 * 0.001)
    };
    (0..(ROWS * COLUMNS) as u64).map(element).collect()
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.chunks_exact(4).map(|bytes| f32::from_le_bytes(bytes.try_into().unwrap())).collect()
}

fn weight(format: Format, dtype: DType) -> QuantizedWeight {
    let (sizes, x) = (Sizes { rows: ROWS, columns: COLUMNS }, matrix());
    let (bytes, scales, section) = match format {
        Format::Nf4 => {
            let nf4::Quantized { codes, amax, nested, offset } = nf4::quantize(&x);
            let (scales, first) = ([tables(), nested].concat(), tables().len());
            let section = Section { amax: codes.len(), scales: first, offset, ..Section::whole(sizes) };
            ([codes, amax].concat(), scales, section)
        }
        Format::Fp8 => {
            let (codes, scales) = fp8::quantize(&x, sizes);
            (codes, scales, Section::whole(sizes))
        }
    };
    QuantizedWeight::new(format, (bytes, scales), vec![section], dtype, &Device::flex())
}

#[test]
fn nf4_is_that_of_bitsandbytes_bit_for_bit() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden/bitsandbytes/nf4.safetensors");
    let file = std::fs::read(path).unwrap();
    let golden = SafeTensors::deserialize(&file).unwrap();
    let bytes = |name: &str| golden.tensor(name).unwrap().data().to_vec();
    assert_eq!(nf4::dynamic_numbers(), floats(&bytes("map")));
    let found = nf4::quantize(&matrix());
    assert_eq!(found.codes, bytes("codes"));
    assert_eq!(found.amax, bytes("amax_codes"));
    assert_eq!((found.nested, vec![found.offset]), (floats(&bytes("nested")), floats(&bytes("offset"))));
    for dtype in [DType::F64, DType::F32] {
        let all = values(weight(Format::Nf4, dtype).value());
        let (head, tail) = (floats(&bytes("dequantized_head")), floats(&bytes("dequantized_tail")));
        let same = |found: &[f64], expected: &[f32]| found.iter().zip(expected).all(|(a, b)| *a == f64::from(*b));
        assert!(same(&all, &head) && same(&all[all.len() - tail.len()..], &tail), "{dtype:?}");
    }
    let few = weight(Format::Nf4, DType::F32);
    assert!((few.bytes() as f64) < 0.53 * (ROWS * COLUMNS) as f64 + 4.0 * tables().len() as f64, "{}", few.bytes());
}

#[test]
fn a_layer_computes_what_it_does_with_the_dequantized_weight() {
    for (format, dtype) in [(Format::Nf4, DType::F64), (Format::Fp8, DType::F32), (Format::Nf4, DType::BF16)] {
        let stored = weight(format, dtype);
        let run = |options: LinearOptions| {
            let x = leaf(&numbers(6 * COLUMNS, 1), dtype, true);
            let w = burn::tensor::Tensor::from_inner(stored.value());
            let input = x.clone().reshape([3, 2, COLUMNS]);
            let y = linear_with(input, Prologue::None, w, None, options);
            let out = values(y.clone());
            let gradients = (y * leaf(&numbers(out.len(), 9), dtype, false).reshape([3, 2, ROWS])).sum().backward();
            (out, values(x.grad(&gradients).unwrap()))
        };
        let saved = run(LinearOptions::default());
        let again = run(LinearOptions { stored: Some(stored.clone()), ..LinearOptions::default() });
        assert_eq!(saved, again, "{format:?} {dtype:?}");
    }
}
