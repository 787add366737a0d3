//! Layers in FP8 with a scale for each block: in f64 every layout has the numbers of one device, down to its rounding.

use crate::harness::{cpu, tensor};
use backend_dist::launch::{Rank, launch};
use backend_dist::mesh::{Axis, Mesh};
use backend_dist::mesh_backend::{LogicalDevice, LogicalOptions, Teams, explain};
use backend_dist::parallelize::{Plan, parallelize};
use burn::nn::transformer::{TransformerEncoder, TransformerEncoderConfig, TransformerEncoderInput};
use burn::optim::GradientsParams;
use burn::tensor::{Device, Tensor};
use std::collections::BTreeMap;

/// Blocks of features on two ranks.
const WIDTH: usize = 256;
const SHAPE: [usize; 3] = [2, 256, WIDTH];

/// The loss and gradients of each layer's matrices, and how often each kernel ran.
type Found = (Vec<Vec<f64>>, BTreeMap<&'static str, usize>);

fn pass(rank: &Rank, device: &Device) -> Found {
    let device = device.clone().autodiff();
    device.seed(3);
    let model = TransformerEncoderConfig::new(WIDTH, 512, 4, 2).with_dropout(0.0).init(&device);
    let model: TransformerEncoder = parallelize(model, rank, &Plan::auto()).unwrap();
    let loss = model.forward(TransformerEncoderInput::new(tensor(SHAPE, 1, &device))) * tensor(SHAPE, 2, &device);
    let loss = loss.sum();
    let read = |x: Tensor<1>| x.into_data().iter::<f64>().collect::<Vec<_>>();
    let mut found = vec![read(loss.clone())];
    let grads = GradientsParams::from_grads(loss.backward(), &model);
    for layer in &model.layers {
        let linears = [&layer.mha.query, &layer.mha.output, &layer.pwff.linear_inner, &layer.pwff.linear_outer];
        found.extend(linears.map(|linear| read(grads.get::<2>(linear.weight.id).unwrap().flatten(0, 1))));
    }
    (found, explain(&device).kernels)
}

fn outcome(layout: &str, fp8: bool) -> Found {
    let options = LogicalOptions { fp8, fusion: Some(true), ..Default::default() };
    let mesh = Mesh::new(layout.parse().unwrap()).unwrap();
    let teams = Teams::new(&mesh, Axis::Tp).sequence_parallel(layout.contains("SP")).options(options);
    let ranks = launch(&mesh, &[cpu()], |rank| match layout {
        "TP2 SP" => teams.run(&rank, |device| Ok(pass(&rank, &device))),
        _ => Ok(Some(pass(&rank, &rank.logical_device_with(&[Axis::Tp], options)))),
    });
    ranks.unwrap().into_iter().flatten().next().unwrap()
}

/// The largest relative difference of a tensor.
fn apart(found: &Found, expected: &Found) -> f64 {
    let norm = |x: &mut dyn Iterator<Item = f64>| x.map(|x| x * x).sum::<f64>().sqrt();
    let part = |(x, y): (&Vec<f64>, &Vec<f64>)| {
        assert_eq!(x.len(), y.len());
        norm(&mut x.iter().zip(y).map(|(x, y)| x - y)) / norm(&mut y.iter().copied())
    };
    found.0.iter().zip(&expected.0).map(part).fold(0.0, f64::max)
}

#[test]
fn layouts_round_the_same_numbers() {
    let [exact, alone] = [false, true].map(|fp8| outcome("TP1", fp8));
    let off = apart(&alone, &exact);
    assert!((1e-3..0.2).contains(&off), "{off:e}");
    // Two layers of six matrices: outputs, gradients of weights, and of inputs but the first layer's of its queries, keys and values.
    assert_eq!(alone.1["FP8 GEMM"], 12 + 12 + 9, "{:?}", alone.1);
    assert!(!exact.1.contains_key("FP8 GEMM"));
    for layout in ["TP2", "TP2 SP"] {
        let found = outcome(layout, true);
        let off = apart(&found, &alone);
        assert!(off < 1e-10, "{layout}: {off:e}");
        assert_eq!(found.1["FP8 GEMM"], alone.1["FP8 GEMM"], "{layout}");
    }
}
