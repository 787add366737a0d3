//! The optimizers over a bucket of tensors.
use super::{Element, download, poisoned, random, report, upload, upload_u32};
use cubecl::prelude::*;
use cubecl::server::Handle;
use half::bf16;
use kernels_cubecl::narrow::{self, Place, dynamic::BLOCK, dynamic::Map};
use kernels_cubecl::pointwise::adamw::{self, AdamWBucket, AdamWStep, Parameters};
use kernels_cubecl::pointwise::adamw_blocks::{self, Blocks, BlocksBucket};
use kernels_cubecl::pointwise::flat::FloatType;
use kernels_cubecl::pointwise::momentum::{self, MomentumBucket, MomentumRule, MomentumStep};
use kernels_cubecl::pointwise::{muon, remainder};

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
    step: 7,
};

fn decays(element: usize) -> bool {
    DECAYS[tensor(element)] == 1
}

/// The place of each tensor: parts of global tensors, whose elements the bucket numbers from its own start.
fn places() -> Vec<Place> {
    let place = |tensor: usize| {
        let start = if tensor == 0 { 0 } else { ENDS[tensor - 1] };
        let (key, first) = (0x9e37 + tensor as u32, 3u32.wrapping_sub(start));
        Place { key, first, block: 5 + tensor as u32, stride: 11, offset: 2 }
    };
    (0..ENDS.len()).map(place).collect()
}

fn tensor(element: usize) -> usize {
    ENDS.iter().position(|end| element < *end as usize).expect("the last end is the length")
}

/// Parameters, moments and gradients before a step, and after it by the formula.
struct Expected {
    before: [Vec<f64>; 4],
    after: [Vec<f64>; 3],
}

fn expected() -> Expected {
    let [p, m, v, g] = [1, 2, 3, 4].map(|seed| random(LEN, seed));
    // A second moment that is a bf16 number, but no other than its root mean square in size.
    let v: Vec<f64> = v.iter().map(|v| v.abs()).collect();
    let mut after = [vec![], vec![], vec![]];
    for i in 0..LEN {
        let k = f64::from;
        let g = g[i] * k(ADAMW.gradient_scale);
        let next_m = k(ADAMW.beta1) * m[i] + (1.0 - k(ADAMW.beta1)) * g;
        let next_v = k(ADAMW.beta2) * v[i] + (1.0 - k(ADAMW.beta2)) * g * g;
        let keep = if decays(i) { k(ADAMW.keep) } else { 1.0 };
        let root = next_v.sqrt() * k(ADAMW.root_scale) + k(ADAMW.eps);
        after[0].push(p[i] * keep - k(ADAMW.step_size) * next_m / root);
        after[1].push(next_m);
        after[2].push(next_v);
    }
    Expected { before: [p, m, v, g], after }
}

fn place_words(client: &Client) -> Handle {
    upload_u32(client, &places().iter().flat_map(Place::words).collect::<Vec<_>>())
}

/// With weights of type `E`, and all states in fp32.
pub fn adamw<E: Element>(client: &Client, float: FloatType) -> usize {
    let Expected { before: [p, m, v, g], after } = expected();
    let [master, first, second, gradient] = [&p, &m, &v, &g].map(|values| upload::<f32>(client, values));
    let (weight, ends, decays) = (poisoned::<E>(client, LEN), upload_u32(client, &ENDS), upload_u32(client, &DECAYS));
    let wide = float == FloatType::F32;
    let bucket = AdamWBucket {
        parameters: if wide { Parameters::Wide(&master) } else { Parameters::Master(&master, &weight, float) },
        first: (&first, FloatType::F32),
        second: (&second, FloatType::F32),
        gradient: (&gradient, FloatType::F32),
        ends: &ends,
        decays: &decays,
        places: &place_words(client),
        tensors: ENDS.len(),
        len: LEN,
    };
    adamw::step(client, bucket, &ADAMW).expect("legal");
    let weight = if wide { &master } else { &weight };
    report("adamw parameter", &download::<f32>(client, &master), &after[0], 1e-6)
        + report("adamw first moment", &download::<f32>(client, &first), &after[1], 1e-6)
        + report("adamw second moment", &download::<f32>(client, &second), &after[2], 1e-6)
        + report(&format!("adamw weight {}", E::NAME), &download::<E>(client, weight), &after[0], E::LIMIT)
}

