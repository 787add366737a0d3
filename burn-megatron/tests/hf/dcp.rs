//! PyTorch's distributed checkpoints are read as the weights that PyTorch saved.

use std::collections::BTreeMap;
use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};

use backend_dist::shard::HostTensor;
use burn::tensor::{Device, FloatDType};
use burn_megatron::dcp::DcpObjects;
use burn_megatron::hf::{HfFolder, TensorReader};
use burn_megatron::replay::{Oracle, model, replay};
use models::names::Foreign;
use models::{FamilyConfig, ModelConfig, WeightSource};
use tempfile::TempDir;

use crate::files::{golden, read};
use crate::round_trip::{fail, succeed, text};

/// A folder of golden/dcp with llama3's configuration.
fn dcp(name: &str) -> TempDir {
    let folder = copied(name);
    fs::copy(golden("llama3").join("config.json"), folder.path().join("config.json")).unwrap();
    folder
}

fn copied(name: &str) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    let from = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden/dcp").join(name);
    for file in fs::read_dir(&from).unwrap_or_else(|error| panic!("{}: {error}", from.display())) {
        let file = file.unwrap();
        fs::copy(file.path(), folder.path().join(file.file_name())).unwrap();
    }
    folder
}

/// A folder that Megatron-Core has written, with the configuration of the recorded run of the same name.
fn megatron(kind: &str) -> TempDir {
    let folder = copied(&format!("megatron_{kind}"));
    let config = recorded(kind).0.to_hf().unwrap();
    fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
    folder
}

/// The model of a recorded run, and its weights before the first step.
fn recorded(kind: &str) -> (FamilyConfig, Oracle) {
    let oracle = Oracle::load(&golden("").join("../megatron").join(kind)).unwrap();
    (model(&oracle.model).unwrap(), oracle)
}

/// All weights of a folder, by our names.
fn weights(folder: &HfFolder) -> BTreeMap<String, HostTensor> {
    let read = |(name, foreign): (&str, &Foreign)| {
        let shape = foreign.our_shape();
        let whole: Vec<Range<usize>> = shape.iter().map(|size| 0..*size).collect();
        let data = folder.read(name, &shape, &whole).unwrap();
        (name.to_string(), HostTensor { shape, data })
    };
    folder.config().hf_names().iter().map(read).collect()
}

/// Tensor and pipeline parallel ranks, and ranks of experts. The run continues with Megatron's losses.
#[test]
fn weights_of_megatron_core_are_those_that_were_saved() {
    for kind in ["dense", "moe"] {
        let folder = megatron(kind);
        let opened = HfFolder::open(folder.path()).unwrap();
        let (config, mut oracle) = recorded(kind);
        let ours = weights(&opened);
        let expected = config.megatron_names().import(&oracle.initial).unwrap();
        assert!(ours == expected, "{kind}");
        oracle.initial = config.megatron_names().export(&ours).unwrap();
        let replay = replay(&oracle, &"TP2".parse().unwrap(), FloatDType::F64, &[Device::flex()].into()).unwrap();
        assert!(replay.passes() && replay.steps.len() >= 10, "{replay}");
    }
}

/// Megatron pads a vocabulary so that ranks can divide it.
#[test]
fn of_a_padded_vocabulary_the_model_has_the_first_rows() {
    let folder = megatron("dense");
    let whole = weights(&HfFolder::open(folder.path()).unwrap());
    let path = folder.path().join("config.json");
    let text = fs::read_to_string(&path).unwrap();
    fs::write(&path, text.replace("\"vocab_size\":128", "\"vocab_size\":101")).unwrap();
    let fewer = weights(&HfFolder::open(folder.path()).unwrap());
    for name in ["embed_tokens.weight", "lm_head.weight"] {
        assert_eq!(fewer[name].shape, [101, 64]);
        assert!(fewer[name].data == whole[name].data[..101 * 64], "{name}");
    }
}

/// Three FSDP ranks, a program's own names before the weights', and an optimizer next to them; and FSDP × TP, boxes in two
/// dimensions.
#[test]
fn weights_are_those_that_were_saved() {
    let plain = HfFolder::open(golden("llama3")).unwrap();
    for name in ["fsdp", "mesh"] {
        let folder = dcp(name);
        let opened = HfFolder::open(folder.path()).unwrap();
        for (name, foreign) in opened.config().hf_names().iter() {
            let shape = foreign.our_shape();
            // The whole, and a box in the middle that boxes of the file share.
            let whole: Vec<Range<usize>> = shape.iter().map(|size| 0..*size).collect();
            let middle: Vec<Range<usize>> = shape.iter().map(|size| size / 3..size - size / 5).collect();
            for ranges in [whole, middle] {
                let [ours, mut expected] = [&opened, &plain].map(|from| from.read(name, &shape, &ranges).unwrap());
                if opened.element(name, &shape).unwrap().size() == 2 {
                    expected.iter_mut().for_each(|value| *value = half::bf16::from_f32(*value as f32).to_f64());
                }
                assert!(ours == expected, "{name} {ranges:?}");
            }
        }
    }
}

