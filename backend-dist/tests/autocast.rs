//! Mixed precision: close to f32, with f32 parameters and gradients.

use backend_dist::fused_adamw::FusedAdamW;
use backend_dist::gradients::overlapped::Reducer;
use backend_dist::launch::{BoxError, Rank, launch};
use backend_dist::mesh::{Axis, Mesh};
use backend_dist::mesh_backend::{Count, LogicalDevice, LogicalOptions, explain};
use backend_dist::parallelize::{Plan, parallelize};
use burn::module::Module;
use burn::nn::transformer::{TransformerEncoder, TransformerEncoderConfig, TransformerEncoderInput};
use burn::nn::{DropoutConfig, LayerNormConfig, Linear, LinearConfig};
use burn::optim::{AdamWConfig, GradientsParams, ModuleOptimizer};
use burn::store::ModuleRecord;
use burn::tensor::activation::{log_softmax, softmax};
use burn::tensor::{DType, Device, FloatDType, Int, Tensor, TensorData};
use burn::tensor::{module::attention, ops::AttentionModuleOptions};

/// The losses of some steps on the same batch.
fn losses(model: TransformerEncoder, device: &Device, steps: usize) -> Vec<f64> {
    losses_by(AdamWConfig::new().init(), model, device, steps)
}

fn losses_by(mut optimizer: ModuleOptimizer, mut model: TransformerEncoder, device: &Device, steps: usize) -> Vec<f64> {
    let values: Vec<f32> = (0..4 * 8 * 16).map(|i| (i as f32 * 0.37).sin()).collect();
    let x = Tensor::<3>::from_data(TensorData::new(values, [4, 8, 16]), (device, DType::F32));
    let mut losses = Vec::new();
    for _ in 0..steps {
        let loss = model.forward(TransformerEncoderInput::new(x.clone())).powi_scalar(2).mean();
        losses.push(loss.clone().into_data().iter::<f64>().next().unwrap());
        let grads = GradientsParams::from_grads(loss.backward(), &model);
        for layer in &model.layers {
            let grad = grads.get::<2>(layer.mha.query.weight.id).unwrap();
            assert_eq!(grad.dtype(), DType::F32);
        }
        model = optimizer.step(1e-2, model, grads);
    }
    losses
}

fn config() -> TransformerEncoderConfig {
    TransformerEncoderConfig::new(16, 32, 4, 2).with_dropout(0.0)
}

/// What the ranks of a layout find, each on a device that computes in bf16.
fn in_half<T: Send>(layout: &str, find: impl Fn(Rank, Device) -> Result<T, BoxError> + Sync) -> Vec<T> {
    let mesh = Mesh::new(layout.parse().unwrap()).unwrap();
    let ranks = launch(&mesh, &[Device::flex()], |rank| {
        let options = LogicalOptions { autocast: Some(FloatDType::BF16), fusion: Some(true), ..Default::default() };
        let device = rank.logical_device_with(&[Axis::Tp], options).autodiff();
        find(rank, device)
    });
    ranks.unwrap()
}

#[test]
fn autocast_trains_as_f32_does() {
    let alone = Device::flex().autodiff();
    let model = config().init(&alone);
    let record = model.clone().into_record().into_bytes().unwrap();
    let expected = losses(model, &alone, 6);
    for layout in ["TP1", "TP2"] {
        let ranks = in_half(layout, |rank, device| {
            let model = config().init(&device).load_record(ModuleRecord::from_bytes(record.clone())?);
            let model = parallelize(model, &rank, &Plan::auto())?;
            Ok(losses(model, &device, 6))
        });
        for losses in ranks {
            let is_near = |(x, y): (&f64, &f64)| (x - y).abs() <= 2e-2 * y.abs();
            assert!(losses.iter().zip(&expected).all(is_near), "{layout}: {losses:?} and {expected:?}");
            assert_ne!(losses, expected, "{layout}: nothing was rounded");
            assert!(losses[5] < 0.9 * losses[0], "{layout}: {losses:?}");
        }
    }
}

