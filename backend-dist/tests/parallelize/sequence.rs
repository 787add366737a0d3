//! Sequence parallelism of a program that does not know of it: a team with [`Teams::sequence_parallel`].

use crate::harness::{Step, compare, cpu, determined, gradients, ints, tensor};
use backend_dist::launch::launch;
use backend_dist::logical::Placement::{self, Shard};
use backend_dist::mesh::{Axis, Mesh};
use backend_dist::mesh_backend::{Counts, MetaDevice, Redistribute, Report, Teams, explain};
use backend_dist::parallelize::{Plan, parallelize};
use burn::module::{Module, ModuleDisplay};
use burn::nn::transformer::{TransformerEncoder, TransformerEncoderConfig, TransformerEncoderInput};
use burn::nn::{Embedding, EmbeddingConfig};
use burn::tensor::{Device, Tensor};

/// A module, and its activations after the last layer.
pub struct Case<M> {
    pub init: fn(&Device) -> M,
    pub encode: fn(&M, &Device) -> Tensor<3>,
}

fn loss(y: Tensor<3>) -> Tensor<1> {
    let target = tensor(y.dims(), 5, &y.device());
    (y.clone() - target).powf_scalar(2.0).sum() + y.powf_scalar(3.0).mean()
}

impl<M: Module + ModuleDisplay> Case<M> {
    fn step(&self, model: &M, device: &Device) -> (Step, Tensor<3>) {
        let y = (self.encode)(model, device);
        let loss = loss(y.clone());
        let grads = loss.backward();
        let step = Step { loss: loss.into_data().iter::<f64>().next().unwrap(), gradients: gradients(model, &grads) };
        (step, y)
    }

    /// Compares a team with one device. What the team did until gradients were read, and where the activations were.
    pub fn check(&self, layout: &str) -> (Report, Placement) {
        self.check_by(layout, &Plan::auto())
    }

    /// [`check`](Self::check) by another plan.
    pub fn check_by(&self, layout: &str, plan: &Plan) -> (Report, Placement) {
        let alone = cpu().autodiff();
        let (expected, _) = self.step(&determined((self.init)(&alone)), &alone);
        let mesh = Mesh::new(layout.parse().unwrap()).unwrap();
        let teams = Teams::new(&mesh, Axis::Tp).sequence_parallel(mesh.layout().sequence_parallel());
        let mut led = launch(&mesh, &[cpu()], |rank| {
            teams.run(&rank, |device| {
                let device = device.autodiff();
                let model = parallelize(determined((self.init)(&device)), &rank, plan)?;
                let before = explain(&device);
                let y = (self.encode)(&model, &device);
                let at = y.placement(Axis::Tp);
                drop(loss(y).backward());
                let report = explain(&device).since(&before);
                compare(&self.step(&model, &device).0, &expected, layout);
                Ok((report, at))
            })
        });
        let (report, at) = led.as_mut().unwrap().swap_remove(0).unwrap();
        // A device without data counts the same.
        assert_eq!(self.planned(&mesh, plan).collectives, report.collectives, "{layout}");
        (report, at)
    }

    fn planned(&self, mesh: &Mesh, plan: &Plan) -> Counts {
        let sequence = mesh.layout().sequence_parallel();
        let mut counts = launch(mesh, &[cpu()], |rank| {
            let meta = MetaDevice::new(&rank, &[Axis::Tp], sequence, false);
            let device = meta.device().autodiff();
            let model = parallelize(determined((self.init)(&device)), &rank, plan)?;
            meta.reset();
            drop(loss((self.encode)(&model, &device)).backward());
            Ok(meta.counts())
        });
        counts.as_mut().unwrap().swap_remove(0)
    }
}

pub fn encoder(device: &Device) -> TransformerEncoder {
    TransformerEncoderConfig::new(16, 32, 4, 2).with_dropout(0.0).with_norm_first(true).init(device)
}