#[test]
fn a_checkpoint_is_imported_also_where_its_configuration_is_elsewhere() {
    let (from, to) = (dcp("mesh"), tempfile::tempdir().unwrap());
    fs::remove_file(from.path().join("config.json")).unwrap();
    let [checkpoint, out] = ["checkpoint", "out"].map(|name| to.path().join(name));
    let hf = golden("llama3");
    succeed(&["import", "--hf", text(&hf), "--weights", text(from.path()), "--output", text(&checkpoint)]);
    succeed(&["export", "--hf", text(&out), "--checkpoint", text(&checkpoint)]);
    assert_eq!(read(&out.join("model.safetensors")), read(&hf.join("model.safetensors")));
    let message = fail(&["import", "--hf", text(&hf), "--weights", text(to.path()), "--output", "x"]);
    says!(message, "a PyTorch DCP checkpoint");
}

/// Written by `export` and read again: the same weights, in several files.
#[test]
fn weights_go_out_as_they_came_in() {
    for (model, format) in [("llama3", "--dcp"), ("gpt2", "--dcp"), ("dense", "--torch-dist"), ("moe", "--torch-dist")]
    {
        let from = if format == "--dcp" { crate::files::changed(model, |_| {}) } else { megatron(model) };
        let to = tempfile::tempdir().unwrap();
        let [checkpoint, out] = ["checkpoint", "out"].map(|name| to.path().join(name));
        succeed(&["import", "--hf", text(from.path()), "--output", text(&checkpoint)]);
        let options = ["--checkpoint", text(&checkpoint), "--max-shard-size", "100KB"];
        succeed(&[&["export", format, text(&out)], &options[..]].concat());
        assert!(out.join("__0_1.distcp").exists() && out.join("metadata.json").exists() == (format == "--torch-dist"));
        let [before, after] = [from.path(), &out].map(|folder| weights(&HfFolder::open(folder).unwrap()));
        assert!(before == after, "{model}");
    }
}

/// Modules of PyTorch have a tied weight under both names. The bytes are there once.
#[test]
fn tied_weights_go_out_under_both_names() {
    for (model, names) in [
        ("gpt2", ["transformer.wte.weight", "lm_head.weight"]),
        ("gemma2", ["model.embed_tokens.weight", "lm_head.weight"]),
    ] {
        let to = tempfile::tempdir().unwrap();
        let [checkpoint, out] = ["checkpoint", "out"].map(|name| to.path().join(name));
        succeed(&["import", "--hf", text(&golden(model)), "--output", text(&checkpoint)]);
        let options = ["--checkpoint", text(&checkpoint), "--max-shard-size", "100KB"];
        succeed(&[&["export", "--dcp", text(&out)], &options[..]].concat());
        let stored = DcpObjects::open(&out).unwrap().names;
        assert!(names.iter().all(|name| stored.contains(*name)), "{model}: {stored:?}");
        // A copy that differs is refused.
        let [before, after] = [&golden(model), &out].map(|folder| weights(&HfFolder::open(folder).unwrap()));
        assert!(before == after, "{model}");
        let files = fs::read_dir(&out).unwrap().map(|file| file.unwrap());
        let files = files.filter(|file| file.path().extension().is_some_and(|kind| kind == "distcp"));
        let written: usize = files.map(|file| file.metadata().unwrap().len() as usize).sum();
        let tensors = read(&golden(model).join("model.safetensors"));
        let bytes: usize = tensors.values().map(|stored| stored.data.len()).sum();
        // An archive has about a kilobyte around its elements.
        assert!(written < bytes + 1100 * tensors.len(), "{model}: {written} bytes of {bytes}");
    }
}

/// The names and shapes of the tensors are those of Megatron-Core's own file.
#[test]
fn tensors_of_megatron_core_have_its_names_and_shapes() {
    let (from, to) = (megatron("dense"), tempfile::tempdir().unwrap());
    let [checkpoint, out] = ["checkpoint", "out"].map(|name| to.path().join(name));
    succeed(&["import", "--hf", text(from.path()), "--output", text(&checkpoint)]);
    succeed(&["export", "--torch-dist", text(&out), "--checkpoint", text(&checkpoint)]);
    let about = |folder: &Path| fs::read(folder.join(".metadata")).unwrap();
    let names = |bytes: &[u8]| -> std::collections::BTreeSet<String> {
        let text = String::from_utf8_lossy(bytes);
        let names = regex::Regex::new(r"(decoder|embedding|output_layer)\.[a-z0-9_.]*weight").unwrap();
        names.find_iter(&text).map(|name| name.as_str().to_string()).collect()
    };
    assert_eq!(names(&about(&out)), names(&about(from.path())));
    let [ours, theirs] =
        [&out, &from.path().to_path_buf()].map(|folder| fs::read(folder.join("metadata.json")).unwrap());
    let json = |bytes: &[u8]| serde_json::from_slice::<serde_json::Value>(bytes).unwrap();
    assert_eq!(json(&ours), json(&theirs));
}

