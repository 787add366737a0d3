//! The causal convolution.
use super::{Element, download, poisoned, random, report, upload};
use cubecl::prelude::*;
use kernels_cubecl::pointwise::convolution::{self, ConvolutionShape, Inputs};

/// How many positions of the same document are in front of each position: `[seq, samples]`, documents of changing
/// lengths.
pub fn ages(seq: usize, samples: usize) -> Vec<f64> {
    let mut ages = vec![0.0; seq * samples];
    for sample in 0..samples {
        let mut age = 0;
        for at in 0..seq {
            // Lengths 1, 5, 9, ... and for other samples 2, 6, ..
            age = if at > 0 && (at + sample) % (4 * (at / 7) + 5) == 0 { 0 } else { age + usize::from(at > 0) };
            ages[at * samples + sample] = age as f64;
        }
    }
    ages
}

pub fn causal_convolution<E: Element>(client: &Client, shape: ConvolutionShape, biased: bool, divided: bool) -> usize {
    let ConvolutionShape { seq, samples, features, kernel } = shape;
    let (len, row) = (seq * samples * features, samples * features);
    let [x, w, bias, dy] = [(len, 1), (features * kernel, 2), (features, 3), (len, 4)].map(|(n, s)| random(n, s));
    let age = if divided { ages(seq, samples) } else { (0..seq * samples).map(|i| (i / samples) as f64).collect() };
    let (mut y, mut dx) = (vec![0.0; len], vec![0.0; len]);
    let (mut dw, mut db) = (vec![0.0; features * kernel], vec![0.0; features]);
    for at in 0..len {
        let (c, reach) = (at % features, (age[at / features] as usize).min(kernel - 1));
        let z = if biased { bias[c] } else { 0.0 };
        let z = z + (0..=reach).map(|d| w[c * kernel + kernel - 1 - d] * x[at - d * row]).sum::<f64>();
        let s = 1.0 / (1.0 + (-z).exp());
        let slope = dy[at] * s * (1.0 + z * (1.0 - s));
        y[at] = z * s;
        db[c] += slope;
        for d in 0..=reach {
            dx[at - d * row] += slope * w[c * kernel + kernel - 1 - d];
            dw[c * kernel + kernel - 1 - d] += slope * x[at - d * row];
        }
    }
    let [x, w, bias, dy] = [x, w, bias, dy].map(|values| upload::<E>(client, &values));
    let (out, age) = (poisoned::<E>(client, len), upload::<f32>(client, &age));
    let [x_gradient, sums] = [poisoned::<E>(client, len), poisoned::<f32>(client, features * (kernel + 1))];
    let inputs = Inputs { x: &x, weight: &w, bias: biased.then_some(&bias), ages: divided.then_some(&age) };
    convolution::forward::<E>(client, inputs, &out, shape).expect("legal");
    convolution::backward::<E>(client, inputs, &dy, [&x_gradient, &sums], shape).expect("legal");
    let sums = download::<f32>(client, &sums);
    let (of_taps, of_bias) = sums.split_at(features * kernel);
    let name = |what: &str| format!("convolution {what} {}, {shape:?}", E::NAME);
    report(&name("y"), &download::<E>(client, &out), &y, E::LIMIT)
        + report(&name("dx"), &download::<E>(client, &x_gradient), &dx, E::LIMIT)
        + report(&name("taps"), of_taps, &dw, f32::LIMIT)
        + report(&name("bias"), of_bias, &db, f32::LIMIT)
}
