//! What GPTQ must know of a model's layers, block by block: the inputs of a block are those that the blocks before it give
//! with their rounded weights, so that it makes up for their errors too (as `sequential` pipelines of llm-compressor, and
//! AutoGPTQ).
//!
//! The activations between blocks wait in host memory, so that every block is built twice and computed twice, however many
//! there are.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, OnceLock};

use backend_dist::launch::{BoxError, Rank, launch};
use backend_dist::mesh::{Mesh, ParallelLayout};
use backend_dist::shard::HostTensor;
use burn::tensor::{DType, Int, Tensor, TensorData};
use models::observer::{InputObserver, Moments};
use models::{CausalLm, MicroBatch, ParamBuilder, Part, WeightSource, WithModel};

use super::{Calibration, InputSums};
use crate::hf::Rounding;
use crate::quantise::Factor;

/// The factors of the inputs of linear layers, of routed experts those of the tokens that they take, times their
/// probabilities in front of the last layer.
pub struct SequentialHessians<'a> {
    calibration: Calibration<'a>,
    /// The block that is rounded now, and what its layers read, by our names.
    block: Option<usize>,
    layers: BTreeMap<String, Arc<Input>>,
    /// Of each sequence, what goes into that block, `[s, 1, hidden]`.
    activations: Vec<TensorData>,
    /// The block's rounded weights.
    rounded: BTreeMap<String, Vec<f64>>,
}

/// The input that some layers share.
struct Input {
    sum: Arc<HostTensor>,
    factor: OnceLock<Arc<Factor>>,
}

impl<'a> SequentialHessians<'a> {
    /// None is computed yet.
    pub fn new(calibration: Calibration<'a>) -> Self {
        let (layers, rounded) = (BTreeMap::new(), BTreeMap::new());
        Self { calibration, block: None, layers, activations: Vec::new(), rounded }
    }

    /// Continues to a block, through those before it with the weights that they have now.
    fn enter(&mut self, block: usize) -> Result<(), BoxError> {
        let first = self.block.unwrap_or(0);
        if block < first {
            return Err(format!("block {block} is rounded after block {first}, whose inputs it makes").into());
        }
        for before in first..block {
            self.activations = self.pass(before, None)?.1;
            self.rounded.clear();
        }
        let (sums, _) = self.pass(block, Some(&InputObserver::new(Moments::All, block..block + 1)))?;
        let mut inputs: Vec<Arc<Input>> = Vec::new();
        self.layers.clear();
        for (name, sum) in sums {
            let known = inputs.iter().find(|input| Arc::ptr_eq(&input.sum, &sum)).cloned();
            let input = known.unwrap_or_else(|| Arc::new(Input { sum, factor: OnceLock::new() }));
            inputs.push(input.clone());
            self.layers.insert(name, input);
        }
        self.block = Some(block);
        Ok(())
    }

    /// Computes a block for all sequences: with an observer its inputs' sums, without one the inputs of the next block.
    fn pass(&self, block: usize, observer: Option<&InputObserver>) -> Result<Passed, BoxError> {
        let source = Rounded { base: self.calibration.source, values: &self.rounded };
        let calibration = Calibration { source: &source, ..self.calibration };
        self.calibration.config.visit(RunBlock { calibration, block, observer, activations: &self.activations })
    }
}

impl Rounding for SequentialHessians<'_> {
    fn factor(&mut self, layer: &str) -> Result<Option<Arc<Factor>>, BoxError> {
        let block = layer.strip_prefix("layers.").and_then(|rest| rest.split('.').next()?.parse::<usize>().ok());
        let Some(block) = block else { return Ok(None) };
        if self.block != Some(block) {
            self.enter(block)?;
        }
        let Some(input) = self.layers.get(layer) else { return Ok(None) };
        if input.factor.get().is_none() {
            let factor = Arc::new(Factor::new(input.sum.data.clone(), input.sum.shape[0])?);
            return Ok(Some(input.factor.get_or_init(|| factor).clone()));
        }
        Ok(input.factor.get().cloned())
    }

    fn rounded(&mut self, weight: &str, values: &dyn Fn() -> Vec<f64>) {
        self.rounded.insert(weight.into(), values());
    }
}

/// A model's weights, some of them rounded.
struct Rounded<'a> {
    base: &'a dyn WeightSource,
    values: &'a BTreeMap<String, Vec<f64>>,
}

impl WeightSource for Rounded<'_> {
    fn read(&self, name: &str, shape: &[usize], ranges: &[Range<usize>]) -> Result<Vec<f64>, BoxError> {
        let Some(values) = self.values.get(name) else { return self.base.read(name, shape, ranges) };
        let columns = shape[1];
        let row = |row: usize| &values[row * columns..][ranges[1].clone()];
        Ok(ranges[0].clone().flat_map(row).copied().collect())
    }
}

/// The sums of an observer, and without one what goes into the next block.
type Passed = (InputSums, Vec<TensorData>);

/// A block, and what goes into it; the first begins with the tokens.
struct RunBlock<'a> {
    calibration: Calibration<'a>,
    block: usize,
    observer: Option<&'a InputObserver>,
    activations: &'a [TensorData],
}

impl WithModel for RunBlock<'_> {
    type Output = Result<Passed, BoxError>;

    fn with<M: CausalLm + 'static>(self, config: &M::Config) -> Self::Output {
        let Self { calibration, block, observer, activations } = self;
        let run = |rank: Rank| -> Self::Output {
            let part = Part { layers: block..block + 1, embedding: block == 0, head: false };
            let params = ParamBuilder::new(&rank, calibration.dtype, 0).with_source(calibration.source);
            let params = params.without_autodiff().with_part(part);
            let params = if let Some(observer) = observer { params.with_observer(observer.clone()) } else { params };
            let (model, batch) = (M::build(config, params)?, MicroBatch::default());
            let mut after = Vec::new();
            for (at, tokens) in calibration.sequences.iter().enumerate() {
                let x = match activations.get(at) {
                    Some(x) => Tensor::from_data(x.clone(), (&rank.device, DType::from(calibration.dtype))),
                    None => {
                        let tokens = TensorData::new(tokens.clone(), [1, tokens.len()]);
                        let tokens: Tensor<2, Int> = Tensor::from_data(tokens, (&rank.device, DType::I64));
                        model.embed(tokens, &batch)
                    }
                };
                let x = model.layer(block, x, &batch);
                if observer.is_none() {
                    after.push(x.try_into_data()?);
                }
            }
            Ok((observer.map_or_else(|| Ok(InputSums::new()), InputObserver::take)?, after))
        };
        let mesh = Mesh::new(ParallelLayout::default())?;
        let mut done = launch(&mesh, std::slice::from_ref(calibration.device), run)?;
        Ok(done.pop().expect("one rank has a result"))
    }
}
