//! `train` of ViT and LLaVA from a file: real images, the same losses in every layout, a run that resumes, an export that is read
//! again, and what is refused.

mod lists;
mod llava;
mod vit;

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use crate::runs::{DP, PP, SP, TP, ZERO, export, logged, refused, train, trained};

const PICTURES: [&str; 6] = ["small.png", "wide.png", "grey.png", "alpha.png", "palette.png", "wide.jpg"];
/// What they show: three of them are one picture.
const CLASSES: [usize; 6] = [0, 1, 2, 3, 1, 1];

/// A picture of the tests of images.
fn picture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("host/tests/golden/images").join(name)
}

/// A list of each picture as often, with what is said of it by its number.
fn list(path: &Path, times: usize, said: impl Fn(usize) -> Value) {
    for name in PICTURES {
        fs::copy(picture(name), path.with_file_name(name)).unwrap();
    }
    let line = |index: usize| {
        let mut line = said(index % PICTURES.len());
        line["image"] = PICTURES[index % PICTURES.len()].into();
        format!("{line}\n")
    };
    fs::write(path, (0..times * PICTURES.len()).map(line).collect::<String>()).unwrap();
}

fn labels(path: &Path, times: usize) {
    list(path, times, |number| json!({"label": CLASSES[number]}));
}

/// The file of a run of `model`, six steps of eight samples of `train.jsonl`.
fn write_run(folder: &Path, model: &str, more: &str) {
    let at = folder.display();
    let text = format!(
        "[model]\n{model}[training]\nsteps = 6\nmicro-batch = 2\nglobal-batch = 8\ndtype = \"f64\"\n[lr]\nmax = 0.01\n\
         warmup = \"1 steps\"\n[evaluation]\nevery = 2\nbatches = 1\n[data]\nsplit = \"60,40,0\"\n[images]\n\
         train = \"{at}/train.jsonl\"\n{more}[output]\ndirectory = \"{at}/run\"\n[checkpoint]\nkeep-last = \"none\"\n"
    );
    fs::write(folder.join("run.toml"), text).unwrap();
}

/// That losses and accuracies of layouts are those of one rank. Gives the losses.
fn layouts_agree(folder: &Path, flags: &[&str], layouts: &[&[&str]]) -> [Vec<f64>; 2] {
    crate::runs::layouts_agree(folder, flags, &["loss", "accuracy"], layouts)
}

/// That a run resumes, but not with other samples under the same name.
fn resumes(folder: &Path, flags: &[&str]) {
    crate::runs::resumes(folder, flags, || {
        let list = folder.join("train.jsonl");
        let text = fs::read_to_string(&list).unwrap();
        fs::write(&list, text.split_once('\n').unwrap().1).unwrap();
        let output = train(folder, flags);
        let message = String::from_utf8_lossy(&output.stderr);
        assert!(message.contains("other samples than those of the run that would be resumed"), "{message}");
        fs::write(&list, text).unwrap();
    });
}
