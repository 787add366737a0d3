//! The weights of a model in a PyTorch DCP checkpoint under Hugging Face's names.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::path::Path;

use models::names::NameMap;
use models::{FamilyConfig, ModelConfig};

use super::dp_reshardable::{self, bucket};
use super::error::HfFolderError;
use super::torch_dist::{EMBEDDING, state_dict};
use crate::dcp::DcpFolder;

/// Opens the weights of a model, under its names in Hugging Face's files, or if Megatron-Core has written them in
/// Megatron-Core's `state_dict`; and says whether it has. What a program has put before all names, such as `model.`
/// where it saves `{"model": .., "optimizer": ..}`, is removed. Fails if the folder is damaged, or not as DCP writes
/// it.
pub(super) fn open(folder: &Path, model: &FamilyConfig) -> Result<(DcpFolder, bool), HfFolderError> {
    let mut names = model.hf_names();
    let mut expected = hf_names(model);
    // A copy of a tied weight is refused where configuration and file differ.
    let copy = model.hf_tied_copy();
    expected.extend(copy.map(|[copy, _]| copy.to_string()));
    let (mut megatron, mut twice) = (false, None);
    let mut opened = DcpFolder::open(folder, |stored| {
        megatron = stored.iter().any(|name| *name == EMBEDDING || name.ends_with(&format!(".{EMBEDDING}")));
        if megatron {
            names = model.megatron_names();
            expected = names_of(&names);
            expected.extend(copy.map(|_| "output_layer.weight".to_string()));
        }
        let mut prefixes = prefixes(stored, &expected);
        prefixes.retain(|prefix| !prefix.starts_with("optim") && !prefix.contains(".optimizer.state."));
        twice = apart(&prefixes).map(|pair| pair.map(String::from));
        weights(stored, &expected, prefixes.first().copied().unwrap_or(""))
    })?;
    if megatron {
        opened.tensors = state_dict(std::mem::take(&mut opened.tensors), vocab(&names));
    }
    once(folder, "weights", twice)?;
    Ok((opened, megatron))
}

/// Opens the states of an optimizer that are called `state`, each under the name of its weight. Fails as [`open`].
pub(super) fn open_states(
    folder: &Path,
    model: &FamilyConfig,
    (megatron, state): (bool, &str),
) -> Result<DcpFolder, HfFolderError> {
    let names = if megatron { model.megatron_names() } else { model.hf_names() };
    let expected = if megatron { names_of(&names) } else { hf_names(model) };
    let (of_megatron, of_torch) = (format!("optimizer.state.{state}."), format!(".{state}"));
    let (mut twice, mut in_buffers) = (None, false);
    let mut opened = DcpFolder::open(folder, |stored| {
        in_buffers = megatron && stored.iter().any(|name| bucket(name).is_some());
        let weight = |name: &&str| match megatron {
            true => name.split_once(&of_megatron).map(|(_, weight)| weight.to_string()),
            false => name.strip_suffix(&of_torch).filter(|weight| weight.contains("state.")).map(String::from),
        };
        let weights_of: Vec<(&str, String)> = stored.iter().filter_map(|name| Some((*name, weight(name)?))).collect();
        let bare: Vec<&str> = weights_of.iter().map(|(_, weight)| weight.as_str()).collect();
        let prefixes = prefixes(&bare, &expected);
        twice = apart(&prefixes).map(|pair| pair.map(String::from));
        let prefix = prefixes.first().copied().unwrap_or("");
        let ours = weights(&bare, &expected, prefix);
        weights_of.iter().filter_map(|(name, weight)| Some((name.to_string(), ours.get(weight)?.clone()))).collect()
    })?;
    if in_buffers {
        return open_buffers(folder, &names, &expected, state);
    }
    if megatron {
        opened.tensors = state_dict(std::mem::take(&mut opened.tensors), vocab(&names));
    }
    once(folder, "states of an optimizer", twice)?;
    Ok(opened)
}

/// Opens states that are in buffers of tensor-parallel ranks.
fn open_buffers(folder: &Path, names: &NameMap, expected: &[String], state: &str) -> Result<DcpFolder, HfFolderError> {
    let mut opened = DcpFolder::open(folder, |stored| {
        let wanted = |name: &&&str| bucket(name).is_some_and(|(.., of)| [state, "param"].contains(&of));
        let buckets = stored.iter().filter(wanted).map(|name| (name.to_string(), name.to_string()));
        let prefix = prefixes(stored, expected).first().copied().unwrap_or("");
        weights(stored, expected, prefix).into_iter().chain(buckets).collect()
    })?;
    let is_bucket = |(name, _): &(String, _)| bucket(name).is_some();
    let (buckets, stored) = std::mem::take(&mut opened.tensors).into_iter().partition(is_bucket);
    opened.tensors = buckets;
    let weights = state_dict(stored, usize::MAX);
    let found = dp_reshardable::states(&opened, &weights, state).map_err(HfFolderError::io("read", folder))?;
    let found = found.map_err(|what| HfFolderError::file(folder, what))?;
    opened.tensors = state_dict(found, vocab(names));
    Ok(opened)
}