fn refused(folder: &TempDir) -> String {
    HfFolder::open(folder.path()).unwrap_err().to_string()
}

/// The bytes of `from` are those of `to` afterwards.
fn replace(path: &PathBuf, from: &[u8], to: &[u8]) {
    let mut bytes = fs::read(path).unwrap();
    let at = bytes.windows(from.len()).position(|window| window == from).unwrap();
    bytes.splice(at..at + from.len(), to.iter().copied());
    fs::write(path, bytes).unwrap();
}

#[test]
fn what_is_wrong_with_a_folder_is_told_with_file_and_tensor() {
    let folder = dcp("fsdp");
    let file = folder.path().join("__1_0.distcp");
    let bytes = fs::read(&file).unwrap();
    fs::write(&file, &bytes[..bytes.len() / 2]).unwrap();
    says!(refused(&folder), "__1_0.distcp: tensor `model.", "but the file has");
    fs::remove_file(&file).unwrap();
    assert!(refused(&folder).contains("__1_0.distcp: tensor `model."), "{}", refused(&folder));

    let metadata = |folder: &TempDir| folder.path().join(".metadata");
    let folder = dcp("fsdp");
    let whole = fs::read(metadata(&folder)).unwrap();
    fs::write(metadata(&folder), &whole[..whole.len() / 2]).unwrap();
    assert!(refused(&folder).contains(".metadata: pickle, byte"), "{}", refused(&folder));

    // A pickle that would run a command: the class is named, and nothing is run.
    fs::write(metadata(&folder), b"\x80\x04\x8c\x05posix\x8c\x06system\x93\x8c\x04true\x85R.").unwrap();
    assert!(refused(&folder).contains("class posix.system is none of those"), "{}", refused(&folder));

    let folder = dcp("fsdp");
    replace(&metadata(&folder), b"__1_0.distcp", b"../_0.distcp");
    assert!(refused(&folder).contains("\"../_0.distcp\", which is no file of this folder"), "{}", refused(&folder));

    // One of the weights is another one.
    let folder = dcp("mesh");
    let text = fs::read_to_string(folder.path().join("config.json")).unwrap();
    fs::write(folder.path().join("config.json"), text.replace("\"num_hidden_layers\": 4", "\"num_hidden_layers\": 5"))
        .unwrap();
    says!(refused(&folder), "tensor `model.layers.4.", "is missing");
    fs::write(folder.path().join("config.json"), text.replace("\"vocab_size\": 256", "\"vocab_size\": 250")).unwrap();
    assert!(refused(&folder).contains("has shape [256, 32], config.json needs [250, 32]"), "{}", refused(&folder));
}

/// A byte of the metadata or of a file is another one: an error or other numbers, never a panic.
#[test]
fn damaged_folders_do_not_end_the_program() {
    let folder = dcp("fsdp");
    let cases = std::env::var("BURN_MEGATRON_FUZZ_CASES").map_or(200, |cases| cases.parse().unwrap());
    let mut state = 7_u64;
    let mut random = |below: usize| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as usize % below
    };
    let mut refused = 0;
    for case in 0..cases {
        let path = folder.path().join([".metadata", "__0_0.distcp"][case % 2]);
        let bytes = fs::read(&path).unwrap();
        let mut damaged = bytes.clone();
        for _ in 0..=random(3) {
            let at = random(damaged.len());
            damaged[at] = random(256) as u8;
        }
        fs::write(&path, damaged).unwrap();
        match HfFolder::open(folder.path()) {
            Err(error) => {
                assert!(error.to_string().contains(text(folder.path())), "{error}");
                refused += 1;
            }
            Ok(opened) => {
                for (name, foreign) in opened.config().hf_names().iter() {
                    let shape = foreign.our_shape();
                    let whole: Vec<Range<usize>> = shape.iter().map(|size| 0..*size).collect();
                    let _numbers = opened.read(name, &shape, &whole);
                }
            }
        }
        fs::write(&path, bytes).unwrap();
    }
    assert!(refused > cases / 10, "{refused} of {cases}");
}
