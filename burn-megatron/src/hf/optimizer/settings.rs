//! Parameter groups of an optimizer as the keys of a run's configuration.

use serde_json::{Value, json};

use crate::dcp::{self, Value as Saved};

/// What a group of parameters was told.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Group {
    /// What errors call it.
    pub name: String,
    pub lr: Option<f64>,
    pub betas: [f64; 2],
    pub eps: f64,
    pub weight_decay: f64,
}

impl Group {
    /// Of the settings that `of` has under their names. Fails if one is missing, or says what AdamW of ours does not
    /// do.
    pub fn read<'a>(name: &str, of: impl Fn(&str) -> Option<Saved<'a>>) -> Result<Self, String> {
        let missing = |key: &str| format!("`{name}.{key}` is missing: it is a setting of AdamW");
        let number = |key: &str| of(key).and_then(dcp::number);
        let yes = |key: &str| of(key).and_then(Saved::boolean);
        for (key, what) in [("amsgrad", "the largest second moment"), ("maximize", "steps that raise the loss")] {
            if yes(key) == Some(true) {
                return Err(format!("`{name}.{key}` is True ({what}), which AdamW has not here; legal: False"));
            }
        }
        let weight_decay = number("weight_decay").ok_or_else(|| missing("weight_decay"))?;
        if yes("decoupled_weight_decay") == Some(false) && weight_decay != 0.0 {
            let what = "is False: the weight decay of Adam is part of the gradient; legal: True, of AdamW";
            return Err(format!("`{name}.decoupled_weight_decay` {what}"));
        }
        let betas = of("betas").and_then(Saved::items).ok_or_else(|| missing("betas"))?;
        let betas: Vec<f64> = betas.into_iter().filter_map(dcp::number).collect();
        let betas = <[f64; 2]>::try_from(betas).map_err(|_| format!("`{name}.betas` are not two numbers"))?;
        let eps = number("eps").ok_or_else(|| missing("eps"))?;
        Ok(Self { name: name.into(), lr: number("lr"), betas, eps, weight_decay })
    }
}

/// The section `optimizer` of a run with these groups, if its vectors (norms and biases) decay or not. Fails if groups
/// have other moments than each other.
pub(super) fn section(groups: &[Group], decay_vectors: bool) -> Result<Value, String> {
    let Some(first) = groups.first() else { return Ok(json!({})) };
    for group in groups {
        let differs = |key: &str, theirs: &str, ours: &str| {
            format!(
                "`{}.{key}` is {theirs}, `{}.{key}` is {ours}: all parameters have the same here",
                group.name, first.name
            )
        };
        if group.betas != first.betas {
            return Err(differs("betas", &format!("{:?}", group.betas), &format!("{:?}", first.betas)));
        }
        if group.eps.to_bits() != first.eps.to_bits() {
            return Err(differs("eps", &group.eps.to_string(), &first.eps.to_string()));
        }
    }
    let weight_decay = groups.iter().map(|group| group.weight_decay).fold(0.0, f64::max);
    Ok(json!({
        "kind": "adamw",
        "beta1": first.betas[0],
        "beta2": first.betas[1],
        "eps": first.eps,
        "weight-decay": weight_decay,
        "decay-vectors": decay_vectors,
    }))
}

/// What to know of learning rates that differ between groups.
pub(super) fn rates(groups: &[Group]) -> Option<String> {
    let mut rates: Vec<f64> = groups.iter().filter_map(|group| group.lr).collect();
    rates.sort_by(f64::total_cmp);
    rates.dedup();
    match rates[..] {
        [] | [_] => None,
        _ => {
            Some(format!("parameter groups have learning rates {rates:?}: param-groups.lr-scale says which have which"))
        }
    }
}
