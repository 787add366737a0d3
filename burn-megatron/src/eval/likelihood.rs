//! Log-likelihoods of the last tokens of sequences, on the ranks of a layout.

use backend_dist::launch::Rank;
use backend_dist::mesh::Axis;
use backend_dist::ops::context::{ContextParallel, CpCommType};
use backend_dist::ops::draw::{OWN, is_drawn_on_device, likelihoods};
use backend_dist::ops::sum_dim;
use burn::tensor::{DType, FloatDType, Int, Tensor, TensorData};
use models::{CausalLm, MicroBatch};
use serde::{Deserialize, Serialize};

/// A sequence whose last tokens are scored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request {
    /// At least one token more than are scored.
    pub tokens: Vec<i64>,
    /// How many of the last ones.
    pub scored: usize,
}

impl Request {
    /// Tokens that the model reads.
    fn inputs(&self) -> usize {
        self.tokens.len() - 1
    }
}

/// What a model says of a request.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Scored {
    /// Sum of the log-probabilities of the scored tokens.
    pub log_likelihood: f64,
    /// Whether each of them is the likeliest.
    pub is_greedy: bool,
}

/// How sequences are computed together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Batching {
    /// Sequences of a data-parallel rank that are computed at once.
    pub sequences: usize,
    /// What their length is padded to a multiple of.
    pub unit: usize,
    /// Tokens of the vocabulary.
    pub vocab: usize,
}

/// Elements of the logits that exist at a time.
const LOGITS_AT_ONCE: usize = 1 << 25;

/// The requests of every pass, by index: the longest first, as many as all data-parallel ranks take together.
pub(super) fn passes(requests: &[Request], at_once: usize) -> Vec<Vec<usize>> {
    let mut order: Vec<usize> = (0..requests.len()).collect();
    order.sort_by_key(|index| std::cmp::Reverse(requests[*index].inputs()));
    order.chunks(at_once.max(1)).map(<[usize]>::to_vec).collect()
}

/// This rank's share of the scores of all requests, by index: of sequences that context-parallel ranks share those of
/// its positions, and nothing on all but the first of a tensor-parallel group.
///
/// All ranks of the mesh make the same call. The model is whole and records no gradients.
pub(super) fn scores<M: CausalLm>(
    rank: &Rank,
    model: &M,
    requests: &[Request],
    batching: Batching,
) -> Vec<(usize, Scored)> {
    let (dp, mut all) = (rank.group(Axis::Dp), Vec::new());
    for pass in passes(requests, batching.sequences * dp.size()) {
        let longest = pass.iter().map(|index| requests[*index].inputs()).max().unwrap_or(1);
        let padded = longest.next_multiple_of(batching.unit);
        // Data-parallel ranks whose experts are shared make as many passes; what is too much is computed in vain.
        let count = pass.len().div_ceil(dp.size());
        let mine = (0..count).map(|at| pass.get(dp.rank() * count + at).copied()).collect::<Vec<_>>();
        all.extend(score_pass(rank, model, requests, &mine, padded, batching.vocab));
    }
    all
}

fn score_pass<M: CausalLm>(
    rank: &Rank,
    model: &M,
    requests: &[Request],
    mine: &[Option<usize>],
    padded: usize,
    vocab: usize,
) -> Vec<(usize, Scored)> {
    let (cp, tp) = (rank.group(Axis::Cp), rank.group(Axis::Tp));
    let own = padded / cp.size();
    let context = ContextParallel { group: cp, comm: CpCommType::default() };
    let batch = MicroBatch { context: (own < padded).then_some(context), ..MicroBatch::default() };
    let positions: Vec<usize> = batch.positions(own).into_iter().flatten().collect();
    let of = |index: &Option<usize>| index.map(|index| &requests[index]);
    let input = |request: Option<&Request>, position: usize| {
        request.filter(|request| position < request.inputs()).map_or(0, |request| request.tokens[position])
    };
    let ids: Vec<i64> =
        (mine.iter()).flat_map(|index| positions.iter().map(move |position| input(of(index), *position))).collect();
    let tokens: Tensor<2, Int> = Tensor::from_data(TensorData::new(ids, [mine.len(), own]), (&rank.device, DType::I64));
    let hidden = model.hidden_states(tokens, &batch);

    // Ranks of sequence parallelism have their shares of the positions; the logits of some of each are computed at a
    // time, those of one rank after the other.
    let rows = hidden.dims()[0];
    let shares = own / rows;
    let at_once = (LOGITS_AT_ONCE / (mine.len() * shares * vocab).max(1)).clamp(1, rows);
    let target = |index: &Option<usize>, position: usize| {
        let request = of(index)?;
        let first = request.inputs() - request.scored;
        (first..request.inputs()).contains(&position).then(|| request.tokens[position + 1])
    };
    let mut scores: Vec<Scored> = vec![Scored { log_likelihood: 0.0, is_greedy: true }; mine.len()];
    for start in (0..rows).step_by(at_once) {
        let count = at_once.min(rows - start);
        let places: Vec<usize> = (0..shares)
            .flat_map(|share| (0..count).map(move |row| share * rows + start + row))
            .map(|at| positions[at])
            .collect();
        let targets: Vec<Option<i64>> =
            mine.iter().flat_map(|index| places.iter().map(move |position| target(index, *position))).collect();
        // All ranks of a tensor-parallel group agree about this.
        if targets.iter().all(Option::is_none) {
            continue;
        }
        let logits = model.head_logits(hidden.clone().narrow(0, start, count));
        if tp.rank() > 0 {
            continue;
        }
        for (at, (log_probability, best)) in log_probabilities(logits, &targets).into_iter().enumerate() {
            let Some(target) = targets[at] else { continue };
            let score = &mut scores[at / places.len()];
            score.log_likelihood += log_probability;
            score.is_greedy &= best == target;
        }
    }
    match tp.rank() {
        0 => mine.iter().zip(scores).filter_map(|(index, score)| Some(((*index)?, score))).collect(),
        _ => Vec::new(),
    }
}

