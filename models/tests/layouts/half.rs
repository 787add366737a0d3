//! Models of 16-bit parameters and activations against `f64` with the same weights, to the precision of the type.

use std::ops::Range;

use backend_dist::launch::BoxError;
use burn::tensor::{DType, FloatDType, TensorData};
use models::layers::DropoutKey;
use models::layers::moe::RoutingReplay;
use models::recompute::Module::{CoreAttention, MlpActivation, Norms};
use models::{
    CausalLm, Gpt, GptConfig, Llama, LlamaConfig, Mixtral, MixtralConfig, ModelConfig, Recompute, WeightSource,
};

use crate::harness::{Batch, Noise, Outcome, assert_within, largest, run_on};
use crate::{gpt, llama};

/// Noise which the type can hold.
struct Rounded(FloatDType);

impl WeightSource for Rounded {
    fn read(&self, name: &str, shape: &[usize], ranges: &[Range<usize>]) -> Result<Vec<f64>, BoxError> {
        let values = Noise.read(name, shape, ranges)?;
        let count = values.len();
        let rounded = TensorData::new(values, [count]).convert_dtype(DType::from(self.0)).convert_dtype(DType::F64);
        Ok(rounded.try_to_vec::<f64>().expect("converted to f64"))
    }
}

fn outcome<M: CausalLm>(
    config: &M::Config,
    layout: &str,
    weights: FloatDType,
    dtype: FloatDType,
    routing: RoutingReplay,
) -> Outcome {
    let batch = Batch { routing: Some(routing), ..Batch::synthetic(config.vocab_size()) };
    let dropout = Some(DropoutKey { seed: 3, first_sample: 0 });
    let recompute = Recompute::selective(&[CoreAttention, MlpActivation, Norms]);
    run_on::<M>(config, layout, dtype, &Rounded(weights), &batch, dropout, |params| params.with_recompute(&recompute))
}

fn check<M: CausalLm>(config: &M::Config) {
    // Some twenty roundings lie between a weight of the first layer and the loss.
    for (dtype, limit) in [(FloatDType::BF16, 20.0 / 256.0), (FloatDType::F16, 20.0 / 2048.0)] {
        let routing = RoutingReplay::recording();
        let exact = outcome::<M>(config, "TP1", dtype, FloatDType::F64, routing.clone());
        let floor = 1e-2 * exact.gradients.values().map(|gradient| largest(&gradient.data)).fold(0.0, f64::max);
        for layout in ["TP1", "TP2 SP"] {
            // With the same experts: another choice is no rounding.
            let half = outcome::<M>(config, layout, dtype, dtype, routing.following());
            assert!(half.losses != exact.losses, "{layout} {dtype:?}: as exact as f64");
            assert_within(&format!("{layout} {dtype:?} losses"), &half.losses, &exact.losses, limit / 4.0, 0.0);
            for (name, gradient) in &half.gradients {
                let expected = &exact.gradients[name].data;
                assert_within(&format!("{layout} {dtype:?} {name}"), &gradient.data, expected, limit, floor);
            }
        }
    }
}

#[test]
fn llama_in_half_precision() {
    check::<Llama>(&LlamaConfig { hidden_dropout: 0.1, attention_dropout: 0.1, attention_bias: true, ..llama() });
}

#[test]
fn gpt_in_half_precision() {
    check::<Gpt>(&GptConfig { hidden_dropout: 0.1, attention_dropout: 0.1, ..gpt() });
}

#[test]
fn mixtral_in_half_precision() {
    check::<Mixtral>(&MixtralConfig { vocab_size: 50, ..MixtralConfig::tiny() });
}
