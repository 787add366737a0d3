//! BERT's folders against transformers.

use std::fs;
use std::path::Path;

use burn_megatron::forward::forward_module;
use burn_megatron::hf::ModuleFolder;
use models::Bert;
use models::hf::HostInput;
use serde_json::Value;

use super::{Inputs, changed, equals_transformers, last8, logits, oracle, round_trip, run, settings, written};
use crate::files::{Stored, Tensors, golden, read};
use crate::forward::difference;

#[test]
fn bert_is_that_of_transformers() {
    equals_transformers("bert", 1e-9);
}

/// Tokens where the mask is 0 change nothing elsewhere, and -100 is no label.
#[test]
fn padding_of_bert_changes_nothing() {
    let (mut inputs, _) = oracle("bert");
    let ints = |data: Vec<i64>| HostInput::Ints { shape: vec![2, 40], data };
    let alike = |padding: i64| (0..80).map(|at| if at % 40 < 30 { at * 3 % 256 } else { padding }).collect();
    let labels = (0..80).map(|at| if at % 40 < 30 && at % 3 == 0 { at } else { -100 }).collect();
    inputs.insert("labels".into(), ints(labels));
    inputs.insert("attention_mask".into(), ints((0..80).map(|at| i64::from(at % 40 < 30)).collect()));
    inputs.insert("token_type_ids".into(), ints((0..80).map(|at| i64::from(at % 40 > 12)).collect()));
    let mut run_with = |padding: i64, layout: &str| {
        inputs.insert("input_ids".into(), ints(alike(padding)));
        let outputs = run("bert", &inputs, layout, true).unwrap();
        let first: Vec<f64> = logits(&outputs).read_box(&[0..2, 0..30, 0..256]);
        (first, outputs)
    };
    let (logits, one) = run_with(7, "TP1");
    for (padding, layout) in [(200, "TP1"), (7, "TP2"), (200, "TP2 SP")] {
        let (other_logits, other) = run_with(padding, layout);
        let gap = difference(&other_logits, &logits);
        assert!(gap < 1e-12, "{padding} {layout}: {gap:e}");
        assert!((other.loss.unwrap() - one.loss.unwrap()).abs() < 1e-12);
        let name = "bert.encoder.layer.3.output.dense.weight";
        assert!(difference(&other.gradients[name].data, &one.gradients[name].data) < 1e-11);
    }
    // The mask is not without effect.
    inputs.remove("attention_mask");
    let without = run("bert", &inputs, "TP1", false).unwrap();
    assert!((without.loss.unwrap() - one.loss.unwrap()).abs() > 1e-6);
}

#[test]
fn bert_is_written_as_it_was_read() {
    round_trip::<Bert>("bert");
}

/// Published folders have names of old, copies of tied weights, positions, and the other head.
#[test]
fn old_folders_of_bert() {
    let folder = changed(
        "bert",
        |_| {},
        |tensors| {
            for name in tensors.keys().filter(|name| name.contains("LayerNorm")).cloned().collect::<Vec<_>>() {
                let old =
                    name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta");
                let tensor = tensors.remove(&name).unwrap();
                tensors.insert(old, tensor);
            }
            tensors.insert(
                "cls.predictions.decoder.weight".into(),
                tensors["bert.embeddings.word_embeddings.weight"].clone(),
            );
            tensors.insert("bert.embeddings.position_ids".into(), Stored::f32(&[1, 128], 0.0));
            for (name, out) in [("bert.pooler.dense", 32), ("cls.seq_relationship", 2)] {
                tensors.insert(format!("{name}.weight"), Stored::f32(&[out, 32], 0.1));
                tensors.insert(format!("{name}.bias"), Stored::f32(&[out], 0.2));
            }
        },
    );
    let opened = ModuleFolder::open(folder.path()).unwrap();
    let (inputs, oracle) = oracle("bert");
    let outputs = forward_module(&opened, &inputs, &settings("TP2", false)).unwrap();
    assert!(difference(&last8(logits(&outputs)), &oracle["logits_last8"].values()) < 1e-9);
    let (name, relations) = &outputs.tensors[1];
    assert_eq!((name.as_str(), &relations.shape[..]), ("seq_relationship_logits", &[2, 2][..]));
    // Both rows of the head are alike: the loss of the next sentence is ln 2.
    let mut with_next = inputs.clone();
    with_next.insert("next_sentence_label".into(), HostInput::Ints { shape: vec![2], data: vec![0, 1] });
    let loss = forward_module(&opened, &with_next, &settings("TP2", false)).unwrap().loss.unwrap();
    assert!((loss - outputs.loss.unwrap() - 2.0_f64.ln()).abs() < 1e-12);
    // The file said `BertForMaskedLM`, and is kept.
    let to = folder.path().join("written");
    written::<Bert>(folder.path(), &to, u64::MAX);
    let json =
        |folder: &Path| -> Value { serde_json::from_slice(&fs::read(folder.join("config.json")).unwrap()).unwrap() };
    assert_eq!(json(&to), json(folder.path()));
    assert!(read(&to.join("model.safetensors")).contains_key("cls.seq_relationship.weight"));
}

