//! AdamW of PyTorch in a DCP folder, as `torch.distributed.checkpoint.state_dict` gives it: nested (`param_groups.0.lr`) or
//! flat (`param_groups.NAME.lr`, as torchtitan has it).

use std::collections::{BTreeMap, BTreeSet};

use models::ModelConfig;
use serde_json::json;

use super::settings::{Group, rates, section};
use super::{MOMENTS, Recorded, of_another_optimizer};
use crate::dcp::{self, DcpObjects, Pickle};
use crate::hf::folder::HfFolder;

/// What is before `state.` in the names of an optimizer's states, if there are any. Fails if one of them is none of
/// AdamW.
pub(super) fn states(objects: &DcpObjects, model: &HfFolder) -> Result<Option<String>, String> {
    let expected: BTreeSet<String> = model.config().hf_names().iter().map(|(_, of)| of.name.clone()).collect();
    let mut found = None;
    for name in &objects.names {
        let Some((weight, state)) = name.rsplit_once('.') else { continue };
        let Some((before, _)) = weight
            .match_indices("state.")
            .map(|(at, word)| (at, &weight[at + word.len()..]))
            .find(|(_, rest)| expected.contains(*rest))
        else {
            continue;
        };
        if !MOMENTS.contains(&state) && state != "step" {
            return Err(of_another_optimizer(name));
        }
        if MOMENTS.contains(&state) {
            found = Some(weight[..before].to_string());
        }
    }
    Ok(found)
}

/// What the optimizer has counted and was told. Fails if parameters have made different numbers of steps, or were told
/// what ours cannot do.
pub(super) fn recorded(objects: &DcpObjects, prefix: &str, model: &HfFolder) -> Result<Recorded, String> {
    let updates = steps(objects, &format!("{prefix}state."))?;
    let groups = groups(objects, &format!("{prefix}param_groups."))?;
    let (settings, members): (Vec<Group>, Vec<BTreeSet<String>>) = groups.into_iter().unzip();
    let mut notes: Vec<String> = rates(&settings).into_iter().collect();
    let most = settings.iter().map(|group| group.weight_decay).fold(0.0, f64::max);
    let names = model.config().hf_names();
    let decay = |name: &str| members.iter().position(|group| group.contains(name)).map(|at| settings[at].weight_decay);
    let of = |vectors: bool| {
        let some = names.iter().filter(move |(_, of)| (of.shape.len() == 1) == vectors);
        some.filter_map(|(_, of)| Some((of.name.as_str(), decay(&of.name)?))).collect::<Vec<(&str, f64)>>()
    };
    let (vectors, matrices) = (of(true), of(false));
    let decay_vectors = most > 0.0 && vectors.iter().any(|(_, decay)| *decay > 0.0);
    let of_vectors = if decay_vectors { most } else { 0.0 };
    let odd =
        vectors.iter().find(|(_, decay)| *decay != of_vectors).or(matrices.iter().find(|(_, decay)| *decay != most));
    if let Some((name, decay)) = odd {
        notes.push(format!(
            "weight decay of {name} is {decay}, of others {most}: param-groups.weight-decay-scale says so"
        ));
    }
    if let Some(lr) = settings.iter().find_map(|group| group.lr) {
        notes.push(format!("the learning rate was {lr}; DCP does not hold its schedule, [lr] says how it continues"));
    } else {
        notes.push("there are no param_groups: [optimizer] and [lr] must say what the run was told".into());
    }
    let config = json!({"optimizer": section(&settings, decay_vectors)?});
    Ok(Recorded { step: updates, updates, config, notes, ..Recorded::default() })
}

/// The step of all parameters.
fn steps(objects: &DcpObjects, before: &str) -> Result<u64, String> {
    let mut found: Option<(&str, u64)> = None;
    for name in objects.names.iter().filter(|name| name.starts_with(before) && name.ends_with(".step")) {
        let read = objects.read(name).map_err(|error| error.to_string())?;
        let step = dcp::count(read.value()).ok_or_else(|| format!("`{name}` is no number of steps"))?;
        match found {
            Some((first, other)) if other != step => {
                return Err(format!("`{name}` is {step}, `{first}` is {other}: all parameters have the same here"));
            }
            _ => found = Some((name, step)),
        }
    }
    found.map(|(_, step)| step).ok_or_else(|| format!("`{before}NAME.step` is missing: it is a state of AdamW"))
}

/// Each group with the names of its parameters.
fn groups(objects: &DcpObjects, before: &str) -> Result<Vec<(Group, BTreeSet<String>)>, String> {
    let mut read: BTreeMap<&str, BTreeMap<&str, Pickle>> = BTreeMap::new();
    for name in &objects.names {
        if let Some((group, key)) = name.strip_prefix(before).and_then(|rest| rest.rsplit_once('.')) {
            let value = objects.read(name).map_err(|error| error.to_string())?;
            read.entry(group).or_default().insert(key, value);
        }
    }
    let group = |(name, settings): (&str, BTreeMap<&str, Pickle>)| {
        let group = Group::read(&format!("{before}{name}"), |key| settings.get(key).map(Pickle::value))?;
        let params = settings.get("params").and_then(|params| params.value().items());
        let members = match params {
            Some(params) => params.into_iter().filter_map(|name| Some(name.text()?.to_string())).collect(),
            None => BTreeSet::from([name.to_string()]),
        };
        Ok((group, members))
    };
    read.into_iter().map(group).collect()
}
