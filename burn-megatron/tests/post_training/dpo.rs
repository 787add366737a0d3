//! Direct preference optimisation: log-probabilities, loss and gradients are those of transformers and trl's formula.

use burn::tensor::{Device, FloatDType};
use burn_megatron::forward::{Settings, dpo, forward, read_preference};
use burn_megatron::hf::{HfFolder, read_adapter};

use super::{fail, gap, golden, read, succeed};

fn settings(layout: &str) -> Settings {
    Settings {
        layout: layout.parse().unwrap(),
        devices: vec![Device::flex()],
        dtype: FloatDType::F64,
        exact: false,
        gradients: true,
        adapter: None,
    }
}

#[test]
fn loss_and_gradients_are_those_of_the_oracle_in_every_layout() {
    let path = golden("dpo/oracle.safetensors");
    let (pairs, oracle) = (read_preference(&path).unwrap(), read(&path));
    let [policy, reference] = ["lora/base", "dpo/reference"].map(|name| HfFolder::open(golden(name)).unwrap());
    for layout in ["TP1", "TP2 SP", "CP2", "DP2", "TP2 DP3"] {
        let models = [&policy, &reference].map(|folder| (folder.config(), folder as &dyn models::WeightSource));
        let output = dpo(models[0], models[1], &pairs, &settings(layout)).unwrap();
        for (name, found) in
            [("policy_logps", &output.policy), ("reference_logps", &output.reference), ("loss", &vec![output.loss])]
        {
            let gap = gap(found, &oracle[name].data);
            assert!(gap < 1e-9, "{layout}: {name} {gap:e}");
        }
        let names: Vec<&str> = oracle.keys().filter_map(|name| name.strip_prefix("grad.")).collect();
        assert_eq!(output.gradients.len(), names.len());
        for name in names {
            let gap = gap(&output.gradients[name].data, &oracle[&format!("grad.{name}")].data);
            assert!(gap < 1e-6, "{layout}: {name} {gap:e}");
        }
    }
}

/// With an adapter the reference may be the model without it.
#[test]
fn the_reference_of_an_adapter_is_its_base() {
    let pairs = read_preference(&golden("dpo/oracle.safetensors")).unwrap();
    let base = HfFolder::open(golden("lora/base")).unwrap();
    let adapter = read_adapter(&golden("lora/lora_all/adapter"), base.config()).unwrap();
    let model = (base.config(), &base as &dyn models::WeightSource);
    let with = Settings { adapter: Some(adapter), exact: true, ..settings("TP2") };
    let output = dpo(model, model, &pairs, &with).unwrap();
    let plain = dpo(model, model, &pairs, &Settings { exact: true, ..settings("TP1") }).unwrap();
    assert!((plain.loss - 2f64.ln()).abs() < 1e-12, "a policy that is its reference prefers nothing: {}", plain.loss);
    assert!(gap(&output.reference, &plain.policy) < 1e-12 && gap(&output.policy, &plain.policy) > 1e-3);
    assert!(output.gradients.keys().all(|name| name.contains("lora_")) && output.gradients.len() == 2 * 7 * 4);
    // A derivative, from the loss of a model that is a little further: B, which moves the policy only.
    let (name, step) = ("layers.1.mlp.down_proj.lora_B.weight", 1e-5);
    let mut moved = with.clone();
    moved.gradients = false;
    moved.adapter.as_mut().unwrap().tensors.get_mut(name).unwrap().data[5] += step;
    let quotient = (dpo(model, model, &pairs, &moved).unwrap().loss - output.loss) / step;
    let gradient = output.gradients["model.layers.1.mlp.down_proj.lora_B.weight"].data[5];
    assert!((quotient - gradient).abs() < 1e-4 * gradient.abs().max(1e-2), "{quotient} {gradient}");
    assert!(forward(base.config(), &base, &pairs.input, &settings("TP1")).is_ok());
}

#[test]
fn the_command_writes_the_oracles_tensors_and_refuses_what_is_missing() {
    let folder = tempfile::tempdir().unwrap();
    let [policy, reference, input] =
        ["lora/base", "dpo/reference", "dpo/oracle.safetensors"].map(|name| golden(name).display().to_string());
    let command =
        format!("forward --objective dpo --hf {policy} --input {input} --output out.safetensors --grads --dtype f64");
    let said = succeed(folder.path(), &format!("{command} --reference {reference} --tensor-parallel 2"));
    assert!(said.contains("3 pairs") && said.contains("loss 0.721238691"), "{said}");
    let (found, oracle) = (read(&folder.path().join("out.safetensors")), read(&golden("dpo/oracle.safetensors")));
    for name in oracle.keys().filter(|name| *name != "beta") {
        assert!(gap(&found[name].data, &oracle[name].data) < 1e-6, "{name}");
    }
    assert!(fail(folder.path(), &command).contains("--objective dpo needs --reference, or --adapter"));
    let other = golden("lora/lora_all/oracle.safetensors").display().to_string();
    let said = fail(
        folder.path(),
        &format!("forward --objective dpo --hf {policy} --reference {reference} --input {other} --output o"),
    );
    assert!(said.contains("tensor `completion_mask` is missing"), "{said}");
}