/// `bert-base-chinese` has keys of a pooler that no code reads.
#[test]
fn keys_of_other_heads_change_nothing() {
    let keys = [
        "directionality",
        "pooler_fc_size",
        "pooler_num_attention_heads",
        "pooler_num_fc_layers",
        "pooler_size_per_head",
        "pooler_type",
    ];
    let folder =
        changed("bert", |config| keys.iter().for_each(|key| config[key] = "first_token_transform".into()), |_| {});
    let read = ModuleFolder::open(folder.path()).unwrap().config::<Bert>().unwrap();
    assert_eq!(read, ModuleFolder::open(golden("bert")).unwrap().config::<Bert>().unwrap());
}

#[test]
fn what_does_not_fit_is_named() {
    let weight = "bert.encoder.layer.2.attention.self.key.weight";
    let open = |config: &dyn Fn(&mut Value), change: &dyn Fn(&mut Tensors)| {
        let folder = changed("bert", config, change);
        let (inputs, _) = oracle("bert");
        let opened = ModuleFolder::open(folder.path()).unwrap();
        forward_module(&opened, &inputs, &settings("TP1", false)).unwrap_err().to_string()
    };
    let same = |_: &mut Tensors| {};
    for (error, texts) in [
        (
            open(&|_| {}, &|tensors| drop(tensors.remove(weight))),
            ["model.safetensors: tensor `", "self.key.weight` is missing"],
        ),
        (
            open(&|_| {}, &|tensors| drop(tensors.insert(weight.into(), Stored::f32(&[3, 32], 1.0)))),
            ["has shape [3, 32]", "needs [32, 32]"],
        ),
        (
            open(&|_| {}, &|tensors| drop(tensors.insert("stray".into(), Stored::f32(&[3], 1.0)))),
            ["tensor `stray` is not part", "remove it"],
        ),
        (
            open(&|_| {}, &|tensors| {
                drop(tensors.insert("cls.predictions.decoder.bias".into(), Stored::f32(&[256], 1.0)))
            }),
            ["differs from", "`cls.predictions.bias`"],
        ),
        (
            open(&|config| config["hidden_act"] = "mish".into(), &same),
            ["`hidden_act` is mish", "gelu_pytorch_tanh, quick_gelu, relu, relu2"],
        ),
        (
            open(&|config| config["num_attention_heads"] = 5.into(), &same),
            ["`num_attention_heads` is 5", "nearest legal: 4"],
        ),
        (open(&|config| config["novel_key"] = 5.into(), &same), ["`novel_key`", "known"]),
        (open(&|config| config["is_decoder"] = true.into(), &same), ["`is_decoder` is true", "nearest legal: false"]),
        (
            open(&|config| config["architectures"] = serde_json::json!(["BertForQuestionAnswering"]), &same),
            ["BertForQuestionAnswering", "BertForMaskedLM, BertForPreTraining"],
        ),
    ] {
        assert!(texts.iter().all(|text| error.contains(text)), "{error}");
    }
}

#[test]
fn inputs_and_layouts_that_do_not_fit_are_named() {
    let (inputs, _) = oracle("bert");
    for (layout, text) in [
        ("DP2", "data-parallel 2: a forward pass of this model has tensor and sequence parallelism; nearest legal: 1"),
        ("PP2", "pipeline-parallel 2"),
        ("TP3", "nearest"),
    ] {
        let error = run("bert", &inputs, layout, false).unwrap_err().to_string();
        says!(error, text);
    }
    let with = |name: &str, shape: &[usize], value: i64| {
        let mut inputs = inputs.clone();
        let data = vec![value; shape.iter().product()];
        inputs.insert(name.into(), HostInput::Ints { shape: shape.into(), data });
        run("bert", &inputs, "TP1", false).unwrap_err().to_string()
    };
    for (error, text) in [
        (with("input_ids", &[2, 40], 256), "tensor `input_ids` has 256 at [0, 0]; legal: 0 to 255"),
        (with("labels", &[2, 39], 1), "tensor `labels` has shape [2, 39]; legal: [2, 40]"),
        (with("token_type_ids", &[2, 40], 2), "tensor `token_type_ids` has 2 at [0, 0]; legal: 0 to 1"),
        (with("labels", &[2, 40], -100), "nothing to predict"),
        (with("input_ids", &[1, 129], 1), "at most 128 tokens (max_position_embeddings)"),
        (
            with("next_sentence_label", &[2], 0),
            "tensor `next_sentence_label` is none that this model takes; legal: input_ids, token_type_ids, attention_mask, labels",
        ),
        (with("position_ids", &[2, 40], 3), "tensor `position_ids` is none that this model takes"),
    ] {
        says!(error, text);
    }
    // This is said before the model runs, which would miss its tokens.
    assert!(run("bert", &Inputs::new(), "TP1", true).unwrap_err().to_string().contains("no `labels`"));
}
