//! `BertModel`: a BERT without heads (`tests/golden/hf/make_bert_model.py`), as models that embed texts are published.

use burn::tensor::{Device, FloatDType};
use burn_megatron::forward::forward_module;
use burn_megatron::hf::{ModuleExport, ModuleFolder};
use models::Bert;
use models::hf::{HfModule, HostInput};
use serde_json::json;

use super::{changed, run, settings};
use crate::files::{Stored, golden};
use crate::images::{inputs, pools_as_transformers};
use crate::round_trip::{fail, text};

#[test]
fn hidden_states_are_those_of_transformers() {
    pools_as_transformers("bert_model");
}

/// Under the names of a whole model, as transformers reads them too.
#[test]
fn a_model_without_heads_is_written() {
    let folder = ModuleFolder::open(golden("bert_model")).unwrap();
    let config = folder.config::<Bert>().unwrap();
    assert_eq!((config.predictions, config.next_sentence, config.pooler), (false, false, true));
    assert_eq!(Bert::from_hf(&Bert::to_hf(&config)).unwrap(), config);
    let model: Bert = folder.read(&config, FloatDType::F64, &Device::flex()).unwrap();
    let to = tempfile::tempdir().unwrap();
    let to = to.path().join("written");
    ModuleExport::default().write(&to, &model, &config).unwrap();
    let outputs = forward_module(&ModuleFolder::open(&to).unwrap(), &inputs("bert_model"), &settings("TP1", false));
    assert_eq!(outputs.unwrap(), run("bert_model", &inputs("bert_model"), "TP1", false).unwrap());
}

/// Files of older versions have positions, and keys that no code reads; some have no pooler.
#[test]
fn old_folders_of_a_model_without_heads() {
    let folder = changed(
        "bert_model",
        |config| {
            config["output_past"] = true.into();
            config["pruned_heads"] = json!({});
            config["use_bfloat16"] = false.into();
        },
        |tensors| {
            tensors.insert("embeddings.position_ids".into(), Stored::f32(&[1, 16], 0.0));
            tensors.retain(|name, _| !name.starts_with("pooler."));
        },
    );
    let opened = ModuleFolder::open(folder.path()).unwrap();
    let outputs = forward_module(&opened, &inputs("bert_model"), &settings("TP1", false)).unwrap();
    let whole = run("bert_model", &inputs("bert_model"), "TP1", false).unwrap();
    assert_eq!(outputs.tensors[..], whole.tensors[..1]);

    let pruned = changed("bert_model", |config| config["pruned_heads"] = json!({"0": [1]}), |_| {});
    says!(ModuleFolder::open(pruned.path()).unwrap().config::<Bert>().unwrap_err(), "`pruned_heads` is not a key");
}

#[test]
fn what_needs_a_head_is_refused() {
    let mut with = inputs("bert_model");
    with.insert("labels".into(), HostInput::Ints { shape: vec![2, 12], data: vec![1; 24] });
    says!(
        run("bert_model", &with, "TP1", false).unwrap_err(),
        "tensor `labels` is none that this model takes; legal: input_ids, token_type_ids, attention_mask"
    );
    let folder = golden("bert_model");
    says!(fail(&["plan", "--hf", text(&folder)]), "a BertModel has no head to train; nearest legal: BertForMaskedLM");
}