#[test]
fn the_residual_stream_is_sharded_from_the_first_rows_on() {
    let case = Case {
        init: encoder,
        encode: |model: &TransformerEncoder, device| {
            model.forward(TransformerEncoderInput::new(tensor([4, 8, 16], 3, device)))
        },
    };
    for layout in ["TP2 SP", "TP4 SP"] {
        let (report, at) = case.check(layout);
        assert!(at == Shard(0) && report.fallbacks.is_empty(), "{layout}: {report}");
        // Two layers of two blocks, forward and backward. The first block reads what every rank has.
        assert_eq!((report.times("all-gather"), report.times("reduce-scatter")), (7, 8), "{layout}: {report}");
        assert_eq!(report.times("all-reduce"), 0, "{layout}: {report}");
    }
    let (report, at) = case.check("TP2");
    assert!(!at.is_shard() && report.times("all-reduce") == 8, "{report}");
}

#[test]
fn what_comes_out_of_an_embedding_is_sharded() {
    let case = Case::<(Embedding, TransformerEncoder)> {
        init: |device| (EmbeddingConfig::new(20, 16).init(device), encoder(device)),
        encode: |(tokens, encoder), device| {
            let embedded = tokens.forward(ints([4, 8], 20, device));
            encoder.forward(TransformerEncoderInput::new(embedded))
        },
    };
    for layout in ["TP2 SP", "TP4 SP"] {
        let (report, at) = case.check(layout);
        assert!(at == Shard(0) && report.fallbacks.is_empty(), "{layout}: {report}");
        assert_eq!((report.times("all-gather"), report.times("reduce-scatter")), (9, 9), "{layout}: {report}");
        // One of each is the embedding's, as in Megatron-LM.
        assert_eq!(report.times("all-to-all"), 0, "{layout}: {report}");
    }
}

/// The encoder's report for a batch of this many samples and tokens each, and where its activations were.
fn with_batch<const SAMPLES: usize, const TOKENS: usize>() -> (Report, Placement) {
    let case = Case {
        init: encoder,
        encode: |model: &TransformerEncoder, device| {
            model.forward(TransformerEncoderInput::new(tensor([SAMPLES, TOKENS, 16], 3, device)))
        },
    };
    case.check("TP2 SP")
}

#[test]
fn samples_that_the_ranks_do_not_divide_are_sharded_along_the_sequence() {
    let (report, at) = with_batch::<3, 8>();
    assert!(at == Shard(1) && report.fallbacks.is_empty() && report.whole.is_empty(), "{report}");
    assert_eq!((report.times("all-gather"), report.times("reduce-scatter")), (7, 8), "{report}");
}

#[test]
fn tokens_that_the_ranks_do_not_divide_stay_whole() {
    let (report, at) = with_batch::<3, 7>();
    assert!(!at.is_shard() && report.times("all-reduce") == 8, "{report}");
    assert_eq!(
        report.whole.iter().map(|(shape, count)| (&shape[..], count.times)).collect::<Vec<_>>(),
        [(&[3, 7, 16][..], 8)]
    );
    assert!(report.to_string().contains("[3, 7, 16] stayed whole under sequence parallelism"), "{report}");
}

#[test]
fn the_gradient_of_a_parameter_is_no_activation_that_stayed_whole() {
    let mesh = Mesh::new("TP2 SP".parse().unwrap()).unwrap();
    let teams = Teams::new(&mesh, Axis::Tp).sequence_parallel(true);
    let led = launch(&mesh, &[cpu()], |rank| {
        teams.run(&rank, |device| {
            let of = |is_parameter: bool| {
                let scale = tensor([1, 1, if is_parameter { 16 } else { 8 }], 1, &device);
                let scale = if is_parameter {
                    scale.redistribute_parameter(&rank, Axis::Tp, Placement::Replicate)
                } else {
                    scale
                };
                let x = tensor([4, 8, scale.dims()[2]], 3, &device).redistribute(&rank, Axis::Tp, Shard(0));
                let gradient = (x * scale).sum_dim(0).sum_dim(1);
                assert_eq!(gradient.placement(Axis::Tp), Placement::Partial);
                let before = explain(&device);
                drop(gradient.powf_scalar(2.0));
                explain(&device).since(&before).whole.len()
            };
            Ok([true, false].map(of))
        })
    });
    assert_eq!(led.unwrap().swap_remove(0), Some([0, 1]));
}
