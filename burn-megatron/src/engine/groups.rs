//! Parameters with a learning rate or a weight decay of their own, and frozen ones.

use std::collections::BTreeMap;

use backend_dist::shard::ParamSpec;
use models::names::fits;
use serde::{Deserialize, Serialize};

use crate::optim::ParamScale;

/// Groups of parameters, by patterns of the names of their global tensors in which `*` stands for any characters.
///
/// ```
/// use burn_megatron::engine::ParamGroups;
///
/// let groups = ParamGroups {
///     lr_scale: [("embed_tokens.*".into(), 0.1)].into(),
///     frozen: vec!["layers.0.*".into()],
///     ..ParamGroups::default()
/// };
/// let names = ["embed_tokens.weight", "layers.0.mlp.gate_proj.weight", "norm.weight"];
/// assert_eq!(groups.check(names), Ok(()));
/// assert!(groups.check(&names[..1]).unwrap_err().contains("`layers.0.*`"));
/// ```
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub struct ParamGroups {
    /// Factors of the learning rate.
    pub lr_scale: BTreeMap<String, f64>,
    /// Factors of the weight decay.
    pub weight_decay_scale: BTreeMap<String, f64>,
    /// Parameters without gradient, main gradient, moments and master weights.
    /// [`ParamBuilder::with_frozen`](models::ParamBuilder::with_frozen) must hear of them too.
    pub frozen: Vec<String>,
}

impl ParamGroups {
    /// Whether there are any.
    pub fn is_empty(&self) -> bool {
        self.lr_scale.is_empty() && self.weight_decay_scale.is_empty() && self.frozen.is_empty()
    }

    /// Whether every pattern fits one of these tensors, no two of a key fit the same, and some are trained.
    ///
    /// # Errors
    /// The key, the pattern and the nearest name.
    pub fn check<'a>(
        &self,
        names: impl IntoIterator<Item = &'a (impl AsRef<str> + ?Sized + 'a)>,
    ) -> Result<(), String> {
        let names: Vec<&str> = names.into_iter().map(AsRef::as_ref).collect();
        let keys = [
            ("lr-scale", self.lr_scale.keys().collect::<Vec<_>>()),
            ("weight-decay-scale", self.weight_decay_scale.keys().collect()),
            ("frozen", self.frozen.iter().collect()),
        ];
        let unused = |pattern: &&&String| !names.iter().any(|name| fits(pattern, name));
        for (key, patterns) in &keys {
            let Some(pattern) = patterns.iter().find(unused) else { continue };
            let far = |name: &&&str| strsim::damerau_levenshtein(&pattern.replace('*', ""), name);
            let nearest = names.iter().min_by_key(far).map_or("none", |name| *name);
            return Err(format!("{key}: no parameter fits `{pattern}`; the nearest is `{nearest}`"));
        }
        for (key, patterns) in &keys[..2] {
            for name in &names {
                if let [one, other, ..] = patterns.iter().filter(|pattern| fits(pattern, name)).collect::<Vec<_>>()[..]
                {
                    return Err(format!("{key}: `{one}` and `{other}` both fit `{name}`; name it once"));
                }
            }
        }
        let is_frozen = |name: &&str| self.frozen.iter().any(|pattern| fits(pattern, name));
        // Ranks that have other experts of a layer must agree on its backward pass.
        let mut of_layers: BTreeMap<String, (&str, bool)> = BTreeMap::new();
        for name in &names {
            let Some(layer) = without_expert(name) else { continue };
            let (other, frozen) = *of_layers.entry(layer).or_insert((name, is_frozen(name)));
            if frozen != is_frozen(name) {
                return Err(format!(
                    "frozen: `{name}` and `{other}` are experts of one layer; freeze all of them or none"
                ));
            }
        }
        match !names.is_empty() && names.iter().all(is_frozen) {
            true => Err("frozen: it leaves no parameter to train".into()),
            false => Ok(()),
        }
    }

    /// The factors of a parameter; its sections are updated as one. Fails if a pattern fits only some of the sections.
    pub(super) fn scale(&self, spec: &ParamSpec) -> Result<ParamScale, String> {
        let of = |name: &str| {
            let factor = |scales: &BTreeMap<String, f64>| {
                scales.iter().find(|(pattern, _)| fits(pattern, name)).map_or(1.0, |(_, factor)| *factor)
            };
            ParamScale { lr: factor(&self.lr_scale), weight_decay: factor(&self.weight_decay_scale) }
        };
        let scale = of(spec.name());
        match spec.sections.iter().find(|section| of(&section.name) != scale) {
            None => Ok(scale),
            Some(other) => Err(format!(
                "param-groups: `{}` and `{}` are one parameter and must have the same factors",
                spec.name(),
                other.name
            )),
        }
    }

    /// All factors that parameters can have, the same on all ranks.
    pub(super) fn scales(&self) -> Vec<ParamScale> {
        let factors = |scales: &BTreeMap<String, f64>| {
            let mut all: Vec<f64> = scales.values().copied().chain([1.0]).collect();
            all.sort_by(f64::total_cmp);
            all.dedup();
            all
        };
        let decays = factors(&self.weight_decay_scale);
        let pairs = factors(&self.lr_scale).into_iter();
        pairs.flat_map(|lr| decays.iter().map(move |decay| ParamScale { lr, weight_decay: *decay })).collect()
    }
}

/// The name of a matrix of all experts of a layer: that of one of them without its number.
fn without_expert(name: &str) -> Option<String> {
    let (layer, expert) = name.split_once(".experts.")?;
    let (number, matrix) = expert.split_once('.')?;
    number.bytes().all(|byte| byte.is_ascii_digit()).then(|| format!("{layer}.experts.*.{matrix}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_that_fit_nothing_or_the_same_are_named() {
        let names = ["embed_tokens.weight", "layers.0.mlp.up_proj.weight", "norm.weight"];
        let lr = |patterns: &[&str]| ParamGroups {
            lr_scale: patterns.iter().map(|pattern| (pattern.to_string(), 0.5)).collect(),
            ..ParamGroups::default()
        };
        assert_eq!(lr(&["norm.*", "*embed*"]).check(names), Ok(()));
        assert_eq!(
            lr(&["embed_token.*"]).check(names).unwrap_err(),
            "lr-scale: no parameter fits `embed_token.*`; the nearest is `embed_tokens.weight`"
        );
        assert_eq!(
            lr(&["layers.*", "*.mlp.*"]).check(names).unwrap_err(),
            "lr-scale: `*.mlp.*` and `layers.*` both fit `layers.0.mlp.up_proj.weight`; name it once"
        );
        let frozen = ParamGroups { frozen: vec!["*".into()], ..ParamGroups::default() };
        assert_eq!(frozen.check(names).unwrap_err(), "frozen: it leaves no parameter to train");
        let experts =
            ["layers.0.experts.0.w1", "layers.0.experts.1.w1", "layers.1.experts.0.w1", "layers.1.experts.1.w1"];
        let frozen = |pattern: &str| ParamGroups { frozen: vec![pattern.into()], ..ParamGroups::default() };
        assert_eq!(frozen("layers.0.*").check(experts), Ok(()));
        assert_eq!(
            frozen("layers.0.experts.1.*").check(experts).unwrap_err(),
            "frozen: `layers.0.experts.1.w1` and `layers.0.experts.0.w1` are experts of one layer; freeze all of them or none"
        );
        assert_eq!(lr(&["layers.*"]).scales().len(), 2);
    }
}
