//! Models of Burn's `LayerParallelism`, which say themselves what their layers are, as chains.

use backend_dist::paths::PathVisitor;
use burn::module::Module;
use burn::module::parallel::LayerParallelism;

use super::Part;
use super::division::Parameters;

impl Part {
    /// The part of a model of Burn's [`LayerParallelism`] that the parameter with this path belongs to, the layer that has it:
    /// [`Part::Tied`] if the first and the last layer have it, [`Part::Shared`] if others have it together.
    pub fn of_layer<M: LayerParallelism>(model: &M, path: &str) -> Option<Self> {
        let of_model = Parameters::default().walk(model).0;
        let id = of_model.into_iter().find(|(other, ..)| other == path)?.1;
        let has = |ids: Vec<_>| ids.contains(&id);
        let blocks = model.layers_hidden().enumerate().map(|(index, layer)| (Self::Block(index), has(ids(layer))));
        let first = (Self::First, has(ids(model.layer_input())));
        let last = (Self::Last, has(ids(model.layer_output())));
        let all = [first].into_iter().chain(blocks).chain([last]);
        let mut parts: Vec<Self> = all.filter(|(_, has)| *has).map(|(part, _)| part).collect();
        match parts[..] {
            [Self::First, Self::Last] => Some(Self::Tied),
            [] | [_] => parts.pop(),
            _ => Some(Self::Shared(parts)),
        }
    }
}

fn ids<M: Module>(module: &M) -> Vec<burn::module::ParamId> {
    Parameters::default().walk(module).0.into_iter().map(|(_, id, _)| id).collect()
}

/// Makes a model of Burn's [`LayerParallelism`] a chain of [`Stages`](super::Stages), and a model of burn-train: its input
/// layer is the first part, its hidden layers are the blocks. The model, its batches, its output; what of a batch goes into the
/// input layer; and the loss and the output of what comes out of the output layer. The signal of the hidden layers must be an
/// [`Activation`](super::Activation).
///
/// ```
/// use burn::module::parallel::{DistributedLayer, LayerParallelism, LayerSequence};
/// use burn::nn::loss::{MseLoss, Reduction};
/// use burn::nn::{Linear, LinearConfig};
/// use burn::prelude::*;
/// use burn::train::RegressionOutput;
/// use burn_megatron::prelude::*;
///
/// #[derive(Module, Debug)]
/// struct Layer {
///     linear: Linear,
/// }
///
/// impl DistributedLayer for Layer {
///     type Input = Tensor<2>;
///     type Output = Tensor<2>;
///
///     fn forward(&self, x: Tensor<2>) -> Tensor<2> {
///         self.linear.forward(x).tanh()
///     }
/// }
///
/// #[derive(Module, Debug)]
/// struct Mlp {
///     input: Layer,
///     hidden: Vec<Layer>,
///     output: Layer,
/// }
///
/// impl LayerParallelism for Mlp {
///     type InputLayer = Layer;
///     type HiddenLayer = Layer;
///     type OutputLayer = Layer;
///
///     fn layer_input(&self) -> &Layer {
///         &self.input
///     }
///
///     fn layers_hidden(&self) -> impl Iterator<Item = &Layer> {
///         self.hidden.iter()
///     }
///
///     fn layer_output(&self) -> &Layer {
///         &self.output
///     }
///
///     fn into_layers(self) -> LayerSequence<Self> {
///         LayerSequence { input: self.input, hidden: self.hidden, output: self.output }
///     }
/// }
///
/// #[derive(Module, Debug)]
/// struct Batch {
///     x: Tensor<2>,
///     y: Tensor<2>,
/// }
///
/// burn_megatron::stages_of_layers!(Mlp, Batch, RegressionOutput, |batch| batch.x.clone(), |y, batch| {
///     let loss = MseLoss::new().forward(y.clone(), batch.y.clone(), Reduction::Mean);
///     (loss.clone(), RegressionOutput::new(loss, y, batch.y.clone()))
/// });
///
/// let strategy: burn::train::TrainingStrategy<Mlp> = MegatronStrategy::mesh("PP2".parse()?).micro_batches(4).stages().into();
/// # Ok::<(), BoxError>(())
/// ```
#[macro_export]
macro_rules! stages_of_layers {
    ($model:ty, $batch:ty, $output:ty, $input:expr, $loss:expr) => {
        impl $crate::prelude::Stages for $model {
            type Activation = ::burn::module::parallel::HiddenLayerSignal<$model>;

            fn blocks(&self) -> usize {
                ::burn::module::parallel::LayerParallelism::layers_hidden(self).count()
            }

            fn owner(&self, path: &str) -> Option<$crate::prelude::Part> {
                $crate::prelude::Part::of_layer(self, path)
            }

            fn first(&self, batch: &$batch) -> Self::Activation {
                use ::burn::module::parallel::{DistributedLayer, LayerParallelism};
                type Input = <<$model as LayerParallelism>::InputLayer as DistributedLayer>::Input;
                let input: fn(&$batch) -> Input = $input;
                DistributedLayer::forward(LayerParallelism::layer_input(self), input(batch))
            }

            fn block(&self, index: usize, x: Self::Activation, _: &$batch) -> Self::Activation {
                use ::burn::module::parallel::{DistributedLayer, LayerParallelism};
                let layer = LayerParallelism::layers_hidden(self).nth(index).expect("a hidden layer of the model");
                DistributedLayer::forward(layer, x)
            }

            fn last(&self, x: Self::Activation, batch: &$batch) -> (::burn::tensor::Tensor<1>, $output) {
                use ::burn::module::parallel::{DistributedLayer, LayerParallelism};
                type Predicted = <<$model as LayerParallelism>::OutputLayer as DistributedLayer>::Output;
                let loss: fn(Predicted, &$batch) -> (::burn::tensor::Tensor<1>, $output) = $loss;
                loss(DistributedLayer::forward(LayerParallelism::layer_output(self), x), batch)
            }
        }

        $crate::steps_of_stages!($model, $batch, $output);
    };
}
