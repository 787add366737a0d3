//! The engine on a bigram table: how batches are split, masks, both loss means, errors.

mod anomalies;
mod filled;

use super::*;
use crate::lr::{LrConfig, LrDecay, Span, WeightDecayConfig, WeightDecayIncr};
use crate::optim::AdamWConfig;
use backend_dist::comm::RunError;
use backend_dist::launch::{Rank, launch};
use backend_dist::mesh::{Mesh, ParallelLayout};
use backend_dist::shard::{GroupPosition, ParamSpec, Registry, Section};
use burn::module::{Module, Param, ParamId};
use burn::tensor::activation::log_softmax;
use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use models::MicroBatch;
use models::layers::paged::{PagedKvCache, Step};
use models::layout::ModelDims;
use models::names::NameMap;
use models::param::{BuildError, ParamBuilder};
use models::{CausalLm, ModelConfig, Part};
use serde::{Deserialize, Serialize};

const VOCAB: usize = 5;
const SEQ: usize = 3;

#[derive(Module, Debug)]
struct Bigram {
    table: Param<Tensor<2>>,
    #[module(skip)]
    part: Part,
    #[module(skip)]
    registry: Registry,
}

#[derive(Clone, Serialize, Deserialize)]
struct NoConfig;

impl ModelConfig for NoConfig {
    fn dims(&self) -> ModelDims {
        ModelDims {
            vocab: VOCAB,
            hidden: VOCAB,
            heads: 1,
            kv_heads: 1,
            intermediate: 1,
            experts: None,
            layers: 1,
            max_positions: None,
            states: None,
        }
    }
    fn megatron_names(&self) -> NameMap {
        NameMap::default()
    }
    fn hf_names(&self) -> NameMap {
        NameMap::default()
    }
}

impl CausalLm for Bigram {
    type Config = NoConfig;

    fn build(_config: &NoConfig, _params: ParamBuilder) -> Result<Self, BuildError> {
        Ok(bigram(None))
    }

    fn part(&self) -> &Part {
        &self.part
    }

    fn embed(&self, tokens: Tensor<2, Int>, _: &MicroBatch) -> Tensor<3> {
        let [sequences, seq] = tokens.dims();
        self.table.val().select(0, tokens.transpose().reshape([sequences * seq])).reshape([seq, sequences, VOCAB])
    }

    fn layer(&self, _: usize, x: Tensor<3>, _: &MicroBatch) -> Tensor<3> {
        x
    }

    fn head_losses(&self, x: Tensor<3>, labels: Tensor<2, Int>, _: &MicroBatch) -> Tensor<2> {
        let [seq, sequences, _] = x.dims();
        let labels = labels.transpose().reshape([seq * sequences, 1]);
        let picked = log_softmax(x.reshape([seq * sequences, VOCAB]), 1).gather(1, labels);
        picked.neg().reshape([seq, sequences]).transpose()
    }

    fn head_logits(&self, x: Tensor<3>) -> Tensor<3> {
        x.swap_dims(0, 1)
    }

    fn extend_embed(&self, step: &Step) -> Tensor<3> {
        let ids = Tensor::from_data(step.tokens().as_slice(), &self.table.val().device());
        self.table.val().select(0, ids).unsqueeze_dim(1)
    }

    fn extend_layer(&self, _: usize, x: Tensor<3>, _: &Step, _: &mut PagedKvCache) -> Tensor<3> {
        x
    }

    fn extend_head(&self, x: Tensor<3>, step: &Step) -> Tensor<2> {
        let outputs: Vec<i64> = step.outputs().iter().map(|index| *index as i64).collect();
        let ids = Tensor::from_data(outputs.as_slice(), &x.device());
        x.squeeze_dim::<2>(1).select(0, ids)
    }

    fn registry(&self) -> &Registry {
        &self.registry
    }
}

/// A table whose row `poisoned` is NaN.
fn bigram(poisoned: Option<usize>) -> Bigram {
    let mut registry = Registry::default();
    let section = Section::replicated("table", &[VOCAB, VOCAB], GroupPosition { rank: 0, size: 1 });
    registry.register(ParamSpec::new(vec![section], false)).unwrap();
    let value = |i: usize| if poisoned == Some(i / VOCAB) { f64::NAN } else { (i as f64).sin() };
    let values: Vec<f64> = (0..VOCAB * VOCAB).map(value).collect();
    let data = TensorData::new(values, [VOCAB, VOCAB]);
    let table = Tensor::from_data(data, (&Device::flex().autodiff(), DType::F64)).require_grad();
    let id = ParamId::from(registry.iter().next().unwrap().id);
    Bigram { table: Param::initialized(id, table), part: Part::whole(1), registry }
}

