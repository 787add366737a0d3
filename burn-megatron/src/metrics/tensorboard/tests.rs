//! Against a file that TensorBoard has read; see `tests/golden/README.md`.

use std::path::PathBuf;

use serde_json::Value;

use super::*;

fn golden(name: &str) -> Vec<u8> {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../tests/golden/tensorboard");
    fs::read(folder.join(name)).unwrap()
}

/// Tags and values of a step of the golden file.
fn values(step: u64) -> Vec<(String, f64)> {
    let value = |tag: &str, value: f64| (tag.to_string(), value);
    let mut values = vec![
        value("train/loss", 10.0 / step as f64),
        value("train/lr", 3e-4 * step as f64),
        value("train/tokens", 524_288.0 * step as f64),
    ];
    if step == 300 {
        values.push(value("valid/Perplexität", f64::INFINITY));
    }
    values
}

/// The golden file: steps on both sides of a length of one byte more, times a quarter second apart.
fn written() -> Vec<u8> {
    let mut bytes = Vec::new();
    begin(&mut bytes, 1_700_000_000.0, 0).unwrap();
    for (index, step) in [1, 127, 128, 300].into_iter().enumerate() {
        let time = 1_700_000_000.25 + 0.25 * index as f64;
        bytes.extend(message::record(&Event::Scalars(&values(step)).encode(time, step)));
    }
    bytes
}

#[test]
fn the_bytes_are_those_that_tensorboard_has_read() {
    assert_eq!(written(), golden("events.out.tfevents.1700000000.golden.1.0"));
}

/// What TensorBoard's own reader made of the golden file.
#[test]
fn tensorboard_reads_what_was_written() {
    let read: Value = serde_json::from_slice(&golden("expected.json")).unwrap();
    for (index, step) in [1, 127, 128, 300].into_iter().enumerate() {
        for (tag, value) in values(step) {
            let event = read[&tag].as_array().unwrap().iter().find(|event| event["step"] == step).unwrap();
            assert_eq!(event["wall_time"], 1_700_000_000.25 + 0.25 * index as f64);
            let expected = value as f32;
            match expected.is_finite() {
                true => assert_eq!(event["value"].as_f64().unwrap() as f32, expected, "{tag} of step {step}"),
                false => assert_eq!(event["value"], "inf"),
            }
        }
    }
    assert_eq!(read.as_object().unwrap().len(), 4);
}

#[test]
fn a_file_is_named_as_tensorboard_wants_it_and_two_do_not_share_one() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path().join("board");
    let mut files = [EventFile::create(&folder, 0).unwrap(), EventFile::create(&folder, 7).unwrap()];
    files.iter_mut().for_each(|file| file.scalars(8, &values(8)).unwrap());
    let mut names: Vec<String> =
        fs::read_dir(&folder).unwrap().map(|file| file.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    assert_eq!(names.len(), 2);
    for name in names {
        let rest = name.strip_prefix("events.out.tfevents.").unwrap();
        assert!(
            rest.split('.').next().unwrap().len() == 10 && rest.contains(&std::process::id().to_string()),
            "{name}"
        );
        assert!(fs::metadata(folder.join(name)).unwrap().len() > 100);
    }
}
