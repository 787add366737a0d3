//! What modules are made of: options, lists, pairs, enums, constants, integers and booleans; frozen and unused parameters.

use std::ops::Range;

use burn::module::{Initializer, Param, ParamId};
use burn::nn::{Identity, Linear, LinearConfig};
use burn::prelude::*;
use burn_megatron::prelude::*;

use crate::{PLAIN, numbers, plan, proven};

#[derive(Module, Debug)]
enum Mixer {
    Dense(Linear),
    Gated(Gate),
    Nothing(Identity),
}

#[derive(Module, Debug)]
struct Gate {
    gate: Linear,
    value: Linear,
}

#[derive(Module, Debug)]
struct Parts {
    options: [Option<Linear>; 2],
    pair: (Linear, Vec<Mixer>),
    nested: Vec<Vec<Linear>>,
    scale: Param<Tensor<1>>,
    cube: Param<Tensor<3>>,
    /// No elements, as of tokens that a configuration does not ask for.
    registers: Param<Tensor<2>>,
    table: Param<Tensor<2, Int>>,
    mask: Param<Tensor<1, Bool>>,
    constant: Tensor<2>,
    #[module(skip)]
    steepness: f64,
    depth: usize,
    name: String,
    frozen: Linear,
    unused: Linear,
}

impl Parts {
    fn new(device: &Device) -> Self {
        let linear = || LinearConfig::new(4, 4).init(device);
        Self {
            options: [Some(linear()), None],
            pair: (
                linear(),
                vec![
                    Mixer::Dense(linear()),
                    Mixer::Nothing(Identity::new()),
                    Mixer::Gated(Gate { gate: linear(), value: linear() }),
                ],
            ),
            nested: vec![vec![linear()], vec![], vec![linear(), linear()]],
            scale: Param::from_tensor(Tensor::from_data([0.6], device)),
            cube: Initializer::Normal { mean: 0.0, std: 0.5 }.init([4, 4, 4], device),
            registers: Initializer::Zeros.init([0, 4], device),
            table: Param::initialized(ParamId::new(), Tensor::from_data([[1, 3], [0, 2]], device)),
            mask: Param::initialized(ParamId::new(), Tensor::from_data([true, false, true, true], device)),
            constant: Tensor::from_data([[0.5, -0.25, 0.125, 1.0]], device),
            steepness: 1.5,
            depth: 2,
            name: "parts".into(),
            frozen: linear().no_grad(),
            unused: linear(),
        }
    }

    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        let n = x.dims()[0];
        let x = self.options.iter().flatten().fold(x, |x, layer| layer.forward(x).tanh());
        let x = self.pair.1.iter().fold(self.pair.0.forward(x), |x, mixer| match mixer {
            Mixer::Dense(dense) => dense.forward(x).tanh(),
            Mixer::Gated(Gate { gate, value }) => {
                value.forward(x.clone()) * burn::tensor::activation::sigmoid(gate.forward(x))
            }
            Mixer::Nothing(identity) => identity.forward(x),
        });
        let x = self.nested.iter().flatten().fold(x, |x, layer| (layer.forward(x) * self.steepness).tanh());
        let x = x * self.scale.val().unsqueeze() + self.constant.clone();
        let x = Tensor::cat(vec![self.registers.val(), x], 0);
        let x = (0..self.depth).fold(x, |x, at| {
            let matrix = self.cube.val().slice(s![at..at + 1, .., ..]).reshape([4, 4]);
            x.matmul(matrix)
        });
        let picked = x.clone().select(1, self.table.val().reshape([4]));
        let mask = self.mask.val().unsqueeze::<2>().repeat_dim(0, n);
        assert_eq!(self.name, "parts");
        self.frozen.forward(x.mask_where(mask, picked))
    }
}

fn parts_loss(model: &Parts, items: Range<usize>, device: &Device) -> Tensor<1> {
    let n = items.len();
    (model.forward(numbers(&items, [n, 4], 0, device)) - numbers(&items, [n, 4], 1, device)).powi_scalar(2).mean()
}

#[test]
fn fields_of_all_kinds() {
    let plan_of = || plan(Plan::default().columns("options.*|gate|value|cube").rows("nested.*.weight|frozen.weight"));
    proven(Parts::new, parts_loss, PLAIN, plan_of());
    proven(Parts::new, parts_loss, "DP2, DP2 ZeRO2, TP2 DP2 ZeRO1", plan_of().overlap_grad_reduce());
}
