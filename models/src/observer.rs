//! What the inputs of linear layers are like, for quantisation and pruning: sums over the tokens that a model has read.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use backend_dist::launch::BoxError;
use backend_dist::shard::HostTensor;
use burn::tensor::{DType, Tensor};
use parking_lot::Mutex;

/// What is summed over a layer's inputs `x`, at least in fp32.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Moments {
    /// `xᵀ x [in, in]`, half the Hessian of the squared error of the layer's outputs.
    All,
    /// Its diagonal, `[1, in]`.
    Squares,
}

/// Sums over the inputs of the linear layers of some blocks of a model on one device, which a
/// [`ParamBuilder`](crate::ParamBuilder) gives to the layers that it builds.
///
/// ```
/// use backend_dist::launch::{BoxError, launch};
/// use backend_dist::mesh::Mesh;
/// use burn::tensor::{Device, FloatDType, Int, Tensor};
/// use models::observer::{InputObserver, Moments};
/// use models::{CausalLm, Llama, LlamaConfig, MicroBatch, ParamBuilder};
///
/// let config = LlamaConfig::tiny();
/// let sums = launch(&Mesh::new("TP1".parse()?)?, &[Device::flex()], |rank| {
///     let observer = InputObserver::new(Moments::All, 0..1);
///     let params = ParamBuilder::new(&rank, FloatDType::F32, 1).without_autodiff().with_observer(observer.clone());
///     let model = Llama::build(&config, params)?;
///     model.hidden_states(Tensor::<2, Int>::from_data([[1, 2, 3]], &rank.device), &MicroBatch::default());
///     observer.take()
/// })?;
/// assert_eq!(sums[0]["layers.0.mlp.down_proj"].shape, [config.intermediate_size; 2]);
/// assert!(!sums[0].contains_key("layers.1.mlp.down_proj"));
/// # Ok::<(), BoxError>(())
/// ```
#[derive(Clone, Debug)]
pub struct InputObserver {
    moments: Moments,
    blocks: Range<usize>,
    /// Layers that share an input, and their sum.
    sums: Arc<Mutex<BTreeMap<Vec<String>, Tensor<2>>>>,
}

impl InputObserver {
    /// An observer of these blocks of a model.
    pub fn new(moments: Moments, blocks: Range<usize>) -> Self {
        Self { moments, blocks, sums: Arc::default() }
    }

    /// The sums by our names of the layers; those of layers that share an input are the same tensor.
    ///
    /// # Errors
    /// If the device cannot be read.
    pub fn take(&self) -> Result<BTreeMap<String, Arc<HostTensor>>, BoxError> {
        let sums = std::mem::take(&mut *self.sums.lock());
        let mut taken = BTreeMap::new();
        for (names, sum) in sums {
            let shape = sum.dims().to_vec();
            let sum = Arc::new(HostTensor { shape, data: sum.try_into_data()?.iter::<f64>().collect() });
            taken.extend(names.into_iter().map(|name| (name, sum.clone())));
        }
        Ok(taken)
    }

    /// What the layer with these outputs records, if it is in one of the blocks.
    pub(crate) fn of<'n>(&self, names: impl Iterator<Item = &'n str>) -> Option<ObservedInput> {
        let names: Vec<String> = names.map(String::from).collect();
        let block: usize = names.first()?.strip_prefix("layers.")?.split('.').next()?.parse().ok()?;
        self.blocks.contains(&block).then(|| ObservedInput { observer: self.clone(), names })
    }
}

/// A layer's side of an observer.
#[derive(Clone, Debug)]
pub(crate) struct ObservedInput {
    observer: InputObserver,
    names: Vec<String>,
}

impl ObservedInput {
    /// Adds a layer's input `[s, b, in]`.
    pub fn record(&self, x: Tensor<3>) {
        let inputs = x.dims()[2];
        self.record_rows(x.reshape([-1, inputs as i64]));
    }

    /// Adds inputs `[tokens, in]`.
    pub fn record_rows(&self, x: Tensor<2>) {
        let x = if x.device().is_autodiff() { x.inner() } else { x };
        let x = if x.dtype().size() < 4 { x.cast(DType::F32) } else { x };
        let term = match self.observer.moments {
            Moments::All => x.clone().transpose().matmul(x),
            Moments::Squares => (x.clone() * x).sum_dim(0),
        };
        let mut sums = self.observer.sums.lock();
        let sum = match sums.remove(&self.names) {
            Some(sum) => sum + term,
            None => term,
        };
        sums.insert(self.names.clone(), sum);
    }
}
