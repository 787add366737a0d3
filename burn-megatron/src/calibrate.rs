//! A model reads calibration texts on one device, and its linear layers say what their inputs are like.

use std::cell::OnceCell;
use std::collections::BTreeMap;
use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;

use backend_dist::launch::{BoxError, launch};
use backend_dist::mesh::{Mesh, ParallelLayout};
use backend_dist::shard::HostTensor;
use burn::tensor::{DType, Device, FloatDType, Int, Tensor, TensorData};
use models::observer::{InputObserver, Moments};
use models::{CausalLm, FamilyConfig, MicroBatch, ModelConfig, ParamBuilder, WeightSource, WithModel};

use crate::forward::ForwardError;
use crate::quantise::Factor;

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

/// Bytes of Hessians that are held at a time.
const AT_ONCE: usize = 8 << 30;

/// The factors of all layers' inputs for GPTQ, computed for some blocks at a time: a model's Hessians are larger than the
/// model.
pub struct InputHessians<'a> {
    calibration: Calibration<'a>,
    /// Blocks that are computed together.
    together: usize,
    held: Range<usize>,
    layers: BTreeMap<String, Rc<Input>>,
}

/// The input that some layers share.
struct Input {
    sum: Arc<HostTensor>,
    factor: OnceCell<Arc<Factor>>,
}

impl<'a> InputHessians<'a> {
    /// None is computed yet.
    pub fn new(calibration: Calibration<'a>) -> Self {
        let names = calibration.config.hf_names();
        let matrices = names.iter().filter_map(|(ours, foreign)| match foreign.our_shape()[..] {
            [_, inputs] if ours.starts_with("layers.0.") && !ours.contains(".experts.") => Some(inputs * inputs * 8),
            _ => None,
        });
        let together = (AT_ONCE / matrices.sum::<usize>().max(1)).max(1);
        Self { calibration, together, held: 0..0, layers: BTreeMap::new() }
    }

    /// The factor of a layer's inputs; `None` if the layer records none, as routed experts. Fails if the model cannot
    /// compute, or its activations are not finite.
    pub fn factor(&mut self, layer: &str) -> Result<Option<Arc<Factor>>, BoxError> {
        let block = layer.strip_prefix("layers.").and_then(|rest| rest.split('.').next()?.parse::<usize>().ok());
        let Some(block) = block else { return Ok(None) };
        if !self.held.contains(&block) {
            self.layers.clear();
            self.held = block..block + self.together;
            let sums = self.calibration.observe(Moments::All, self.held.clone())?;
            let mut inputs: Vec<Rc<Input>> = Vec::new();
            for (name, sum) in sums {
                let known = inputs.iter().find(|input| Arc::ptr_eq(&input.sum, &sum)).cloned();
                let input = known.unwrap_or_else(|| Rc::new(Input { sum, factor: OnceCell::new() }));
                inputs.push(input.clone());
                self.layers.insert(name, input);
            }
        }
        let Some(input) = self.layers.get(layer) else { return Ok(None) };
        if input.factor.get().is_none() {
            let factor = Factor::new(input.sum.data.clone(), input.sum.shape[0])?;
            return Ok(Some(input.factor.get_or_init(|| Arc::new(factor)).clone()));
        }
        Ok(input.factor.get().cloned())
    }
}
