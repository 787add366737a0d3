//! ZeRO 1, 2 and 3 under `SupervisedTraining` against stage 0, which `tests/mesh_strategy` tests against one device.

mod net;

use std::path::Path;
use std::sync::Arc;

use backend_dist::launch::launch;
use backend_dist::mesh::{Axis, Mesh, ParallelLayout};
use burn::grad_clipping::GradientClippingConfig;
use burn::module::ParamGroup;
use burn::optim::momentum::MomentumConfig;
use burn::optim::{AdamWConfig, ModuleOptimizer, OptimizerRecord, SgdConfig};
use burn::tensor::{DType, Device};
use burn::train::renderer::CliMetricsRenderer;
use burn::train::{Learner, SupervisedTraining, TrainingStrategy};
use burn_pack::Reader;
use parking_lot::Mutex;

use crate::learner::data_parallel::DataParallel;
use crate::learner::dp_rank::DpRank;
use crate::learner::report::{Fit, Fitted, Training};
use crate::learner::zero::Units;
use crate::learner::zero::records::optimizer_record;
use crate::learner::{MegatronStrategy, custom};

use net::{NEVER, Net, SOMETIMES, loader};

fn worst(left: &[f64], right: &[f64]) -> f64 {
    assert_eq!(left.len(), right.len());
    left.iter().zip(right).map(|(left, right)| (left - right).abs() / right.abs().max(1e-3)).fold(0.0, f64::max)
}

fn adamw() -> ModuleOptimizer {
    let clipping = GradientClippingConfig::Norm(0.3);
    AdamWConfig::new().with_weight_decay(0.1).with_grad_clipping(Some(clipping)).init()
}

fn momentum() -> SgdConfig {
    SgdConfig::new().with_momentum(Some(MomentumConfig { momentum: 0.9, dampening: 0.1, nesterov: true }))
}

fn sgd() -> ModuleOptimizer {
    momentum().init()
}

/// Two optimizers: a checkpoint has to say which parameters go with which.
fn mixed() -> ModuleOptimizer {
    adamw().with_group(ParamGroup::from_predicate("second"), momentum().build(), None)
}

/// All but the parameter that only some batches use are sharded.
fn units() -> Units {
    Units::auto().keep_below(2)
}

fn zero(stage: u8, ranks: usize) -> TrainingStrategy<Net> {
    match stage {
        3 => MegatronStrategy::fully_shard(vec![Device::flex(); ranks], units()),
        _ => MegatronStrategy::zero(stage, ranks),
    }
}

#[derive(Clone)]
struct Setup {
    epochs: usize,
    accumulation: Option<usize>,
    optimizer: fn() -> ModuleOptimizer,
    device: Device,
    dtype: DType,
    /// Keeps checkpoints, and resumes from that of an epoch.
    checkpoints: Option<Option<usize>>,
}

impl Setup {
    fn new(optimizer: fn() -> ModuleOptimizer) -> Self {
        let device = Device::flex().autodiff();
        Self { epochs: 2, accumulation: None, optimizer, device, dtype: DType::F64, checkpoints: None }
    }

    /// The weights after training on batches of 2.
    fn run(&self, directory: &Path, strategy: TrainingStrategy<Net>) -> Vec<Vec<f64>> {
        let train = loader(59, 2, self.dtype);
        let mut training = SupervisedTraining::new(directory, train, loader(4, 4, self.dtype))
            .with_application_logger(None)
            .renderer(Box::new(CliMetricsRenderer::new()))
            .num_epochs(self.epochs)
            .with_training_strategy(strategy);
        if let Some(accumulation) = self.accumulation {
            training = training.grads_accumulation(accumulation);
        }
        let mut net = Net::new(&self.device, self.dtype);
        if let Some(resume) = self.checkpoints {
            training = training.with_default_checkpointers();
            if let Some(epoch) = resume {
                training = training.checkpoint(epoch);
                // Other weights, so that only the checkpoint can bring back the right ones.
                net.first = net.first.map(|tensor| tensor.mul_scalar(0.5));
            }
        }
        let result = training.launch(Learner::new(net, (self.optimizer)(), 0.01));
        assert!(result.error.is_none(), "{}", result.error.unwrap());
        assert!(result.interrupted.is_none(), "{:?}", result.interrupted);
        result.model.weights()
    }

    fn weights(&self, strategy: TrainingStrategy<Net>) -> Vec<Vec<f64>> {
        self.run(tempfile::tempdir().unwrap().path(), strategy)
    }
}

#[test]
fn every_stage_has_the_bits_of_stage_0() {
    let start = Net::new(&Device::flex(), DType::F64).weights();
    for optimizer in [adamw, sgd] {
        // On 8 ranks two own nothing.
        for (ranks, accumulation) in [(1, None), (2, None), (3, None), (4, None), (8, None), (2, Some(3)), (3, Some(4))]
        {
            let setup = Setup { accumulation, ..Setup::new(optimizer) };
            let whole = setup.weights(MegatronStrategy::data_parallel(ranks));
            let changed: Vec<bool> = whole.iter().zip(&start).map(|(now, start)| now != start).collect();
            assert!((0..changed.len()).all(|index| changed[index] == (index != NEVER)), "{changed:?}");
            for stage in [1, 2, 3] {
                let sharded = setup.weights(zero(stage, ranks));
                if stage >= 2 && accumulation.is_some() {
                    let worst = worst(&sharded.concat(), &whole.concat());
                    assert!(worst < 1e-12, "{ranks} ranks: {worst}");
                } else {
                    assert_eq!(sharded, whole, "ZeRO {stage}, {ranks} ranks, accumulation {accumulation:?}");
                }
            }
        }
    }
}

