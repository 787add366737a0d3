//! Damaged safetensors folders are errors that name their file; never a panic.

use std::fs;

use burn_megatron::hf::{HfFolder, TensorReader};
use models::ModelConfig;
use proptest::prelude::*;

use crate::damage::{apply, cases, damage};
use crate::files::{changed, shard};

proptest! {
    #![proptest_config(cases(60))]

    #[test]
    fn damaged_folders_are_refused_or_read(
        model in prop::sample::select(vec!["llama3", "gpt2", "qwen3_moe"]),
        sharded: bool,
        file in 0usize..2,
        damage in damage(),
    ) {
        let folder = changed(model, |_| {});
        let name = match (sharded, file) {
            (false, _) => "model.safetensors",
            (true, 0) => "model.safetensors.index.json",
            (true, _) => "1.safetensors",
        };
        if sharded {
            shard(folder.path());
        }
        let path = folder.path().join(name);
        let mut bytes = fs::read(&path).unwrap();
        apply(&mut bytes, &damage);
        fs::write(&path, bytes).unwrap();
        match HfFolder::open(folder.path()) {
            Err(error) => prop_assert!(error.to_string().contains(folder.path().to_str().unwrap()), "{error}"),
            Ok(opened) => {
                for (ours, foreign) in opened.config().hf_names().iter() {
                    let shape = foreign.our_shape();
                    let whole: Vec<_> = shape.iter().map(|size| 0..*size).collect();
                    let size = opened.element(ours, &shape).unwrap().size();
                    let bytes = opened.read_bytes(ours, &shape, &whole).unwrap();
                    prop_assert_eq!(bytes.len(), shape.iter().product::<usize>() * size);
                }
            }
        }
    }
}
