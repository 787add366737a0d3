//! Plain Burn modules that Hugging Face publishes: written for one device, they know no ranks.

use std::fmt;

use backend_dist::parallelize::Plan;
use backend_dist::shard::HostTensor;
use burn::module::{Module, ModuleDisplay};
use burn::tensor::{Device, Tensor};
use serde_json::Value;

use super::HfError;
use super::input_error::InputError;
use super::inputs::ModuleInputs;

/// Hugging Face's `model_type` and `architectures` of the models that are plain Burn modules.
const MODULES: [(&str, &[&str]); 6] = [
    ("bert", &["BertForMaskedLM", "BertForPreTraining", "BertModel"]),
    ("t5", &["T5ForConditionalGeneration"]),
    ("llava", &["LlavaForConditionalGeneration"]),
    ("siglip", &["SiglipForImageClassification"]),
    ("siglip_vision_model", &["SiglipVisionModel"]),
    ("vit", &["ViTForImageClassification", "ViTModel"]),
];

/// Hugging Face's classes of a `model_type` that is a plain Burn module here.
pub fn module_classes(model_type: &str) -> Option<&'static [&'static str]> {
    MODULES.iter().find(|(known, _)| *known == model_type).map(|(_, classes)| *classes)
}

/// A model family as a plain Burn module: its layouts are those that any Burn module has (`parallelize`,
/// `fully_shard`, the learner's mesh strategy).
pub trait HfModule: Module + ModuleDisplay {
    /// Its sizes.
    type Config: Clone + PartialEq + fmt::Debug;

    /// The sizes of a `config.json`.
    ///
    /// # Errors
    /// Names the key that is missing or that this model does not have.
    fn from_hf(config: &Value) -> Result<Self::Config, HfError>;

    /// The `config.json` of these sizes.
    fn to_hf(config: &Self::Config) -> Value;

    /// The model that the weights of a folder are of: some have parts that `config.json` does not name.
    fn present(config: Self::Config, _has: &dyn Fn(&str) -> bool) -> Self::Config {
        config
    }

    /// The sizes without dropout, as a model computes when it does not train.
    fn without_dropout(config: Self::Config) -> Self::Config {
        config
    }

    /// The module with random weights.
    fn init(config: &Self::Config, device: &Device) -> Self;

    /// Hugging Face's names of its tensors.
    const NAMES: ModuleNames;

    /// The names of a tensor in files that older versions of transformers wrote, or that are of a model without a head.
    fn older_names(_name: &str) -> Vec<String> {
        Vec::new()
    }

    /// The names of a tensor of files in the model that transformers has in memory, by which peft names adapters: those of
    /// its newest version first.
    fn names_in_memory(name: &str) -> Vec<String> {
        vec![name.into()]
    }

    /// peft's `task_type` of adapters, for families that it has a class for.
    const PEFT_TASK: Option<&'static str> = None;

    /// What tensor parallelism shards.
    fn plan() -> Plan {
        Plan::auto()
    }

    /// Computes from tensors under Hugging Face's names (`input_ids`, `labels`), with the loss if there are labels.
    ///
    /// # Errors
    /// Names the tensor that is missing or another one than the model takes.
    fn run(&self, inputs: &ModuleInputs) -> Result<ModuleOutput, InputError>;
}

/// What a module computed.
pub struct ModuleOutput {
    /// Under Hugging Face's names, such as `logits`.
    pub tensors: Vec<(&'static str, HostTensor)>,
    /// One number, if there are labels.
    pub loss: Option<Tensor<1>>,
}

impl ModuleOutput {
    /// Logits of any shape, and the loss.
    pub fn new<const D: usize>(logits: Tensor<D>, loss: Option<Tensor<1>>) -> Self {
        Self { tensors: Vec::new(), loss }.with("logits", logits)
    }

