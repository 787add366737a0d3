//! The training step of one rank.

mod state;

use super::report::LossSum;
use super::{EngineConfig, EngineError, EvalReport, LossMean, StepReport, TokenBatch};
use crate::batch::BatchPlan;
use crate::lr::LrSchedule;
use crate::optim::{BucketSpec, Optimizer, StepInfo, clip_factor};
use backend_dist::comm::Group;
use backend_dist::launch::Rank;
use backend_dist::mesh::Axis;
use backend_dist::shard::{Registry, stable_hash};
use burn::module::{ModuleVisitor, Param};
use burn::tensor::{DType, Tensor};
use models::CausalLm;
use models::layers::DropoutKey;
pub use state::Position;
use std::time::Instant;

/// A rank's model, gradients, optimizer and groups. All ranks of the mesh call the same methods in the same order.
pub struct RankEngine<M> {
    /// Always there between calls; a step takes it apart and puts it together again.
    model: Option<M>,
    optimizer: Optimizer,
    schedule: LrSchedule,
    config: EngineConfig,
    plan: BatchPlan,
    rank: Rank,
    /// Ranks that hold the same weights and see other tokens.
    replicas: Group,
    /// Ranks that together hold the model.
    model_parallel: Group,
    step: u64,
    consumed: u64,
    grad_scale: f64,
}

impl<M: CausalLm> RankEngine<M> {
    /// An engine before its first step.
    ///
    /// # Errors
    /// Where batch sizes do not divide, the learning rate contradicts itself, or `model` holds other parameters than its
    /// registry says.
    pub fn new(rank: &Rank, model: M, config: EngineConfig) -> Result<Self, EngineError> {
        let plan = config.plan(rank.mesh.layout().dp)?;
        let schedule = config.lr.schedule(config.global_batch)?;
        let params = model.registry().iter().cloned().collect();
        let buckets = vec![BucketSpec { key: 0, params, hidden: true }];
        let (replicas, neighbours) = (rank.group(Axis::DpCp), |size| rank.subgroup(Axis::Tp, size));
        let mut optimizer =
            Optimizer::new(&config.optimizer, 0, buckets, replicas, neighbours, &rank.device, dtype_of(&model));
        optimizer.check(&model, &[0])?;
        let model = optimizer.shard(0, model);
        Ok(Self {
            model: Some(model),
            optimizer,
            schedule,
            config,
            plan,
            replicas: rank.group(Axis::DpCp),
            model_parallel: rank.group(Axis::TpPp),
            rank: rank.clone(),
            step: 0,
            consumed: 0,
            grad_scale: 1.0,
        })
    }

    /// The model with the parameters of the last finished step.
    pub fn model(&self) -> &M {
        self.model.as_ref().expect("the model is in place between steps")
    }

    /// What this rank holds of which global tensor.
    pub fn registry(&self) -> &Registry {
        self.model().registry()
    }

    /// How the global batch is cut.
    pub fn plan(&self) -> &BatchPlan {
        &self.plan
    }

    /// Finished optimizer steps.
    pub fn steps(&self) -> u64 {
        self.step
    }

    /// This rank's gradients of the last step, per counted token and before clipping, flat in the registry's order.
    pub fn gradients(&self) -> Vec<f64> {
        self.optimizer.gradients(0, self.grad_scale)
    }

    /// One optimizer step on the global batch; this rank computes its own rows.
    ///
    /// # Errors
    /// [`EngineError::NonFiniteLoss`] and [`EngineError::NonFiniteGradient`] before anything is updated;
    /// [`EngineError::Rows`] if the batch does not have the configured rows.
    pub fn train_step(&mut self, batch: &TokenBatch) -> Result<StepReport, EngineError> {
        if batch.rows != self.plan.global() {
            return Err(EngineError::Rows { rows: batch.rows, expected: self.plan.global() });
        }
        let rows = |micro| batch.slice(self.plan.rows(micro, self.rank.coords.dp));
        let micro_batches: Vec<_> = (0..self.plan.accumulation).map(rows).collect();
        self.train_micro_batches(&micro_batches)
    }

