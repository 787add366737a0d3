//! A model of Burn's `LayerParallelism`, whose layers are the parts of a pipeline.

use std::ops::Range;

use burn::module::parallel::{DistributedLayer, LayerParallelism, LayerSequence};
use burn::nn::loss::{MseLoss, Reduction};
use burn::nn::{LayerNorm, LayerNormConfig, Linear, LinearConfig};
use burn::prelude::*;
use burn::train::RegressionOutput;
use burn_megatron::prelude::*;
use burn_megatron::stages_of_layers;

use crate::{layouts, muon, proven};

const WIDTH: usize = 8;

#[derive(Module, Debug)]
struct Layer {
    linear: Linear,
    norm: LayerNorm,
    /// The first and the last layer have the same one.
    mix: Option<Linear>,
}

impl Layer {
    fn new(device: &Device, mix: Option<&Linear>) -> Self {
        let linear = LinearConfig::new(WIDTH, WIDTH).init(device);
        Self { linear, norm: LayerNormConfig::new(WIDTH).init(device), mix: mix.cloned() }
    }
}

impl DistributedLayer for Layer {
    type Input = Tensor<2>;
    type Output = Tensor<2>;

    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        let y = x.clone() + self.norm.forward(self.linear.forward(x)).tanh();
        match &self.mix {
            Some(mix) => mix.forward(y),
            None => y,
        }
    }
}

#[derive(Module, Debug)]
struct Model {
    input: Layer,
    hidden: Vec<Layer>,
    output: Layer,
}

impl Model {
    fn new(device: &Device, hidden: usize, is_tied: bool) -> Self {
        let mix = LinearConfig::new(WIDTH, WIDTH).with_bias(false).init(device);
        // Drawn: what is not yet would be drawn twice.
        mix.weight.val();
        let mix = Some(&mix).filter(|_| is_tied);
        Self {
            input: Layer::new(device, mix),
            hidden: (0..hidden).map(|_| Layer::new(device, None)).collect(),
            output: Layer::new(device, mix),
        }
    }
}

impl LayerParallelism for Model {
    type InputLayer = Layer;
    type HiddenLayer = Layer;
    type OutputLayer = Layer;

    fn layer_input(&self) -> &Layer {
        &self.input
    }

    fn layers_hidden(&self) -> impl Iterator<Item = &Layer> {
        self.hidden.iter()
    }

    fn layer_output(&self) -> &Layer {
        &self.output
    }

    fn into_layers(self) -> LayerSequence<Self> {
        LayerSequence { input: self.input, hidden: self.hidden, output: self.output }
    }
}

#[derive(Module, Debug)]
struct Batch {
    x: Tensor<2>,
    y: Tensor<2>,
}

stages_of_layers!(Model, Batch, RegressionOutput, |batch| batch.x.clone(), |y, batch| {
    let loss = MseLoss::new().forward(y.clone(), batch.y.clone(), Reduction::Mean);
    (loss.clone(), RegressionOutput::new(loss, y, batch.y.clone()))
});

fn batch(items: Range<usize>, device: &Device) -> Batch {
    let numbers = |seed: usize| {
        let values = items.clone().flat_map(|item| (0..WIDTH).map(move |at| ((item * 13 + at * seed) as f64).sin()));
        Tensor::from_data(TensorData::new(values.collect::<Vec<f64>>(), [items.len(), WIDTH]), device)
    };
    Batch { x: numbers(3), y: numbers(5) }
}

#[test]
fn layers_train_in_pipelines_as_on_one_device() {
    let layouts = layouts("PP2, PP4, PP2 VPP2, PP2 DP2 ZeRO1, PP2 DP2 ZeRO3");
    let proof = Proof::default().optimizer(muon);
    proven(verify_stages_as(|device| Model::new(device, 4, false), batch, &layouts, &proof), layouts.len());
}

#[test]
fn layers_that_share_a_parameter_are_found() {
    let mut cpu = Device::flex();
    // As for the proofs of this process.
    let _ = cpu.configure(burn::tensor::FloatDType::F64);
    let device = cpu.autodiff();
    let owner = |model: &Model, path: &str| Part::of_layer(model, path);
    let model = Model::new(&device, 3, true);
    assert_eq!(owner(&model, "input.linear.weight"), Some(Part::First));
    assert_eq!(owner(&model, "hidden.2.norm.gamma"), Some(Part::Block(2)));
    assert_eq!(owner(&model, "output.linear.bias"), Some(Part::Last));
    assert_eq!(owner(&model, "input.mix.weight"), Some(Part::Tied));
    assert_eq!(owner(&model, "input.mix.bias"), None);
    let mut model = Model::new(&device, 3, false);
    model.hidden[2].linear = model.hidden[0].linear.clone();
    assert_eq!(owner(&model, "hidden.2.linear.weight"), Some(Part::Shared(vec![Part::Block(0), Part::Block(2)])));
}