#[test]
fn parameters_keep_their_gradient_checkpointing() {
    let setup = Setup { device: Device::flex().autodiff().gradient_checkpointing(), ..Setup::new(adamw) };
    let [whole, first, third] = [0, 1, 3].map(|stage| setup.weights(zero(stage, 2)));
    assert_eq!(first, whole);
    assert_eq!(third, whole);
}

#[test]
fn checkpoints_resume_in_any_stage() {
    let setup = |epochs, resume| {
        // burn-train restores the optimizer's state in f32.
        Setup { epochs, dtype: DType::F32, checkpoints: Some(resume), ..Setup::new(mixed) }
    };
    let uninterrupted = setup(4, None).weights(MegatronStrategy::data_parallel(3));
    for (before, after) in [(0, 0), (1, 1), (2, 2), (2, 0), (0, 1), (3, 3), (3, 0), (0, 3), (1, 3)] {
        let directory = tempfile::tempdir().unwrap();
        setup(2, None).run(directory.path(), zero(before, 3));
        let resumed = setup(4, Some(2)).run(directory.path(), zero(after, 3));
        assert_eq!(resumed, uninterrupted, "ZeRO {before}, then {after}");
    }
}

/// Takes one step of a training that resumes from a checkpoint and notes the states that each rank holds, before and
/// after.
struct Probe {
    ranks: usize,
    zero: u8,
    elements: Arc<Mutex<Vec<[usize; 2]>>>,
}

impl Fit<Net> for Probe {
    fn fit(&self, training: Training<Net>) -> Fitted<Net> {
        let Training { components, mut learner, train, starting_epoch, .. } = training;
        let strategy = DataParallel::new(self.ranks, self.zero, units());
        let store = &*components.event_store;
        let (zero, model) = (strategy.zero(&learner, false), learner.model());
        let learners =
            strategy.learner_of_each_rank(&mut learner, &zero, (starting_epoch > 1).then_some(store)).unwrap();
        let learners = Mutex::new(learners);
        let mesh = Mesh::new(ParallelLayout { dp: self.ranks, ..Default::default() }).unwrap();
        let device = Device::flex().autodiff();
        let batch = Mutex::new(train.to_device(&device).iter().next().unwrap().unwrap());
        let counts = launch(&mesh, std::slice::from_ref(&device), |rank| {
            let learner = learners.lock()[rank.rank].clone();
            let before = elements(optimizer_record(&learner, store));
            let mut dp_rank = DpRank::new(learner, &device, zero.clone(), &rank.group(Axis::Dp), None)?;
            let batch = batch.lock().clone();
            let output = dp_rank.train_step(batch, true);
            dp_rank.accumulate(output.grads);
            dp_rank.step();
            Ok([before, elements(dp_rank.states(store))])
        });
        *self.elements.lock() = counts.unwrap();
        Fitted { model, processor: components.event_processor, failure: None }
    }
}

/// Elements of all tensors of the record.
fn elements(record: OptimizerRecord) -> usize {
    let tensors = Reader::from_bytes(record.into_bytes().unwrap()).unwrap().into_tensors().unwrap();
    tensors.iter().map(|tensor| tensor.shape.num_elements()).sum()
}

#[test]
fn a_state_exists_on_its_owner_only() {
    let directory = tempfile::tempdir().unwrap();
    let setup = |resume| Setup { epochs: 1, dtype: DType::F32, checkpoints: Some(resume), ..Setup::new(adamw) };
    let weights = setup(None).run(directory.path(), MegatronStrategy::data_parallel(2));
    let lengths: Vec<usize> = weights.iter().map(Vec::len).collect();
    // AdamW's two moments of every parameter that was used.
    let total = 2 * (lengths.iter().sum::<usize>() - lengths[NEVER]);
    let largest = 2 * lengths.iter().max().unwrap();
    assert_eq!((lengths[NEVER], lengths[SOMETIMES], total, largest), (20, 1, 174, 96));
    for (zero, ranks) in [(0, 2), (1, 2), (2, 3), (1, 4), (3, 2), (3, 4)] {
        let probe = Arc::new(Mutex::new(Vec::new()));
        setup(Some(1)).run(directory.path(), custom(Probe { ranks, zero, elements: probe.clone() }));
        let counts = probe.lock().clone();
        assert!(counts.iter().all(|[restored, stepped]| restored == stepped), "{counts:?}");
        let held: Vec<usize> = counts.into_iter().map(|[held, _]| held).collect();
        if zero == 0 {
            assert_eq!(held, vec![total; ranks]);
        } else {
            // What stays whole has its states on every rank.
            let whole = if zero == 3 { 2 * lengths[SOMETIMES] * (ranks - 1) } else { 0 };
            assert_eq!(held.iter().sum::<usize>(), total + whole, "{held:?}");
            assert!(held.iter().all(|held| *held <= total / ranks + largest), "{held:?}");
        }
    }
}

#[test]
#[should_panic(expected = "ZeRO has the stages 0, 1, 2 and 3, not 4; nearest: 3")]
fn zero_4_is_refused() {
    let _ = MegatronStrategy::zero::<Net>(4, 2);
}
