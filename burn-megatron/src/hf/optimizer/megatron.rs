//! AdamW of Megatron-Core in a `torch_dist` folder: without the distributed optimizer, and with it as `fully_reshardable`,
//! `fully_sharded_model_space` or `dp_reshardable` (`megatron/core/optimizer/distrib_optimizer.py`). Settings and counts are in
//! `common.pt`.

use std::collections::BTreeMap;
use std::path::Path;

use serde_json::{Map, Value, json};

use super::settings::{Group, rates, section};
use super::{MASTERS, MOMENTS, Recorded, of_another_optimizer};
use crate::dcp::{self, DcpObjects, Value as Saved};
use crate::hf::dp_reshardable::{BUFFERS, bucket, of_optimizer};
use crate::hf::error::HfFolderError;

const STATE: &str = "optimizer.state.";

/// Whether there are states. Fails if they are those of another optimizer, or sharded as
/// buffers.
pub(super) fn states(objects: &DcpObjects) -> Result<bool, String> {
    let mut found = false;
    for name in &objects.names {
        if name.contains(BUFFERS) {
            match bucket(name) {
                Some((.., state)) if MOMENTS.contains(&state) => found = true,
                Some((.., state)) if MASTERS.contains(&state) => {}
                Some(_) => return Err(of_another_optimizer(name)),
                None if of_optimizer(name).is_some() && name.contains("/shard_") => {}
                None => {
                    return Err(format!(
                        "`{name}` is a buffer of some ranks (dp_reshardable) as Megatron-Core 0.16 has none; load and save \
                         the checkpoint once with --dist-ckpt-optim-fully-reshardable"
                    ));
                }
            }
            continue;
        }
        let Some((_, state)) = name.split_once(STATE) else { continue };
        let state = state.split('.').next().unwrap_or_default();
        match state {
            _ if MOMENTS.contains(&state) => found = true,
            _ if MASTERS.contains(&state) => {}
            _ => return Err(of_another_optimizer(name)),
        }
    }
    Ok(found)
}

/// What the run has counted and was told. Fails if the file is damaged, or says what ours cannot do.
pub(super) fn recorded(path: &Path, objects: &DcpObjects) -> Result<Recorded, HfFolderError> {
    let file = DcpObjects::load(path)?;
    // With buffers of its ranks, an optimizer's settings are next to them, the same for every rank.
    let settings_of = |name: &String| {
        let (optimizer, rest) = of_optimizer(name)?;
        rest.contains(".optimizer/shard_").then_some(optimizer)
    };
    let named: BTreeMap<usize, &String> =
        objects.names.iter().filter_map(|name| Some((settings_of(name)?, name))).collect();
    let settings = named.into_values().map(|name| objects.read(name)).collect::<Result<Vec<_>, _>>()?;
    let settings = settings.iter().filter_map(|read| read.value().items()?.first().copied()).collect();
    of_common(file.value(), settings).map_err(|what| HfFolderError::file(path, what))
}