/// With masters that are split into weights and remainders and everything else in bf16, against the step with all states
/// in fp32 that begins with the same numbers: the same masters bit for bit, and moments that are those of fp32, rounded
/// by the random bits of each element's place.
pub fn adamw_in_16_bits(client: &Client) -> usize {
    let Expected { before: [p, m, v, g], .. } = expected();
    // Masters with all digits.
    let p: Vec<f64> = p.iter().map(|p| f64::from((p * 1.000_123_4) as f32)).collect();
    let (ends, decays, places_there) = (upload_u32(client, &ENDS), upload_u32(client, &DECAYS), place_words(client));
    let of = |parameters, [first, second, gradient]: [(&Handle, FloatType); 3]| {
        let (ends, decays, places, tensors, len) = (&ends, &decays, &places_there, ENDS.len(), LEN);
        let bucket = AdamWBucket { parameters, first, second, gradient, ends, decays, places, tensors, len };
        adamw::step(client, bucket, &ADAMW).expect("legal");
    };
    let [master, first, second, gradient] = [&p, &m, &v, &g].map(|values| upload::<f32>(client, values));
    let (weight, remainder) = (poisoned::<bf16>(client, LEN), poisoned::<bf16>(client, LEN));
    remainder::split(client, &master, (&weight, &remainder), LEN).expect("legal");
    of(Parameters::Wide(&master), [&first, &second, &gradient].map(|of| (of, FloatType::F32)));

    let narrow_states = [&m, &v, &g].map(|values| upload::<bf16>(client, values));
    let [narrow_first, narrow_second, narrow_gradient] = &narrow_states;
    of(
        Parameters::Split(&weight, &remainder),
        [narrow_first, narrow_second, narrow_gradient].map(|of| (of, FloatType::Bf16)),
    );
    let joined = poisoned::<f32>(client, LEN);
    remainder::join(client, (&weight, &remainder), &joined, LEN).expect("legal");
    let masters = download::<f32>(client, &master);
    let weights: Vec<f64> = masters.iter().map(|x| bits(narrow::split(*x as f32).0)).collect();
    let places = places();
    let rounded = |wide: &[f64], shift: u32| -> Vec<f64> {
        let one = |(i, x): (usize, &f64)| {
            let random = places[tensor(i)].random(i as u32, ADAMW.step) >> shift;
            bits(narrow::round(*x as f32, random as u16))
        };
        wide.iter().enumerate().map(one).collect()
    };
    let [first, second] = [&first, &second].map(|of| download::<f32>(client, of));
    report("adamw master of weight and remainder", &download::<f32>(client, &joined), &masters, 0.0)
        + report("its weight", &download::<bf16>(client, &weight), &weights, 0.0)
        + report("its first moment", &download::<bf16>(client, narrow_first), &rounded(&first, 0), 0.0)
        + report("its second moment", &download::<bf16>(client, narrow_second), &rounded(&second, 16), 0.0)
}

fn bits(of: u16) -> f64 {
    bf16::from_bits(of).to_f64()
}

