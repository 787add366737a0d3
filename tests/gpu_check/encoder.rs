//! What the checks on burn-nn's encoder share.

use crate::numbers::relative;
use crate::report::Report;
use backend_dist::launch::BoxError;
use burn::module::{Module, ModuleMapper, ModuleVisitor, Param};
use burn::nn::transformer::{TransformerEncoder, TransformerEncoderConfig, TransformerEncoderInput};
use burn::optim::{AdamWConfig, GradientsParams, ModuleOptimizer};
use burn::store::ModuleRecord;
use burn::tensor::{Bool, Bytes, DType, Device, FloatDType, Tensor, TensorData};

/// Tokens of a sample whose steps are timed.
pub const SEQUENCE: usize = 512;
/// Timed steps.
pub const STEPS: usize = 5;

/// The encoder whose steps are timed.
pub fn large(width: usize, layers: usize) -> TransformerEncoderConfig {
    TransformerEncoderConfig::new(width, 4 * width, 16, layers).with_dropout(0.0)
}

/// The encoder that is checked, with the same weights each time.
pub struct Small {
    config: TransformerEncoderConfig,
    weights: Bytes,
}

impl Small {
    pub fn new() -> Result<Self, BoxError> {
        Self::of(TransformerEncoderConfig::new(64, 128, 4, 3).with_dropout(0.0))
    }

    /// With dropout, and heads of a size for which there is FlashAttention.
    pub fn with_dropout() -> Result<Self, BoxError> {
        Self::of(TransformerEncoderConfig::new(128, 256, 2, 3).with_dropout(0.1))
    }

    fn of(config: TransformerEncoderConfig) -> Result<Self, BoxError> {
        let weights = config.init(&Device::flex()).into_record().into_bytes()?;
        Ok(Self { config, weights })
    }

    pub fn model(&self, device: &Device, dtype: DType) -> Result<TransformerEncoder, BoxError> {
        let record = ModuleRecord::from_bytes(self.weights.clone())?;
        Ok(self.config.init(device).load_record(record).map(&mut To(dtype)))
    }

    /// The batch of a step, of eight tokens a sample.
    pub fn batch(&self, samples: usize, step: usize, device: &Device, dtype: DType) -> Tensor<3> {
        let shape = [samples, 8, self.config.d_model];
        let values: Vec<f64> = (0..shape.iter().product()).map(|i: usize| ((i * 37 + step) as f64).sin()).collect();
        Tensor::from_data(TensorData::new(values, shape), (device, dtype))
    }
}

/// The last tokens of each sample as padding, one more for each: `[samples, tokens]`, and the first sample has none.
pub fn padding(x: &Tensor<3>) -> Tensor<2, Bool> {
    let [samples, tokens, _] = x.dims();
    let is_padding = (0..samples * tokens).map(|i| i % tokens + i / tokens >= tokens).collect::<Vec<bool>>();
    Tensor::from_data(TensorData::new(is_padding, [samples, tokens]), &x.device())
}

/// Gradients of the mean square of the output.
pub fn gradients(model: &TransformerEncoder, x: Tensor<3>) -> GradientsParams {
    gradients_of(model, TransformerEncoderInput::new(x))
}

pub fn gradients_of(model: &TransformerEncoder, input: TransformerEncoderInput) -> GradientsParams {
    let loss = model.forward(input).powi_scalar(2).mean();
    GradientsParams::from_grads(loss.backward(), model)
}

/// A model in training by AdamW.
pub struct Training {
    /// Empty during a step, so that the optimizer may write over the weights.
    model: Option<TransformerEncoder>,
    optimizer: ModuleOptimizer,
}

impl Training {
    pub fn new(model: TransformerEncoder) -> Self {
        Self { model: Some(model), optimizer: AdamWConfig::new().init() }
    }

    pub fn step(&mut self, lr: f64, gradients: impl FnOnce(&TransformerEncoder) -> GradientsParams) {
        let model = self.model.take().expect("one step at a time");
        let grads = gradients(&model);
        self.model = Some(self.optimizer.step(lr, model, grads));
    }

    pub fn model(self) -> TransformerEncoder {
        self.model.expect("one step at a time")
    }
}

/// The values of all parameters.
pub fn values(model: &TransformerEncoder) -> Vec<f64> {
    let mut values = Values(Vec::new());
    model.visit(&mut values);
    values.0
}

/// How far parameters are from those of one GPU.
pub fn compare(report: &mut Report, what: &str, dtype: DType, found: &[f64], expected: &[f64]) {
    let bound = match dtype {
        DType::F64 => 1e-10,
        DType::F32 => 1e-4,
        _ => 1e-2,
    };
    report.error(format!("{dtype:?} {what}"), relative(found, expected), bound);
}

/// Parameters in another number type.
struct To(DType);

impl ModuleMapper for To {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let device = param.lazy_device();
        param.map(|value| {
            let cast = value.inner().cast(FloatDType::from(self.0));
            Tensor::<D>::from_data(cast.into_data(), (&device, self.0)).require_grad()
        })
    }
}

struct Values(Vec<f64>);

impl ModuleVisitor for Values {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        self.0.extend(param.val().into_data().iter::<f64>());
    }
}
