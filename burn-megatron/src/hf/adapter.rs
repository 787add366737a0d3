//! Adapters as peft stores them: `adapter_config.json` and `adapter_model.safetensors`.

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use backend_dist::shard::HostTensor;
use models::hf::HfModule;
use models::lora::{ALL_LINEAR, Adapter, LoraConfig, LoraError, LoraPlan, explained, linear_names, module_adapter};
use models::names::NameMap;
use models::{FamilyConfig, ModelConfig};
use safetensors::tensor::TensorView;
use safetensors::{SafeTensors, serialize_to_file};
use serde_json::{Value, json};

use super::adapter_experts::OneTensorExperts;
use super::adapter_patterns::Patterns;
use super::adapter_targets::Targets;
use super::error::HfFolderError;
use super::writer::{pretty, refuse_full, write_text};
use crate::checkpoint::{Checkpoint, Kind};
use crate::element::Element;

const CONFIG: &str = "adapter_config.json";
const TENSORS: &str = "adapter_model.safetensors";
/// What peft puts before a module's name in files.
const PREFIX: &str = "base_model.model.";

/// Keys of `adapter_config.json` that must not say anything, with what they would do.
const UNSUPPORTED: [(&str, &str); 12] = [
    ("modules_to_save", "whole modules that are trained"),
    ("layer_replication", "repeated layers"),
    ("trainable_token_indices", "trained tokens"),
    ("fan_in_fan_out", "transposed weights"),
    ("lora_bias", "biases of B"),
    ("use_qalora", "QA-LoRA"),
    ("use_bdlora", "BD-LoRA"),
    ("alora_invocation_tokens", "activated LoRA"),
    ("arrow_config", "Arrow"),
    ("kasa_config", "KaSA"),
    ("monteclora_config", "MonteCLoRA"),
    ("velora_config", "VeLoRA"),
];

/// Beginnings of values of `init_lora_weights` that change the base's weights: without the change the adapter says
/// nothing of them.
const CHANGES_BASE: [&str; 5] = ["pissa", "olora", "corda", "loftq", "lora_ga"];

/// Reads an adapter of a model.
///
/// # Errors
/// If a file is missing, a key says what is not supported, or the tensors are not those of an adapter of this model.
pub fn read_adapter(folder: &Path, model: &FamilyConfig) -> Result<Adapter, HfFolderError> {
    read(folder, &[model.hf_names()], |error| error)
}

/// Reads an adapter of a plain Burn module, for [`with_adapters`](models::lora::with_adapters).
///
/// # Errors
/// As [`read_adapter`].
pub fn read_module_adapter<M: HfModule>(folder: &Path, module: &M) -> Result<Adapter, HfFolderError> {
    read(folder, &linear_names(module), |error| explained(module, error))
}

