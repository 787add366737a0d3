//! States in fewer bits than fp32.

use super::layouts::{cases, train};
use super::saving::collect;
use super::*;
use crate::optim::flat::Flat;
use crate::optim::layout::Layout;
use crate::optim::states::place;
use half::bf16;

/// Moments in bf16, masters as weights and remainders.
pub(super) fn in_16_bits() -> OptimizerConfig {
    AdamWConfig {
        beta2: 0.95,
        weight_decay: 0.1,
        exp_avg_dtype: StateDtype::Bf16,
        exp_avg_sq_dtype: StateDtype::Bf16,
        main_params_dtype: MainParamsDtype::Bf16Remainder,
        ..AdamWConfig::default()
    }
    .into()
}

/// Main gradients too. Those of these tests add up without rounding in bf16 as well.
fn all_in_16_bits() -> OptimizerConfig {
    let OptimizerConfig::AdamW(config) = in_16_bits() else { unreachable!("it is AdamW") };
    AdamWConfig { main_grads_dtype: StateDtype::Bf16, ..config }.into()
}

/// Moments in 8 bits, masters as weights and remainders.
pub(super) fn in_8_bits() -> OptimizerConfig {
    let OptimizerConfig::AdamW(config) = in_16_bits() else { unreachable!("it is AdamW") };
    AdamWConfig { exp_avg_dtype: StateDtype::Bits8, exp_avg_sq_dtype: StateDtype::Bits8, ..config }.into()
}

/// However elements are sharded, each is rounded with the same random bits.
#[test]
fn states_in_16_bits_equal_one_rank() {
    for dtype in [DType::F32, DType::BF16] {
        let single = train(Case::SINGLE, &in_16_bits(), dtype, SAMPLES, exact);
        assert_ne!(single.weights, train(Case::SINGLE, &kinds()[0], dtype, SAMPLES, exact).weights);
        for case in cases() {
            let other = train(case, &in_16_bits(), dtype, 3, exact);
            assert_eq!(other.weights, single.weights, "{case:?} {dtype:?}");
            assert_eq!(other.norms, single.norms, "{case:?} {dtype:?}");
            let all = train(case, &all_in_16_bits(), dtype, 3, exact);
            assert_eq!((all.weights, all.norms), (other.weights, other.norms), "{case:?} {dtype:?} gradients");
        }
    }
}

/// However elements are sharded, a block of moments has the same elements: over tensor-parallel ranks where their rows are
/// whole blocks, over data-parallel ranks always, also where several tensors share a block.
#[test]
fn states_in_8_bits_equal_one_rank() {
    for (width, tp) in [(256, 2), (1, 1)] {
        let of = |case| Case { width, ..case };
        let single = train(of(Case::SINGLE), &in_8_bits(), DType::BF16, SAMPLES, exact);
        assert_ne!(single.weights, train(of(Case::SINGLE), &in_16_bits(), DType::BF16, SAMPLES, exact).weights);
        for case in cases().filter(|case| case.tp <= tp).map(of) {
            let other = train(case, &in_8_bits(), DType::BF16, 3, exact);
            assert_eq!(other.weights, single.weights, "{case:?}");
            assert_eq!(other.norms, single.norms, "{case:?}");
        }
    }
}

/// What one rank saves after some steps.
fn saved(config: OptimizerConfig, steps: usize) -> Saved {
    let run = |rank| {
        let mut worker = Worker::<Net>::new(rank, Case::SINGLE, &config, DType::BF16);
        (0..steps).for_each(|step| {
            worker.step(step, SAMPLES, rough);
        });
        Ok(collect(worker.save()))
    };
    Case::SINGLE.run(run).remove(0)
}

/// Masters are the same bit for bit, and the weights too but for ties.
#[test]
fn remainders_are_masters() {
    let adamw = AdamWConfig { weight_decay: 0.1, ..AdamWConfig::default() };
    let split = AdamWConfig { main_params_dtype: MainParamsDtype::Bf16Remainder, ..adamw };
    let (wide, split) = (saved(adamw.into(), 3), saved(split.into(), 3));
    assert_eq!(wide, split, "no master is halfway between two weights here");
    for ((kind, name), masters) in split.iter().filter(|((kind, _), _)| *kind == Kind::Master) {
        let weights = &split[&(Kind::Weight, name.clone())];
        for (master, weight) in masters.data.iter().zip(&weights.data) {
            let expected = bf16::from_bits(backend_dist::gpu::buffer::split(*master as f32).0).to_f64();
            assert_eq!(*weight, expected, "{kind} {name}");
        }
    }
}

/// 2 bytes each, as they are saved; CPU ranks keep fp32 masters.
#[test]
fn states_in_16_bits_take_half_of_the_memory() {
    let memory = |config: &OptimizerConfig| train(Case::SINGLE, config, DType::BF16, SAMPLES, exact).memory[0];
    let (wide, narrow) = (memory(&kinds()[0]), memory(&in_16_bits()));
    assert_eq!((2 * narrow.states, narrow.values, narrow.grads), (wide.states, wide.values, wide.grads));
    assert_eq!(2 * memory(&all_in_16_bits()).grads, narrow.grads);
    // A byte each and a scale for 256, of parameters that begin with a block: the embedding, and three of the layer.
    assert_eq!(memory(&in_8_bits()).states, 4 * 2 * (256 + 4));
    // fp64 weights have fp64 states.
    let double = |config: &OptimizerConfig| train(Case::SINGLE, config, DType::F64, SAMPLES, exact).memory[0].states;
    assert_eq!(double(&in_16_bits()), double(&kinds()[0]));
    assert_eq!(double(&in_8_bits()), double(&kinds()[0]));
}

