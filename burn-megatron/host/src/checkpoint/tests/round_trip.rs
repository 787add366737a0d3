//! What is saved is read again, in any slices.

use std::fs;
use std::ops::Range;
use std::path::Path;

use safetensors::{Dtype, SafeTensors};
use serde_json::json;

use super::super::{Checkpoint, Kind, RunState, SavedTensor, Saver, SaverOptions, Slice};
use super::saving::submit;
use crate::data::read_tokenizer;

pub(super) fn state(step: u64) -> RunState {
    RunState {
        step,
        consumed_samples: 8 * step,
        updates: step,
        skipped_samples: Some(0),
        layout: "TP2".parse().unwrap(),
        world_size: 2,
        model: json!({"family": "llama"}),
        config: json!({"seed": u64::MAX}),
        schedule: json!({}),
        rng: json!([1, 2]),
        ..RunState::default()
    }
}

/// Two tensors, one split between the writers along its second dimension, one of the second writer alone.
pub(super) fn slices(writer: usize, salt: u32) -> Vec<Slice> {
    let bytes =
        |values: Vec<u32>| values.iter().flat_map(|v| (*v as f32 + salt as f32).to_le_bytes()).collect::<Vec<u8>>();
    let columns = 2 * writer..2 * writer + 2;
    let mut slices = vec![Slice {
        kind: Kind::Weight,
        name: "layers.0.q_proj.weight".into(),
        global_shape: vec![3, 4],
        ranges: vec![0..3, columns.clone()],
        dtype: Dtype::F32,
        data: bytes((0..3).flat_map(|row| columns.clone().map(move |column| row * 4 + column as u32)).collect()).into(),
    }];
    if writer == 1 {
        slices.push(Slice {
            kind: Kind::FirstMoment,
            name: "norm.weight".into(),
            global_shape: vec![5],
            ranges: vec![0..5],
            dtype: Dtype::F32,
            data: bytes((100..105).collect()).into(),
        });
    }
    slices
}

pub(super) fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()
}

/// Everything that can be read from a checkpoint.
pub(super) type Contents = (RunState, Vec<(String, Vec<u8>)>);

pub(super) fn contents(checkpoint: &Checkpoint) -> Contents {
    let read = |tensor: &SavedTensor| {
        let whole: Vec<_> = tensor.global_shape.iter().map(|&size| 0..size).collect();
        let (_, bytes) = checkpoint.read(tensor.kind, &tensor.name, &tensor.global_shape, &whole).unwrap();
        (tensor.key(), bytes)
    };
    (checkpoint.state().clone(), checkpoint.tensors().iter().map(read).collect())
}

/// The contents of a checkpoint of [`slices`].
pub(super) fn expected(step: u64, salt: u32) -> Contents {
    let bytes = |values: Range<u32>| values.flat_map(|v| (v as f32 + salt as f32).to_le_bytes()).collect();
    let tensors = [("weight/layers.0.q_proj.weight", 0..12), ("exp_avg/norm.weight", 100..105)];
    (state(step), tensors.into_iter().map(|(key, values)| (key.into(), bytes(values))).collect())
}

fn save(root: &Path, background: bool) {
    let saver = Saver::new(root, 2, SaverOptions { background, ..Default::default() }).unwrap();
    saver.submit(0, slices(0, 0), &state(7)).unwrap();
    saver.submit(1, slices(1, 0), &state(7)).unwrap();
    let reports = saver.wait().unwrap();
    assert_eq!(reports.len(), 1);
    assert_eq!((reports[0].step, &reports[0].path), (7, &root.join("step_00000007")));
}

#[test]
fn a_checkpoint_is_read_in_any_slices() {
    for background in [false, true] {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path().join("not/yet/there");
        save(&root, background);
        let checkpoint = Checkpoint::open(&root).unwrap();
        assert_eq!(checkpoint.state(), &state(7));
        assert_eq!(checkpoint.warning(), None);
        assert_eq!(checkpoint.tensors().len(), 2);
        let (dtype, all) = checkpoint.read(Kind::Weight, "layers.0.q_proj.weight", &[3, 4], &[0..3, 0..4]).unwrap();
        assert_eq!((dtype, floats(&all)), (Dtype::F32, (0..12).map(|v| v as f32).collect()));
        let (_, part) = checkpoint.read(Kind::Weight, "layers.0.q_proj.weight", &[3, 4], &[1..3, 1..3]).unwrap();
        assert_eq!(floats(&part), [5.0, 6.0, 9.0, 10.0]);
        let bytes: u64 = (0..3).map(|share| checkpoint.verify(share, 3).unwrap()).sum();
        assert_eq!(bytes, checkpoint.files().iter().map(|file| file.bytes).sum::<u64>());
    }
}

#[test]
fn any_safetensors_reader_understands_the_files() {
    let folder = tempfile::tempdir().unwrap();
    save(folder.path(), false);
    let bytes = std::fs::read(folder.path().join("step_00000007/rank_00001.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let mut names = file.names();
    names.sort_unstable();
    assert_eq!(names, ["exp_avg/norm.weight", "weight/layers.0.q_proj.weight[0:3,2:4]"]);
    assert_eq!(file.tensor("exp_avg/norm.weight").unwrap().shape(), [5]);
}

/// The name of the file and `tokenizer_config.json` next to it say what is put around a text, and neither is in a checkpoint.
#[test]
fn a_tokenizer_in_another_file_is_the_same_one_in_the_checkpoint() {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/tokenizers");
    for (file, name, config, first, last) in [
        ("llama2.model", "tokenizer.model", json!({}), Some("<s>"), None),
        ("t5.model", "spiece.model", json!({"extra_ids": 3}), None, Some("</s>")),
        (
            "letters.tiktoken",
            "tiktoken.model",
            json!({"add_bos_token": true, "bos_token": "<b>", "added_tokens_decoder": {"480": {"content": "<b>"}}}),
            Some("<b>"),
            None,
        ),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let given = folder.path().join(name);
        fs::copy(golden.join(file), &given).unwrap();
        fs::write(folder.path().join("tokenizer_config.json"), config.to_string()).unwrap();
        let root = folder.path().join("root");
        let saver =
            Saver::new(&root, 2, SaverOptions { tokenizer: Some(given.clone()), ..Default::default() }).unwrap();
        submit(&saver, 1);
        let [ours, saved] =
            [given, Checkpoint::open(&root).unwrap().tokenizer().unwrap()].map(|path| read_tokenizer(&path).unwrap());
        assert_eq!(saved.get_vocab(true), ours.get_vocab(true), "{name}");
        let tokens = saved.encode("Hello", true).unwrap().get_tokens().to_vec();
        assert_eq!(tokens, ours.encode("Hello", true).unwrap().get_tokens(), "{name}");
        let is = |token: Option<&String>, expected: Option<&str>| expected.is_none_or(|it| token.unwrap() == it);
        assert!(is(tokens.first(), first) && is(tokens.last(), last), "{name}: {tokens:?}");
    }
}