/// Also where the steps of parameters of one size run together: their copies in half precision come with them.
#[test]
fn the_fused_optimizer_trains_as_burns() {
    for layout in ["TP1", "TP2"] {
        in_half(layout, |rank, device| {
            let model = parallelize(config().init(&device), &rank, &Plan::auto())?;
            let count = |kernel| explain(&device).kernels.get(kernel).copied().unwrap_or(0);
            let by = |optimizer, model| {
                let before = ["cast", "fused kernel"].map(count);
                let losses = losses_by(optimizer, model, &device, 4);
                let [casts, kernels] = ["cast", "fused kernel"].map(count);
                (losses, casts - before[0], kernels - before[1])
            };
            let (expected, casts, kernels) = by(AdamWConfig::new().init(), model.clone());
            let (found, fused_casts, fused_kernels) = by(AdamWConfig::new().init_fused(), model);
            let is_near = |(x, y): (&f64, &f64)| (x - y).abs() <= 1e-3 * y.abs();
            assert!(found.iter().zip(&expected).all(is_near), "{layout}: {found:?} and {expected:?}");
            assert!(fused_casts <= casts, "{layout}: {fused_casts} casts, {casts} with Burn's");
            assert!(fused_kernels < kernels, "{layout}: {fused_kernels} kernels, {kernels} with Burn's");
            Ok(())
        });
    }
}

#[test]
fn tensors_of_ones_and_zeros_are_no_memory() {
    for layout in ["TP1", "TP2"] {
        in_half(layout, |rank, device| {
            let model = parallelize(config().init(&device), &rank, &Plan::auto())?;
            let fills = || *explain(&device).kernels.get("fill").expect("the loss alone is filled");
            losses(model.clone(), &device, 1);
            let before = fills();
            losses(model, &device, 1);
            // That of the loss alone, and not those of Burn's gradients of sums.
            assert_eq!(fills(), before + 1, "{layout}");
            Ok(())
        });
    }
}

/// Biases are added by the GEMMs of their layers, and what follows from a norm's input is neither stored nor cast: a layer
/// with its norms first has a kernel before each of its two parts and one within the MLP, and as many for gradients. Those
/// are not split where a parameter's gradient is to be reduced as soon as it is there, and gradients of weights are f32.
#[test]
fn a_layer_has_few_kernels_besides_gemms() {
    let kernels = |layers: usize, samples: usize| {
        let config = TransformerEncoderConfig::new(16, 48, 4, layers).with_dropout(0.0).with_norm_first(true);
        in_half("TP1", |rank, device| {
            let model = parallelize(config.init(&device), &rank, &Plan::auto())?;
            let reducer = Reducer::new(&model, &rank.group(Axis::Dp), |_| None);
            let model = reducer.attach(model);
            let x = Tensor::<3>::ones([samples, 8, 16], &device);
            let pass = || {
                reducer.begin_pass(&model, GradientsParams::new());
                let loss = model.forward(TransformerEncoderInput::new(x.clone())).powi_scalar(2).mean();
                let gradients = reducer.end_pass(&model, GradientsParams::from_grads(loss.backward(), &model));
                device.sync().unwrap();
                drop(gradients);
            };
            // Weights are cast once.
            pass();
            let before = explain(&device);
            pass();
            let kernels = explain(&device).since(&before).kernels;
            Ok(["fused kernel", "cast", "GEMM"].map(|kernel| kernels.get(kernel).copied().unwrap_or(0)))
        })[0]
    };
    // Burn multiplies all rows by a weight at once, or those of each sample.
    for samples in [3, 4] {
        let (three, two) = (kernels(3, samples), kernels(2, samples));
        let of_a_layer: Vec<usize> = three.iter().zip(two).map(|(three, two)| three - two).collect();
        assert_eq!(of_a_layer, [6, 0, 18], "kernels, casts, and GEMMs: six forward, twelve for gradients");
    }
}

