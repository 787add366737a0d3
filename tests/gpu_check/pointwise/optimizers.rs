//! The optimizers on a bucket of parameters.

use crate::checks::upload_u32;
use crate::clock::Clock;
use kernels_cubecl::narrow::dynamic::Map;
use kernels_cubecl::pointwise::adamw::{self, AdamWBucket, AdamWStep, Parameters};
use kernels_cubecl::pointwise::adamw_blocks::{self, Blocks, BlocksBucket};
use kernels_cubecl::pointwise::flat::{self, CHUNK, Chunks, FloatType};
use kernels_cubecl::pointwise::momentum::{self, MomentumBucket, MomentumRule, MomentumStep};
use kernels_cubecl::pointwise::muon;

/// Parameters of a bucket.
const BUCKET: usize = 1 << 28;

pub fn all(clock: &mut Clock) {
    let names = ["adamw", "sgd", "lion", "muon", "squares"];
    if !clock.wants(&names) {
        return;
    }
    let client = clock.client;
    let [master, first, second, gradient] = [(); 4].map(|()| clock.tensor(FloatType::F32, BUCKET));
    let weight = client.empty(2 * BUCKET);
    let tensors = 256;
    let ends: Vec<u32> = (1..=tensors).map(|i| (i * BUCKET / tensors) as u32).collect();
    let decays: Vec<u32> = (0..tensors as u32).map(|i| i % 2).collect();
    let (ends, decays) = (upload_u32(client, &ends), upload_u32(client, &decays));
    let places: Vec<u32> = (0..tensors as u32).flat_map(|key| [key, 0, 4096, 8192, 4096]).collect();
    let (places, remainder) = (upload_u32(client, &places), client.empty(2 * BUCKET));
    let bucket = AdamWBucket {
        parameters: Parameters::Master(master.at(0), &weight, FloatType::Bf16),
        first: (first.at(0), FloatType::F32),
        second: (second.at(0), FloatType::F32),
        gradient: (gradient.at(0), FloatType::F32),
        ends: &ends,
        decays: &decays,
        places: &places,
        tensors,
        len: BUCKET,
    };
    let (beta1, beta2, eps, step_size, root_scale, keep) = (0.9, 0.95, 1e-8, 1e-6, 1.0, 1.0 - 1e-7);
    let step = AdamWStep { beta1, beta2, eps, step_size, root_scale, keep, gradient_scale: 1e-3, step: 1 };
    clock.time("adamw", 30 * BUCKET, |_| adamw::step(client, bucket, &step).expect("legal"));
    let bucket = AdamWBucket {
        parameters: Parameters::Split(&weight, &remainder),
        first: (first.at(0), FloatType::Bf16),
        second: (second.at(0), FloatType::Bf16),
        ..bucket
    };
    clock.time("adamw, 16-bit states", 20 * BUCKET, |_| adamw::step(client, bucket, &step).expect("legal"));
    let maps = upload_u32(client, &Map::words());
    let [first_codes, second_codes] = [(); 2].map(|()| client.empty(BUCKET));
    let [first_scales, second_scales] = [(); 2].map(|()| client.create_from_slice(&vec![0; BUCKET / 64]));
    let blocks = BlocksBucket {
        parameters: bucket.parameters,
        first: Blocks { codes: &first_codes, scales: &first_scales },
        second: Blocks { codes: &second_codes, scales: &second_scales },
        gradient: (gradient.at(0), FloatType::Bf16),
        maps: &maps,
        ends: &ends,
        decays: &decays,
        tensors,
        len: BUCKET,
    };
    clock.time("adamw, 8-bit moments, bf16 gradients", 14 * BUCKET, |_| {
        adamw_blocks::step(client, blocks, &step).expect("legal")
    });
    let bucket = MomentumBucket {
        master: master.at(0),
        momentum: Some(first.at(0)),
        gradient: gradient.at(0),
        weight: Some((&weight, FloatType::Bf16)),
        ends: &ends,
        decays: &decays,
        tensors,
        len: BUCKET,
    };
    for (name, rule, bytes) in [
        ("sgd without momentum", MomentumRule::Plain, 14),
        ("sgd with momentum", MomentumRule::Sum, 22),
        ("lion", MomentumRule::Lion, 22),
    ] {
        let k = MomentumStep { rule, a: 0.9, b: 0.95, lr: 1e-6, keep, gradient_scale: 1e-3 };
        clock.time(name, bytes * BUCKET, |_| momentum::step(client, bucket, &k).expect("legal"));
    }
    clock.time("muon momentum", 16 * BUCKET, |_| {
        let targets = (first.at(0), second.at(0));
        muon::mix(client, gradient.at(0), targets, BUCKET, (0.95, 1e-3), true).expect("legal")
    });
    clock.time("muon step", 12 * BUCKET, |_| {
        muon::apply(client, gradient.at(0), master.at(0), BUCKET, (keep, 1e-6)).expect("legal")
    });
    let starts: Vec<u32> = (0..BUCKET).step_by(CHUNK).map(|start| start as u32).collect();
    let lens = upload_u32(client, &vec![CHUNK as u32; starts.len()]);
    let (count, starts, sums) = (starts.len(), upload_u32(client, &starts), client.empty(4 * starts.len()));
    clock.time("squares", 4 * BUCKET, |_| {
        let chunks = Chunks { starts: &starts, lens: &lens, count, end: BUCKET };
        flat::squares(client, (gradient.at(0), FloatType::F32), chunks, &sums, 0).expect("legal")
    });
}