/// Four sequences of which sequence 3 alone uses token 4; masks leave 3, 1, 2 and 3 tokens.
fn batch() -> TokenBatch {
    let ids = [0, 1, 2, 3, 3, 2, 1, 0, 1, 1, 3, 2, 2, 4, 0, 1];
    let mask = [1, 1, 1, 0, 1, 0, 1, 1, 0, 1, 1, 1];
    TokenBatch { mask: Some(mask.iter().map(|m| *m == 1).collect()), ..TokenBatch::from_sequences(&ids, SEQ) }
}

fn config(micro_batch: usize, loss: LossMean) -> EngineConfig {
    let lr = LrConfig {
        init: 0.1,
        warmup: Span::Steps(2),
        decay: Span::Steps(8),
        form: LrDecay::Linear,
        ..LrConfig::constant(0.3)
    };
    EngineConfig { clip: Some(0.1), loss, ..EngineConfig::new(micro_batch, 4, lr) }
}

struct Run {
    reports: Vec<StepReport>,
    gradients: Vec<f64>,
    eval: EvalReport,
}

fn train(dp: usize, config: EngineConfig, poisoned: Option<usize>) -> Result<Vec<Run>, RunError> {
    let mesh = Mesh::new(ParallelLayout { dp, ..Default::default() }).unwrap();
    launch(&mesh, &[Device::flex()], |rank: Rank| {
        let mut engine = RankEngine::new(&rank, &NoConfig.dims(), |_| Ok(bigram(poisoned)), config.clone())?;
        let mut reports = Vec::new();
        for _ in 0..3 {
            reports.push(engine.train_step(&batch())?);
        }
        Ok(Run { reports, gradients: engine.gradients().remove(0).1, eval: engine.eval_step(&batch())? })
    })
}

#[test]
fn every_cut_of_the_batch_trains_the_same() {
    let single = train(1, config(4, LossMean::PerToken), None).unwrap().remove(0);
    assert_eq!(single.reports[0].tokens, 9);
    assert_eq!(single.reports.iter().map(|r| r.consumed).collect::<Vec<_>>(), [4, 8, 12]);
    let rates: Vec<f64> = single.reports.iter().map(|r| (r.lr * 1e9).round() / 1e9).collect();
    assert_eq!(rates, [0.1, 0.2, 0.3]);
    assert!(single.reports[2].loss < single.reports[0].loss);
    assert!(single.reports[0].clip_factor < 1.0);
    for (dp, micro) in [(1, 1), (1, 2), (2, 1), (2, 2), (4, 1)] {
        for run in train(dp, config(micro, LossMean::PerToken), None).unwrap() {
            for (a, b) in run.reports.iter().zip(&single.reports) {
                assert!((a.loss - b.loss).abs() < 1e-13 && (a.grad_norm - b.grad_norm).abs() < 1e-13, "{a:?} {b:?}");
                assert_eq!(a.tokens, b.tokens);
            }
            assert!(run.gradients.iter().zip(&single.gradients).all(|(a, b)| (a - b).abs() < 1e-13));
            assert!((run.eval.loss - single.eval.loss).abs() < 1e-13 && run.eval.tokens == 9);
        }
    }
}