fn names_of(map: &NameMap) -> Vec<String> {
    map.iter().map(|(_, foreign)| foreign.name.clone()).collect()
}

/// Hugging Face's names of a model's tensors, also without what may be before them.
pub(super) fn hf_names(model: &FamilyConfig) -> Vec<String> {
    let names = names_of(&model.hf_names());
    let short = |name: &String| Some(name.strip_prefix(model.hf_optional_prefix()?)?.to_string());
    let more: Vec<String> = names.iter().filter_map(short).collect();
    names.into_iter().chain(more).collect()
}

/// The vocabulary of a model of these names.
fn vocab(names: &NameMap) -> usize {
    let found = names.iter().find(|(_, foreign)| foreign.name == EMBEDDING);
    found.map_or(0, |(_, foreign)| foreign.shape[0])
}

/// Refuses a folder that has the same names under two prefixes.
fn once(folder: &Path, what: &str, twice: Option<[String; 2]>) -> Result<(), HfFolderError> {
    let Some([a, b]) = twice else { return Ok(()) };
    let what = format!("holds these {what} twice, under `{a}` and `{b}`: save only the ones that are wanted");
    Err(HfFolderError::file(folder, what))
}

/// What most of the weights with these names have before them; several if as many have each. A program may have put the
/// same names before its optimizer's states.
pub(super) fn prefixes<'a>(stored: &[&'a str], expected: &[String]) -> Vec<&'a str> {
    let wanted: HashSet<&str> = expected.iter().map(String::as_str).collect();
    let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
    for name in stored {
        let starts = name.match_indices('.').map(|(at, _)| at + 1).chain([0]);
        starts.filter(|at| wanted.contains(&name[*at..])).for_each(|at| *counts.entry(&name[..at]).or_default() += 1);
    }
    let most = counts.values().max().copied().unwrap_or(0);
    counts.into_iter().filter(|(_, count)| *count == most).map(|(prefix, _)| prefix).collect()
}

/// Two prefixes of which neither continues the other: GPT's own `transformer.` is no second set of weights.
fn apart<'a>(prefixes: &[&'a str]) -> Option<[&'a str; 2]> {
    prefixes.windows(2).map(|pair| [pair[0], pair[1]]).find(|[a, b]| !b.starts_with(*a))
}

/// Which of the stored tensors are weights of a model with these names behind a prefix, and under which of them. Next to
/// weights there are states of optimizers and loaders: names that begin as no weight does.
fn weights(stored: &[&str], expected: &[String], prefix: &str) -> HashMap<String, String> {
    let first = |name: &str| name.split('.').next().unwrap_or_default().to_string();
    let beginnings: HashSet<String> = expected.iter().map(|name| first(name)).collect();
    let weights = stored.iter().filter_map(|name| Some((*name, name.strip_prefix(prefix)?)));
    weights
        .filter(|(_, name)| beginnings.contains(&first(name)))
        .map(|(name, ours)| (name.into(), ours.into()))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(stored: &[&str]) -> Vec<(String, String)> {
        let expected = ["model.norm.weight", "lm_head.weight", "model.layers.0.x.weight"].map(String::from);
        let prefix = prefixes(stored, &expected)[0];
        let mut found: Vec<_> = weights(stored, &expected, prefix).into_iter().collect();
        found.sort();
        found
    }

    #[test]
    fn weights_are_found_under_what_is_before_their_names() {
        let pair = |a: &str, b: &str| (a.to_string(), b.to_string());
        let wrapped = ["model.lm_head.weight", "model.model.norm.weight", "optimizer.state.model.norm.weight.exp_avg"];
        let expected = [pair(wrapped[0], "lm_head.weight"), pair(wrapped[1], "model.norm.weight")];
        assert_eq!(found(&wrapped), expected);
        assert_eq!(found(&["model.norm.weight", "train_state.step"]), [pair("model.norm.weight", "model.norm.weight")]);
        // A tensor too many stays, so that it is refused by its name.
        assert_eq!(found(&["model.norm.weight", "model.other"])[1], pair("model.other", "model.other"));
        assert_eq!(found(&["app.lm_head.weight", "app.model.norm.weight"])[0].1, "lm_head.weight");
    }

    #[test]
    fn two_sets_of_weights_are_noticed() {
        let expected = ["h.0.x", "transformer.h.0.x"].map(String::from);
        let of = |stored: &[&'static str]| apart(&prefixes(stored, &expected));
        assert_eq!(of(&["ema.h.0.x", "model.h.0.x"]), Some(["ema.", "model."]));
        assert_eq!(of(&["transformer.h.0.x"]), None);
        assert_eq!(of(&["h.0.x", "optimizer.exp_avg.h.0.x"]), None);
    }
}
