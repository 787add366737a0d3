//! Matrices in few bits.
use super::{Element, download, poisoned, random, report, upload};
use cubecl::prelude::*;
use kernels_cubecl::blockwise::{self, Format, Section, Sizes, kernel, nf4, tables};

/// Two sections in shared buffers, as the projections of attention are.
pub fn dequantize<E: Element>(client: &Client, format: Format) -> usize {
    let (mut bytes, mut scales, mut sections) = (Vec::new(), Vec::new(), Vec::new());
    if format == Format::Nf4 {
        scales = tables();
    }
    for (rows, columns, seed) in [(40, 128, 1), (9, 128, 2)] {
        let x: Vec<f32> = random(rows * columns, seed).iter().map(|x| *x as f32).collect();
        let sizes = Sizes { rows, columns };
        let mut section = Section { codes: bytes.len(), scales: scales.len(), ..Section::whole(sizes) };
        match format {
            Format::Nf4 => {
                let found = nf4::quantize(&x);
                section = Section { amax: section.codes + found.codes.len(), offset: found.offset, ..section };
                bytes.extend(found.codes.into_iter().chain(found.amax));
                scales.extend(found.nested);
            }
            Format::Fp8 => {
                let (codes, own) = blockwise::fp8::quantize(&x, sizes);
                bytes.extend(codes);
                scales.extend(own);
            }
        }
        bytes.resize(bytes.len().next_multiple_of(4), 0);
        sections.push(section);
    }
    let total = sections.iter().map(|section| section.sizes.rows * section.sizes.columns).sum();
    let out = poisoned::<E>(client, total);
    let given = client.create_from_slice(&bytes);
    let numbers = upload::<f32>(client, &scales.iter().map(|x| f64::from(*x)).collect::<Vec<_>>());
    let (mut first, mut expected) = (0, vec![0.0f32; total]);
    for section in &sections {
        let Sizes { rows, columns } = section.sizes;
        kernel::dequantize::<E>(client, format, (&given, &numbers), section, (&out, first)).expect("legal");
        let part = &mut expected[first..first + rows * columns];
        blockwise::dequantize(format, &bytes, &scales, section, 0..rows, part);
        first += rows * columns;
    }
    let expected: Vec<f64> = expected.into_iter().map(f64::from).collect();
    report(&format!("{format:?} to {}", E::NAME), &download::<E>(client, &out), &expected, E::LIMIT)
}
