//! `prune` of every dense model of Llama's family: a model whose parts have no effect is the one without them.

use std::fs;
use std::path::Path;

use backend_dist::mesh::ParallelLayout;
use burn::tensor::{Device, FloatDType};
use burn_megatron::forward::{Input, Settings, forward};
use burn_megatron::hf::HfFolder;
use burn_megatron::prune::{Kept, Pruned};
use models::{DecoderConfig, FamilyConfig, ModelConfig, WeightSource};

use super::{gap, golden, read, write};

fn logits(config: &FamilyConfig, source: &dyn WeightSource) -> Vec<f64> {
    let settings = Settings::new([Device::flex()], ParallelLayout::default(), FloatDType::F64);
    let ids: Vec<i64> = (0..64).map(|at| (at * at * 3 + 7 * at) % 150).collect();
    forward(config, source, &Input { sequences: 2, seq: 32, labels: None, ids }, &settings).unwrap().logits
}

/// A copy of a folder whose tensors `change` has changed.
fn changed(from: &Path, to: &Path, change: impl Fn(&str, &mut [f64], &[usize])) {
    fs::create_dir(to).unwrap();
    fs::copy(from.join("config.json"), to.join("config.json")).unwrap();
    let mut tensors = read(&from.join("model.safetensors"));
    tensors.iter_mut().for_each(|(name, tensor)| change(name, &mut tensor.data, &tensor.shape));
    write(&to.join("model.safetensors"), &tensors);
}

#[test]
fn every_dense_family_is_pruned_to_what_computes_the_same() {
    let folder = tempfile::tempdir().unwrap();
    let families = "llama3 mistral qwen2 qwen3 smollm3 olmo2 olmo3 gemma2 gemma3 phi3 glm4";
    for family in families.split(' ') {
        let from = golden("hf").join(family);
        let model = HfFolder::open(&from).unwrap().config().clone();
        let dims = model.dims();
        let features = model.block(0).attention().unwrap().head_dim * dims.heads / dims.kv_heads;
        // OLMo 2 and 3 have a norm of all queries, which heads without an effect change.
        let heads = !family.starts_with("olmo");
        // In layer l the neurons n with (n + l) % 4 = 0, the key-value head l % 2, and of layer 1 everything.
        let is_cut = |layer: usize, neuron: usize| (neuron + layer).is_multiple_of(4);
        changed(&from, &folder.path().join(family), |name, values, shape| {
            let Some(layer) = name.split('.').nth(2).and_then(|layer| layer.parse::<usize>().ok()) else { return };
            let columns = shape.last().copied().unwrap_or(1);
            let down = name.ends_with("mlp.down_proj.weight");
            if !down && !name.ends_with("self_attn.o_proj.weight") {
                return;
            }
            for (at, value) in values.iter_mut().enumerate() {
                let column = at % columns;
                let is_cut = if down { is_cut(layer, column) } else { heads && column / features == layer % 2 };
                if layer == 1 || is_cut {
                    *value = 0.0;
                }
            }
        });
        let base = HfFolder::open(folder.path().join(family)).unwrap();
        let mut kept = Kept::all(&model);
        kept.layers = vec![0, 2, 3];
        for layer in 0..4 {
            kept.intermediate[layer].retain(|neuron| !is_cut(layer, *neuron));
            kept.groups[layer].retain(|group| !heads || *group != layer % 2);
        }
        let pruned = Pruned::new(&base, &model, kept).unwrap();
        assert!(pruned.config().parameter_count() < model.parameter_count());
        let difference = gap(&logits(pruned.config(), &pruned), &logits(&model, &base));
        assert!(difference < 1e-12, "{family}: {difference}");
    }
}