/// Of each position the log-probability of its target, and the likeliest token; in fp32 at least.
fn log_probabilities(logits: Tensor<3>, targets: &[Option<i64>]) -> Vec<(f64, i64)> {
    let [batch, count, vocab] = logits.dims();
    let rows = logits.clone().reshape([batch * count, vocab]);
    if is_drawn_on_device(&rows) {
        return by_kernel(&rows, targets);
    }
    let logits = if logits.dtype() == DType::F64 { logits } else { logits.cast(FloatDType::F32) };
    let device = logits.device();
    let ids: Vec<i64> = targets.iter().map(|target| target.unwrap_or(0)).collect();
    let ids: Tensor<3, Int> = Tensor::from_data(TensorData::new(ids, [batch, count, 1]), (&device, DType::I64));
    let largest = logits.clone().max_dim(2);
    let best = logits.clone().argmax(2);
    let chosen = logits.clone().gather(2, ids) - largest.clone();
    let log_sum = sum_dim((logits - largest).exp(), 2).log();
    let log_probabilities = (chosen - log_sum).into_data();
    let best = best.into_data();
    log_probabilities.iter::<f64>().zip(best.iter::<i64>()).collect()
}

/// The same by one kernel; nothing of a position without a target.
fn by_kernel(logits: &Tensor<2>, targets: &[Option<i64>]) -> Vec<(f64, i64)> {
    let asked: Vec<_> = targets.iter().map(|target| target.map(|token| (Some(token as usize), 1))).collect();
    let none = Tensor::zeros([targets.len()], (&logits.device(), DType::I32));
    let numbers: Vec<f64> = likelihoods(logits, &none, &asked).into_data().iter::<f64>().collect();
    let of = |of: &[f64]| (of[2] - of[0] - of[1].ln(), of[OWN] as i64);
    numbers.chunks_exact(OWN + 2).map(of).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_sequences_come_first_and_each_once() {
        let request = |len: usize| Request { tokens: vec![0; len], scored: 1 };
        let requests: Vec<Request> = [3, 9, 2, 9, 5].into_iter().map(request).collect();
        assert_eq!(passes(&requests, 2), [vec![1, 3], vec![4, 0], vec![2]]);
        assert_eq!(passes(&requests, 100).len(), 1);
        assert!(passes(&[], 4).is_empty());
    }

    #[test]
    fn log_probabilities_are_those_of_a_softmax() {
        let device = burn::tensor::Device::flex();
        let logits: Vec<f64> = vec![0.5, -1.0, 2.0, 1.0, 1.5, -0.25];
        let tensor = Tensor::<3>::from_data(TensorData::new(logits.clone(), [1, 2, 3]), (&device, DType::F64));
        let found = log_probabilities(tensor, &[Some(0), Some(1)]);
        for (at, (target, best)) in [(0, 2), (1, 1)].into_iter().enumerate() {
            let row = &logits[3 * at..3 * at + 3];
            let expected = row[target] - row.iter().map(|x| x.exp()).sum::<f64>().ln();
            assert!((found[at].0 - expected).abs() < 1e-14 && found[at].1 == best, "{found:?}");
        }
    }
}
