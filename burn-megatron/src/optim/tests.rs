//! The optimizer on a small module: the host path against the plain tensor path, in-place updates, bookkeeping.

use super::*;
use backend_dist::comm::Group;
use backend_dist::shard::{ParamSpec, Place, Registry, Section, stable_hash};
use burn::module::{Module, Param, ParamId};
use burn::tensor::{DType, Device, Tensor, TensorData};

#[derive(Module, Debug)]
struct Two {
    weight: Param<Tensor<2>>,
    norm: Param<Tensor<1>>,
}

fn registry() -> Registry {
    let at = Place { rank: 0, size: 1 };
    let mut registry = Registry::default();
    for (name, shape) in [("weight", vec![3, 2]), ("norm", vec![2])] {
        registry.register(ParamSpec::new(vec![Section::replicated(name, &shape, at)], false)).unwrap();
    }
    registry
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

fn values(model: &Two) -> Vec<f64> {
    let (weight, norm) = (model.weight.val().into_data(), model.norm.val().into_data());
    weight.iter::<f64>().chain(norm.iter::<f64>()).collect()
}

const CONFIG: AdamWConfig = AdamWConfig { beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1, decay_vectors: false };

fn train(dtype: DType) -> (Two, Vec<f64>, f64) {
    let mut model = model(dtype);
    let mut optimizer = Optimizer::new(&model, &registry(), CONFIG).unwrap();
    let single = Group::single();
    let (mut norm, mut grads) = (0.0, Vec::new());
    for step in 0..3 {
        for micro in 0..2 {
            optimizer.accumulate(&model, backward(&model, 1.0 + micro as f64 + step as f64), micro == 0);
        }
        optimizer.reduce(&single, |_| Group::single());
        norm = optimizer.norm(0.5, &single);
        grads = optimizer.gradients(0.5);
        model = optimizer.step(model, 0.01, 0.5);
    }
    (model, grads, norm)
}

#[test]
fn host_and_tensor_stores_agree() {
    let (trained, grads, norm) = train(DType::F64);
    let by_hand = grads.iter().map(|g| g * g).sum::<f64>().sqrt();
    assert!((norm - by_hand).abs() < 1e-14 * norm);

    // The same three steps with the plain tensor store.
    let mut twin = model(DType::F64);
    let plan = BucketPlan::new(&registry());
    let mut store = DeviceStore::new(&plan, &Device::flex(), DType::F64);
    for step in 0..3u64 {
        for micro in 0..2 {
            let mut grads = backward(&twin, 1.0 + micro as f64 + step as f64);
            let (weight, bias) = (twin.weight.val().grad_remove(&mut grads), twin.norm.val().grad_remove(&mut grads));
            store.accumulate(0..6, weight.map(|g| g.flatten(0, 1)), micro == 0);
            store.accumulate(6..8, bias, micro == 0);
        }
        let k = CONFIG.coefficients(0.01, step + 1, 0.5);
        let flat = |t: Tensor<2>| t.inner().flatten::<1>(0, 1);
        let weight = store.update(0..6, flat(twin.weight.val()), true, &k);
        let norm = store.update(6..8, twin.norm.val().inner(), false, &k);
        twin.weight = twin.weight.map(|_| Tensor::from_inner(weight.reshape([3, 2])).require_grad());
        twin.norm = twin.norm.map(|_| Tensor::from_inner(norm).require_grad());
    }
    for (a, b) in values(&trained).iter().zip(values(&twin)) {
        assert!((a - b).abs() < 1e-14, "{a} {b}");
    }
    let (single, _, _) = train(DType::F32);
    for (a, b) in values(&trained).iter().zip(values(&single)) {
        assert!((a - b).abs() < 1e-5, "{a} {b}");
    }
}

/// Bytes of the states of both stores after two steps, put into new stores: the third step gives the same bits.
#[test]
fn states_go_out_and_in() {
    let (plan, k) = (BucketPlan::new(&registry()), |step| CONFIG.coefficients(0.01, step, 0.5));
    let flat = |step: u64, dtype| param("weight", [6], dtype).val().inner().mul_scalar(0.3 + step as f64);
    let step = |store: &mut dyn GradStore, weight: Tensor<1>, step: u64| {
        let grad = flat(step, weight.dtype());
        store.accumulate(0..6, Some(grad), true);
        store.update(0..6, weight, true, &k(step))
    };
    let (device, cases) = (Device::flex(), [DType::F64, DType::F32, DType::BF16]);
    let stores = |dtype| -> Vec<Box<dyn GradStore>> {
        let host: Box<dyn GradStore> = match dtype {
            DType::F64 => Box::new(HostStore::<f64>::new(plan.len())),
            _ => Box::new(HostStore::<f32>::new(plan.len())),
        };
        let tensors = Box::new(DeviceStore::new(&plan, &device, dtype));
        if dtype == DType::BF16 { vec![tensors] } else { vec![host, tensors] }
    };
    for dtype in cases {
        for (mut first, mut second) in stores(dtype).into_iter().zip(stores(dtype)) {
            let mut weight = flat(9, dtype);
            for index in 1..3 {
                weight = step(first.as_mut(), weight, index);
            }
            for state in [State::FirstMoment, State::SecondMoment, State::Master] {
                let Some((dtype, bytes)) = first.state(state, 0..6) else {
                    assert!(state == State::Master && dtype != DType::BF16, "{state:?} of {dtype:?}");
                    continue;
                };
                let values: Vec<f64> = match dtype {
                    DType::F64 => bytemuck::pod_collect_to_vec(&bytes),
                    _ => bytemuck::pod_collect_to_vec::<u8, f32>(&bytes).into_iter().map(f64::from).collect(),
                };
                second.set_state(state, 0..6, values);
            }
            let (kept, resumed) = (step(first.as_mut(), weight.clone(), 3), step(second.as_mut(), weight, 3));
            assert_eq!(kept.into_data(), resumed.into_data(), "{dtype:?}");
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
    let mut optimizer = Optimizer::new(&model, &registry(), CONFIG).unwrap();
    let before = address(&model);
    for _ in 0..2 {
        optimizer.accumulate(&model, backward(&model, 1.0), true);
        model = optimizer.step(model, 0.01, 1.0);
        assert_eq!(address(&model), before, "the update moved the parameter");
        assert!(model.weight.val().is_require_grad());
    }
    let (kept, values_before) = (model.clone(), values(&model));
    optimizer.accumulate(&model, backward(&model, 1.0), true);
    model = optimizer.step(model, 0.01, 1.0);
    assert_eq!(values(&kept), values_before, "a copy that somebody holds must not change");
    assert_ne!(values(&model), values_before);
}

#[test]
fn a_missing_gradient_is_zero_and_a_foreign_parameter_is_named() {
    let model = model(DType::F32);
    let mut optimizer = Optimizer::new(&model, &registry(), CONFIG).unwrap();
    optimizer.accumulate(&model, backward(&model, 1.0), true);
    optimizer.accumulate(&model, model.weight.val().sum().backward(), true);
    assert_eq!(optimizer.gradients(1.0), [1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.0, 0.0]);

    let stranger = Two { norm: param("other", [2], DType::F32), ..model.clone() };
    let error = Optimizer::new(&stranger, &registry(), CONFIG).err().unwrap();
    assert_eq!(error, OptimError::Unregistered { id: stable_hash("other"), shape: vec![2] });
    let twice = Two { norm: param("norm", [3], DType::F32), ..model };
    assert!(matches!(Optimizer::new(&twice, &registry(), CONFIG), Err(OptimError::Length { .. })));
}