/// With moments in 8 bits, against the step with fp32 moments that begins with the same numbers: the same parameters bit
/// for bit, and the codes and scales of its moments.
pub fn adamw_in_8_bits(client: &Client) -> usize {
    const LEN: usize = 5 * BLOCK;
    // Tensors that share blocks and vectors, one with whole blocks, and a block of zeros.
    let ends = [5, 6, 300, 1024, LEN as u32];
    let (ends, decays) = (upload_u32(client, &ends), upload_u32(client, &DECAYS));
    let (maps, places) = (upload_u32(client, &Map::words()), place_words(client));
    let zero_last = |mut values: Vec<f64>| {
        values[4 * BLOCK..].fill(0.0);
        values
    };
    let [p, m, v, g] = [1, 2, 3, 4].map(|seed| zero_last(random(LEN, seed)));
    let v: Vec<f64> = v.iter().map(|v| 1e-9 * v * v).collect();
    let as_f32 = |values: &[f64]| values.iter().map(|x| *x as f32).collect::<Vec<f32>>();
    let quantised = |map: Map, values: &[f64]| -> (Vec<f64>, Vec<f64>) {
        let values = as_f32(values);
        let scales: Vec<f32> = values.chunks(BLOCK).map(Map::scale).collect();
        let code = |(i, x): (usize, &f32)| f64::from(map.code(*x, scales[i / BLOCK]));
        (values.iter().enumerate().map(code).collect(), scales.iter().map(|scale| f64::from(*scale)).collect())
    };
    let codes_of = |handle: &Handle| -> Vec<f64> {
        client.read_one_unchecked(handle.clone()).iter().map(|code| f64::from(*code)).collect()
    };
    let mut failures = 0;
    let upload_moment = |map: Map, values: &[f64]| {
        let (codes, scales) = quantised(map, values);
        let (there, of_scales) = (client.create_from_slice(&[0xff; LEN]), upload::<f32>(client, &scales));
        let blocks = Blocks { codes: &there, scales: &of_scales };
        adamw_blocks::encode(client, &upload::<f32>(client, values), blocks, (map, &maps), LEN).expect("legal");
        let failures = report(&format!("codes, {map:?}"), &codes_of(&there), &codes, 0.0);
        let number = |(i, code): (usize, &f64)| f64::from(map.number(*code as u8, scales[i / BLOCK] as f32));
        let wide: Vec<f64> = codes.iter().enumerate().map(number).collect();
        (there, of_scales, upload::<f32>(client, &wide), failures)
    };
    for (split, of_gradient) in [(true, FloatType::Bf16), (false, FloatType::F32)] {
        let (m_codes, m_scales, first, of_m) = upload_moment(Map::Signed, &m);
        let (v_codes, v_scales, second, of_v) = upload_moment(Map::Unsigned, &v);
        failures += of_m + of_v;
        let [master, own] = [(); 2].map(|()| upload::<f32>(client, &p));
        let [weight, wide_weight, remainder] = [(); 3].map(|()| poisoned::<bf16>(client, LEN));
        remainder::split(client, &own, (&weight, &remainder), LEN).expect("legal");
        let gradient =
            if of_gradient == FloatType::F32 { upload::<f32>(client, &g) } else { upload::<bf16>(client, &g) };
        let wide = AdamWBucket {
            parameters: Parameters::Master(&master, &wide_weight, FloatType::Bf16),
            first: (&first, FloatType::F32),
            second: (&second, FloatType::F32),
            gradient: (&gradient, of_gradient),
            ends: &ends,
            decays: &decays,
            places: &places,
            tensors: DECAYS.len(),
            len: LEN,
        };
        adamw::step(client, wide, &ADAMW).expect("legal");
        let parameters = match split {
            true => Parameters::Split(&weight, &remainder),
            false => Parameters::Master(&own, &weight, FloatType::Bf16),
        };
        let bucket = BlocksBucket {
            parameters,
            first: Blocks { codes: &m_codes, scales: &m_scales },
            second: Blocks { codes: &v_codes, scales: &v_scales },
            gradient: (&gradient, of_gradient),
            maps: &maps,
            ends: &ends,
            decays: &decays,
            tensors: DECAYS.len(),
            len: LEN,
        };
        adamw_blocks::step(client, bucket, &ADAMW).expect("legal");
        if split {
            remainder::join(client, (&weight, &remainder), &own, LEN).expect("legal");
        } else {
            let [found, expected] = [&weight, &wide_weight].map(|of| download::<bf16>(client, of));
            failures += report("adamw weight, moments in 8 bits", &found, &expected, 0.0);
        }
        let [found, expected] = [&own, &master].map(|of| download::<f32>(client, of));
        failures += report("adamw master, moments in 8 bits", &found, &expected, 0.0);
        for (name, map, codes, scales, wide) in [
            ("first", Map::Signed, &m_codes, &m_scales, &first),
            ("second", Map::Unsigned, &v_codes, &v_scales, &second),
        ] {
            let expected = quantised(map, &download::<f32>(client, wide));
            failures += report(&format!("its {name} moment's codes"), &codes_of(codes), &expected.0, 0.0);
            failures += report(&format!("their scales, {name}"), &download::<f32>(client, scales), &expected.1, 0.0);
        }
    }
    failures
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