/// `several` are the optimizers that are not in the file: dense parameters and experts may have one each.
fn of_common<'a>(common: Saved<'a>, mut several: Vec<Saved<'a>>) -> Result<Recorded, String> {
    if several.is_empty() {
        let optimizer = common.get("optimizer");
        let optimizer = optimizer.ok_or("`optimizer` is missing: the step and the settings of the states")?;
        several = match optimizer.get("param_groups").or_else(|| optimizer.get("optimizer")) {
            Some(_) => vec![optimizer],
            None => optimizer.entries().unwrap_or_default().into_iter().map(|(_, optimizer)| optimizer).collect(),
        };
    }
    let (mut groups, mut steps, mut scaled, mut undecayed) = (Vec::new(), Vec::new(), false, false);
    for (at, optimizer) in several.into_iter().enumerate() {
        let inner = optimizer.get("optimizer").unwrap_or(optimizer);
        steps.extend(inner.get("state").and_then(|state| state.get("common_step")).and_then(dcp::count));
        for (index, group) in
            inner.get("param_groups").and_then(Saved::items).unwrap_or_default().into_iter().enumerate()
        {
            steps.extend(group.get("step").and_then(dcp::count));
            scaled |= group.get("lr_mult").and_then(dcp::number).is_some_and(|factor| factor != 1.0);
            undecayed |= group.get("wd_mult").and_then(dcp::number) == Some(0.0);
            groups.push(Group::read(&format!("optimizer.{at}.param_groups.{index}"), |key| group.get(key))?);
        }
    }
    let iteration = common.get("iteration").and_then(dcp::count);
    let updates = steps.iter().copied().max().or(iteration);
    let updates = updates.ok_or("`iteration` is missing, and no parameter group has a `step`")?;
    if let Some(step) = steps.iter().find(|step| **step != updates) {
        return Err(format!("a parameter group has made {step} steps, another one {updates}: all have the same here"));
    }
    let decayed = groups.iter().any(|group| group.weight_decay > 0.0);
    let mut config = Map::from_iter([("optimizer".to_string(), section(&groups, decayed && !undecayed)?)]);
    let mut notes: Vec<String> = rates(&groups).into_iter().collect();
    if scaled {
        notes.push("a parameter group has another lr_mult than 1: param-groups.lr-scale says which".into());
    }
    let scheduler = common.get("opt_param_scheduler");
    match scheduler {
        Some(scheduler) => schedule(scheduler, &mut config, &mut notes)?,
        None => notes.push("there is no opt_param_scheduler: [lr] must say what the run was told".into()),
    }
    let of_schedule = scheduler.and_then(|scheduler| scheduler.get("num_steps")).and_then(dcp::count);
    let consumed = common.get("args").and_then(|args| args.get("consumed_train_samples")).and_then(dcp::count);
    let consumed = consumed.or(of_schedule);
    let skipped = consumed.zip(of_schedule).map_or(0, |(all, scheduled)| all.saturating_sub(scheduled));
    let step = iteration.unwrap_or(updates).max(updates);
    Ok(Recorded { step, updates, consumed, skipped, config: Value::Object(config), notes })
}