    /// The same with one more tensor.
    pub fn with<const D: usize>(mut self, name: &'static str, tensor: Tensor<D>) -> Self {
        let (shape, data) = (tensor.dims().to_vec(), tensor.into_data().iter::<f64>().collect());
        self.tensors.push((name, HostTensor { shape, data }));
        self
    }
}

/// How Hugging Face names the parameters of a module: pairs of paths, ours first, in which `*` stands for the number of
/// a layer. A path is that of a layer of burn-nn, whose own parameters are known (`gamma` is `weight`, `beta` is `bias`),
/// or of a parameter.
#[derive(Clone, Copy, Debug)]
pub struct ModuleNames {
    /// `("layers.*.attention.query", "encoder.layer.*.attention.self.query")`.
    pub pairs: &'static [(&'static str, &'static str)],
    /// Tensors that files may have twice, and the names that are read: `("lm_head.weight", "shared.weight")`.
    pub copies: &'static [(&'static str, &'static str)],
    /// Tensors that follow from the sizes.
    pub derived: &'static [&'static str],
}

/// Where Hugging Face has a parameter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ForeignParam {
    /// Its name.
    pub name: String,
    /// Its name in files that are older than PyTorch's `LayerNorm.weight`.
    pub old_name: Option<String>,
    /// Whether it is stored as `[out, in]`, and ours is `[in, out]`.
    pub transposed: bool,
}

impl ModuleNames {
    /// The place of the parameter at `path` (`layers.3.norm.gamma`), which a layer of type `layer` (`LayerNorm`) has.
    pub fn foreign(&self, path: &str, layer: &str) -> Option<ForeignParam> {
        if let Some(name) = self.translate(path) {
            return Some(ForeignParam { name, old_name: None, transposed: false });
        }
        let (module, leaf) = path.rsplit_once('.')?;
        let module = self.translate(module)?;
        let (now, old) = match leaf {
            "gamma" => ("weight", Some("gamma")),
            "beta" => ("bias", Some("beta")),
            other => (other, None),
        };
        Some(ForeignParam {
            name: format!("{module}.{now}"),
            old_name: old.map(|old| format!("{module}.{old}")),
            transposed: layer == "Linear" && leaf == "weight",
        })
    }

    fn translate(&self, path: &str) -> Option<String> {
        self.pairs.iter().find_map(|(ours, theirs)| {
            let numbers = matched(ours, path)?;
            let mut theirs = theirs.to_string();
            for number in numbers {
                theirs = theirs.replacen('*', number, 1);
            }
            Some(theirs)
        })
    }
}

/// What the stars of a pattern stand for in a path that it matches.
fn matched<'a>(pattern: &str, path: &'a str) -> Option<Vec<&'a str>> {
    let (pattern, path): (Vec<&str>, Vec<&str>) = (pattern.split('.').collect(), path.split('.').collect());
    let fits = |(pattern, part): (&&str, &&str)| pattern == part || (*pattern == "*" && part.parse::<usize>().is_ok());
    let all = pattern.len() == path.len() && pattern.iter().zip(&path).all(fits);
    all.then(|| pattern.iter().zip(path).filter(|(pattern, _)| **pattern == "*").map(|(_, part)| part).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    const NAMES: ModuleNames = ModuleNames {
        pairs: &[("layers.*.query", "encoder.layer.*.self.query"), ("norm", "LayerNorm"), ("bias", "cls.bias")],
        copies: &[],
        derived: &[],
    };

    #[test]
    fn layers_and_parameters_have_their_names() {
        let query = NAMES.foreign("layers.11.query.weight", "Linear").unwrap();
        assert_eq!((query.name.as_str(), query.transposed), ("encoder.layer.11.self.query.weight", true));
        assert!(!NAMES.foreign("layers.11.query.bias", "Linear").unwrap().transposed);
        let norm = NAMES.foreign("norm.gamma", "LayerNorm").unwrap();
        assert_eq!((norm.name.as_str(), norm.old_name.as_deref()), ("LayerNorm.weight", Some("LayerNorm.gamma")));
        assert_eq!(NAMES.foreign("bias", "Bert").unwrap().name, "cls.bias");
        for unknown in ["layers.x.query.weight", "layers.1.key.weight", "head"] {
            assert_eq!(NAMES.foreign(unknown, "Linear"), None, "{unknown}");
        }
    }
}
