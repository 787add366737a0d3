//! One rank: gradients from autodiff, updates in place, the plain tensor formulation, errors.

use super::super::bucket::{Bucket, MatrixSteps};
use super::super::modules::visit_gradients;
use super::*;

#[derive(Module, Debug)]
struct Two {
    weight: Param<Tensor<2>>,
    norm: Param<Tensor<1>>,
}

fn bucket() -> BucketSpec {
    let at = GroupPosition { rank: 0, size: 1 };
    let spec = |(name, shape): (&str, &[usize])| ParamSpec::new(vec![Section::replicated(name, shape, at)], false);
    let params = [("weight", [3, 2].as_slice()), ("norm", &[2])].map(spec).to_vec();
    BucketSpec { key: 0, params, hidden: true, at_once: 1, scale: ParamScale::default() }
}

fn param<const D: usize>(name: &str, shape: [usize; D], dtype: DType) -> Param<Tensor<D>> {
    let values: Vec<f64> = (0..shape.iter().product()).map(|i| (i as f64 * 0.7 + 0.3).sin()).collect();
    let device = Device::flex().autodiff();
    let tensor = Tensor::from_data(TensorData::new(values, shape), (&device, dtype)).require_grad();
    Param::initialized(ParamId::from(stable_hash(name)), tensor)
}

fn model(dtype: DType) -> Two {
    Two { weight: param("weight", [3, 2], dtype), norm: param("norm", [2], dtype) }
}

fn backward(model: &Two, factor: f64) -> burn::tensor::Gradients {
    let out = model.weight.val().mul_scalar(factor).sin() * model.norm.val().unsqueeze();
    out.sum().backward()
}

fn optimizer(config: &OptimizerConfig, dtype: DType) -> Optimizer {
    Optimizer::new(
        config,
        vec![bucket()],
        |_| Sharding::single(),
        |_, _| Group::single(),
        (&Device::flex(), dtype),
        usize::MAX,
    )
}

const INFO: StepInfo = StepInfo { lr: 0.01, grad_scale: 0.5 };

fn train(config: &OptimizerConfig, dtype: DType) -> Vec<f64> {
    let mut optimizer = optimizer(config, dtype);
    let mut model = optimizer.shard(0, model(dtype));
    for step in 0..3 {
        for micro in 0..2 {
            optimizer.accumulate(0, &model, &mut backward(&model, 1.0 + micro as f64 + step as f64));
            optimizer.complete(0);
        }
        optimizer.reduce(0);
        let norm = optimizer.norm(0.5, &[(GridKind::Dense, Group::single())]);
        let by_hand = optimizer.gradients(0, 0.5).iter().map(|g| g * g).sum::<f64>().sqrt();
        assert!((norm - by_hand).abs() < 1e-14 * norm);
        optimizer.begin_step();
        model = optimizer.step(0, model, &INFO);
    }
    values(&model)
}

/// The same three steps with tensor operations only, as devices do them.
#[test]
fn host_and_tensor_updates_agree() {
    for config in kinds().iter().take(3) {
        let mut bucket = Bucket::new(bucket(), 1, config, Sharding::single(), &Device::flex(), DType::F64);
        bucket.allocate(config, &Device::flex());
        for buffer in [&mut bucket.first, &mut bucket.second] {
            *buffer = buffer.take().map(super::super::flat::Flat::off_host);
        }
        let mut twin = model(DType::F64);
        for step in 0..3u64 {
            let mut sum = super::super::flat::Flat::zeros(8, &Device::flex(), DType::F64).off_host();
            for micro in 0..2 {
                let mut grads = backward(&twin, 1.0 + micro as f64 + step as f64);
                let layout = &bucket.layout;
                visit_gradients(&twin, layout, &mut grads, |slot, grad| sum.add(layout.slots[slot].range.start, grad));
            }
            let squares = sum.squares(&[0..6, 6..8]);
            let by_hand = sum.values(0..8).iter().map(|g| g * g).sum::<f64>();
            assert!((squares.iter().sum::<f64>() - by_hand).abs() < 1e-14 * by_hand);
            bucket.grads.replace(sum);
            bucket.values = Some(bucket.extract(&twin).off_host());
            let rule = config.rule(INFO.lr, step + 1, INFO.grad_scale);
            twin = bucket.step(twin, &rule, &MatrixSteps::default(), None);
        }
        let host = train(config, DType::F64);
        for (a, b) in host.iter().zip(values(&twin)) {
            assert!((a - b).abs() < 1e-14, "{a} {b} {config:?}");
        }
        for (a, b) in host.iter().zip(train(config, DType::F32)) {
            assert!((a - b).abs() < 1e-5, "{a} {b} {config:?}");
        }
    }
}