/// Nothing reads the gradient of a weight before the optimizer, and its operands would be in memory as long as it waits.
#[test]
fn gradients_of_weights_do_not_wait_for_a_bias() {
    in_half("TP1", |_, device| {
        let layers: Vec<Linear> = (0..4).map(|_| LinearConfig::new(16, 16).init(&device)).collect();
        let loss = layers.iter().fold(Tensor::<2>::ones([8, 16], &device), |x, layer| layer.forward(x).tanh()).mean();
        let gradients = loss.backward();
        // Forward, and the gradients of four weights and three inputs, of which the last may wait.
        assert!(explain(&device).kernels["GEMM"] >= 4 + 7 - 1, "{}", explain(&device));
        drop(gradients);
        Ok(())
    });
}

/// Burn's sums of all elements try kernels first, for seconds, and sums of rows would read what the norm's gradient writes.
#[test]
fn losses_and_gradients_of_norms_are_summed_in_fused_kernels() {
    in_half("TP1", |_, device| {
        let norm = LayerNormConfig::new(8).init(&device);
        let values: Vec<f32> = (0..96).map(|i| (i as f32 * 0.37).sin()).collect();
        let x = Tensor::<3>::from_data(TensorData::new(values.clone(), [3, 4, 8]), (&device, DType::F32));
        for (found, expected) in [
            (x.clone().mean(), values.iter().sum::<f32>() / 96.0),
            (x.clone().reshape([96]).sum(), values.iter().sum()),
            (x.clone().slice([0..1, 0..1, 0..1]).sum(), values[0]),
        ] {
            let found = found.into_scalar::<f32>();
            assert!((found - expected).abs() < 1e-5, "{found} is not {expected}");
        }
        let grads = norm.forward(x).powi_scalar(2).mean().backward();
        for parameter in [norm.gamma.val(), norm.beta.unwrap().val()] {
            parameter.grad(&grads).unwrap().into_data();
        }
        let kernels = explain(&device).kernels;
        let alone = ["arithmetic alone", "sum of rows"].map(|kind| kernels.contains_key(kind));
        assert_eq!(alone, [false; 2], "{kernels:?}");
        Ok(())
    });
}

/// Without gradients a norm is one operation of Burn's, and so is a logarithm of a softmax: Burn's reductions in them would
/// try kernels first, in the first validation.
#[test]
fn validation_has_no_kernels_of_burns() {
    in_half("TP1", |_, device| {
        let model = config().with_norm_first(true).init(&device);
        let values: Vec<f32> = (0..4 * 8 * 16).map(|i| (i as f32 * 0.37).sin()).collect();
        let x = Tensor::<3>::from_data(TensorData::new(values, [4, 8, 16]), (&device, DType::F32));
        let scores = |model: &TransformerEncoder, x| log_softmax(model.forward(TransformerEncoderInput::new(x)), 2);
        let expected = scores(&model, x.clone()).into_data().try_to_vec::<f32>()?;
        let before = explain(&device);
        let found = scores(&model.valid(), x.inner()).into_data().try_to_vec::<f32>()?;
        let kernels = explain(&device).since(&before).kernels;
        assert!(found.iter().zip(&expected).all(|(x, y)| (x - y).abs() < 3e-2), "{found:?} and {expected:?}");
        let alone = ["module operation", "activation alone", "arithmetic alone"].map(|kind| kernels.contains_key(kind));
        assert_eq!(alone, [false; 3], "{kernels:?}");
        Ok(())
    });
}

/// On several ranks they wait for a collective: those that are dropped before are not computed, in whatever shape.
#[test]
fn gradients_of_weights_wait_for_a_collective() {
    for rows in [7, 8] {
        in_half("TP2", |rank, device| {
            let layer = LinearConfig::new(16, 16).with_bias(false).init(&device);
            let layer = parallelize(layer, &rank, &Plan::default().columns("weight"))?;
            drop(layer.forward(Tensor::<3>::ones([4, rows, 16], &device)).sum().backward());
            device.sync()?;
            let gemms = explain(&device).kernels.get("GEMM").copied().unwrap_or(0);
            assert!(gemms <= 1, "{rows} rows: {gemms} GEMMs, forward and for gradients");
            Ok(())
        });
    }
}