/// A checkpoint of fp32 moments begins a run with bf16 moments, rounded to nearest, and the other way round, exactly.
#[test]
fn moments_are_converted_when_a_run_resumes() {
    let (wide, narrow) = (saved(kinds()[0], 2), saved(in_16_bits(), 2));
    let resumed = |from: &Saved, config: OptimizerConfig| {
        let run = |rank| {
            let mut worker = Worker::<Net>::new(rank, Case::SINGLE, &config, DType::BF16);
            let mut read = |kind: Kind, section: &Section, ranges: &[Range<usize>]| {
                let kind = if kind == Kind::Weight { Kind::Master } else { kind };
                let none = || HostFloats::from(vec![0.0; ranges.iter().map(ExactSizeIterator::len).product()]);
                let found = from.get(&(kind, section.name.clone()));
                Ok::<_, Infallible>(found.map_or_else(none, |tensor| HostFloats::from(tensor.read_box(ranges))))
            };
            worker.restore(&mut read)?;
            Ok(collect(worker.save()))
        };
        Case::SINGLE.run(run).remove(0)
    };
    assert_eq!(resumed(&narrow, kinds()[0]), narrow);
    let rounded = |kind: Kind, value: f64| {
        if matches!(kind, Kind::Master | Kind::Weight) { value } else { bf16::from_f64(value).to_f64() }
    };
    for (key, tensor) in resumed(&wide, in_16_bits()) {
        let expected: Vec<f64> = wide[&key].data.iter().map(|value| rounded(key.0, *value)).collect();
        assert_eq!(tensor.data, expected, "{key:?}");
    }
    // In 8 bits, within half of the greatest distance of two codes.
    let coded = resumed(&wide, in_8_bits());
    for ((kind, name), tensor) in &wide {
        let close = if matches!(kind, Kind::FirstMoment | Kind::SecondMoment) { 0.0071 } else { 0.0 };
        let most = wide.iter().filter(|((other, _), _)| other == kind).flat_map(|(_, tensor)| &tensor.data);
        let most = most.fold(0.0f64, |most, value| most.max(value.abs()));
        for (value, found) in tensor.data.iter().zip(&coded[&(*kind, name.clone())].data) {
            assert!((value - found).abs() <= close * most, "{kind} {name}: {value} {found}");
        }
    }
    let mut plain = coded.clone();
    plain.retain(|(kind, _), _| !matches!(kind, Kind::FirstScale | Kind::SecondScale));
    assert_eq!(resumed(&coded, kinds()[0]), plain, "exactly");
    assert_eq!(resumed(&coded, in_8_bits()), coded, "bit for bit");
}

/// Without gradients a second moment decays by `beta2` a step, also where that is less than the last digit of bf16: on
/// average over elements. Rounded to nearest it would stay as it is.
#[test]
fn second_moments_in_bf16_decay() {
    let (len, steps) = (4096, 400);
    let section = Section::replicated("w", &[len], GroupPosition { rank: 0, size: 1 });
    let params = vec![ParamSpec::new(vec![section], false)];
    let spec = BucketSpec { key: 0, params, hidden: true, at_once: 1, scale: ParamScale::default() };
    let layout = Layout::new(&spec, 1, 1);
    let config = AdamWConfig { exp_avg_sq_dtype: StateDtype::Bf16, ..AdamWConfig::default() };
    let zeros = |dtype| Flat::zeros(len, &Device::flex(), dtype);
    let (mut param, grad, mut m, mut v) = (zeros(DType::F32), zeros(DType::F32), zeros(DType::F32), zeros(DType::BF16));
    let before = 1.5e-6;
    v.put_floats(0, HostFloats::from(vec![before; len]));
    for step in 1..=steps {
        let rule = OptimizerConfig::from(config).rule(1e-3, step, 1.0);
        let place = place(&layout.units[0], &(0..len));
        let moments = [&mut m, &mut v].map(|flat| Some((flat, 0..len)));
        let [first, second] = moments;
        rule.update((&mut param, 0..len), (&grad, 0..len), first, second, (true, place));
    }
    let mean = v.values(0..len).iter().sum::<f64>() / len as f64;
    let expected = bf16::from_f64(before).to_f64() * config.beta2.powi(steps as i32);
    assert!((mean / expected - 1.0).abs() < 5e-3, "{mean} instead of {expected}");
}

/// Over 300 steps with gradients of a mean, noise and sizes of their own, parameters go where fp32 moments lead them.
#[test]
fn moments_in_8_bits_lead_where_those_in_fp32_do() {
    let moved = |dtype| {
        let adamw =
            AdamWConfig { beta2: 0.95, exp_avg_dtype: dtype, exp_avg_sq_dtype: dtype, ..AdamWConfig::default() };
        let case = Case { width: 16, ..Case::SINGLE };
        let run = |rank| {
            let mut worker = Worker::<Net>::new(rank, case, &adamw.into(), DType::F32);
            let before = worker.weights();
            for step in 0..300 {
                worker.step(step, 1, |step, sample, name, place| {
                    let size = 10f64.powi((place % 4) as i32 - 4);
                    size * (0.3 * f64::from(u8::from(place % 3 == 0)) + rough(step, sample, name, place))
                });
            }
            Ok(worker.weights().iter().zip(before).map(|(after, before)| after - before).collect::<Vec<_>>())
        };
        case.run(run).remove(0)
    };
    let (wide, coded) = (moved(StateDtype::F32), moved(StateDtype::Bits8));
    let size = |moves: &[f64]| moves.iter().map(|x| x * x).sum::<f64>().sqrt();
    let apart: Vec<f64> = wide.iter().zip(&coded).map(|(a, b)| a - b).collect();
    let share = size(&apart) / size(&wide);
    assert!((1e-6..0.05).contains(&share), "{share}");
}
