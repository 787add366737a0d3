//! Mamba 2, whose projection and convolution have parts of different sizes.

use crate::harness::{Case, LAYOUTS, tensor};
use backend_dist::parallelize::Plan;
use burn::module::{Module, Param};
use burn::nn::conv::{Conv1d, Conv1dConfig};
use burn::nn::{Linear, LinearConfig, PaddingConfig1d};
use burn::tensor::activation::{silu, softplus};
use burn::tensor::{Device, Tensor};

const WIDTH: usize = 16;
const HEADS: usize = 4;
const INNER: usize = 16;
const GROUPS: usize = 4;
const STATE: usize = 2;
const OF_GROUPS: usize = GROUPS * STATE;

/// Mamba 2 with a scan by hand: gate, input, its two projections to states of groups of heads, and a rate for each head.
#[derive(Module, Debug)]
struct Mamba {
    in_proj: Linear,
    conv1d: Conv1d,
    dt_bias: Param<Tensor<1>>,
    a_log: Param<Tensor<1>>,
    d: Param<Tensor<1>>,
    out_proj: Linear,
}

impl Mamba {
    fn new(device: &Device) -> Self {
        let (channels, ones) = (INNER + 2 * OF_GROUPS, || Param::from_tensor(Tensor::ones([HEADS], device)));
        let padding = PaddingConfig1d::Explicit(3, 3);
        Self {
            in_proj: LinearConfig::new(WIDTH, INNER + channels + HEADS).init(device),
            conv1d: Conv1dConfig::new(channels, channels, 4).with_padding(padding).with_groups(channels).init(device),
            dt_bias: ones(),
            a_log: ones(),
            d: ones(),
            out_proj: LinearConfig::new(INNER, WIDTH).init(device),
        }
    }

    fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        let [n, length, _] = x.dims();
        let sizes = vec![INNER, INNER + 2 * OF_GROUPS, HEADS];
        let [z, xbc, dt]: [Tensor<3>; 3] = self.in_proj.forward(x).split_with_sizes(sizes, 2).try_into().unwrap();
        let xbc = self.conv1d.forward(xbc.swap_dims(1, 2)).narrow(2, 0, length).swap_dims(1, 2);
        let [x, b, c]: [Tensor<3>; 3] =
            silu(xbc).split_with_sizes(vec![INNER, OF_GROUPS, OF_GROUPS], 2).try_into().unwrap();
        let x = x.reshape([n, length, HEADS, INNER / HEADS]);
        let states = |x: Tensor<3>| x.reshape([n, length, GROUPS, STATE]);
        let (b, c) = (states(b), states(c));
        let dt = softplus(dt + self.dt_bias.val().unsqueeze(), 1.0);
        let decay = (dt.clone() * -self.a_log.val().exp().unsqueeze::<3>()).exp();
        let input = x.clone() * dt.unsqueeze_dim::<4>(3);
        let mut state = Tensor::<4>::zeros([n, HEADS, INNER / HEADS, STATE], (&x.device(), x.dtype()));
        let mut outputs = Vec::new();
        for at in 0..length {
            let now = |x: &Tensor<4>| x.clone().narrow(1, at, 1).squeeze_dim::<3>(1);
            let decay = decay.clone().narrow(1, at, 1).reshape([n, HEADS, 1, 1]);
            state = decay * state + now(&input).unsqueeze_dim::<4>(3) * now(&b).unsqueeze_dim::<4>(2);
            outputs.push(state.clone().matmul(now(&c).unsqueeze_dim::<4>(3)).squeeze_dim::<3>(3));
        }
        let y = Tensor::stack::<4>(outputs, 1) + x * self.d.val().reshape([1, 1, HEADS, 1]);
        self.out_proj.forward(y.reshape([n, length, INNER]) * silu(z))
    }
}

#[test]
fn parts_of_mamba_have_different_sizes() {
    let case = Case::<Mamba> {
        init: Mamba::new,
        loss: |model, device, _| model.forward(tensor([2, 5, WIDTH], 3, device)).powf_scalar(3.0).mean(),
    };
    let of_filters = [INNER, OF_GROUPS, OF_GROUPS];
    let plan = Plan::default()
        .columns("dt_bias|a_log|d")
        .columns_in("in_proj", &[INNER, INNER, OF_GROUPS, OF_GROUPS, HEADS])
        .columns_in("conv1d", &of_filters)
        .rows("out_proj");
    for layout in LAYOUTS {
        let report = case.check(layout, &plan);
        assert!(report.fallbacks.is_empty() && report.times("all-gather") == 0, "{layout}: {report}");
    }
    // Filters that are whole are sliced, and their gradients gathered when they are read.
    let whole = plan.replicate("conv1d");
    assert!(case.check("TP2", &whole).fallbacks.is_empty());
}