#[test]
fn sums_over_tensor_parallel_ranks_are_in_half_precision() {
    let ranks = in_half("TP2", |rank, device| {
        let model = parallelize(config().with_norm_first(true).init(&device), &rank, &Plan::auto())?;
        let x = Tensor::<3>::ones([4, 8, 16], &device);
        let before = explain(&device);
        let loss = model.forward(TransformerEncoderInput::new(x.require_grad())).mean();
        drop(loss.backward());
        Ok(explain(&device).since(&before).collectives["all-reduce"])
    });
    // Two layers, two in each direction, of `[4, 8, 16]` bf16: the residual stream, which is f32, is in none of them.
    let expected = Count { times: 8, bytes: 8 * 4 * 8 * 16 * 2 };
    assert_eq!(ranks, [expected; 2]);
}

/// Attention of queries over keys and values.
type Attend = fn([Tensor<4>; 3]) -> Tensor<4>;

fn causal([q, k, v]: [Tensor<4>; 3]) -> Tensor<4> {
    attention(q, k, v, None, None, AttentionModuleOptions { is_causal: true, ..Default::default() })
}

/// Without the last two keys, and with dropout, as in `MultiHeadAttention`.
fn masked([q, k, v]: [Tensor<4>; 3]) -> Tensor<4> {
    let hidden = Tensor::<1, Int>::arange(0..6, &q.device()).greater_elem(3).reshape([1, 1, 1, 6]);
    let scores = (q.matmul(k.transpose()) * 0.3).mask_fill(hidden.clone(), f32::NEG_INFINITY);
    let weights = softmax(scores.mask_fill(hidden.clone().all_dim(3), 0.0), 3).mask_fill(hidden, 0.0);
    DropoutConfig::new(0.1).init().forward(weights).matmul(v)
}

/// The output of attention of 4 heads over so many, and the gradients in query, key and value.
fn output_and_gradients(device: &Device, heads: usize, attend: Attend) -> Vec<Vec<f64>> {
    let tensor = |seed: usize, heads: usize| {
        let values: Vec<f32> = (0..2 * heads * 6 * 8).map(|i| ((i * 7 + seed * 13) as f32 * 0.37).sin()).collect();
        Tensor::<4>::from_data(TensorData::new(values, [2, heads, 6, 8]), (device, DType::F32)).require_grad()
    };
    let qkv = [tensor(1, 4), tensor(2, heads), tensor(3, heads)];
    let out = attend(qkv.clone());
    let grads = (out.clone() * tensor(4, 4).detach()).sum().backward();
    let read = |x: Tensor<4>| x.into_data().iter::<f64>().collect::<Vec<_>>();
    let gradients = qkv.iter().map(|x| read(x.grad(&grads).unwrap()));
    std::iter::once(read(out)).chain(gradients).collect()
}

#[test]
fn attention_under_autocast_is_one_operation_in_half_precision() {
    let cases: [(usize, Attend); 2] = [(2, causal), (4, masked)];
    for (heads, attend) in cases {
        let options = LogicalOptions { fusion: Some(false), ..Default::default() };
        let expected = launch(&Mesh::new("TP1".parse().unwrap()).unwrap(), &[Device::flex()], |rank| {
            let device = rank.logical_device_with(&[Axis::Tp], options).autodiff();
            Ok(output_and_gradients(&device, heads, attend))
        });
        let ranks = in_half("TP1", |_, device| {
            let found = output_and_gradients(&device, heads, attend);
            let kernels = explain(&device).kernels;
            let attention = ["attention", "attention gradient"].map(|kernel| kernels.get(kernel));
            assert_eq!(attention, [Some(&1); 2], "{kernels:?}");
            Ok(found)
        });
        let norm = |x: &[f64]| x.iter().map(|x| x * x).sum::<f64>().sqrt();
        for (i, (x, y)) in ranks[0].iter().zip(&expected.unwrap()[0]).enumerate() {
            let difference: Vec<f64> = x.iter().zip(y).map(|(x, y)| x - y).collect();
            let relative = norm(&difference) / norm(y);
            assert!((1e-5..2e-2).contains(&relative), "{heads} heads, tensor {i}: {relative}");
        }
    }
}
