//! The forward pass of a plain Burn module from a Hugging Face folder, over tensor-parallel ranks.

use std::collections::BTreeMap;
use std::path::Path;

use backend_dist::launch::BoxError;
use backend_dist::mesh::{Axis, Mesh, ParallelLayout};
use backend_dist::mesh_backend::Teams;
use backend_dist::parallelize::{check, parallelize_on};
use backend_dist::shard::HostTensor;
use burn::tensor::Device;
use models::hf::{HfModule, HostInput, ModuleInputs, ModuleOutput};
use models::images::{Llava, Siglip, Vit};
use models::lora::{Adapter, adapter_gradients, with_adapters};
use models::{Bert, T5};
use safetensors::SafeTensors;
use serde::{Deserialize, Serialize};

use super::error::ForwardError;
use super::files::{integers, open, write_tensors};
use super::settings::Settings;
use crate::element::Element;
use crate::hf::{ModuleFolder, Wanted, named_tensors};

/// How a family runs.
type Run = fn(&ModuleFolder, &BTreeMap<String, HostInput>, &Settings) -> Result<ModuleOutputs, ForwardError>;

/// Families by the `model_type` of their `config.json`.
const FAMILIES: [(&str, Run); 6] = [
    ("bert", run::<Bert>),
    ("llava", run::<Llava>),
    ("siglip", run::<Siglip>),
    ("siglip_vision_model", run::<Siglip>),
    ("t5", run::<T5>),
    ("vit", run::<Vit>),
];

/// What a plain Burn module computed.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ModuleOutputs {
    /// Under Hugging Face's names, such as `logits`.
    pub tensors: Vec<(String, HostTensor)>,
    /// The mean, if there are labels.
    pub loss: Option<f64>,
    /// The loss's gradient of every weight, of a model with an adapter those of the adapter, under Hugging Face's name; empty
    /// unless it was wanted.
    pub gradients: BTreeMap<String, HostTensor>,
}

/// Runs the model of a folder on `inputs`, without dropout. The layout may have tensor and sequence parallelism. Fails
/// if input, model and layout do not fit, or a rank fails.
pub fn forward_module(
    folder: &ModuleFolder,
    inputs: &BTreeMap<String, HostInput>,
    settings: &Settings,
) -> Result<ModuleOutputs, ForwardError> {
    let run = FAMILIES.iter().find(|(kind, _)| *kind == folder.model_type()).map(|(_, run)| *run);
    let unknown = || ForwardError::ModelType {
        found: folder.model_type().into(),
        legal: FAMILIES.map(|(kind, _)| kind).join(", "),
    };
    run.ok_or_else(unknown)?(folder, inputs, settings)
}

fn run<M: HfModule + Sync + 'static>(
    folder: &ModuleFolder,
    inputs: &BTreeMap<String, HostInput>,
    settings: &Settings,
) -> Result<ModuleOutputs, ForwardError> {
    if settings.gradients && !inputs.contains_key("labels") {
        return Err(ForwardError::NoLabels);
    }
    let (module, adapter) = read_module::<M>(folder, settings)?;
    let layout = &settings.layout;
    let on = |device: Device| ModuleInputs { tensors: inputs.clone(), device, dtype: settings.dtype };
    let mesh = Mesh::new(layout.clone())?;
    let teams = Teams::new(&mesh, Axis::Tp).sequence_parallel(layout.sequence_parallel());
    let outputs = settings.cluster.launch_all(&mesh, |rank| {
        teams.run(&rank, |device| -> Result<ModuleOutputs, BoxError> {
            let device = if settings.gradients { device.autodiff() } else { device };
            let module = parallelize_on(module.clone(), &device, &rank, &M::plan())?;
            let ModuleOutput { tensors, loss } = module.run(&on(device))?;
            let value = loss.as_ref().map(|loss| loss.clone().into_scalar::<f64>());
            let gradients = match (loss.filter(|_| settings.gradients), &adapter) {
                (Some(loss), Some(Adapter { plan, .. })) => {
                    plan.export("", &adapter_gradients(&module, plan, &loss.backward())?)?
                }
                (Some(loss), None) => named_tensors(&module, Wanted::Gradients(&loss.backward())),
                (None, _) => BTreeMap::new(),
            };
            let tensors = tensors.into_iter().map(|(name, tensor)| (name.to_string(), tensor)).collect();
            Ok(ModuleOutputs { tensors, loss: value, gradients })
        })
    })?;
    let first = outputs.into_iter().flatten().next();
    Ok(first.expect("the first rank of a team gives its program's value"))
}

