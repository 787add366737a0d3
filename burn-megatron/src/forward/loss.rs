//! The mean loss of predicting each next token, from logits.

pub(super) use models::hf::IGNORED;

/// For each position of a sequence the token that it should predict, from labels that are the tokens themselves; the
/// last position predicts nothing.
pub(super) fn shifted(labels: &[i64], seq: usize) -> Vec<i64> {
    let next = |sequence: &[i64]| sequence.iter().skip(1).copied().chain([IGNORED]).collect::<Vec<_>>();
    labels.chunks_exact(seq).flat_map(next).collect()
}

/// Number of targets that count.
pub(super) fn counted(targets: &[i64]) -> usize {
    targets.iter().filter(|target| **target != IGNORED).count()
}

/// The mean in double precision; `logits` has `vocab` for each target.
pub(super) fn exact(logits: &[f64], targets: &[i64], vocab: usize) -> f64 {
    let losses = (logits.chunks_exact(vocab).zip(targets))
        .filter(|(_, target)| **target != IGNORED)
        .map(|(logits, target)| log_sum_exp(logits) - logits[*target as usize]);
    losses.sum::<f64>() / counted(targets) as f64
}

/// The mean as transformers has it whatever the model computes in: `ForCausalLMLoss` casts the logits to fp32, and
/// PyTorch's `nll_loss` adds what it gets in fp32, in a cascade of sums (`aten/src/ATen/native/LossNLL.cpp`).
pub(super) fn fp32(logits: &[f64], targets: &[i64], vocab: usize) -> f64 {
    const LEVELS: usize = 8;
    let power = (targets.len().next_power_of_two().trailing_zeros() as usize / LEVELS).max(4);
    let mut sums = [0.0_f32; LEVELS];
    for (index, (logits, target)) in logits.chunks_exact(vocab).zip(targets).enumerate() {
        if *target == IGNORED {
            continue;
        }
        let logits: Vec<f64> = logits.iter().map(|logit| f64::from(*logit as f32)).collect();
        let largest = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max) as f32;
        let rest = (log_sum_exp(&logits) - f64::from(largest)) as f32;
        sums[0] -= (logits[*target as usize] as f32 - largest) - rest;
        for level in 0..LEVELS - 1 {
            if index & (((1 << power) - 1) << (level * power)) != 0 {
                break;
            }
            sums[level + 1] += std::mem::take(&mut sums[level]);
        }
    }
    f64::from(sums.iter().sum::<f32>() / counted(targets) as f32)
}

pub(super) fn log_sum_exp(logits: &[f64]) -> f64 {
    let largest = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    largest + logits.iter().map(|logit| (logit - largest).exp()).sum::<f64>().ln()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_is_predicted_from_those_before_it() {
        let targets = shifted(&[1, 2, 3, 4, IGNORED, 6], 3);
        assert_eq!(targets, [2, 3, IGNORED, IGNORED, 6, IGNORED]);
        assert_eq!(counted(&targets), 3);
    }

    #[test]
    fn both_means_are_those_of_the_counted_tokens() {
        let (vocab, tokens) = (5, 300);
        let logits: Vec<f64> = (0..tokens * vocab).map(|i| ((i * 7919) % 83) as f64 / 10.0).collect();
        let targets: Vec<i64> = (0..tokens).map(|i| if i % 7 == 0 { IGNORED } else { (i % vocab) as i64 }).collect();
        let mut expected = 0.0;
        for (logits, target) in logits.chunks(vocab).zip(&targets).filter(|(_, target)| **target != IGNORED) {
            let sum: f64 = logits.iter().map(|logit| logit.exp()).sum();
            expected -= (logits[*target as usize].exp() / sum).ln();
        }
        expected /= counted(&targets) as f64;
        assert!((exact(&logits, &targets, vocab) - expected).abs() < 1e-12 * expected);
        let rounded = fp32(&logits, &targets, vocab);
        assert!((rounded - expected).abs() < 1e-6 * expected && rounded == f64::from(rounded as f32));
    }
}
