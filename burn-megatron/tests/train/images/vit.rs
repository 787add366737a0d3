//! ViT.

use std::collections::BTreeMap;
use std::fs;

use backend_dist::shard::HostTensor;
use burn::tensor::{Device, FloatDType};
use burn_megatron::data::images::{ImageProcessor, RgbImage};
use burn_megatron::forward::{Settings, forward_module};
use burn_megatron::hf::ModuleFolder;
use burn_megatron::prelude::*;
use models::hf::HostInput;

use super::*;
use crate::command::{fail, succeed};

const VIT: &str = "preset = \"vit-base\"\nhidden-size = 16\nnum-hidden-layers = 2\nnum-attention-heads = 4\n\
    intermediate-size = 32\nimage-size = 8\npatch-size = 4\nnum-labels = 4\ninitializer-range = 0.1\n";

fn run_of(times: usize) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    labels(&folder.path().join("train.jsonl"), times);
    write_run(folder.path(), VIT, "");
    folder
}

#[test]
fn vit_learns_the_same_in_every_layout() {
    let folder = run_of(4);
    let layouts: [&[&str]; 4] = [
        &[TP, "2", SP, "true", DP, "2", ZERO, "1"],
        &[PP, "2", DP, "2", ZERO, "2"],
        &[DP, "4", ZERO, "3"],
        &[TP, "2", PP, "2"],
    ];
    let [losses, held_out] = layouts_agree(folder.path(), &[], &layouts);
    assert_eq!((losses.len(), held_out.len()), (6, 3));
}

#[test]
fn vit_resumes_bit_for_bit() {
    resumes(run_of(4).path(), &[TP, "2", DP, "2", ZERO, "1"]);
}

#[test]
fn real_images_are_learned_exported_and_told() {
    let folder = run_of(8);
    let (run, hf) = (folder.path().join("run"), folder.path().join("hf"));
    let flags = ["--training.steps", "60", "--evaluation.every", "20", "--training.dtype", "f32"];
    let said = trained(folder.path(), &flags);
    let [_, accuracy] = logged(&run, "accuracy");
    // A picture with transparency is another one without.
    assert_eq!(accuracy.last(), Some(&1.0), "{accuracy:?}");
    assert!(said.contains("accuracy 100.00 %") && said.contains("training: 48 images"), "{said}");

    export(&run, &hf);
    let config: Value = serde_json::from_slice(&fs::read(hf.join("config.json")).unwrap()).unwrap();
    assert_eq!(config["id2label"].as_object().unwrap().len(), 4);
    let (_, processor) = ImageProcessor::read(&ImageProcessor::file_of(&hf).unwrap()).unwrap();
    for (name, class) in PICTURES.iter().zip(CLASSES) {
        let image = RgbImage::decode(&fs::read(picture(name)).unwrap()).unwrap();
        let data = processor.process(&image).into_iter().map(f64::from).collect();
        let pixels = HostInput::Floats(HostTensor { shape: vec![1, 3, 8, 8], data });
        let inputs = BTreeMap::from([("pixel_values".to_string(), pixels)]);
        let settings = Settings::new(vec![Device::flex()], ParallelLayout::default(), FloatDType::F64);
        let outputs = forward_module(&ModuleFolder::open(&hf).unwrap(), &inputs, &settings).unwrap();
        let logits = &outputs.tensors[0].1.data;
        let best = (0..4).max_by(|a, b| logits[*a].total_cmp(&logits[*b]));
        assert_eq!(best, Some(class), "{name}: {logits:?}");
    }

    // A folder is where a run begins, with another number of classes too, and with frozen parameters.
    let other = folder.path().join("other");
    let of_folder = ["--model.preset", "none", "--model.hf", hf.to_str().unwrap(), "--output.directory"];
    let from = |more: &[&str]| {
        let _ = fs::remove_dir_all(&other);
        trained(folder.path(), &[&of_folder[..], &[other.to_str().unwrap(), "--lr.warmup", "0"], more].concat());
        logged(&other, "loss")[0][0]
    };
    fs::write(folder.path().join("run.toml"), without_sizes(&folder)).unwrap();
    let (same, new) = (from(&[]), from(&["--model.num-labels", "9"]));
    assert!(same < 0.1 && (new - 9f64.ln()).abs() < 1.0, "{same} {new}");
    from(&["--param-groups.frozen", "[\"vit.embeddings.*\", \"vit.encoder.layer.0.*\"]"]);
    let (before, after) = (export(&run, &folder.path().join("b")), export(&other, &folder.path().join("a")));
    let as_numbers = |bytes: &[u8], size: usize| -> Vec<f64> {
        let of = |bytes: &[u8]| match size {
            4 => f64::from(f32::from_le_bytes(bytes.try_into().unwrap())),
            _ => f64::from_le_bytes(bytes.try_into().unwrap()),
        };
        bytes.chunks(size).map(of).collect()
    };
    for (name, value) in before {
        let is_frozen = name.starts_with("vit.embeddings.") || name.starts_with("vit.encoder.layer.0.");
        assert_eq!(as_numbers(&value, 4) == as_numbers(&after[&name], 8), is_frozen, "{name}");
    }
}

