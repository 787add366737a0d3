//! States in host memory end with the bits of states on the device.

use super::layouts::{cases, train};
use super::saving::collect;
use super::*;

/// The same with the states of a share of the parameters in host memory.
pub(super) fn offloaded(config: OptimizerConfig, share: f64) -> OptimizerConfig {
    let OptimizerConfig::AdamW(config) = config else { unreachable!("it is AdamW") };
    AdamWConfig { cpu_offload: true, offload_fraction: share, ..config }.into()
}

/// Wide enough that regions have several pieces, also of eight ranks.
const WIDTH: usize = 256;

#[test]
fn every_layout_ends_with_the_bits_of_states_on_the_device() {
    for case in cases() {
        let narrow = [kinds()[0], states::in_16_bits()].map(|config| (config, DType::BF16, 16));
        let all = [(kinds()[0], DType::F64, 16), (kinds()[0], DType::F16, 1), (kinds()[0], DType::F32, 64)];
        for (config, dtype, width) in all.into_iter().chain(narrow) {
            let case = Case { width, ..case };
            let plain = train(case, &config, dtype, SAMPLES, rough);
            let hosted = train(case, &offloaded(config, 1.0), dtype, SAMPLES, rough);
            assert!(hosted.same_bits(&plain), "{case:?} {dtype:?} {config:?}");
        }
    }
}

#[test]
fn moments_in_8_bits_are_the_same_on_the_host() {
    for zero in 0..4 {
        let case = Case { dp: 2, zero, width: WIDTH, ..Case::SINGLE };
        let plain = train(case, &states::in_8_bits(), DType::BF16, SAMPLES, rough);
        let hosted = train(case, &offloaded(states::in_8_bits(), 1.0), DType::BF16, SAMPLES, rough);
        assert!(hosted.same_bits(&plain), "ZeRO {zero}");
        assert_eq!(hosted.memory[0].states, 0);
        let masters = if zero == 3 { 0 } else { 2 * plain.memory[0].values };
        assert!(hosted.memory[0].host >= plain.memory[0].states + masters / 2, "ZeRO {zero}");
    }
}

/// Of bf16 weights 12 bytes each are in host memory, and none on the device.
#[test]
fn memory_moves_to_the_host() {
    let case = Case { dp: 2, zero: 1, width: WIDTH, ..Case::SINGLE };
    let of = |config| train(case, &config, DType::BF16, SAMPLES, exact).memory[0];
    let plain = of(kinds()[0]);
    let all = of(offloaded(kinds()[0], 1.0));
    let moved = plain.states + plain.values;
    // Each state of a bucket begins at a multiple of 256 bytes.
    let padded = moved..moved + 6 * 256;
    assert!(all.states + all.values == 0 && padded.contains(&all.host), "{all:?} {moved}");
    assert_eq!((all.grads, plain.host), (plain.grads, 0));
    let half = of(offloaded(kinds()[0], 0.5));
    assert!(padded.contains(&(half.states + half.values + half.host)), "{half:?} {moved}");
    assert!(half.host > 0 && half.states > 0, "{half:?}");
    let bits = |config| train(case, &config, DType::BF16, SAMPLES, rough);
    assert!(bits(offloaded(kinds()[0], 0.5)).same_bits(&bits(kinds()[0])));
}

/// Two steps in one layout, its checkpoint, and the third step in another; what is saved in between, and the weights.
fn stopped(before: (Case, OptimizerConfig), after: (Case, OptimizerConfig), dtype: DType) -> [Saved; 3] {
    let first = before.0.run(|rank| {
        let mut worker = Worker::<Net>::new(rank, before.0, &before.1, dtype);
        (0..2).for_each(|step| _ = worker.step(step, SAMPLES, exact));
        Ok(worker.save())
    });
    let saved = collect(first.into_iter().flatten());
    let rest = after.0.run(|rank| {
        let mut worker = Worker::<Net>::new(rank, after.0, &after.1, dtype);
        worker.resume(&saved, 2, dtype);
        let again = worker.save();
        worker.step(2, SAMPLES, exact);
        Ok((again, worker.save()))
    });
    let (again, last): (Vec<_>, Vec<_>) = rest.into_iter().unzip();
    [saved, collect(again.into_iter().flatten()), collect(last.into_iter().flatten())]
}

/// Checkpoints do not tell where states were, and runs continue from them with the same bits, on the host or not.
#[test]
fn checkpoints_are_those_of_states_on_the_device() {
    let pairs = [
        (Case { dp: 2, zero: 1, ..Case::SINGLE }, Case { dp: 3, zero: 3, tp: 2, ..Case::SINGLE }),
        (Case { dp: 2, zero: 3, ..Case::SINGLE }, Case::SINGLE),
        (Case { dp: 2, tp: 2, ..Case::SINGLE }, Case { dp: 4, zero: 2, group: Some(2), ..Case::SINGLE }),
    ];
    let configs = [(kinds()[0], DType::F64, 16), (kinds()[0], DType::BF16, 16)];
    let small = [states::in_16_bits(), states::in_8_bits()].map(|config| (config, DType::BF16, WIDTH));
    for (config, dtype, width) in configs.into_iter().chain(small) {
        for (before, after) in pairs.map(|(a, b)| (Case { width, ..a }, Case { width, ..b })) {
            let plain = stopped((before, config), (after, config), dtype);
            for shares in [[1.0, 1.0], [1.0, 0.0], [0.0, 1.0], [0.5, 1.0]] {
                let [first, second] = shares.map(|share| offloaded(config, share));
                let found = stopped((before, first), (after, second), dtype);
                assert!(found == plain, "{before:?} {after:?} {dtype:?} {shares:?} {config:?}");
                assert!(found[0] == found[1], "what was read is saved again");
            }
        }
    }
}

/// What has no room in host memory stays on the device, and somebody is told.
#[test]
fn too_little_host_memory_leaves_states_on_the_device() {
    let specs = specs(GroupPosition { rank: 0, size: 1 }, 16);
    let with = |host_bytes| {
        let (config, on) = (offloaded(kinds()[0], 1.0), (&Device::flex(), DType::BF16));
        let (sharding, neighbours) = (|_| Sharding::single(), |_, _| Group::single());
        let mut optimizer = Optimizer::new(&config, specs.clone(), sharding, neighbours, on, host_bytes);
        (optimizer.memory(), optimizer.take_offload_trouble())
    };
    let (all, trouble) = with(usize::MAX);
    assert!(trouble.is_none() && all.states == 0, "{trouble:?}");
    // The embedding has 24 of 135 rows.
    let (some, trouble) = with(all.host as usize / 2);
    assert_eq!(some.host, 24 * 16 * 12);
    assert!(some.states > 0 && trouble.is_some_and(|trouble| trouble.contains("GB of host memory")));
    let (none, trouble) = with(10);
    assert!(none.host == 0 && none.states > some.states && trouble.is_some());
}