    /// One optimizer step, given only this rank's rows: `accumulation` micro-batches of `micro` rows.
    ///
    /// # Errors
    /// As [`RankEngine::train_step`].
    pub fn train_micro_batches(&mut self, micro_batches: &[TokenBatch]) -> Result<StepReport, EngineError> {
        let start = Instant::now();
        let rows: usize = micro_batches.iter().map(|micro| micro.rows).sum();
        let expected = self.plan.accumulation * self.plan.micro;
        if rows != expected || micro_batches.len() != self.plan.accumulation {
            return Err(EngineError::Rows { rows, expected });
        }
        let mut sum = LossSum::default();
        for (index, micro_batch) in micro_batches.iter().enumerate() {
            let part = self.forward_backward(index, micro_batch)?;
            sum = LossSum { loss: sum.loss + part.loss, tokens: sum.tokens + part.tokens };
        }

        self.optimizer.reduce(0);
        self.optimizer.sum_partial();
        let sum = sum.total(&self.replicas);
        self.grad_scale = match self.config.loss {
            LossMean::PerToken => 1.0 / sum.tokens.max(1) as f64,
            LossMean::PerMicroBatch => 1.0,
        };
        let loss = sum.mean();
        let grad_norm = self.optimizer.norm(self.grad_scale, &self.model_parallel);
        if !grad_norm.is_finite() {
            return Err(EngineError::NonFiniteGradient { norm: grad_norm, loss, step: self.step + 1 });
        }
        let clip_factor = clip_factor(self.config.clip, grad_norm);
        let lr = self.schedule.at(self.consumed);
        let model = self.model.take().expect("the model is in place between steps");
        self.optimizer.begin_step();
        let info = StepInfo { lr, grad_scale: self.grad_scale * clip_factor };
        self.model = Some(self.optimizer.step(0, model, &info));

        let step = self.step;
        self.step += 1;
        self.consumed += self.plan.global() as u64;
        let (tokens, consumed) = (sum.tokens, self.consumed);
        let seconds = start.elapsed().as_secs_f64();
        Ok(StepReport { step, loss, grad_norm, clip_factor, lr, tokens, consumed, seconds })
    }

    /// Loss of one micro-batch, its gradient added to the main gradients.
    fn forward_backward(&mut self, index: usize, batch: &TokenBatch) -> Result<LossSum, EngineError> {
        let device = self.rank.device.clone().autodiff();
        let (tokens, labels) = batch.to_device(&device);
        let first_sample = self.plan.rows(index, self.rank.coords.dp).start;
        let seed = stable_hash(&format!("dropout {} step {}", self.config.seed, self.step));
        let losses = self.model().training_losses(tokens, labels, Some(&DropoutKey { seed, first_sample }));
        let sum = loss_sum(&losses, batch);
        if !sum.loss.is_finite() {
            let Rank { rank, coords, .. } = self.rank;
            return Err(EngineError::NonFiniteLoss {
                loss: sum.mean(),
                step: self.step + 1,
                micro_batch: index,
                rank,
                coords,
            });
        }
        // The root is a matrix: backward starts from ones, which makes it the sum.
        let factor = match self.config.loss {
            LossMean::PerToken => 1.0,
            LossMean::PerMicroBatch => {
                1.0 / (sum.tokens.max(1) * (self.plan.accumulation * self.replicas.size()) as u64) as f64
            }
        };
        let root = match batch.weights(factor, &self.rank.device, losses.dtype()) {
            Some(weights) => losses * weights,
            None => losses,
        };
        let mut grads = root.backward();
        let Self { model, optimizer, .. } = self;
        optimizer.accumulate(0, model.as_ref().expect("the model is in place between steps"), &mut grads);
        optimizer.complete(0);
        Ok(sum)
    }

    /// Mean loss over the rows of a held-out batch, without gradients. The rows may be any multiple of micro-batch
    /// times data-parallel ranks.
    ///
    /// # Errors
    /// If the rows do not divide.
    pub fn eval_step(&self, batch: &TokenBatch) -> Result<EvalReport, EngineError> {
        let plan = BatchPlan::from_global(batch.rows, self.plan.micro, self.plan.data_parallel)?;
        let model = self.model().valid();
        let mut sum = LossSum::default();
        for micro in 0..plan.accumulation {
            let rows = batch.slice(plan.rows(micro, self.rank.coords.dp));
            let (tokens, labels) = rows.to_device(&self.rank.device);
            let part = loss_sum(&model.token_losses(tokens, labels), &rows);
            sum = LossSum { loss: sum.loss + part.loss, tokens: sum.tokens + part.tokens };
        }
        let sum = sum.total(&self.replicas);
        Ok(EvalReport { loss: sum.mean(), tokens: sum.tokens })
    }
}

/// Element type of the parameters.
fn dtype_of<M: CausalLm>(model: &M) -> DType {
    struct Type(DType);

    impl ModuleVisitor for Type {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            self.0 = param.val().dtype();
        }
    }
    let mut dtype = Type(DType::F32);
    model.visit(&mut dtype);
    dtype.0
}

/// Sum over the counted tokens in double precision, on the host.
fn loss_sum(losses: &Tensor<2>, batch: &TokenBatch) -> LossSum {
    let values = losses.clone().inner().into_data();
    LossSum { loss: batch.masked_sum(values.iter::<f64>()), tokens: batch.counted() as u64 }
}
