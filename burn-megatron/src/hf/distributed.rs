//! The weights of a model in a PyTorch DCP checkpoint under Hugging Face's names.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::path::Path;

use models::names::NameMap;
use models::{FamilyConfig, ModelConfig};

use super::error::HfFolderError;
use super::torch_dist::{EMBEDDING, state_dict};
use crate::dcp::DcpFolder;

/// Opens the weights of a model, under its names in Hugging Face's files, or if Megatron-Core has written them in
/// Megatron-Core's `state_dict`; and says whether it has. What a program has put before all names, such as
/// `model.` where it saves `{"model": .., "optimizer": ..}`, is removed.
///
/// # Errors
/// If the folder is damaged, or not as DCP writes it.
pub(super) fn open(folder: &Path, model: &FamilyConfig) -> Result<(DcpFolder, bool), HfFolderError> {
    let short = |name: &str| model.hf_optional_prefix().and_then(|prefix| Some(name.strip_prefix(prefix)?.to_string()));
    let names_of = |map: &NameMap| map.iter().map(|(_, foreign)| foreign.name.clone()).collect::<Vec<String>>();
    let mut names = model.hf_names();
    let mut expected = names_of(&names);
    expected.extend(names_of(&names).iter().filter_map(|name| short(name)));
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
        let prefixes = prefixes(stored, &expected);
        twice = apart(&prefixes).map(|pair| pair.map(String::from));
        weights(stored, &expected, prefixes.first().copied().unwrap_or(""))
    })?;
    if megatron {
        let vocab = names.iter().find(|(_, foreign)| foreign.name == EMBEDDING);
        let vocab = vocab.map_or(0, |(_, foreign)| foreign.shape[0]);
        opened.tensors = state_dict(std::mem::take(&mut opened.tensors), vocab);
    }
    match twice {
        Some([a, b]) => {
            let what = format!("holds these weights twice, under `{a}` and `{b}`: save only the ones that are wanted");
            Err(HfFolderError::file(folder, what))
        }
        None => Ok((opened, megatron)),
    }
}

/// What most of the weights with these names have before them; several if as many have each. A program may have put the
/// same names before its optimizer's states.
fn prefixes<'a>(stored: &[&'a str], expected: &[String]) -> Vec<&'a str> {
    let wanted: HashSet<&str> = expected.iter().map(String::as_str).collect();
    let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
    for name in stored {
        let starts = name.match_indices('.').map(|(at, _)| at + 1).chain([0]);
        starts.filter(|at| wanted.contains(&name[*at..])).for_each(|at| *counts.entry(&name[..at]).or_default() += 1);
    }
    let most = counts.values().max().copied().unwrap_or(0);
    counts
        .into_iter()
        .filter(|(prefix, count)| *count == most && !prefix.starts_with("optim"))
        .map(|(prefix, _)| prefix)
        .collect()
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
