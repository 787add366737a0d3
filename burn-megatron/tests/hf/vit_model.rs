//! `ViTModel`: a ViT without a head (`tests/golden/hf/make_vit_model.py`).

use burn::tensor::{Device, FloatDType};
use burn_megatron::forward::forward_module;
use burn_megatron::hf::{ModuleExport, ModuleFolder};
use models::images::{Vit, VitConfig};

use crate::files::golden;
use crate::images::{inputs, pools_as_transformers};
use crate::modules::{changed, run, settings};

#[test]
fn hidden_states_are_those_of_transformers() {
    pools_as_transformers("vit_model");
}

/// Under the names of a whole model, as transformers reads them too.
#[test]
fn a_model_without_a_head_is_written() {
    let folder = ModuleFolder::open(golden("vit_model")).unwrap();
    let config = folder.config::<Vit>().unwrap();
    assert_eq!((config.num_labels, config.pooler_output_size), (None, Some(12)));
    assert_eq!(VitConfig::from_hf(&config.to_hf()).unwrap(), config);
    let model: Vit = folder.read(&config, FloatDType::F64, &Device::flex()).unwrap();
    let to = tempfile::tempdir().unwrap();
    let to = to.path().join("written");
    ModuleExport::default().write(&to, &model, &config).unwrap();
    let outputs = forward_module(&ModuleFolder::open(&to).unwrap(), &inputs("vit_model"), &settings("TP1", false));
    assert_eq!(outputs.unwrap(), run("vit_model", &inputs("vit_model"), "TP1", false).unwrap());
}

#[test]
fn a_folder_may_lack_the_pooling_layer() {
    let folder = changed("vit_model", |_| {}, |tensors| tensors.retain(|name, _| !name.starts_with("pooler.")));
    let opened = ModuleFolder::open(folder.path()).unwrap();
    let outputs = forward_module(&opened, &inputs("vit_model"), &settings("TP1", false)).unwrap();
    assert_eq!(outputs.tensors.len(), 1);
    assert_eq!(outputs.tensors[0].0, "last_hidden_state");

    let unlike = changed("vit_model", |config| config["pooler_act"] = "relu".into(), |_| {});
    let error = ModuleFolder::open(unlike.path()).unwrap().config::<Vit>().unwrap_err();
    says!(error, "`pooler_act` is relu", "tanh");
}
