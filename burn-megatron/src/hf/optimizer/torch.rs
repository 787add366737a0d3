//! AdamW of PyTorch in a DCP folder, as `torch.distributed.checkpoint.state_dict` gives it: nested (`param_groups.0.lr`) or
//! flat (`param_groups.NAME.lr`, as torchtitan has it).

use std::collections::{BTreeMap, BTreeSet, HashSet};

use models::ModelConfig;
use serde_json::json;

use super::settings::{Group, rates, section};
use super::{MOMENTS, Recorded, of_another_optimizer};
use crate::dcp::{self, DcpObjects, Pickle};
use crate::hf::distributed;
use crate::hf::folder::HfFolder;

/// What programs put before the names of an optimizer's states.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Prefixes {
    /// Before `state.` and `param_groups.`.
    optimizer: String,
    /// Then before the name of a weight, such as `model.` where a module of the program's own holds the model.
    weight: String,
}

/// What is before the names of an optimizer's states, if there are any among `names`, for weights with the `expected` names.
/// Fails if one of them is none of AdamW, or they are those of no weight.
pub(super) fn states(names: &BTreeSet<String>, expected: &[String]) -> Result<Option<Prefixes>, String> {
    let states = names.iter().filter_map(|name| name.rsplit_once('.'));
    let states = states.filter(|(weight, _)| weight.contains("state.") && !weight.contains("param_groups."));
    let states: Vec<(&str, &str)> = states.collect();
    let weights: Vec<&str> = states.iter().map(|(weight, _)| *weight).collect();
    let before = distributed::prefixes(&weights, expected).first().copied();
    let Some((before, (optimizer, weight))) = before.and_then(|before| Some((before, before.rsplit_once("state.")?)))
    else {
        return match states.iter().find(|(_, state)| MOMENTS.contains(state)) {
            Some((weight, state)) => Err(format!(
                "`{weight}.{state}` is a state of no weight that config.json describes: save the optimizer with \
                 torch.distributed.checkpoint.state_dict, or import the weights alone"
            )),
            None => Ok(None),
        };
    };
    let expected: HashSet<&str> = expected.iter().map(String::as_str).collect();
    let is_ours = |of: &str| of.strip_prefix(before).is_some_and(|name| expected.contains(name));
    let ours = states.iter().filter(|(of, _)| is_ours(of));
    if let Some((of, state)) = ours.clone().find(|(_, state)| !MOMENTS.contains(state) && *state != "step") {
        return Err(of_another_optimizer(&format!("{of}.{state}")));
    }
    let has_moments = ours.clone().any(|(_, state)| MOMENTS.contains(state));
    Ok(has_moments.then(|| Prefixes { optimizer: optimizer.into(), weight: weight.into() }))
}

/// What the optimizer has counted and was told. Fails if parameters have made different numbers of steps, or were told
/// what ours cannot do.
pub(super) fn recorded(objects: &DcpObjects, prefixes: &Prefixes, model: &HfFolder) -> Result<Recorded, String> {
    let Prefixes { optimizer, weight } = prefixes;
    let updates = steps(objects, &format!("{optimizer}state."))?;
    let groups = groups(objects, &format!("{optimizer}param_groups."), weight)?;
    let (settings, members): (Vec<Group>, Vec<BTreeSet<String>>) = groups.into_iter().unzip();
    let mut notes: Vec<String> = rates(&settings).into_iter().collect();
    let most = settings.iter().map(|group| group.weight_decay).fold(0.0, f64::max);
    let names = model.config().hf_names();
    let decay = |name: &str| {
        let short = model.config().hf_optional_prefix().and_then(|before| name.strip_prefix(before)).unwrap_or(name);
        let group = members.iter().position(|group| group.contains(name) || group.contains(short));
        group.map(|at| settings[at].weight_decay)
    };
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

/// Each group with the names of its parameters, without what is before a `weight`'s.
fn groups(objects: &DcpObjects, before: &str, weight: &str) -> Result<Vec<(Group, BTreeSet<String>)>, String> {
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
        let ours = |name: &str| name.strip_prefix(weight).unwrap_or(name).to_string();
        let members = match params {
            Some(params) => params.into_iter().filter_map(|name| name.text().map(ours)).collect(),
            None => BTreeSet::from([ours(name)]),
        };
        Ok((group, members))
    };
    read.into_iter().map(group).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Programs save modules of their own that hold the model, and GPT-2 without its `transformer.`.
    #[test]
    fn states_are_found_under_what_is_before_the_names_of_weights() {
        let expected = ["model.norm.weight", "lm_head.weight", "transformer.h.0.x", "h.0.x"].map(String::from);
        let of = |stored: &[&str]| states(&stored.iter().map(|name| name.to_string()).collect(), &expected);
        let both =
            |weight: &str| [format!("{weight}.exp_avg"), format!("{weight}.exp_avg_sq"), format!("{weight}.step")];
        for (optimizer, weight, names) in [
            ("optimizer.", "", &["model.norm.weight", "lm_head.weight"][..]),
            ("optimizer.", "model.", &["model.norm.weight", "lm_head.weight"]),
            ("train_state.optimizer.", "app.model.", &["model.norm.weight", "lm_head.weight"]),
            ("optim.", "", &["h.0.x"]),
            ("optim.", "", &["transformer.h.0.x"]),
            ("optim.", "model.", &["h.0.x"]),
        ] {
            let mut stored: Vec<String> =
                names.iter().flat_map(|name| both(&format!("{optimizer}state.{weight}{name}"))).collect();
            for key in ["lr", "betas", "eps", "weight_decay", "fused"] {
                stored.extend(names.iter().map(|name| format!("{optimizer}param_groups.{weight}{name}.{key}")));
            }
            let expected = Prefixes { optimizer: optimizer.into(), weight: weight.into() };
            let stored: Vec<&str> = stored.iter().map(String::as_str).collect();
            assert_eq!(of(&stored), Ok(Some(expected)), "{stored:?}");
        }
        let other = of(&["optim.state.model.model.norm.weight.momentum_buffer"]).unwrap_err();
        says!(other, "`optim.state.model.model.norm.weight.momentum_buffer` is a state of another optimizer");
        says!(of(&["optim.state.0.exp_avg"]).unwrap_err(), "`optim.state.0.exp_avg` is a state of no weight");
        assert_eq!(of(&["model.norm.weight", "train_state.step"]), Ok(None));
    }
}
