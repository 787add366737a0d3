//! The loss of pairs of answers and its gradients, with the losses of [`preference`](crate::preference).
//!
//! The gradient is that of a weighted sum of the tokens' losses, the weights being the derivatives of the loss.

use std::collections::BTreeMap;
use std::path::Path;

use backend_dist::shard::HostTensor;
use models::{FamilyConfig, ModelConfig, WeightSource};
use safetensors::SafeTensors;

use super::error::ForwardError;
use super::files::{integers, only_pads_the_end, open, write_tensors};
use super::loss::{IGNORED, counted, log_sum_exp, shifted};
use super::run::{forward, weighted};
use super::settings::{Input, Settings};
use crate::element::Element;
use crate::preference::{Answer, PreferenceConfig, PreferenceLoss, PreferenceSums};

/// Pairs of answers.
#[derive(Clone, Debug, PartialEq)]
pub struct Preference {
    /// First all chosen sequences, then the rejected ones in the same order; labels of tokens that belong to no
    /// completion do not count.
    pub input: Input,
    /// Sequences whose completions answer other prompts, from which KTO estimates its KL divergence; without them it is
    /// 0.
    pub mismatched: Option<Input>,
    /// The loss.
    pub config: PreferenceConfig,
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
    /// Reward of each completion.
    pub rewards: Vec<f64>,
    /// The loss's gradient of every weight of the policy, of adapters where there are some; empty unless it was wanted.
    pub gradients: BTreeMap<String, HostTensor>,
}

/// Reads `input_ids` and `completion_mask`, both `[2 pairs, tokens]`; for KTO perhaps `kl_input_ids` and
/// `kl_completion_mask`, both `[sequences, tokens]`; and the constants of `loss` that are there, each `[1]`: `beta`
/// (0.1 without), `label_smoothing`, `gamma`, `desirable_weight` and `undesirable_weight`. Fails if the file cannot be
/// read or its tensors are others.
pub fn read_preference(path: &Path, loss: PreferenceLoss) -> Result<Preference, ForwardError> {
    let refuse = |what: String| ForwardError::Input { path: path.into(), what };
    let bytes = open(path)?;
    let file = SafeTensors::deserialize(&bytes).map_err(|error| refuse(error.to_string()))?;
    let input = completions(path, &file, "input_ids", "completion_mask")?;
    only_pads_the_end(path, &file, &[input.sequences, input.seq])?;
    if !input.sequences.is_multiple_of(2) {
        let what = "there must be as many chosen sequences as rejected ones";
        return Err(refuse(format!("tensor `input_ids` has shape [{}, {}]: {what}", input.sequences, input.seq)));
    }
    let wanted = loss == PreferenceLoss::Kto && file.tensor("kl_input_ids").is_ok();
    let mismatched = wanted.then(|| completions(path, &file, "kl_input_ids", "kl_completion_mask")).transpose()?;
    let default = PreferenceConfig::default();
    let constant = |name: &str, default: f64, least: f64| match file.tensor(name) {
        Err(_) => Ok(default),
        Ok(tensor) => match Element::of(tensor.dtype()).map(|element| element.decode(tensor.data())).as_deref() {
            Some([value]) if value.is_finite() && *value > least => Ok(*value),
            _ => Err(refuse(format!("tensor `{name}` is not one number above {least}"))),
        },
    };
    let config = PreferenceConfig {
        loss,
        beta: constant("beta", default.beta, 0.0)?,
        label_smoothing: constant("label_smoothing", default.label_smoothing, -f64::MIN_POSITIVE)?,
        gamma: constant("gamma", default.gamma, f64::MIN)?,
        desirable_weight: constant("desirable_weight", default.desirable_weight, 0.0)?,
        undesirable_weight: constant("undesirable_weight", default.undesirable_weight, 0.0)?,
    };
    Ok(Preference { input, mismatched, config })
}

/// Sequences, with labels where their completions are.
fn completions(path: &Path, file: &SafeTensors, ids: &str, mask: &str) -> Result<Input, ForwardError> {
    let refuse = |what: String| ForwardError::Input { path: path.into(), what };
    let tensor = |name: &str| file.tensor(name).map_err(|_| refuse(format!("tensor `{name}` is missing")));
    let (tokens, counts) = (tensor(ids)?, tensor(mask)?);
    let &[sequences, seq] = tokens.shape() else {
        return Err(refuse(format!("tensor `{ids}` has shape {:?}, not [sequences, tokens]", tokens.shape())));
    };
    if sequences * seq == 0 {
        return Err(refuse(format!("tensor `{ids}` has shape [{sequences}, {seq}]: there is nothing to read")));
    }
    if counts.shape() != tokens.shape() {
        let (found, needed) = (counts.shape(), tokens.shape());
        return Err(refuse(format!("tensor `{mask}` has shape {found:?}, `{ids}` has {needed:?}")));
    }
    let (tokens, counts) = (integers(path, ids, &tokens)?, integers(path, mask, &counts)?);
    if let Some(sequence) = counts.chunks_exact(seq).position(|mask| mask[1..].iter().all(|counts| *counts == 0)) {
        return Err(refuse(format!("tensor `{mask}`: sequence {sequence} has an empty completion")));
    }
    let labels = tokens.iter().zip(&counts).map(|(id, counts)| if *counts == 0 { IGNORED } else { *id }).collect();
    Ok(Input { sequences, seq, ids: tokens, labels: Some(labels) })
}

