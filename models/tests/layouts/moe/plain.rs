//! The layer by its formulas: every expert for every token, with zero for a probability where it was not chosen.

use std::collections::BTreeMap;

use burn::tensor::activation::{relu, sigmoid, silu, softmax};
use burn::tensor::{DType, Device, Tensor, TensorData};
use models::layers::{BalanceOver, Capacity, DropPolicy, ExpertKind, MoeConfig, Scores};

use super::{Case, EPS, Found, HIDDEN, SAMPLES, element, weight};
use crate::harness::host;

fn tensor<const D: usize>(values: Vec<f64>, shape: [usize; D]) -> Tensor<D> {
    Tensor::from_data(TensorData::new(values, shape), (&Device::flex().autodiff(), DType::F64))
}

/// Weights by global name.
struct Model {
    config: MoeConfig,
    leaves: BTreeMap<String, Tensor<2>>,
}

impl Model {
    fn new(config: MoeConfig) -> Self {
        let mut shapes = vec![("norm.weight".to_string(), [1, HIDDEN])];
        shapes.push(("layers.0.mlp.router.weight".into(), [config.experts, HIDDEN]));
        let mut mlp = |name: String, features| {
            let gate = (config.kind == ExpertKind::SwiGlu).then_some(("gate", [features, HIDDEN]));
            for (part, shape) in gate.into_iter().chain([("up", [features, HIDDEN]), ("down", [HIDDEN, features])]) {
                shapes.push((format!("{name}.{part}_proj.weight"), shape));
            }
        };
        (0..config.experts).for_each(|e| mlp(format!("layers.0.mlp.experts.{e}"), config.intermediate));
        if let Some(shared) = config.shared {
            mlp("layers.0.mlp.shared_experts".into(), shared.intermediate);
            if shared.gate {
                shapes.push(("layers.0.mlp.shared_experts.gate.weight".into(), [1, HIDDEN]));
            }
        }
        let leaf = |(name, shape): (String, [usize; 2])| {
            let values = weight(&name, shape.iter().product());
            (name, tensor(values, shape).require_grad())
        };
        Self { config, leaves: shapes.into_iter().map(leaf).collect() }
    }

    fn leaf(&self, name: &str) -> Tensor<2> {
        self.leaves[name].clone()
    }

    fn router(&self, x: &Tensor<2>) -> Tensor<2> {
        let square = (x.clone() * x.clone()).mean_dim(1) + EPS;
        self.normed(x, square).matmul(self.leaf("layers.0.mlp.router.weight").transpose())
    }

    fn normed(&self, x: &Tensor<2>, square: Tensor<2>) -> Tensor<2> {
        x.clone() / square.sqrt() * self.leaf("norm.weight")
    }

    fn mlp(&self, x: Tensor<2>, name: &str) -> Tensor<2> {
        let part = |x: Tensor<2>, part: &str| x.matmul(self.leaf(&format!("{name}.{part}_proj.weight")).transpose());
        let up = part(x.clone(), "up");
        match self.config.kind {
            ExpertKind::SwiGlu => part(silu(part(x, "gate")) * up, "down"),
            ExpertKind::SquaredRelu => part(relu(up).powi_scalar(2), "down"),
            ExpertKind::Clamped { .. } => panic!("of no case"),
        }
    }
}

/// The places of the greatest `count` values, the first ones of equal values.
fn greatest(values: &[f64], count: usize) -> Vec<usize> {
    let mut places: Vec<usize> = (0..values.len()).collect();
    places.sort_by(|a, b| values[*b].total_cmp(&values[*a]).then(a.cmp(b)));
    places.truncate(count);
    places
}