/// Reads an adapter of a model with one of these sets of names: the first whose names the file has. `explained` may say more
/// of a layer that cannot have one.
fn read(
    folder: &Path,
    versions: &[NameMap],
    explained: impl Fn(LoraError) -> LoraError,
) -> Result<Adapter, HfFolderError> {
    let path = folder.join(CONFIG);
    let text = std::fs::read(&path).map_err(HfFolderError::io("read", &path))?;
    let json: Value =
        serde_json::from_slice(&text).map_err(|source| HfFolderError::Json { path: path.clone(), source })?;
    let refused = |what| HfFolderError::file(&path, what);
    let (config, targets) = (config_of(&json).map_err(refused)?, Targets::read(&json).map_err(refused)?);
    let patterns = Patterns::read(&json).map_err(refused)?;
    let mut plans = versions.iter().map(|names| {
        let mut parameters = targets.parameters().to_vec();
        let experts = OneTensorExperts::take(&mut parameters, &config, &patterns, names);
        let config = |target_modules| LoraConfig { target_modules, ..config.clone() };
        let plan = |modules: Vec<String>| match modules.is_empty() {
            true => experts.in_files(config(modules)).plan(names),
            false => experts.in_files(patterns.of(config(modules), names)?).plan(names),
        };
        let plan = targets.of(names, &parameters).and_then(plan).map_err(|error| {
            let what = match explained(error) {
                error @ LoraError::Target { .. } => {
                    format!("{error}; the adapter belongs to another model, name its base with --hf (model.hf)")
                }
                error => error.to_string(),
            };
            HfFolderError::file(&path, what)
        });
        plan.map(|plan| (plan, experts))
    });
    let first = plans.next().expect("a model has names");
    let path = folder.join(TENSORS);
    let bytes = std::fs::read(&path).map_err(HfFolderError::io("read", &path))?;
    let file = SafeTensors::deserialize(&bytes).map_err(|error| HfFolderError::file(&path, error.to_string()))?;
    let mut theirs = BTreeMap::new();
    for (name, view) in file.tensors() {
        let Some(element) = Element::of(view.dtype()) else {
            let what = format!("has elements of type {:?}, weights can be F64, F32, BF16 or F16", view.dtype());
            return Err(HfFolderError::tensor(&path, &name, what));
        };
        theirs.insert(name, HostTensor { shape: view.shape().to_vec(), data: element.decode(view.data()) });
    }
    let imported = |(plan, experts): (LoraPlan, OneTensorExperts)| -> Result<Adapter, HfFolderError> {
        let apart = experts.apart(PREFIX, theirs.clone());
        let tensors = apart.and_then(|theirs| plan.import(PREFIX, theirs)).map_err(|error| {
            let what = format!("the adapter belongs to another model, or {CONFIG} is not its own");
            HfFolderError::file(&path, format!("{error}; {what}"))
        })?;
        Ok(Adapter { plan: Arc::new(plan), tensors })
    };
    first.and_then(imported).or_else(|error| plans.find_map(|plan| plan.and_then(imported).ok()).ok_or(error))
}

/// What the file says but of the modules.
fn config_of(json: &Value) -> Result<LoraConfig, String> {
    let says = |key: &str| match &json[key] {
        Value::Null | Value::Bool(false) => false,
        Value::Object(map) => !map.is_empty(),
        Value::Array(list) => !list.is_empty(),
        _ => true,
    };
    match json["peft_type"].as_str() {
        Some("LORA") => {}
        other => return Err(format!("peft_type = {} is not supported; legal: LORA", other.unwrap_or("none"))),
    }
    if let Some((key, what)) = UNSUPPORTED.iter().find(|(key, _)| says(key)) {
        return Err(format!("{key} = {} ({what}) is not supported; legal: none", json[key]));
    }
    if let Some(bias) = json["bias"].as_str().filter(|bias| *bias != "none") {
        return Err(format!("bias = {bias} is not supported; legal: none"));
    }
    let init = json["init_lora_weights"].as_str().unwrap_or_default();
    if CHANGES_BASE.iter().any(|name| init.starts_with(name)) {
        return Err(format!(
            "init_lora_weights = {init} is an adapter of changed base weights; save it as one of the base itself \
             (save_pretrained with path_initial_model_for_weight_conversion in peft)"
        ));
    }
    let rank = json["r"].as_u64().ok_or("r is missing: the rank")? as usize;
    let alpha = json["lora_alpha"].as_f64().ok_or("lora_alpha is missing: the numerator of the scale")?;
    let flag = |key: &str| json[key].as_bool().unwrap_or(false);
    let (rslora, dora) = (flag("use_rslora"), flag("use_dora"));
    Ok(LoraConfig { rank, alpha, target_modules: Vec::new(), rslora, dora, ..LoraConfig::default() })
}

/// Writes an adapter in fp32 as `PeftModel.from_pretrained` reads it; `base` is the name or folder of the model.
///
/// # Errors
/// If the folder has something in it, or cannot be written.
pub fn write_adapter(folder: &Path, adapter: &Adapter, base: Option<&str>) -> Result<(), HfFolderError> {
    write(folder, adapter, base, Some("CAUSAL_LM"))
}

/// Writes the adapters of a plain Burn module, which [`with_adapters`](models::lora::with_adapters) gave it for this plan, as
/// [`write_adapter`] does.
///
/// # Errors
/// As [`write_adapter`]; names a layer of the plan without adapter.
pub fn write_module_adapter<M: HfModule>(
    folder: &Path,
    module: &M,
    plan: &LoraPlan,
    base: Option<&str>,
) -> Result<(), HfFolderError> {
    let adapter =
        module_adapter(module, plan.clone()).map_err(|error| HfFolderError::file(folder, error.to_string()))?;
    write(folder, &adapter, base, M::PEFT_TASK)
}