/// Loss and gradients of `policy` next to `reference`, both with their weights; a loss without a reference model
/// ignores the second. Adapters of `settings` are the policy's. Fails if input, models and layout do not fit, or a rank
/// fails.
pub fn preference(
    policy: (&FamilyConfig, &dyn WeightSource),
    reference: (&FamilyConfig, &dyn WeightSource),
    preference: &Preference,
    settings: &Settings,
) -> Result<PreferenceOutput, ForwardError> {
    let Preference { input, mismatched, config } = preference;
    let plain = Settings { gradients: false, ..settings.clone() };
    let bare = Settings { adapter: None, ..plain.clone() };
    let answers = |input: &Input| -> Result<Vec<Answer>, ForwardError> {
        let ours = log_probabilities(policy, input, &plain)?;
        let theirs = match config.loss.has_reference() {
            true => log_probabilities(reference, input, &bare)?,
            false => vec![0.0; ours.len()],
        };
        let tokens = shifted(input.labels.as_deref().unwrap_or_default(), input.seq);
        let tokens = tokens.chunks_exact(input.seq).map(counted);
        let each = ours.into_iter().zip(theirs).zip(tokens);
        Ok(each.map(|((policy, reference), tokens)| Answer { policy, reference, tokens }).collect())
    };
    let kl = match mismatched {
        None => 0.0,
        Some(input) => {
            let answers = answers(input)?;
            (answers.iter().map(Answer::log_ratio).sum::<f64>() / answers.len() as f64).max(0.0)
        }
    };
    let answers = answers(input)?;
    let pairs = answers.len() / 2;
    let (mut sums, mut derivatives, mut rewards) =
        (PreferenceSums::default(), vec![0.0; answers.len()], vec![0.0; answers.len()]);
    for pair in 0..pairs {
        let loss = config.pair(&answers[pair], &answers[pairs + pair], kl);
        for (side, at) in [pair, pairs + pair].into_iter().enumerate() {
            derivatives[at] = loss.derivatives[side] / pairs as f64;
            rewards[at] = loss.rewards[side];
        }
        sums.add(&loss);
    }
    let gradients = match settings.gradients {
        false => BTreeMap::new(),
        true => {
            let targets = shifted(input.labels.as_deref().unwrap_or_default(), input.seq);
            // A token's loss is minus its log-probability.
            let weight =
                |(at, target): (usize, &i64)| if *target == IGNORED { 0.0 } else { -derivatives[at / input.seq] };
            let weights: Vec<f64> = targets.iter().enumerate().map(weight).collect();
            weighted(policy.0, policy.1, input, settings, Some(&weights))?.gradients
        }
    };
    let of = |of: fn(&Answer) -> f64| answers.iter().map(of).collect();
    let loss = sums.loss / pairs as f64;
    Ok(PreferenceOutput { policy: of(|a| a.policy), reference: of(|a| a.reference), loss, rewards, gradients })
}

/// Log-probability of the completion of each sequence.
fn log_probabilities(
    (config, source): (&FamilyConfig, &dyn WeightSource),
    input: &Input,
    settings: &Settings,
) -> Result<Vec<f64>, ForwardError> {
    let logits = forward(config, source, input, settings)?.logits;
    let targets = shifted(input.labels.as_deref().unwrap_or_default(), input.seq);
    let tokens = logits.chunks_exact(config.vocab_size()).zip(&targets).map(|(logits, target)| match *target {
        IGNORED => 0.0,
        target => logits[target as usize] - log_sum_exp(logits),
    });
    let tokens: Vec<f64> = tokens.collect();
    Ok(tokens.chunks_exact(input.seq).map(|sequence| sequence.iter().sum()).collect())
}

/// Writes `policy_logps`, `reference_logps`, `rewards`, `loss [1]` and `grad.NAME` for every gradient. Fails if the
/// file cannot be written.
pub fn write_preference(path: &Path, output: &PreferenceOutput, element: Element) -> Result<(), ForwardError> {
    let sequences = output.policy.len();
    let tensors = [
        ("policy_logps".to_string(), vec![sequences], &output.policy[..]),
        ("reference_logps".to_string(), vec![sequences], &output.reference[..]),
        ("rewards".to_string(), vec![sequences], &output.rewards[..]),
        ("loss".to_string(), vec![1], std::slice::from_ref(&output.loss)),
    ];
    write_tensors(path, tensors.into(), &output.gradients, element)
}
