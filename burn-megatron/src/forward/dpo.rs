//! Direct preference optimisation (Rafailov et al., "Direct Preference Optimization", 2023): the loss of pairs of answers
//! and its gradients.
//!
//! With the log-probabilities `p` of the policy and `r` of the reference model of whole completions, the loss of a pair is
//! `-log σ(β ((p_chosen - r_chosen) - (p_rejected - r_rejected)))`, and the loss is the mean over the pairs. Its gradient
//! is that of a weighted sum of the tokens' losses, the weights being the derivatives of the loss.

use std::collections::BTreeMap;
use std::path::Path;

use backend_dist::shard::HostTensor;
use models::{FamilyConfig, ModelConfig, WeightSource};

use super::error::ForwardError;
use super::files::{integers, open, write_tensors};
use super::loss::{IGNORED, log_sum_exp, shifted};
use super::run::{Input, Settings, forward, weighted};
use crate::element::Element;

/// Pairs of answers.
#[derive(Clone, Debug, PartialEq)]
pub struct Preference {
    /// First all chosen sequences, then the rejected ones in the same order; labels of tokens that belong to no
    /// completion do not count.
    pub input: Input,
    /// β.
    pub beta: f64,
}

/// What came out.
#[derive(Clone, Debug, PartialEq)]
pub struct PreferenceOutput {
    /// Log-probability of each completion under the policy.
    pub policy: Vec<f64>,
    /// The same under the reference model.
    pub reference: Vec<f64>,
    /// The mean over the pairs.
    pub loss: f64,
    /// The loss's gradient of every weight of the policy, of adapters where there are some; empty unless it was wanted.
    pub gradients: BTreeMap<String, HostTensor>,
}

/// Reads `input_ids` and `completion_mask`, both `[2 pairs, tokens]`, and `beta [1]` if it is there (0.1 without).
///
/// # Errors
/// If the file cannot be read or its tensors are others.
pub fn read_preference(path: &Path) -> Result<Preference, ForwardError> {
    let refuse = |what: String| ForwardError::Input { path: path.into(), what };
    let bytes = open(path)?;
    let file = safetensors::SafeTensors::deserialize(&bytes).map_err(|error| refuse(error.to_string()))?;
    let tensor = |name: &str| file.tensor(name).map_err(|_| refuse(format!("tensor `{name}` is missing")));
    let (ids, mask) = (tensor("input_ids")?, tensor("completion_mask")?);
    let &[sequences, seq] = ids.shape() else {
        return Err(refuse(format!("tensor `input_ids` has shape {:?}, not [sequences, tokens]", ids.shape())));
    };
    if sequences == 0 || !sequences.is_multiple_of(2) || seq == 0 {
        let what = "there must be as many chosen sequences as rejected ones";
        return Err(refuse(format!("tensor `input_ids` has shape [{sequences}, {seq}]: {what}")));
    }
    if mask.shape() != ids.shape() {
        let (found, needed) = (mask.shape(), ids.shape());
        return Err(refuse(format!("tensor `completion_mask` has shape {found:?}, `input_ids` has {needed:?}")));
    }
    let (ids, mask) = (integers(path, "input_ids", &ids)?, integers(path, "completion_mask", &mask)?);
    if let Some(sequence) = mask.chunks_exact(seq).position(|mask| mask[1..].iter().all(|counts| *counts == 0)) {
        return Err(refuse(format!("tensor `completion_mask`: sequence {sequence} has an empty completion")));
    }
    let beta = match file.tensor("beta") {
        Err(_) => 0.1,
        Ok(beta) => match Element::of(beta.dtype()).map(|element| element.decode(beta.data())).as_deref() {
            Some([beta]) if beta.is_finite() && *beta > 0.0 => *beta,
            _ => return Err(refuse("tensor `beta` is not one number above 0".into())),
        },
    };
    let labels = ids.iter().zip(&mask).map(|(id, counts)| if *counts == 0 { IGNORED } else { *id }).collect();
    Ok(Preference { input: Input { sequences, seq, ids, labels: Some(labels) }, beta })
}

