//! What is around a linear recurrence: the causal convolution and the gated norm.
use super::{EPS, Element, download, poisoned, random, report, upload};
use cubecl::prelude::*;
use kernels_cubecl::pointwise::convolution::{self, ConvolutionShape, Inputs};
use kernels_cubecl::pointwise::gated_norm::{self, GatedShape};

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

pub fn gated_norm<E: Element>(client: &Client, shape: GatedShape) -> usize {
    let GatedShape { rows, groups, features } = shape;
    let (len, line) = (rows * groups * features, groups * features);
    let [x, z, w, dy] = [(len, 1), (len, 2), (line, 3), (len, 4)].map(|(n, seed)| random(n, seed));
    let sigmoid = |at: usize| 1.0 / (1.0 + (-z[at]).exp());
    let gated: Vec<f64> = (0..len).map(|at| x[at] * z[at] * sigmoid(at)).collect();
    let (mut y, mut dx, mut dz, mut dw) = (vec![0.0; len], vec![0.0; len], vec![0.0; len], vec![0.0; line]);
    for first in (0..len).step_by(features) {
        let of = first..first + features;
        let factor = (of.clone().map(|at| gated[at].powi(2)).sum::<f64>() / features as f64 + EPS).sqrt().recip();
        let dot = of.clone().map(|at| dy[at] * w[at % line] * gated[at]).sum::<f64>() / features as f64;
        for at in of {
            y[at] = w[at % line] * gated[at] * factor;
            dw[at % line] += dy[at] * gated[at] * factor;
            let slope = factor * (dy[at] * w[at % line] - gated[at] * factor * factor * dot);
            let s = sigmoid(at);
            dx[at] = slope * z[at] * s;
            dz[at] = slope * x[at] * s * (1.0 + z[at] * (1.0 - s));
        }
    }
    let [x, z, w, dy] = [x, z, w, dy].map(|values| upload::<E>(client, &values));
    let [out, of_x, of_z] = [(); 3].map(|()| poisoned::<E>(client, len));
    let (of_w, given, to) = (poisoned::<f32>(client, line), [&x, &z, &w], [&of_x, &of_z]);
    gated_norm::forward::<E>(client, given, &out, EPS as f32, shape).expect("legal");
    gated_norm::backward::<E>(client, given, &dy, [to[0], to[1], &of_w], EPS as f32, shape).expect("legal");
    let name = |what: &str| format!("gated norm {what} {}, {shape:?}", E::NAME);
    report(&name("y"), &download::<E>(client, &out), &y, E::LIMIT)
        + report(&name("dx"), &download::<E>(client, &of_x), &dx, E::LIMIT)
        + report(&name("gate"), &download::<E>(client, &of_z), &dz, E::LIMIT)
        + report(&name("weight"), &download::<f32>(client, &of_w), &dw, f32::LIMIT)
}