/// Three steps of the weight by `emerging_optimizers`' `Muon` (fd77292, fp32, `fp32_matmul_prec = "highest"`), which
/// Megatron-LM uses, and of the norm by PyTorch's `AdamW` (2.15), with the constants below.
#[test]
fn muon_equals_nvidias() {
    let recorded = [
        (
            MuonScale::Spectral,
            0.2,
            [0.289731592, 0.84467423, 0.994231701, 0.673413575, 0.034525767, -0.612497568, 0.266010344, 0.813501716],
        ),
        (
            MuonScale::UnitRms,
            1.0,
            [0.277373999, 0.859579325, 1.008295774, 0.673121274, 0.016934616, -0.618587613, 0.266141325, 0.813478053],
        ),
    ];
    for (scale, extra_scale, expected) in recorded {
        let muon = MuonConfig { weight_decay: 0.1, scale, extra_scale, beta2: 0.95, ..MuonConfig::default() };
        for (a, b) in train(&OptimizerConfig::Muon(muon), DType::F64).iter().zip(expected) {
            assert!((a - b).abs() < 2e-7, "{a} {b} {scale:?}");
        }
    }
}

#[test]
fn parameters_are_updated_in_place_unless_shared() {
    let address = |model: &Two| {
        let primitive = model.weight.val().inner().try_into_primitive::<burn::backend::Flex>().unwrap();
        primitive.bytes().as_ptr() as usize
    };
    let mut model = model(DType::F32);
    let mut optimizer = optimizer(&OptimizerConfig::default(), DType::F32);
    let before = address(&model);
    let step = |optimizer: &mut Optimizer, model: Two| {
        optimizer.accumulate(0, &model, &mut backward(&model, 1.0));
        optimizer.reduce(0);
        optimizer.begin_step();
        optimizer.step(0, model, &INFO)
    };
    for _ in 0..2 {
        model = step(&mut optimizer, model);
        assert_eq!(address(&model), before, "the update moved the parameter");
        assert!(model.weight.val().is_require_grad());
    }
    let (kept, values_before) = (model.clone(), values(&model));
    model = step(&mut optimizer, model);
    assert_eq!(values(&kept), values_before, "a copy that somebody holds must not change");
    assert_ne!(values(&model), values_before);
}

#[test]
fn a_missing_gradient_is_zero_and_a_second_one_is_added() {
    let model = model(DType::F32);
    let mut optimizer = optimizer(&OptimizerConfig::default(), DType::F32);
    let mut accumulate = |grads: &mut [burn::tensor::Gradients]| {
        grads.iter_mut().for_each(|grads| optimizer.accumulate(0, &model, grads));
        optimizer.complete(0);
        optimizer.reduce(0);
        optimizer.skip();
        optimizer.gradients(0, 1.0)
    };
    accumulate(&mut [backward(&model, 1.0)]);
    // A tied weight gets its gradient from two passes.
    let sum = || model.weight.val().sum().backward();
    assert_eq!(accumulate(&mut [sum(), sum()]), [2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 0.0, 0.0]);
    assert_eq!(accumulate(&mut []), [0.0; 8]);
}

#[test]
fn a_module_that_does_not_fit_is_named() {
    let model = model(DType::F32);
    let optimizer = optimizer(&OptimizerConfig::default(), DType::F32);
    assert_eq!(optimizer.check(&model, &[0], &[]), Ok(()));
    let stranger = Two { norm: param("other", [2], DType::F32), ..model.clone() };
    let other = stable_hash("other");
    let error = OptimError::Unregistered { id: other, shape: vec![2] };
    let missing = OptimError::Times { name: "norm".into(), times: 0 };
    assert_eq!(optimizer.check(&stranger, &[0], &[]), Err(error));
    assert_eq!(optimizer.check(&stranger, &[0], &[other]), Err(missing));
    let longer = Two { norm: param("norm", [3], DType::F32), ..model.clone() };
    assert!(matches!(optimizer.check(&longer, &[0], &[]), Err(OptimError::Length { .. })));
    let held_twice = (model.clone(), model.clone());
    assert_eq!(optimizer.check(&held_twice, &[0], &[]), Err(OptimError::Times { name: "weight".into(), times: 2 }));
}