/// Loss and gradients of `policy` next to `reference`, both with their weights. Adapters of `settings` are the policy's.
///
/// # Errors
/// If input, models and layout do not fit, or a rank fails.
pub fn dpo(
    policy: (&FamilyConfig, &dyn WeightSource),
    reference: (&FamilyConfig, &dyn WeightSource),
    preference: &Preference,
    settings: &Settings,
) -> Result<PreferenceOutput, ForwardError> {
    let (input, beta) = (&preference.input, preference.beta);
    let targets = shifted(input.labels.as_deref().unwrap_or_default(), input.seq);
    let logps = |(config, source): (&FamilyConfig, &dyn WeightSource), settings: &Settings| {
        let logits = forward(config, source, input, settings)?.logits;
        Ok::<_, ForwardError>(completions(&logits, &targets, config.vocab_size(), input.seq))
    };
    let plain = Settings { gradients: false, ..settings.clone() };
    let theirs = logps(reference, &Settings { adapter: None, ..plain.clone() })?;
    let ours = logps(policy, &plain)?;
    let (loss, derivatives) = sigmoid_loss(&ours, &theirs, beta);
    let gradients = match settings.gradients {
        false => BTreeMap::new(),
        true => {
            // A token's loss is minus its log-probability.
            let weight =
                |(at, target): (usize, &i64)| if *target == IGNORED { 0.0 } else { -derivatives[at / input.seq] };
            let weights: Vec<f64> = targets.iter().enumerate().map(weight).collect();
            weighted(policy.0, policy.1, input, settings, Some(&weights))?.gradients
        }
    };
    Ok(PreferenceOutput { policy: ours, reference: theirs, loss, gradients })
}

/// Log-probability of the targets of each sequence.
fn completions(logits: &[f64], targets: &[i64], vocab: usize, seq: usize) -> Vec<f64> {
    let tokens = logits.chunks_exact(vocab).zip(targets).map(|(logits, target)| match *target {
        IGNORED => 0.0,
        target => logits[target as usize] - log_sum_exp(logits),
    });
    let tokens: Vec<f64> = tokens.collect();
    tokens.chunks_exact(seq).map(|sequence| sequence.iter().sum()).collect()
}

/// The mean loss, and its derivative by each of the policy's log-probabilities.
fn sigmoid_loss(policy: &[f64], reference: &[f64], beta: f64) -> (f64, Vec<f64>) {
    let pairs = policy.len() / 2;
    let reward: Vec<f64> = policy.iter().zip(reference).map(|(ours, theirs)| beta * (ours - theirs)).collect();
    let (mut loss, mut derivatives) = (0.0, vec![0.0; policy.len()]);
    for pair in 0..pairs {
        let margin = reward[pair] - reward[pairs + pair];
        // log(1 + exp(-margin)) without overflow.
        loss += (-margin).max(0.0) + (-margin.abs()).exp().ln_1p();
        let derivative = beta / (1.0 + margin.exp()) / pairs as f64;
        (derivatives[pair], derivatives[pairs + pair]) = (-derivative, derivative);
    }
    (loss / pairs as f64, derivatives)
}

/// Writes `policy_logps`, `reference_logps`, `loss [1]` and `grad.NAME` for every gradient.
///
/// # Errors
/// If the file cannot be written.
pub fn write_preference(path: &Path, output: &PreferenceOutput, element: Element) -> Result<(), ForwardError> {
    let sequences = output.policy.len();
    let tensors = [
        ("policy_logps".to_string(), vec![sequences], &output.policy[..]),
        ("reference_logps".to_string(), vec![sequences], &output.reference[..]),
        ("loss".to_string(), vec![1], std::slice::from_ref(&output.loss)),
    ];
    write_tensors(path, tensors.into(), &output.gradients, element)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn derivatives_are_those_of_the_loss() {
        let (policy, reference) = ([-3.0, -1.0, -2.5, -4.0], [-2.0, -1.5, -2.0, -2.0]);
        let (loss, derivatives) = sigmoid_loss(&policy, &reference, 0.3);
        // Pair 0: 0.3 ((-1) - (-0.5)), pair 1: 0.3 (0.5 - (-2)).
        let expected = ((1.0 + 0.15_f64.exp()).ln() + (1.0 + (-0.75_f64).exp()).ln()) / 2.0;
        assert!((loss - expected).abs() < 1e-15);
        for (at, derivative) in derivatives.iter().enumerate() {
            let mut moved = policy;
            moved[at] += 1e-6;
            let quotient = (sigmoid_loss(&moved, &reference, 0.3).0 - loss) / 1e-6;
            assert!((quotient - derivative).abs() < 1e-6, "{at}: {quotient} {derivative}");
        }
    }
}
