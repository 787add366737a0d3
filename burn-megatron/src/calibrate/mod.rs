//! A model reads calibration texts on one device, and its linear layers say what their inputs are like.

mod sequential;

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use backend_dist::launch::launch;
use backend_dist::mesh::{Mesh, ParallelLayout};
use backend_dist::shard::HostTensor;
use burn::tensor::{DType, Device, FloatDType, Int, Tensor, TensorData};
use models::observer::{InputObserver, Moments};
use models::{CausalLm, FamilyConfig, MicroBatch, ParamBuilder, WeightSource, WithModel};

use crate::forward::ForwardError;
pub use sequential::SequentialHessians;

/// A model, and what it reads.
#[derive(Clone, Copy)]
pub struct Calibration<'a> {
    /// The model.
    pub config: &'a FamilyConfig,
    /// Its weights.
    pub source: &'a dyn WeightSource,
    /// Token ids of each sequence, at least one.
    pub sequences: &'a [Vec<i64>],
    /// Where it computes.
    pub device: &'a Device,
    /// Type of weights and activations; sums are fp32 at least.
    pub dtype: FloatDType,
}

/// Sums over the inputs of layers, by our names; layers that share an input share the tensor.
pub type InputSums = BTreeMap<String, Arc<HostTensor>>;

impl Calibration<'_> {
    /// The sums of the linear layers of some blocks over all tokens. Fails if weights cannot be read, or the device
    /// fails.
    pub fn observe(&self, moments: Moments, blocks: Range<usize>) -> Result<InputSums, ForwardError> {
        self.config.visit(Observe { calibration: *self, moments, blocks })
    }
}

struct Observe<'a> {
    calibration: Calibration<'a>,
    moments: Moments,
    blocks: Range<usize>,
}

impl WithModel for Observe<'_> {
    type Output = Result<InputSums, ForwardError>;

    fn with<M: CausalLm + 'static>(self, config: &M::Config) -> Self::Output {
        let Self { calibration: Calibration { source, sequences, device, dtype, .. }, moments, blocks } = self;
        let mesh = Mesh::new(ParallelLayout::default())?;
        let mut sums = launch(&mesh, std::slice::from_ref(device), |rank| {
            let observer = InputObserver::new(moments, blocks.clone());
            let params = ParamBuilder::new(&rank, dtype, 0).with_source(source).without_autodiff();
            let model = M::build(config, params.with_observer(observer.clone()))?;
            for tokens in sequences {
                let tokens = TensorData::new(tokens.clone(), [1, tokens.len()]);
                let tokens: Tensor<2, Int> = Tensor::from_data(tokens, (&rank.device, DType::I64));
                model.hidden_states(tokens, &MicroBatch::default());
            }
            observer.take()
        })?;
        Ok(sums.pop().unwrap_or_default())
    }
}
