//! Plain Burn modules in bf16.

use burn::tensor::{DType, Device, FloatDType, Int, Tensor, TensorData};
use burn_megatron::forward::{Settings, forward_module};
use burn_megatron::hf::ModuleFolder;
use models::encoders::cross_entropy;
use models::hf::IGNORED;

use super::{Inputs, logits, oracle, settings};
use crate::files::golden;
use crate::forward::difference;
use crate::images::inputs;

/// The loss and the logits in bf16 are those in fp64 but for what bf16 rounds.
fn half_precision_is_close(model: &str, inputs: &Inputs) {
    let folder = ModuleFolder::open(golden(model)).unwrap();
    for layout in ["TP1", "TP2"] {
        let outputs = [FloatDType::F64, FloatDType::BF16]
            .map(|dtype| forward_module(&folder, inputs, &Settings { dtype, ..settings(layout, true) }).unwrap());
        let [exact, half] = &outputs;
        let gap = difference(&logits(half).data, &logits(exact).data);
        assert!(gap < 0.05, "{model} {layout}: logits {gap:e}");
        let gap = difference(half.loss.as_slice(), exact.loss.as_slice());
        assert!(gap < 1e-3, "{model} {layout}: loss {gap:e}");
        assert!(half.gradients.values().all(|gradient| gradient.data.iter().all(|value| value.is_finite())));
    }
}

#[test]
fn encoders_in_half_precision() {
    for model in ["bert", "t5"] {
        half_precision_is_close(model, &oracle(model).0);
    }
}

#[test]
fn vision_models_in_half_precision() {
    for model in ["vit", "llava"] {
        half_precision_is_close(model, &inputs(model));
    }
}

/// A mean in bf16 has 8 bits, and would be off by a thousandth.
#[test]
fn half_precision_is_summed_in_single() {
    let (device, shape) = (Device::flex(), [2, 300, 7]);
    let values: Vec<f32> = (0..shape.iter().product()).map(|at: usize| (at * 37 % 64) as f32 / 16.0).collect();
    let logits = |dtype: DType| Tensor::<3>::from_data(TensorData::new(values.clone(), shape), (&device, dtype));
    let labels: Vec<i64> = (0..600).map(|at| if at % 5 == 0 { IGNORED } else { at % 7 }).collect();
    let labels = Tensor::<2, Int>::from_data(TensorData::new(labels, [2, 300]), &device);
    let expected = cross_entropy(logits(DType::F64), labels.clone()).into_scalar::<f64>();
    for dtype in [DType::F32, DType::BF16] {
        // The logits are numbers of bf16, so that the loss is the only thing that rounds.
        let found = cross_entropy(logits(dtype), labels.clone()).into_scalar::<f64>();
        assert!((found - expected).abs() < 1e-5 * expected, "{dtype:?}: {found} and {expected}");
    }
}