/// The schedules of the learning rate and the weight decay (`megatron/core/optimizer_param_scheduler.py`), which count
/// samples.
fn schedule(scheduler: Saved, config: &mut Map<String, Value>, notes: &mut Vec<String>) -> Result<(), String> {
    let key = |name: &str| format!("opt_param_scheduler.{name}");
    let missing = |name: &str| format!("`{}` is missing", key(name));
    let number = |name: &str| scheduler.get(name).and_then(dcp::number).ok_or_else(|| missing(name));
    let samples = |name: &str| {
        let count = scheduler.get(name).and_then(dcp::count).ok_or_else(|| missing(name))?;
        Ok::<String, String>(format!("{count} samples"))
    };
    let text = |name: &str| scheduler.get(name).and_then(Saved::text).ok_or_else(|| missing(name));
    let mut lr = json!({
        "max": number("max_lr")?,
        "min": number("min_lr")?,
        "warmup": samples("lr_warmup_steps")?,
        "decay": samples("lr_decay_steps")?,
    });
    match text("lr_decay_style")? {
        style @ ("constant" | "linear" | "cosine" | "inverse-square-root") => lr["form"] = json!(style),
        "WSD" => notes.push("the schedule is WSD, whose tail the checkpoint does not say: [lr] form must".into()),
        other => {
            let legal = "legal: constant, linear, cosine, inverse-square-root, WSD";
            return Err(format!("`{}` = {other} is no schedule of ours; {legal}", key("lr_decay_style")));
        }
    }
    config.insert("lr".into(), lr);
    let (style, end) = (text("wd_incr_style")?, number("end_wd")?);
    config["optimizer"]["weight-decay"] = json!(end);
    if style != "constant" {
        let growth = json!({"incr-style": style, "start": number("start_wd")?, "length": samples("wd_incr_steps")?});
        config.insert("weight-decay".into(), growth);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dcp::{Pickle, Pickler};
    use crate::hf::optimizer::recipe::Recipe;
    use crate::hf::optimizer::writer::write_common;
    use crate::optim::AdamWConfig;

    fn recipe() -> Recipe {
        Recipe {
            adamw: AdamWConfig { beta2: 0.95, weight_decay: 0.1, ..AdamWConfig::default() },
            lr: 2e-3,
            most: 3e-3,
            min: 1e-4,
            lengths: [32, 320],
            form: "linear",
            decay_start: 0.02,
            growth: ("cosine", 640),
            updates: 9,
            scheduled: 72,
            consumed: 80,
            model: [2, 16, 4],
        }
    }

    fn read(recipe: &Recipe) -> Result<Recorded, String> {
        let mut pickler = Pickler::new();
        write_common(&mut pickler, 10, Some(recipe), None);
        of_common(Pickle::of_any(&pickler.finish()).unwrap().value(), Vec::new())
    }

    #[test]
    fn what_is_written_is_read() {
        let told = read(&recipe()).unwrap();
        assert_eq!((told.step, told.updates, told.consumed, told.skipped), (10, 9, Some(80), 8));
        let lr = json!({"max": 3e-3, "min": 1e-4, "warmup": "32 samples", "decay": "320 samples", "form": "linear"});
        let decay = json!({"incr-style": "cosine", "start": 0.02, "length": "640 samples"});
        assert_eq!((&told.config["lr"], &told.config["weight-decay"]), (&lr, &decay));
        assert_eq!(
            (&told.config["optimizer"]["weight-decay"], &told.config["optimizer"]["beta2"]),
            (&json!(0.1), &json!(0.95))
        );
        assert_eq!(told.config["optimizer"]["decay-vectors"], json!(false));
        assert!(told.notes.is_empty(), "{:?}", told.notes);
    }

    /// Megatron-Core finds a group by its multipliers, in an optimizer of its own where there are several.
    #[test]
    fn experts_of_several_ranks_have_the_optimizer_of_megatron_core() {
        let keys = ["wd_mult", "lr_mult", "is_expert_parallel", "is_decoupled_lr"];
        let groups = |optimizer: Saved| -> Vec<[Option<String>; 4]> {
            let groups = optimizer.get("optimizer").and_then(|inner| inner.get("param_groups")).unwrap();
            let told = |value: Saved| {
                value.boolean().map(|flag| flag.to_string()).or(dcp::number(value).map(|number| number.to_string()))
            };
            groups.items().unwrap().iter().map(|group| keys.map(|key| group.get(key).and_then(told))).collect()
        };
        let optimizers = |pickle: &Pickle| {
            let all = pickle.value().get("optimizer").and_then(Saved::entries).unwrap();
            all.iter().map(|(index, of)| (index.integer(), groups(*of))).collect::<Vec<_>>()
        };
        let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden/dcp/megatron_experts/common.pt");
        let written = |experts: Option<bool>| {
            let mut pickler = Pickler::new();
            write_common(&mut pickler, 10, Some(&recipe()), experts);
            Pickle::of_any(&pickler.finish()).unwrap()
        };
        assert_eq!(optimizers(&written(Some(false))), optimizers(&DcpObjects::load(&golden).unwrap()));
        assert_eq!(optimizers(&written(Some(true)))[1].1.len(), 2, "biases of experts are not decayed");
        assert_eq!(groups(written(None).value().get("optimizer").unwrap()).len(), 2, "one optimizer of all");
    }

    #[test]
    fn schedules_that_are_not_known_are_named() {
        let told = read(&Recipe { form: "WSD", ..recipe() }).unwrap();
        assert!(
            told.config["lr"]["form"].is_null() && told.notes[0].contains("the schedule is WSD"),
            "{:?}",
            told.notes
        );
        let refused = read(&Recipe { form: "staircase", ..recipe() }).unwrap_err();
        says!(refused, "`opt_param_scheduler.lr_decay_style` = staircase is no schedule of ours");
    }

    /// One of all parameters, or one for dense parameters and one for experts.
    #[test]
    fn settings_of_several_optimizers_must_agree() {
        let common = |second: f64| {
            let mut pickler = Pickler::new();
            pickler.dict(|pickler| {
                pickler.text("iteration");
                pickler.integer(4);
                pickler.text("optimizer");
                pickler.dict(|pickler| {
                    for (index, beta2) in [(0, 0.95), (1, second)] {
                        pickler.integer(index);
                        pickler.dict(|pickler| {
                            pickler.text("param_groups");
                            pickler.list(|pickler| {
                                pickler.dict(|pickler| {
                                    for (key, value) in [("lr", 0.1), ("eps", 1e-8), ("weight_decay", 0.0)] {
                                        pickler.text(key);
                                        pickler.float(value);
                                    }
                                    pickler.text("betas");
                                    pickler.tuple(|pickler| [0.9, beta2].iter().for_each(|beta| pickler.float(*beta)));
                                });
                            });
                        });
                    }
                });
            });
            of_common(Pickle::of_any(&pickler.finish()).unwrap().value(), Vec::new())
        };
        let told = common(0.95).unwrap();
        assert_eq!((told.updates, told.consumed), (4, None));
        assert!(told.notes[0].contains("there is no opt_param_scheduler"));
        says!(common(0.99).unwrap_err(), "`optimizer.1.param_groups.0.betas` is [0.9, 0.99]");
    }
}