#[test]
fn the_mean_of_micro_batch_means_is_megatrons() {
    // One sequence per micro-batch with 3, 1, 2 and 3 counted tokens: each sequence weighs the same, whoever computes it.
    let single = train(1, config(1, LossMean::PerMicroBatch), None).unwrap().remove(0);
    let over_two = train(2, config(1, LossMean::PerMicroBatch), None).unwrap().remove(1);
    let per_token = train(1, config(1, LossMean::PerToken), None).unwrap().remove(0);
    let gap = |a: &Run, b: &Run| (a.reports[0].grad_norm - b.reports[0].grad_norm).abs();
    assert!(gap(&single, &over_two) < 1e-13);
    assert!(gap(&single, &per_token) > 1e-3);
    // The reported loss is the mean over tokens in both.
    assert_eq!(single.reports[0].loss, per_token.reports[0].loss);

    let model = bigram(None);
    let losses = (0..4).map(|sequence| {
        let sequences = batch().slice(sequence..sequence + 1);
        let device = Device::flex().autodiff();
        let (tokens, labels) = (sequences.tokens_on(&device), sequences.labels_on(&device));
        let weights = sequences.weights(0.25 / sequences.counted() as f64, None, &Device::flex(), DType::F64);
        (model.token_losses(tokens, labels) * weights).sum()
    });
    let grads = losses.reduce(|a, b| a + b).unwrap().backward();
    let grad = model.table.val().grad(&grads).unwrap().into_data();
    let by_hand = grad.iter::<f64>().map(|g| g * g).sum::<f64>().sqrt();
    assert!((single.reports[0].grad_norm - by_hand).abs() < 1e-13);
}

/// From nothing over one step: the first step does not decay, the second one by all of it.
#[test]
fn the_weight_decay_of_a_step_is_that_of_its_samples() {
    let after = |steps: usize, weight_decay: f64, way: WeightDecayConfig| -> Vec<f64> {
        let optimizer = AdamWConfig { weight_decay, ..AdamWConfig::default() }.into();
        let config = EngineConfig { optimizer, weight_decay: way, ..config(4, LossMean::PerToken) };
        let mut engine =
            RankEngine::new(&Rank::single(Device::flex()), &NoConfig.dims(), |_| Ok(bigram(None)), config).unwrap();
        for _ in 0..steps {
            engine.train_step(&batch()).unwrap();
        }
        engine.parameters().remove(0).1
    };
    let (none, constant) = (0.0, WeightDecayConfig::default());
    for incr_style in [WeightDecayIncr::Linear, WeightDecayIncr::Cosine] {
        let schedule = WeightDecayConfig { incr_style, start: 0.0, length: Some(Span::Steps(1)) };
        let first = after(1, 0.5, schedule);
        assert_eq!(first, after(1, none, constant));
        assert_ne!(first, after(1, 0.5, constant));
        // The rate of the second step is 0.2; decoupled decay takes its share of what was there before.
        for ((grown, plain), before) in after(2, 0.5, schedule).iter().zip(after(2, none, constant)).zip(first) {
            assert!((grown - (plain - 0.2 * 0.5 * before)).abs() < 1e-14);
        }
    }
}

#[test]
fn a_bad_loss_names_step_rank_and_micro_batch() {
    // Row 3 is micro-batch 1 of data-parallel rank 1.
    let error = train(2, config(1, LossMean::PerToken), Some(4)).err().unwrap().to_string();
    assert!(error.contains("loss NaN in step 1, micro-batch 1, on rank 1") && error.contains("dp1"), "{error}");
}

#[test]
fn a_bad_batch_changes_nothing() {
    let rank = Rank::single(Device::flex());
    let mut engine =
        RankEngine::new(&rank, &NoConfig.dims(), |_| Ok(bigram(None)), config(4, LossMean::PerToken)).unwrap();
    let table = |engine: &RankEngine<Bigram>| engine.stages().next().unwrap().table.val().into_data();
    let before = table(&engine);
    let error = engine.train_step(&batch().slice(0..2)).unwrap_err();
    assert_eq!(error, EngineError::Sequences { given: 2, expected: 4 });
    assert_eq!(table(&engine), before);
    assert_eq!(engine.steps(), 0);
}

#[test]
fn a_step_after_a_failed_one_is_the_step_without_it() {
    let rank = Rank::single(Device::flex());
    let engine = || RankEngine::new(&rank, &NoConfig.dims(), |_| Ok(bigram(Some(4))), config(2, LossMean::PerToken));
    // Only sequence 3 of the other batch meets the poisoned token.
    let clean = TokenBatch::from_sequences(&[0, 1, 2, 3].repeat(4), SEQ);
    let (mut failing, mut plain) = (engine().unwrap(), engine().unwrap());
    assert!(matches!(failing.train_step(&batch()), Err(EngineError::NonFiniteLoss { .. })));
    let (again, expected) = (failing.train_step(&clean).unwrap(), plain.train_step(&clean).unwrap());
    assert_eq!((again.loss, again.grad_norm, again.step), (expected.loss, expected.grad_norm, expected.step));
    assert_eq!(failing.gradients(), plain.gradients());
}