/// 1 for the chosen experts of each token, `[tokens, experts]`.
fn chosen(scores: &[f64], config: &MoeConfig, limited: bool) -> Vec<f64> {
    let bias = weight("layers.0.mlp.router.expert_bias", config.experts);
    let mut mask = vec![0.0; scores.len()];
    for (scores, mask) in scores.chunks(config.experts).zip(mask.chunks_mut(config.experts)) {
        let mut scores = scores.to_vec();
        if limited && config.router.bias_rate.is_some() {
            scores.iter_mut().zip(&bias).for_each(|(score, bias)| *score += bias);
        }
        if let Some(groups) = config.router.groups.filter(|_| limited) {
            let size = config.experts / groups.groups;
            let best = |group: &[f64]| greatest(group, groups.best).iter().map(|place| group[*place]).sum::<f64>();
            let kept = greatest(&scores.chunks(size).map(best).collect::<Vec<_>>(), groups.top_k);
            let is_out = |expert: usize| !kept.contains(&(expert / size));
            (0..scores.len()).filter(|e| is_out(*e)).for_each(|e| scores[e] = f64::NEG_INFINITY);
        }
        greatest(&scores, config.router.top_k).into_iter().for_each(|expert| mask[expert] = 1.0);
    }
    mask
}

/// Takes copies out of full experts.
fn limit(mask: &mut [f64], probs: &[f64], config: &MoeConfig, Capacity { factor, policy, .. }: Capacity) {
    let (experts, tokens) = (config.experts, mask.len() / config.experts);
    let room = ((tokens * config.router.top_k) as f64 / experts as f64 * factor).ceil() as usize;
    for expert in 0..experts {
        let of = |token: usize| token * experts + expert;
        let own: Vec<usize> = (0..tokens).filter(|token| mask[of(*token)] == 1.0).collect();
        let worth: Vec<f64> = match policy {
            DropPolicy::Probs => own.iter().map(|token| probs[of(*token)]).collect(),
            DropPolicy::Position => own.iter().map(|token| -(*token as f64)).collect(),
        };
        let stays = greatest(&worth, room);
        (0..own.len()).filter(|place| !stays.contains(place)).for_each(|place| mask[of(own[place])] = 0.0);
    }
}

fn column_sums(mask: &[f64], columns: usize) -> Vec<f64> {
    (0..columns).map(|column| mask.iter().skip(column).step_by(columns).sum()).collect()
}