/// Writes an adapter; `task` is peft's `task_type`.
fn write(folder: &Path, adapter: &Adapter, base: Option<&str>, task: Option<&str>) -> Result<(), HfFolderError> {
    let (plan, config) = (&adapter.plan, adapter.plan.config());
    refuse_full(folder)?;
    std::fs::create_dir_all(folder).map_err(HfFolderError::io("create", folder))?;
    let theirs =
        plan.export(PREFIX, &adapter.tensors).map_err(|error| HfFolderError::file(folder, error.to_string()))?;
    let bytes = |tensor: &HostTensor| {
        let mut bytes = Vec::with_capacity(tensor.data.len() * 4);
        Element::F32.encode(&tensor.data, &mut bytes);
        bytes
    };
    let encoded: Vec<(String, Vec<usize>, Vec<u8>)> =
        theirs.into_iter().map(|(name, tensor)| (name, tensor.shape.clone(), bytes(&tensor))).collect();
    let path = folder.join(TENSORS);
    let refused = |error: safetensors::SafeTensorError| HfFolderError::file(&path, error.to_string());
    let views: HashMap<&str, TensorView> = encoded
        .iter()
        .map(|(name, shape, bytes)| Ok((name.as_str(), TensorView::new(Element::F32.dtype(), shape.clone(), bytes)?)))
        .collect::<Result<_, _>>()
        .map_err(refused)?;
    let metadata = HashMap::from([("format".to_string(), "pt".to_string())]);
    serialize_to_file(views, Some(metadata), &path).map_err(refused)?;
    // peft has no words for `all-linear` and patterns in files: it writes the names that they stand for.
    let parameters: Vec<&str> = plan.parameters().into_keys().collect();
    let mut modules: Vec<&str> = plan.modules().into_keys().filter(|name| !parameters.contains(name)).collect();
    if parameters.is_empty() && !config.target_modules.iter().any(|target| target == ALL_LINEAR || target.contains('*'))
    {
        modules = config.target_modules.iter().map(String::as_str).collect();
    }
    let alpha = |alpha: f64| if alpha.fract() == 0.0 { json!(alpha as i64) } else { json!(alpha) };
    let (mut rank_pattern, mut alpha_pattern) = (BTreeMap::new(), BTreeMap::new());
    for (module, (rank, own)) in plan.modules() {
        if rank != config.rank {
            rank_pattern.insert(module, rank);
        }
        if own != config.alpha {
            alpha_pattern.insert(module, alpha(own));
        }
    }
    let json = json!({
        "peft_type": "LORA",
        "task_type": task,
        "base_model_name_or_path": base,
        "inference_mode": true,
        "r": config.rank,
        "lora_alpha": alpha(config.alpha),
        "lora_dropout": 0.0,
        "target_modules": modules,
        "target_parameters": Some(&parameters).filter(|parameters| !parameters.is_empty()),
        "bias": "none",
        "fan_in_fan_out": false,
        "init_lora_weights": true,
        "modules_to_save": null,
        "rank_pattern": rank_pattern,
        "alpha_pattern": alpha_pattern,
        "use_rslora": config.rslora,
        "use_dora": config.dora,
    });
    write_text(&folder.join(CONFIG), &pretty(&json))
}

/// The adapter that a checkpoint of `model` holds.
///
/// # Errors
/// If a tensor cannot be read.
pub fn adapter_of(checkpoint: &Checkpoint, kind: Kind, plan: LoraPlan) -> Result<Adapter, HfFolderError> {
    let read = |(name, foreign): (&str, &models::names::Foreign)| {
        let shape = foreign.our_shape();
        let whole: Vec<Range<usize>> = shape.iter().map(|size| 0..*size).collect();
        let data = checkpoint.read_f64(kind, name, &shape, &whole)?;
        Ok::<_, HfFolderError>((name.to_string(), HostTensor { shape, data }))
    };
    let names = plan.names("");
    let tensors = names.iter().map(read).collect::<Result<_, _>>()?;
    Ok(Adapter { plan: Arc::new(plan), tensors })
}
