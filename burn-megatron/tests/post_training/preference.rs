//! Preference tuning: log-probabilities, loss and gradients of DPO are those of transformers and trl's formula, and those of
//! the other losses follow from the same sums.

use burn::tensor::{Device, FloatDType};
use burn_megatron::forward::{Preference, Settings, forward, preference, read_preference};
use burn_megatron::hf::{HfFolder, read_adapter};
use burn_megatron::preference::PreferenceLoss;
use models::WeightSource;

use super::{fail, gap, golden, read, succeed};

pub(super) fn settings(layout: &str) -> Settings {
    Settings { gradients: true, ..Settings::new([Device::flex()], layout.parse().unwrap(), FloatDType::F64) }
}

#[test]
fn loss_and_gradients_are_those_of_the_oracle_in_every_layout() {
    let path = golden("dpo/oracle.safetensors");
    let (pairs, oracle) = (read_preference(&path, PreferenceLoss::Dpo).unwrap(), read(&path));
    let [policy, reference] = ["lora/base", "dpo/reference"].map(|name| HfFolder::open(golden(name)).unwrap());
    for layout in ["TP1", "TP2 SP", "CP2", "DP2", "TP2 DP3"] {
        let models = [&policy, &reference].map(|folder| (folder.config(), folder as &dyn models::WeightSource));
        let output = preference(models[0], models[1], &pairs, &settings(layout)).unwrap();
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
    let pairs = read_preference(&golden("dpo/oracle.safetensors"), PreferenceLoss::Dpo).unwrap();
    let base = HfFolder::open(golden("lora/base")).unwrap();
    let adapter = read_adapter(&golden("lora/lora_all/adapter"), base.config()).unwrap();
    let model = (base.config(), &base as &dyn models::WeightSource);
    let with = Settings { adapter: Some(adapter), exact: true, ..settings("TP2") };
    let output = preference(model, model, &pairs, &with).unwrap();
    let plain = preference(model, model, &pairs, &Settings { exact: true, ..settings("TP1") }).unwrap();
    assert!((plain.loss - 2f64.ln()).abs() < 1e-12, "a policy that is its reference prefers nothing: {}", plain.loss);
    assert!(gap(&output.reference, &plain.policy) < 1e-12 && gap(&output.policy, &plain.policy) > 1e-3);
    assert!(output.gradients.keys().all(|name| name.contains("lora_")) && output.gradients.len() == 2 * 7 * 4);
    // A derivative, from the loss of a model that is a little further: B, which moves the policy only.
    let (name, step) = ("layers.1.mlp.down_proj.lora_B.weight", 1e-5);
    let mut moved = with.clone();
    moved.gradients = false;
    moved.adapter.as_mut().unwrap().tensors.get_mut(name).unwrap().data[5] += step;
    let quotient = (preference(model, model, &pairs, &moved).unwrap().loss - output.loss) / step;
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
    says!(said, "3 pairs", "loss 0.721238691");
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
    says!(said, "tensor `completion_mask` is missing");
}

/// The losses by the papers' formulas from log-probabilities, and gradients as differences of losses.
#[test]
fn other_losses_follow_from_the_same_sums_in_every_layout() {
    let path = golden("dpo/oracle.safetensors");
    let [policy, reference] = ["lora/base", "dpo/reference"].map(|name| HfFolder::open(golden(name)).unwrap());
    let models = [&policy, &reference].map(|folder| (folder.config(), folder as &dyn WeightSource));
    let oracle = read(&path);
    let [p, r] = ["policy_logps", "reference_logps"].map(|name| oracle[name].data.clone());
    let beta = oracle["beta"].data[0];
    let sigmoid = |x: f64| 1.0 / (1.0 + (-x).exp());
    for loss in [PreferenceLoss::Ipo, PreferenceLoss::Kto, PreferenceLoss::Orpo, PreferenceLoss::Simpo] {
        let pairs = read_preference(&path, loss).unwrap();
        let labels = pairs.input.labels.clone().unwrap();
        let n: Vec<f64> = labels
            .chunks(pairs.input.seq)
            .map(|labels| labels[1..].iter().filter(|label| **label >= 0).count() as f64)
            .collect();
        let of_pair = |w: usize| {
            let l = w + 3;
            let odds = |at: usize| (p[at] / n[at]).exp() / (1.0 - (p[at] / n[at]).exp());
            match loss {
                PreferenceLoss::Ipo => ((p[w] - r[w]) / n[w] - (p[l] - r[l]) / n[l] - 0.5 / beta).powi(2),
                PreferenceLoss::Kto => {
                    (1.0 - sigmoid(beta * (p[w] - r[w]))) / 2.0 + (1.0 - sigmoid(-beta * (p[l] - r[l]))) / 2.0
                }
                PreferenceLoss::Orpo => -p[w] / n[w] - beta * sigmoid((odds(w) / odds(l)).ln()).ln(),
                _ => -sigmoid(beta * (p[w] / n[w] - p[l] / n[l]) - 0.5).ln(),
            }
        };
        let expected = (0..3).map(of_pair).sum::<f64>() / 3.0;
        for layout in ["TP1", "TP2 SP", "CP2", "DP2"] {
            let output = preference(models[0], models[1], &pairs, &settings(layout)).unwrap();
            assert!((output.loss - expected).abs() < 1e-9, "{loss:?} {layout}: {} {expected}", output.loss);
            if layout == "TP1" {
                assert_slope(&policy, &reference, &pairs, &output.gradients["model.norm.weight"].data, loss);
            }
        }
    }
    // Answers to other prompts move KTO's loss.
    let mut pairs = read_preference(&path, PreferenceLoss::Kto).unwrap();
    let plain = preference(models[0], models[1], &pairs, &settings("TP1")).unwrap().loss;
    pairs.mismatched = Some(pairs.input.clone());
    let kl = p.iter().zip(&r).map(|(p, r)| p - r).sum::<f64>() / 6.0;
    let with = preference(models[0], models[1], &pairs, &settings("TP1")).unwrap().loss;
    let z = kl.max(0.0);
    let expected = (0..3)
        .map(|w| (2.0 - sigmoid(beta * (p[w] - r[w] - z)) - sigmoid(beta * (z - p[w + 3] + r[w + 3]))) / 2.0)
        .sum::<f64>()
        / 3.0;
    assert!((with - expected).abs() < 1e-9, "{with} {expected} {plain}");
}

/// The derivative by one weight of the last norm is that of the loss of a model that has it a little larger.
fn assert_slope(policy: &HfFolder, reference: &HfFolder, pairs: &Preference, gradient: &[f64], loss: PreferenceLoss) {
    struct Moved<'a>(&'a HfFolder, f64);

    impl WeightSource for Moved<'_> {
        fn read(
            &self,
            name: &str,
            shape: &[usize],
            ranges: &[std::ops::Range<usize>],
        ) -> Result<Vec<f64>, backend_dist::launch::BoxError> {
            let mut values = self.0.read(name, shape, ranges)?;
            if shape.len() == 1 && name.contains("norm") && !name.contains("layers") {
                values[3] += self.1;
            }
            Ok(values)
        }
    }
    let with = Settings { exact: true, gradients: false, ..settings("TP1") };
    let step = 1e-4;
    let of = |by: f64| {
        let moved = Moved(policy, by);
        preference((policy.config(), &moved), (reference.config(), reference), pairs, &with).unwrap().loss
    };
    let quotient = (of(step) - of(-step)) / (2.0 * step);
    assert!(
        (quotient - gradient[3]).abs() < 1e-5 * gradient[3].abs().max(1e-2),
        "{loss:?}: {quotient} {}",
        gradient[3]
    );
}