/// The model of a folder on the host, without dropout and with the adapter that goes with it. Fails if the layout has more
/// than tensor and sequence parallelism or does not fit the model, or a file cannot be read.
pub(crate) fn read_module<M: HfModule>(
    folder: &ModuleFolder,
    settings: &Settings,
) -> Result<(M, Option<Adapter>), ForwardError> {
    let layout = &settings.layout;
    check_axes(layout)?;
    let host = Device::flex();
    let host = if settings.gradients { host.autodiff() } else { host };
    let config = M::without_dropout(folder.config::<M>()?);
    let module: M = folder.read(&config, settings.dtype, &host)?;
    if layout.tp > 1 {
        check(&module, &M::plan(), layout.tp, layout.sequence_parallel())?;
    }
    let adapter = folder.adapter(&module)?;
    let module = match &adapter {
        Some(Adapter { plan, tensors }) => with_adapters(module, plan, Some(tensors))?,
        None => module,
    };
    Ok((module, adapter))
}

/// Refuses what shards the batch, the layers or the optimizer.
fn check_axes(layout: &ParallelLayout) -> Result<(), ForwardError> {
    let sizes = [
        ("pipeline-parallel", layout.pp, 1),
        ("data-parallel", layout.dp, 1),
        ("context-parallel", layout.cp, 1),
        ("expert-parallel", layout.ep, 1),
        ("zero", layout.zero.into(), 0),
    ];
    match sizes.into_iter().find(|(_, value, legal)| value > legal) {
        Some((key, value, legal)) => Err(ForwardError::Axis { key, value, legal }),
        None => Ok(()),
    }
}

/// Reads the tensors of a file that a module may compute from: whole numbers (I64, I32) and floats. What it computed, so that
/// others can compare (`logits`, `loss`, `grad.NAME`), is passed over, as for causal models. Fails if the file cannot be
/// read or has a tensor of another type.
pub fn read_module_inputs(path: &Path) -> Result<BTreeMap<String, HostInput>, ForwardError> {
    let refuse = |what: String| ForwardError::Input { path: path.into(), what };
    let bytes = open(path)?;
    let file = SafeTensors::deserialize(&bytes).map_err(|error| refuse(error.to_string()))?;
    let mut tensors = BTreeMap::new();
    for (name, view) in file.iter().filter(|(name, _)| !is_output(name)) {
        let shape = view.shape().to_vec();
        let tensor = match Element::of(view.dtype()) {
            Some(element) => HostInput::Floats(HostTensor { shape, data: element.decode(view.data()) }),
            None => HostInput::Ints { shape, data: integers(path, name, &view)? },
        };
        tensors.insert(name.to_string(), tensor);
    }
    Ok(tensors)
}

/// Whether a tensor is what a model computed; some files have the logits of the last positions only.
fn is_output(name: &str) -> bool {
    ["loss", "logits", "seq_relationship_logits", "last_hidden_state", "pooler_output"].contains(&name)
        || name.starts_with("logits_last")
        || name.starts_with("grad.")
}

/// Writes what a module computed: its tensors, `loss [1]` and `grad.NAME` for every gradient. Fails if the file cannot
/// be written.
pub fn write_module_outputs(path: &Path, outputs: &ModuleOutputs, element: Element) -> Result<(), ForwardError> {
    let named = outputs.tensors.iter();
    let mut tensors: Vec<(String, Vec<usize>, &[f64])> =
        named.map(|(name, tensor)| (name.clone(), tensor.shape.clone(), &tensor.data[..])).collect();
    if let Some(loss) = &outputs.loss {
        tensors.push(("loss".into(), vec![1], std::slice::from_ref(loss)));
    }
    write_tensors(path, tensors, &outputs.gradients, element)
}
