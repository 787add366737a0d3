//! The router: logits, the choice of experts, their probabilities, and (in `auxiliary`) auxiliary losses and counts.
//!
//! On GPUs the host waits for the counts of the choice once in a layer. The GPU needs work until the host has read
//! them, communicated them to the other members and begun the all-to-all. So everything that does not need the counts
//! on the host is queued after their copy and before the wait: probabilities, shared experts, the logits' part of
//! losses and statistics, and, by counts on the device, the copies of tokens for other members (`Dispatch::early`). The
//! weights of a load-balancing loss need the counts, but nobody waits for them: they follow the experts.

mod auxiliary;

pub(super) use auxiliary::AfterExperts;

use backend_dist::ops::moe::routing::OrderedCopies;
use backend_dist::ops::moe::{router_logits, row_multiple};
use backend_dist::ops::{add_bias, normalize_sum, softmax};
use backend_dist::shard::Init;
use burn::module::{Module, Param};
use burn::tensor::activation::sigmoid;
use burn::tensor::{Bool, DType, FloatDType, Tensor, TensorData};

use super::balance::Shares;
use super::capacity::{drop_tokens, room};
use super::config::{Capacity, Dispatcher, DropPolicy, MoeConfig, RouterConfig, RouterDevice, Scores};
use super::decide::{self, Choices, Tokens, Uncounted, host};
use super::forced::Forced;
use super::routing_replay::{Purpose, Routed};
use super::select::Choice;
use crate::layers::{DropoutKey, fp32_softmax};
use crate::micro_batch::MicroBatch;
use crate::param::{ParamBuilder, Result};

/// Chooses experts for a rank's own tokens, in fp32 (in f64 for f64).
#[derive(Module, Debug)]
pub(super) struct Router {
    weight: Param<Tensor<2>>,
    /// Added to the logits.
    bias: Option<Param<Tensor<1>>>,
    expert_bias: Option<Param<Tensor<1>>>,
    #[module(skip)]
    config: RouterConfig,
    #[module(skip)]
    capacity: Option<Capacity>,
    #[module(skip)]
    shares: Shares,
    #[module(skip)]
    forced: Option<Forced>,
    #[module(skip)]
    layer: usize,
    #[module(skip)]
    fp32: bool,
    /// Whether experts are chosen on the device.
    #[module(skip)]
    on_device: bool,
}

/// What a router decides.
pub(super) struct Routing {
    /// After dropping.
    pub choice: Choices,
    /// `[tokens, experts]`; meaningless for experts that were not chosen.
    pub probs: Tensor<2>,
    /// The number of tokens that each expert is padded to.
    pub pad_to: Option<usize>,
}

impl Router {
    /// A router under the global name `name`.
    pub fn new(params: &mut ParamBuilder, name: &str, config: &MoeConfig) -> Result<Self> {
        let MoeConfig { hidden, experts, kind, router, capacity, input, .. } = *config;
        // Every rank of a tensor parallel group routes other tokens.
        let weight = params.on_heads(&format!("{name}.weight"), [experts, hidden], input)?;
        let bias = match kind.has_biases() {
            true => Some(params.on_heads(&format!("{name}.bias"), [experts], Init::ZEROS)?),
            false => None,
        };
        let bias_name = format!("{name}.expert_bias");
        let expert_bias = match router.bias_rate {
            Some(_) => Some(params.state(&bias_name, [experts], Init::ZEROS)?),
            None => None,
        };
        // A frozen bias is added and stays what it is, as with Megatron's `frozen_expert_bias`.
        let bias_rate = router.bias_rate.filter(|_| !params.is_frozen(&bias_name));
        let router = RouterConfig { bias_rate, ..router };
        let layer = params.unit().layer().expect("a router is in a layer");
        let shares = Shares::new(params);
        let forced = params.experts().forced.then(|| Forced::new(name, params.experts().group.rank()));
        // transformers has the softmax of gpt-oss, whose router has a bias, in the model's type.
        let (fp32, is_f64) = (params.has_fp32_norms() && bias.is_none(), params.dtype() == FloatDType::F64);
        let on_device = match router.device {
            RouterDevice::Host => false,
            RouterDevice::Auto => row_multiple(params.device()) > 1 && !is_f64,
            RouterDevice::Device => !(fp32 && is_f64),
        };
        // The operations for GPUs know groups by their two best experts only.
        let on_device = on_device && router.groups.is_none_or(|groups| groups.best == 2);
        let on_device = on_device && is_counted(config, params.experts().group.size());
        Ok(Self { weight, bias, expert_bias, config: router, capacity, shares, forced, layer, fp32, on_device })
    }

