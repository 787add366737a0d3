//! Modules of multi-token prediction in files of GLM-4.5 and Qwen3-Next (`tests/golden/hf/make_mtp.py`).

use std::fs;

use backend_dist::launch::launch;
use backend_dist::mesh::Mesh;
use burn::tensor::{Device, FloatDType};
use models::{CausalLm, FamilyConfig, MicroBatch, Mixtral, ModelConfig, ParamBuilder};

use crate::harness::{assert_close, host};
use crate::hf::tensors;

fn compare(folder: &str) {
    let file =
        |name: &str| fs::read(format!("{}/../tests/golden/hf/{folder}/{name}", env!("CARGO_MANIFEST_DIR"))).unwrap();
    let ids = tensors(&file("oracle.safetensors")).remove("input_ids").unwrap();
    let mut weights = tensors(&file("model.safetensors"));
    let mut module = tensors(&file("mtp.safetensors"));
    let expected = module.remove("mtp_losses").unwrap();
    let read = FamilyConfig::from_hf(&serde_json::from_slice(&file("config.json")).unwrap()).unwrap();
    let without = read.clone().hf_present(|name| weights.contains_key(name));
    assert!(module.keys().all(|name| without.hf_is_derived(name)), "passed over by a model without the module");
    weights.extend(module);
    let present = read.hf_present(|name| weights.contains_key(name));
    assert!(weights.keys().all(|name| !present.hf_is_derived(name)));
    assert_eq!(FamilyConfig::from_hf(&present.to_hf().unwrap()).unwrap(), present, "written and read again");
    let FamilyConfig::Mixtral(config) = present else { panic!("{present:?}") };
    let ours = config.hf_names().import(&weights).unwrap();
    assert_eq!(config.hf_names().export(&ours).unwrap(), weights);
    let [samples, seq] = ids.shape[..] else { panic!("input_ids is no matrix") };
    let tokens: Vec<i64> = ids.data.iter().map(|id| *id as i64).collect();
    let labels = tokens.chunks(seq).flat_map(|ids| ids[1..].iter().copied().chain([0])).collect::<Vec<_>>();
    for layout in ["TP1", "TP2 SP", "TP2 EP2 ETP1"] {
        let mesh = Mesh::new(layout.parse().unwrap()).unwrap();
        let ranks = launch(&mesh, &[Device::flex()], |rank| {
            let params = ParamBuilder::new(&rank, FloatDType::F64, 0).with_source(&ours).without_autodiff();
            let model = Mixtral::build(&config, params)?;
            let ids = |ids: &[i64]| {
                let data = burn::tensor::TensorData::new(ids.to_vec(), [samples, seq]);
                burn::tensor::Tensor::from_data(data, &rank.device)
            };
            let x = model.hidden_states(ids(&tokens), &MicroBatch::default());
            Ok(host(model.mtp_losses(x, &ids(&labels), &MicroBatch::default()).remove(0)))
        });
        // The last two positions predict nothing.
        let losses: Vec<f64> = ranks.unwrap()[0].chunks(seq).flat_map(|of| of[..seq - 2].to_vec()).collect();
        assert_close(&format!("{folder} in {layout}"), &losses, &expected.data, 1e-11);
    }
}

#[test]
fn glm4_moe_predicts_as_its_formula() {
    compare("glm4_moe");
}

#[test]
fn qwen3_next_predicts_as_its_formula() {
    compare("qwen3_next");
}
