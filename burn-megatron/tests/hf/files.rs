//! Folders and safetensors files of the tests.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};
use tempfile::TempDir;

pub const MODELS: &str = "\
    llama2 llama3 mistral qwen2 qwen3 qwen3_window smollm3 olmo2 gemma2 gemma3 phi3 phi3_longrope glm4 mixtral \
    mixtral_window qwen2_moe qwen3_moe qwen3_next mamba2 nemotron_h gpt_oss gpt2 gemma olmo3 olmoe seed_oss deepseek";

pub fn golden(model: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden/hf").join(model)
}

#[derive(Clone, Debug, PartialEq)]
pub struct Stored {
    pub dtype: Dtype,
    pub shape: Vec<usize>,
    pub data: Vec<u8>,
}

impl Stored {
    pub fn f32(shape: &[usize], value: f32) -> Self {
        let data = (0..shape.iter().product()).flat_map(|_: usize| value.to_le_bytes()).collect();
        Self { dtype: Dtype::F32, shape: shape.to_vec(), data }
    }

    pub fn values(&self) -> Vec<f64> {
        match self.dtype {
            Dtype::F64 => self.data.as_chunks::<8>().0.iter().map(|b| f64::from_le_bytes(*b)).collect(),
            Dtype::F32 => self.data.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b).into()).collect(),
            Dtype::BF16 => self.data.as_chunks::<2>().0.iter().map(|b| half::bf16::from_le_bytes(*b).into()).collect(),
            Dtype::I64 => self.data.as_chunks::<8>().0.iter().map(|b| i64::from_le_bytes(*b) as f64).collect(),
            other => panic!("{other:?}"),
        }
    }
}

pub type Tensors = BTreeMap<String, Stored>;

pub fn read(path: &Path) -> Tensors {
    let bytes = fs::read(path).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let stored =
        |view: TensorView| Stored { dtype: view.dtype(), shape: view.shape().into(), data: view.data().into() };
    file.iter().map(|(name, view)| (name.to_string(), stored(view))).collect()
}

pub fn write(path: &Path, tensors: &Tensors) {
    let views = tensors.iter().map(|(name, stored)| {
        (name.as_str(), TensorView::new(stored.dtype, stored.shape.clone(), &stored.data).unwrap())
    });
    safetensors::serialize_to_file(views, None, path).unwrap();
}

/// A copy of a model's folder whose tensors `change` may change.
pub fn changed(model: &str, change: impl FnOnce(&mut Tensors)) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    for name in ["config.json", "generation_config.json"] {
        fs::copy(golden(model).join(name), folder.path().join(name)).unwrap();
    }
    let mut tensors = read(&golden(model).join("model.safetensors"));
    change(&mut tensors);
    write(&folder.path().join("model.safetensors"), &tensors);
    folder
}

/// Splits the file of a folder into two shards, and writes their index.
pub fn shard(folder: &Path) {
    let tensors = read(&folder.join("model.safetensors"));
    fs::remove_file(folder.join("model.safetensors")).unwrap();
    let mut shards = [Tensors::new(), Tensors::new()];
    let mut map = serde_json::Map::new();
    for (index, (name, stored)) in tensors.into_iter().enumerate() {
        map.insert(name.clone(), format!("{}.safetensors", index % 2).into());
        shards[index % 2].insert(name, stored);
    }
    for (index, shard) in shards.iter().enumerate() {
        write(&folder.join(format!("{index}.safetensors")), shard);
    }
    let index = serde_json::json!({"metadata": {"total_size": 0}, "weight_map": map});
    fs::write(folder.join("model.safetensors.index.json"), index.to_string()).unwrap();
}