    /// Experts of a token.
    pub fn top_k(&self) -> usize {
        self.config.top_k
    }

    /// Whether experts are chosen on the device.
    pub fn is_on_device(&self) -> bool {
        self.on_device
    }

    /// Experts and probabilities of `x [tokens, hidden]`, what is to be done [after the experts](Self::after_experts),
    /// and the output of `meanwhile`, which gets the choice if the host does not know its counts yet: the device
    /// computes it while the host learns them.
    pub fn forward<T>(
        &self,
        x: Tensor<2>,
        tokens: Tokens,
        batch: &MicroBatch,
        meanwhile: impl FnOnce(Option<Uncounted>) -> T,
    ) -> (Routing, AfterExperts, T) {
        let logits = self.logits(x);
        let logits = match &self.forced {
            Some(forced) => forced.replace(logits),
            None => logits,
        };
        let scores = self.compared(&logits);
        let balance = self.config.balance.map(|balance| balance.over).filter(|_| self.has_losses(batch));
        let bias = self.expert_bias.as_ref().map(|bias| bias.val());
        let (mut choice, counts, (probs, made, auxiliary)) = if self.on_device && batch.routers.replay.is_none() {
            let (choice, counts, made) = decide::on_device(&scores, tokens, &self.config, bias, balance, |found| {
                let probs = self.probabilities(&logits, || found.0.unused(), None);
                let made = meanwhile(self.capacity.is_none().then(|| Uncounted::new(found, &probs, tokens)));
                (probs, made, self.auxiliary(&logits, tokens, batch))
            });
            (Choices::Device(Box::new(choice)), counts, made)
        } else {
            let follow = |what, choice| self.replayed(what, choice, tokens, batch);
            let (choice, counts) = decide::on_host(&scores, tokens, &self.config, bias, balance, follow);
            let probs = self.probabilities(&logits, || decide::others(&choice, &logits), Some(&choice));
            (Choices::Host(choice), counts, (probs, meanwhile(None), self.auxiliary(&logits, tokens, batch)))
        };
        let room = self.capacity.map(|capacity| {
            let experts = counts.routed.len();
            let room = room(tokens.valid, self.config.top_k, experts, &capacity);
            match &mut choice {
                Choices::Device(choice) => choice.drop_last(room),
                Choices::Host(choice) => {
                    let weights = host(&probs);
                    let probability = |token: usize, expert: usize| weights[token * experts + expert];
                    drop_tokens(choice, experts, room, capacity.policy, probability);
                }
            }
            room
        });
        let pad_to = room.filter(|_| self.capacity.is_some_and(|capacity| capacity.pad));
        (Routing { choice, probs, pad_to }, AfterExperts { auxiliary, counts, room }, made)
    }

    /// Whether a decode step can leave the choice on the device: no tokens are dropped.
    pub fn decodes(&self) -> bool {
        self.on_device && self.capacity.is_none() && self.forced.is_none()
    }

    /// The copies of `x [tokens, hidden]`. The host waits for nothing.
    pub fn decode(&self, x: Tensor<2>) -> OrderedCopies {
        let (tokens, logits) = (x.dims()[0], self.logits(x));
        let (scores, bias) = (self.compared(&logits), self.expert_bias.as_ref().map(|bias| bias.val()));
        let chosen = decide::uncounted(&scores, tokens, &self.config, bias);
        let of_chosen = matches!(self.config.scores, Scores::SoftmaxAfterTopK | Scores::NormalisedSoftmax);
        let weights = if of_chosen { logits } else { self.probabilities(&logits, || chosen.unused(), None) };
        let copies = chosen.in_order(&weights, of_chosen).expect("a decode step on a GPU");
        match of_chosen && self.config.scaling != 1.0 {
            true => OrderedCopies { probabilities: copies.probabilities * self.config.scaling, ..copies },
            false => copies,
        }
    }

    /// `[tokens, experts]`, in fp32 at least.
    fn logits(&self, x: Tensor<2>) -> Tensor<2> {
        let logits = router_logits(x, self.weight.val());
        match &self.bias {
            Some(bias) => {
                let bias = bias.val().cast(logits.dtype());
                add_bias(logits, bias)
            }
            None => logits,
        }
    }

