//! Optimizers of Burn on a logical device.

use crate::harness::{cpu, determined, tensor};
use backend_dist::launch::launch;
use backend_dist::logical::Placement::Shard;
use backend_dist::mesh::{Axis, Mesh};
use backend_dist::mesh_backend::{LogicalDevice, LogicalOptions, Redistribute};
use backend_dist::parallelize::{Plan, parallelize};
use burn::module::{Module, ModuleVisitor, Param};
use burn::nn::transformer::{TransformerEncoder, TransformerEncoderConfig, TransformerEncoderInput};
use burn::optim::{AdamWConfig, GradientsParams, ModuleOptimizer, SgdConfig};
use burn::tensor::{Device, Tensor};

type Values = Vec<Vec<f64>>;

#[derive(Default)]
struct Read(Values);

impl ModuleVisitor for Read {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        self.0.push(param.val().into_data().iter::<f64>().collect());
    }
}

/// The model after three steps, between which the states of the optimizer go through a record if `records`.
fn trained(
    mut model: TransformerEncoder,
    device: &Device,
    mut optimizer: ModuleOptimizer,
    records: bool,
) -> TransformerEncoder {
    for step in 0..3 {
        let y = model.forward(TransformerEncoderInput::new(tensor([2, 4, 16], step, device)));
        let loss = (y - tensor([2, 4, 16], 7, device)).powf_scalar(2.0).mean();
        let gradients = GradientsParams::from_grads(loss.backward(), &model);
        model = optimizer.step(1e-2, model, gradients);
        if records {
            let record = optimizer.to_record();
            optimizer = optimizer.load_record(record);
        }
    }
    model
}

fn init(device: &Device) -> TransformerEncoder {
    determined(TransformerEncoderConfig::new(16, 32, 4, 1).with_dropout(0.0).init(device))
}

fn values(model: &TransformerEncoder) -> Values {
    let mut read = Read::default();
    model.visit(&mut read);
    read.0
}

fn check(optimizer: fn() -> ModuleOptimizer, records: bool) {
    let alone = cpu().autodiff();
    let expected = values(&trained(init(&alone), &alone, optimizer(), records));
    for (layout, fusion) in [("TP1", false), ("TP1", true), ("TP2", false), ("TP2", true), ("TP4", false)] {
        let options = LogicalOptions { fusion: Some(fusion), run_ahead: Some(fusion), ..Default::default() };
        let mesh = Mesh::new(layout.parse().unwrap()).unwrap();
        let ranks = launch(&mesh, &[cpu()], |rank| {
            let device = rank.logical_device_with(&[Axis::Tp], options).autodiff();
            let model = parallelize(init(&device), &rank, &Plan::auto())?;
            let model = trained(model, &device, optimizer(), records);
            // The parameter stays where the plan has put it.
            assert_eq!(model.layers[0].mha.query.weight.val().placement(Axis::Tp), Shard(1));
            Ok(values(&model))
        });
        for (rank, values) in ranks.unwrap().iter().enumerate() {
            for (i, (x, y)) in values.iter().zip(&expected).enumerate() {
                let norm = y.iter().map(|y| y * y).sum::<f64>().sqrt();
                let difference = x.iter().zip(y).map(|(x, y)| (x - y).powi(2)).sum::<f64>().sqrt();
                assert!(difference <= 1e-10 * norm, "{layout} rank {rank} parameter {i}: {difference} of {norm}");
            }
        }
    }
}

#[test]
fn three_steps_of_adam_w() {
    check(|| AdamWConfig::new().with_epsilon(1e-4).init(), false);
}

#[test]
fn three_steps_of_sgd() {
    check(|| SgdConfig::new().init(), false);
}

/// Burn writes them in the order of a hash map, which is another one on each rank: query, key and value have one shape.
#[test]
fn records_of_an_optimizer_have_the_states_of_every_parameter() {
    check(|| AdamWConfig::new().with_epsilon(1e-4).init(), true);
}
