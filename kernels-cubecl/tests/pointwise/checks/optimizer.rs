//! The optimizers over a bucket of tensors.
use super::{Element, download, poisoned, random, report, upload, upload_u32};
use cubecl::prelude::*;
use kernels_cubecl::pointwise::adamw::{self, AdamWBucket, AdamWStep};
use kernels_cubecl::pointwise::flat::FloatType;
use kernels_cubecl::pointwise::momentum::{self, MomentumBucket, MomentumRule, MomentumStep};
use kernels_cubecl::pointwise::muon;

/// Tensors that end inside a vector of four, one of a single element among them.
const ENDS: [u32; 5] = [5, 6, 300, 1001, 1004];
const DECAYS: [u32; 5] = [1, 0, 1, 0, 1];
const LEN: usize = 1004;

const ADAMW: AdamWStep = AdamWStep {
    beta1: 0.9,
    beta2: 0.95,
    eps: 1e-8,
    step_size: 3e-3,
    root_scale: 2.5,
    keep: 1.0 - 3e-4,
    gradient_scale: 0.25,
};

fn decays(element: usize) -> bool {
    DECAYS[ENDS.iter().position(|end| element < *end as usize).expect("the last end is the length")] == 1
}

/// With weights of type `E`.
pub fn adamw<E: Element>(client: &Client, float: FloatType) -> usize {
    let [p, m, v, g] = [1, 2, 3, 4].map(|seed| random(LEN, seed));
    let v: Vec<f64> = v.iter().map(|v| v.abs()).collect();
    let mut expected = [vec![], vec![], vec![]];
    for i in 0..LEN {
        let k = f64::from;
        let g = g[i] * k(ADAMW.gradient_scale);
        let next_m = k(ADAMW.beta1) * m[i] + (1.0 - k(ADAMW.beta1)) * g;
        let next_v = k(ADAMW.beta2) * v[i] + (1.0 - k(ADAMW.beta2)) * g * g;
        let keep = if decays(i) { k(ADAMW.keep) } else { 1.0 };
        let root = next_v.sqrt() * k(ADAMW.root_scale) + k(ADAMW.eps);
        expected[0].push(p[i] * keep - k(ADAMW.step_size) * next_m / root);
        expected[1].push(next_m);
        expected[2].push(next_v);
    }
    let [master, first, second, gradient] = [&p, &m, &v, &g].map(|values| upload::<f32>(client, values));
    let (weight, ends, decays) = (poisoned::<E>(client, LEN), upload_u32(client, &ENDS), upload_u32(client, &DECAYS));
    let bucket = AdamWBucket {
        master: &master,
        first: &first,
        second: &second,
        gradient: &gradient,
        weight: (float != FloatType::F32).then_some((&weight, float)),
        ends: &ends,
        decays: &decays,
        tensors: ENDS.len(),
        len: LEN,
    };
    adamw::step(client, bucket, &ADAMW).expect("legal");
    let weight = if float == FloatType::F32 { &master } else { &weight };
    report("adamw parameter", &download::<f32>(client, &master), &expected[0], 1e-6)
        + report("adamw first moment", &download::<f32>(client, &first), &expected[1], 1e-6)
        + report("adamw second moment", &download::<f32>(client, &second), &expected[2], 1e-6)
        + report(&format!("adamw weight {}", E::NAME), &download::<E>(client, weight), &expected[0], E::LIMIT)
}

/// With weights of type `E`.
pub fn momentum<E: Element>(client: &Client, rule: MomentumRule, float: FloatType) -> usize {
    let k = MomentumStep { rule, a: 0.9, b: 0.95, lr: 3e-2, keep: 1.0 - 3e-4, gradient_scale: 0.25 };
    let [p, before, g] = [1, 2, 3].map(|seed| random(LEN, seed));
    // Numbers that decide a sign are not near zero, where their rounding could.
    let before: Vec<f64> = before.iter().map(|m| m + m.signum()).collect();
    let mut m = before.clone();
    let (a, b, mut params) = (f64::from(k.a), f64::from(k.b), vec![]);
    for i in 0..LEN {
        let g = g[i] * f64::from(k.gradient_scale);
        let step = match rule {
            MomentumRule::Plain => g,
            MomentumRule::Lion => (a * m[i] + (1.0 - a) * g).signum(),
            MomentumRule::Sum => a * m[i] + g,
            MomentumRule::Nesterov => g + a * (a * m[i] + g),
        };
        m[i] = match rule {
            MomentumRule::Plain => m[i],
            MomentumRule::Lion => b * m[i] + (1.0 - b) * g,
            MomentumRule::Sum | MomentumRule::Nesterov => a * m[i] + g,
        };
        let keep = if decays(i) { f64::from(k.keep) } else { 1.0 };
        params.push(p[i] * keep - f64::from(k.lr) * step);
    }
    let [master, first, gradient] = [&p, &before, &g].map(|values| upload::<f32>(client, values));
    let (weight, ends, decays) = (poisoned::<E>(client, LEN), upload_u32(client, &ENDS), upload_u32(client, &DECAYS));
    let bucket = MomentumBucket {
        master: &master,
        momentum: (rule != MomentumRule::Plain).then_some(&first),
        gradient: &gradient,
        weight: (float != FloatType::F32).then_some((&weight, float)),
        ends: &ends,
        decays: &decays,
        tensors: ENDS.len(),
        len: LEN,
    };
    momentum::step(client, bucket, &k).expect("legal");
    let weight = if float == FloatType::F32 { &master } else { &weight };
    report(&format!("{rule:?} parameter"), &download::<f32>(client, &master), &params, 1e-6)
        + report("its momentum", &download::<f32>(client, &first), &m, 1e-6)
        + report(&format!("its weight {}", E::NAME), &download::<E>(client, weight), &params, E::LIMIT)
}

/// `len` elements from `start` on: whole vectors or not.
pub fn muon(client: &Client, len: usize, start: usize, nesterov: bool) -> usize {
    let [g, m, p] = [1, 2, 3].map(|seed| random(start + len, seed));
    let ([decay, scale], [keep, factor]) = ([0.95f32, 0.25], [0.999f32, 0.02]);
    let (d, s) = (f64::from(decay), f64::from(scale));
    let mean: Vec<f64> = m.iter().zip(&g).map(|(m, g)| d * m + (1.0 - d) * s * g).collect();
    let again = mean.iter().zip(&g).map(|(m, g)| d * m + (1.0 - d) * s * g);
    let out: Vec<f64> = if nesterov { again.collect() } else { mean.clone() };
    let next: Vec<f64> = p.iter().zip(&g).map(|(p, g)| f64::from(keep) * p - f64::from(factor) * g).collect();
    let here = |values: &[f64]| upload::<f32>(client, values).offset_start(4 * start as u64);
    let [gradient, momentum, master] = [here(&g), here(&m), here(&p)];
    let mixed = poisoned::<f32>(client, len);
    muon::mix(client, &gradient, (&momentum, &mixed), len, (decay, scale), nesterov).expect("legal");
    muon::apply(client, &gradient, &master, len, (keep, factor)).expect("legal");
    report(&format!("muon momentum, nesterov {nesterov}"), &download::<f32>(client, &momentum), &mean[start..], 1e-6)
        + report("muon mean", &download::<f32>(client, &mixed), &out[start..], 1e-6)
        + report("muon parameter", &download::<f32>(client, &master), &next[start..], 1e-6)
}