/// A folder of a `ViTModel`, images of 16 × 16.
#[test]
fn a_model_without_a_head_gets_one() {
    let folder = run_of(4);
    fs::write(folder.path().join("run.toml"), without_sizes(&folder)).unwrap();
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden/hf/vit_model");
    let of_folder = ["--model.preset", "none", "--model.hf", golden.to_str().unwrap()];
    let message = refused(folder.path(), &of_folder);
    assert!(
        message.contains("a ViTModel has no head that tells classes; nearest legal: model.num-labels = 2"),
        "{message}"
    );
    let plan = format!("plan --hf {}", golden.display());
    assert!(fail(folder.path(), &plan).contains("say how many classes a new one has: --num-labels"));
    assert!(succeed(folder.path(), &format!("{plan} --num-labels 4")).contains("fits into"));
    let flags = [&of_folder[..], &["--model.num-labels", "4", TP, "2"]].concat();
    let said = trained(folder.path(), &flags);
    assert!(said.contains("head         drawn anew for 4 classes") && said.contains("has no head"), "{said}");
    // The new head is small, the rest of the model is not: it is the folder's.
    let loss = logged(&folder.path().join("run"), "loss")[0][0];
    assert!((loss - 4f64.ln()).abs() < 0.3, "{loss}");
    let weights = export(&folder.path().join("run"), &folder.path().join("hf"));
    assert!(weights.contains_key("classifier.weight") && !weights.keys().any(|name| name.contains("pooler")));
    let config: Value = serde_json::from_slice(&fs::read(folder.path().join("hf/config.json")).unwrap()).unwrap();
    assert_eq!(config["architectures"], json!(["ViTForImageClassification"]));
    assert_eq!(config["id2label"].as_object().unwrap().len(), 4);
}

/// The weights of this model are some terabytes: whoever made them before a look at the layout would not come to an end.
#[test]
fn layouts_are_checked_before_weights_are_made() {
    let folder = run_of(4);
    let flags = "--dry-run --model.hidden-size 65536 --model.num-attention-heads 32 --model.num-hidden-layers 48 \
                 --model.intermediate-size 262144 --training.micro-batch 1";
    let of = |more: &'static str| -> Vec<&'static str> { flags.split_whitespace().chain(more.split(' ')).collect() };
    let said = trained(folder.path(), &of("--parallel.tensor-parallel 16 --parallel.pipeline-parallel 8"));
    assert!(said.contains("TP16"), "{said}");
    let message = refused(folder.path(), &of("--parallel.tensor-parallel 64"));
    for words in ["parallel.tensor-parallel = 64: plan: `blocks.0.attention` has 32 heads", "nearest legal: 32\n"] {
        assert!(message.contains(words), "{message}");
    }
    let message = refused(folder.path(), &of("--parallel.pipeline-parallel 64"));
    for words in ["pipeline-parallel 64", "nearest legal: pipeline-parallel 48"] {
        assert!(message.contains(words), "{message}");
    }
}

/// The file of the run, whose model is only named by a flag.
fn without_sizes(folder: &tempfile::TempDir) -> String {
    let text = fs::read_to_string(folder.path().join("run.toml")).unwrap();
    text.replace(VIT, "preset = \"vit-base\"\n")
}

#[test]
fn keys_without_a_meaning_are_refused_before_anything_runs() {
    let folder = run_of(4);
    for (flags, words) in [
        (&["--masked.mask-prob", "0.2"][..], "masked.mask-prob = 0.2 has no meaning with vit"),
        (&["--training.seq-length", "64"], "training.seq-length = 64 has no meaning with vit"),
        (&["--data.prefixes", "x"], "data.prefixes = [\"x\"] has no meaning with vit"),
        (&["--images.template", "x"], "images.template = x has no meaning with vit"),
        (&["--parallel.context-parallel", "2"], "parallel.context-parallel = 2 has no meaning with vit"),
        (&["--model.num-labels", "0"], "model.num-labels = 0; legal: 2 to 1048576 classes"),
        (&["--model.patch-size", "3"], "patch_size = 3 does not divide image_size = 8"),
        (&["--model.num-channels", "1"], "num-channels = 1: images have 3; nearest legal: 3"),
        (&[TP, "3"], "parallel.tensor-parallel = 3: plan: "),
        (&[TP, "3"], "which 3 ranks of axis tp do not divide"),
        (&[TP, "3"], "nearest legal: 2, 4"),
        (&[PP, "3"], "nearest legal: pipeline-parallel 2"),
        (&["--param-groups.frozen", "vit.embedding.*"], "frozen: no parameter fits `vit.embedding.*`; the nearest is"),
        (&["--param-groups.lr-scale", "{ \"*\" = 0.5 }"], "param-groups.lr-scale"),
        (&["--images.train", "[]"], "images.train has no files; vit learns from lists of images"),
        (&["--model.preset", "bert-base"], "has no meaning with bert"),
    ] {
        let message = refused(folder.path(), flags);
        assert!(message.contains(words), "{flags:?}: {message}");
    }
    // What the file resolves to is such a file.
    let printed = trained(folder.path(), &["--print-config"]);
    fs::write(folder.path().join("run.toml"), &printed).unwrap();
    assert_eq!(trained(folder.path(), &["--print-config"]), printed);
    fs::write(folder.path().join("run.toml"), "[images]\ntrain = \"x.jsonl\"\n").unwrap();
    let message = refused(folder.path(), &[]);
    assert!(message.contains("has no meaning with this model; only with vit, llava"), "{message}");
}
