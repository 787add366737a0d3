//! Rates of their own for parts of adapters, as LoRA+ has a larger one for B.

use std::path::Path;

use burn_megatron::config::RunConfig;

use super::{adapters, last_loss, read, succeed};

const PLUS: (&str, &str) = ("param-groups.lr-scale", "{ \"*.lora_B.weight\" = 16 }");

fn config(folder: &Path, name: &str, overrides: &[(&str, &str)]) -> RunConfig {
    let slow = [("training.steps", "6"), ("lr.decay", "6 steps"), ("lr.max", "1e-3")];
    let plain = [("training.clip", "none"), ("optimizer.weight-decay", "0.5")];
    adapters(folder, name, ["lora/base", ""], &[&slow[..], &plain, overrides].concat())
}

#[test]
fn b_learns_at_its_own_rate_in_every_layout() {
    let folder = tempfile::tempdir().unwrap();
    let after = |name: &str, overrides: &[(&str, &str)]| {
        last_loss(&config(folder.path(), name, &[overrides, &[("training.steps", "1")]].concat()));
        succeed(folder.path(), &format!("export --checkpoint {name}/checkpoints --adapter {name}-adapter"));
        read(&folder.path().join(format!("{name}-adapter/adapter_model.safetensors")))
    };
    let still = ("param-groups.weight-decay-scale", "{ \"*.lora_A.weight\" = 0 }");
    let [plain, plus, no_decay] = [("plain", vec![]), ("plus", vec![PLUS]), ("still", vec![still])]
        .map(|(name, overrides)| after(name, &overrides));
    for (name, plain) in &plain {
        let (plus, no_decay) = (&plus[name].data, &no_decay[name].data);
        for ((plain, plus), no_decay) in plain.data.iter().zip(plus).zip(no_decay) {
            // B begins at 0 and goes as far as the rate; A has no gradient yet and is decayed alone.
            let (b, a) =
                ((plus - 16.0 * plain).abs() < 1e-6 * plus.abs(), plain == plus && (no_decay - plain).abs() > 0.0);
            assert!(if name.ends_with("lora_B.weight") { b && *plain != 0.0 } else { a || *plain == 0.0 }, "{name}");
        }
    }
    let one = last_loss(&config(folder.path(), "one", &[PLUS]));
    let slow = last_loss(&config(folder.path(), "slow", &[]));
    assert!(one < slow - 1e-3, "{one} {slow}");
    for (index, layout) in [
        &[("parallel.tp", "2"), ("parallel.dp", "2"), ("parallel.zero", "3")][..],
        &[("parallel.pp", "2"), ("parallel.tp", "2"), ("parallel.sp", "true")],
    ]
    .into_iter()
    .enumerate()
    {
        let other = last_loss(&config(folder.path(), &format!("layout{index}"), &[&[PLUS][..], layout].concat()));
        assert!((other - one).abs() < 1e-10 * one, "{layout:?}: {other} {one}");
    }
}