/// Output and gradients over `micro_batches`, whose losses are added.
pub fn run(case: &Case, micro_batches: usize) -> Found {
    let (model, experts, router) = (Model::new(case.config), case.config.experts, case.config.router);
    let (samples, tokens) = (SAMPLES / micro_batches, SAMPLES / micro_batches * case.seq);
    let rows = |name: &'static str, batch: usize| {
        let at = move |token: usize| [batch * samples + token % samples, token / samples];
        let row = move |[s, p]: [usize; 2]| (0..HIDDEN).map(move |feature| element(name, [s, p, feature]));
        tensor((0..tokens).map(at).flat_map(row).collect(), [tokens, HIDDEN])
    };
    let inputs: Vec<Tensor<2>> = (0..micro_batches).map(|batch| rows("x", batch).require_grad()).collect();
    let ones = |x: &Tensor<2>| chosen(&host(scores(&model, x)), &case.config, false);
    let counts: Vec<Vec<f64>> = inputs.iter().map(|x| column_sums(&ones(x), experts)).collect();
    let all: Vec<f64> = (0..experts).map(|e| counts.iter().map(|counts| counts[e]).sum()).collect();
    let (mut total, mut outs) = (tensor(vec![0.0], [1]), Vec::new());
    for (batch, x) in inputs.iter().enumerate() {
        let logits = model.router(x);
        let mask = chosen(&host(scores(&model, x)), &case.config, true);
        let probs = probabilities(&logits, tensor(mask.clone(), [tokens, experts]), &case.config);
        let mut left = mask;
        if let Some(capacity) = case.config.capacity {
            limit(&mut left, &host(probs.clone()), &case.config, capacity);
        }
        let probs = probs * tensor(left, [tokens, experts]);
        let square = (x.clone() * x.clone()).mean_dim(1) + EPS;
        let normed = model.normed(x, square);
        let mut out = (0..experts)
            .map(|e| model.mlp(normed.clone(), &format!("layers.0.mlp.experts.{e}")) * probs.clone().narrow(1, e, 1))
            .reduce(|a, b| a + b)
            .unwrap();
        if let Some(shared) = case.config.shared {
            let y = model.mlp(normed.clone(), "layers.0.mlp.shared_experts");
            let gate =
                || sigmoid(normed.clone().matmul(model.leaf("layers.0.mlp.shared_experts.gate.weight").transpose()));
            out = out + if shared.gate { y * gate() } else { y };
        }
        total = total + (out.clone() * rows("w", batch)).sum();
        let scale = experts as f64 / router.top_k as f64;
        let free = softmax_or_share(&logits, &case.config);
        if let Some(balance) = router.balance {
            let n = tokens as f64;
            let loss = match balance.over {
                BalanceOver::MicroBatch => {
                    (free.sum_dim(0) * tensor(counts[batch].clone(), [1, experts])).sum() * (1.0 / (n * n))
                }
                BalanceOver::Global => {
                    let share = tensor(all.clone(), [1, experts]) * (1.0 / (n * micro_batches as f64));
                    (free.sum_dim(0) * share).sum() * (1.0 / n)
                }
                BalanceOver::Sequence => {
                    let columns = samples * experts;
                    let counts = tensor(column_sums(&ones(x), columns), [1, columns]);
                    let sums = free.reshape([case.seq, columns]).sum_dim(0);
                    (sums * counts).sum() * (1.0 / (case.seq * case.seq * samples) as f64)
                }
            };
            total = total + loss * (scale * balance.coefficient * case.auxiliary);
        }
        if router.z_loss != 0.0 {
            let z = logits.exp().sum_dim(1).log().powi_scalar(2).mean();
            total = total + z * (router.z_loss * case.auxiliary);
        }
        outs.push(out);
    }
    let grads = total.backward();
    let zero = |x: &Tensor<2>| vec![0.0; x.dims().iter().product()];
    let weights = model.leaves.iter().map(|(name, leaf)| (name.clone(), leaf.grad(&grads).map_or(zero(leaf), host)));
    let by_sample = |x: Vec<Tensor<2>>| {
        let turned = x.into_iter().map(|x| host(x.reshape([case.seq, samples, HIDDEN]).swap_dims(0, 1)));
        turned.flatten().collect::<Vec<f64>>()
    };
    let x_grad = by_sample(inputs.iter().map(|x| x.grad(&grads).unwrap()).collect());
    Found { out: by_sample(outs), x_grad, weights: weights.collect() }
}

/// What experts are compared by.
fn scores(model: &Model, x: &Tensor<2>) -> Tensor<2> {
    let logits = model.router(x);
    match model.config.router.scores {
        Scores::Sigmoid | Scores::PlainSigmoid => sigmoid(logits),
        _ => softmax(logits, 1),
    }
}

fn softmax_or_share(logits: &Tensor<2>, config: &MoeConfig) -> Tensor<2> {
    match config.router.scores {
        Scores::Sigmoid | Scores::PlainSigmoid => {
            let scores = sigmoid(logits.clone());
            scores.clone() / scores.sum_dim(1)
        }
        _ => softmax(logits.clone(), 1),
    }
}

fn probabilities(logits: &Tensor<2>, mask: Tensor<2>, config: &MoeConfig) -> Tensor<2> {
    let (all, share) = match config.router.scores {
        Scores::SoftmaxAfterTopK | Scores::NormalisedSoftmax => (softmax(logits.clone(), 1), true),
        Scores::SoftmaxBeforeTopK => (softmax(logits.clone(), 1), false),
        Scores::Sigmoid => (sigmoid(logits.clone()), config.router.top_k > 1),
        Scores::PlainSigmoid => (sigmoid(logits.clone()), false),
    };
    let probs = all * mask;
    let probs = if share { probs.clone() / probs.sum_dim(1) } else { probs };
    probs * config.router.scaling
}