    /// The choice, or that of the run which this one follows.
    fn replayed(&self, purpose: Purpose, mut choice: Choice, tokens: Tokens, batch: &MicroBatch) -> Choice {
        let Some(replay) = &batch.routers.replay else { return choice };
        let key = batch.dropout.unwrap_or(DropoutKey { seed: 0, first_sample: 0 });
        let (layer, step) = (self.layer, key.seed);
        let row = move |place| {
            (0..tokens.samples).map(move |sample| Routed {
                layer,
                purpose,
                step,
                sample: key.first_sample + sample,
                place,
            })
        };
        for (token, routed) in tokens.positions(batch).flat_map(row).enumerate() {
            let experts = replay.experts(routed, choice.of(token).map(|expert| expert as u32).collect());
            choice.set(token, experts.into_iter().map(|expert| expert as usize));
        }
        choice
    }

    /// The scores that experts are compared by, without a graph: a softmax changes no order but that of sums over
    /// groups.
    fn compared(&self, logits: &Tensor<2>) -> Tensor<2> {
        let logits = logits.clone().without_autodiff();
        match self.config.scores {
            Scores::Sigmoid | Scores::PlainSigmoid => sigmoid(logits),
            Scores::SoftmaxBeforeTopK | Scores::NormalisedSoftmax if self.config.groups.is_some() => softmax(logits),
            _ => logits,
        }
    }

    /// `[tokens, experts]`, right where an expert was chosen. `others` are the experts that were not; `choice` is known
    /// on the host.
    fn probabilities(
        &self,
        logits: &Tensor<2>,
        others: impl Fn() -> Tensor<2, Bool>,
        choice: Option<&Choice>,
    ) -> Tensor<2> {
        let (config, [tokens, experts], device) = (self.config, logits.dims(), logits.device());
        let probs = match config.scores {
            // The share of the chosen experts brought to one is a softmax over them.
            Scores::SoftmaxAfterTopK | Scores::NormalisedSoftmax => softmax(logits.clone().mask_fill(others(), LEAST)),
            Scores::SoftmaxBeforeTopK => softmax(logits.clone()),
            Scores::Sigmoid if config.top_k > 1 => {
                normalize_sum(sigmoid(logits.clone()).mask_fill(others(), 0.0), TINY)
            }
            Scores::Sigmoid | Scores::PlainSigmoid => sigmoid(logits.clone()),
        };
        let is_softmax = !matches!(config.scores, Scores::Sigmoid | Scores::PlainSigmoid);
        let rounds = self.fp32 && is_softmax && logits.dtype() == DType::F64;
        let probs = if let Some(choice) = choice.filter(|_| rounds) {
            let rounded =
                rounded(&host(logits), experts, (config.scores != Scores::SoftmaxBeforeTopK).then_some(choice));
            let rounded = Tensor::from_data(TensorData::new(rounded, [tokens, experts]), (&device, DType::F64));
            probs.clone() + (rounded - probs.detach())
        } else {
            probs
        };
        if config.scaling == 1.0 { probs } else { probs * config.scaling }
    }
}

/// Stands for a logit of minus infinity, of which differences are numbers.
const LEAST: f64 = -1e30;
/// Keeps a sum of scores from zero, as in Megatron-LM and DeepSeek-V3.
const TINY: f64 = 1e-20;

/// Whether the copies of a layer depend on nothing but the number of each expert's tokens on its ranks. Tokens dropped
/// by probability depend on more, and so does padding between the tokens of two ranks.
fn is_counted(config: &MoeConfig, members: usize) -> bool {
    let apart = members == 1 || config.dispatcher == Dispatcher::AllToAll;
    config.capacity.is_none_or(|capacity| capacity.policy == DropPolicy::Position && apart)
}

/// The probabilities as transformers rounds them: softmax in fp32, and with a choice divided by the chosen experts'
/// sum.
fn rounded(logits: &[f64], experts: usize, choice: Option<&Choice>) -> Vec<f64> {
    let mut probs = fp32_softmax::softmax(logits, experts);
    for (token, probs) in probs.chunks_exact_mut(experts).enumerate() {
        let sum: Option<f32> = choice.map(|choice| {
            let mut chosen: Vec<f32> = choice.of(token).map(|expert| probs[expert]).collect();
            // In the order of the choice, the greatest first.
            chosen.sort_by(|a, b| b.total_cmp(a));
            chosen.iter().sum()
        });
        if let Some(sum) = sum.filter(|sum| *sum > 0.0) {
            probs.iter_mut().for_each(|prob| *prob /= sum);
        }
    }
    probs.into_iter().map(f64::from).collect()
}

#[cfg(test)]
mod tests;
