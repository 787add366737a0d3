//! The optimizers on a bucket of parameters.

use super::bandwidths::Bandwidths;
use kernels_cubecl::narrow::dynamic::Map;
use kernels_cubecl::pointwise::adamw::{self, AdamWBucket, AdamWStep, Parameters};
use kernels_cubecl::pointwise::adamw_blocks::{self, Blocks, BlocksBucket};
use kernels_cubecl::pointwise::flat::{self, CHUNK, Chunks, FloatType};
use kernels_cubecl::pointwise::momentum::{self, MomentumBucket, MomentumRule, MomentumStep};
use kernels_cubecl::pointwise::muon;

/// Parameters of a bucket.
const BUCKET: usize = 1 << 28;

pub fn all(clock: &Bandwidths) {
    let [master, first, second, gradient] = [(); 4].map(|()| clock.wide(BUCKET));
    let [weight, remainder] = [(); 2].map(|()| clock.empty(2 * BUCKET));
    let tensors = 256;
    let ends = clock.integers((1..=tensors).map(|i| i * BUCKET / tensors));
    let decays = clock.integers((0..tensors).map(|i| i % 2));
    let places = clock.integers((0..tensors).flat_map(|key| [key, 0, 4096, 8192, 4096]));
    let bucket = || AdamWBucket {
        parameters: Parameters::Master(master.at(0), weight.at(0), FloatType::Bf16),
        first: (first.at(0), FloatType::F32),
        second: (second.at(0), FloatType::F32),
        gradient: (gradient.at(0), FloatType::F32),
        ends: ends.at(0),
        decays: decays.at(0),
        places: places.at(0),
        tensors,
        len: BUCKET,
    };
    let (beta1, beta2, eps, step_size, root_scale, keep) = (0.9, 0.95, 1e-8, 1e-6, 1.0, 1.0 - 1e-7);
    let step = AdamWStep { beta1, beta2, eps, step_size, root_scale, keep, gradient_scale: 1e-3, step: 1 };
    clock.time("adamw", 30 * BUCKET, |client, _| adamw::step(client, bucket(), &step).expect("legal"));
    let bucket = || AdamWBucket {
        parameters: Parameters::Split(weight.at(0), remainder.at(0)),
        first: (first.at(0), FloatType::Bf16),
        second: (second.at(0), FloatType::Bf16),
        ..bucket()
    };
    clock.time("adamw, 16-bit states", 20 * BUCKET, |client, _| adamw::step(client, bucket(), &step).expect("legal"));
    let maps = clock.integers(Map::words().into_iter().map(|word| word as usize));
    let codes = [(); 2].map(|()| clock.empty(BUCKET));
    let scales = [(); 2].map(|()| clock.zeros(BUCKET / 64));
    let moment = |i: usize| Blocks { codes: codes[i].at(0), scales: scales[i].at(0) };
    let blocks = || BlocksBucket {
        parameters: bucket().parameters,
        first: moment(0),
        second: moment(1),
        gradient: (gradient.at(0), FloatType::Bf16),
        maps: maps.at(0),
        ends: ends.at(0),
        decays: decays.at(0),
        tensors,
        len: BUCKET,
    };
    clock.time("adamw, 8-bit moments, bf16 gradients", 14 * BUCKET, |client, _| {
        adamw_blocks::step(client, blocks(), &step).expect("legal")
    });
    let bucket = || MomentumBucket {
        master: master.at(0),
        momentum: Some(first.at(0)),
        gradient: gradient.at(0),
        weight: Some((weight.at(0), FloatType::Bf16)),
        ends: ends.at(0),
        decays: decays.at(0),
        tensors,
        len: BUCKET,
    };
    for (name, rule, bytes) in [
        ("sgd without momentum", MomentumRule::Plain, 14),
        ("sgd with momentum", MomentumRule::Sum, 22),
        ("lion", MomentumRule::Lion, 22),
    ] {
        let k = MomentumStep { rule, a: 0.9, b: 0.95, lr: 1e-6, keep, gradient_scale: 1e-3 };
        clock.time(name, bytes * BUCKET, |client, _| momentum::step(client, bucket(), &k).expect("legal"));
    }
    clock.time("muon momentum", 16 * BUCKET, |client, _| {
        let targets = (first.at(0), second.at(0));
        muon::mix(client, gradient.at(0), targets, BUCKET, (0.95, 1e-3), true).expect("legal")
    });
    clock.time("muon step", 12 * BUCKET, |client, _| {
        muon::apply(client, gradient.at(0), master.at(0), BUCKET, (keep, 1e-6)).expect("legal")
    });
    let count = BUCKET / CHUNK;
    let starts = clock.integers((0..count).map(|chunk| chunk * CHUNK));
    let (lens, sums) = (clock.integers(std::iter::repeat_n(CHUNK, count)), clock.empty(4 * count));
    clock.time("squares", 4 * BUCKET, |client, _| {
        let chunks = Chunks { starts: starts.at(0), lens: lens.at(0), count, end: BUCKET };
        flat::squares(client, (gradient.at(0), FloatType::F32), chunks, sums.at(0), 0).expect("legal")
    });
}
