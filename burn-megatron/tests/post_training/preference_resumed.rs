//! Runs of preference tuning resume with the reference that they began with, and are refused without it.

use burn_megatron::config::RunConfig;
use burn_megatron::train::Plan;

use super::preference_runs::{COMPARED, config, prepared, trained};
use super::{Line, golden, succeed};

#[test]
fn a_run_that_resumes_knows_its_reference_again() {
    let folder = tempfile::tempdir().unwrap();
    prepared(folder.path());
    let run = |name: &str, overrides: &[(&str, &str)]| {
        let saves = folder.path().join(name).join("checkpoints").display().to_string();
        trained(
            folder.path(),
            name,
            &[
                overrides,
                &[
                    ("checkpoint.directory", saves.as_str()),
                    ("data.samples", "24"),
                    ("lr.decay", "6 steps"),
                    ("evaluation.every", "6"),
                ],
            ]
            .concat(),
        )
    };
    let adapter = golden("lora/lora_all/adapter").display().to_string();
    // A scale follows the weights of one step alone, and must not follow those of the reference.
    let fp8 = [
        ("fp8.format", "hybrid"),
        ("fp8.recipe", "delayed"),
        ("fp8.amax-history-len", "1"),
        ("lr.max", "2e-2"),
        ("optimizer.weight-decay", "5.0"),
    ];
    let lora = [("lora.rank", "4"), ("lora.alpha", "8"), ("lora.adapter", adapter.as_str()), ("lr.max", "2e-2")];
    for (name, own) in [("whole", &[][..]), ("fp8", &fp8), ("lora", &lora)] {
        let whole = run(name, own);
        let half = format!("half-{name}");
        run(&half, &[own, &[("training.steps", "3")]].concat());
        let parts = run(&half, own);
        let steps = |lines: &[Line]| lines.iter().filter(|line| line["kind"] == "train").cloned().collect::<Vec<_>>();
        let (whole, parts) = (steps(&whole), steps(&parts));
        assert_eq!(parts.len(), 6);
        for (a, b) in parts.iter().zip(&whole) {
            assert_eq!(COMPARED.map(|key| &a[key]), COMPARED.map(|key| &b[key]), "{name}: {a:?}");
        }
    }

    // Without its model, or the adapter that this begins with, the reference would be another.
    let again = |name: &str, own: &[(&str, &str)], change: &dyn Fn(&mut RunConfig)| {
        let saves = folder.path().join(name).join("checkpoints").display().to_string();
        let of_run = [("checkpoint.directory", saves.as_str()), ("data.samples", "24"), ("lr.decay", "6 steps")];
        let mut config = config(folder.path(), name, &[own, &of_run].concat());
        change(&mut config);
        Plan::new(&config, &[]).map(drop).map_err(|error| error.to_string())
    };
    assert_eq!(again("lora", &lora, &|_| ()), Ok(()));
    let said = again("whole", &[], &|config| config.model.hf = None).unwrap_err();
    says!(said, "model.hf was \"", "now it is none", "--allow-change model.hf");
    let said = again("lora", &lora, &|config| config.lora.adapter = None).unwrap_err();
    says!(said, "lora.adapter was \"", "now it is none", "--allow-change lora.adapter");
    succeed(folder.path(), "export --checkpoint lora/checkpoints --adapter learned");
    let learned = folder.path().join("learned");
    let said = again("lora", &lora, &|config| config.lora.adapter = Some(learned.clone())).unwrap_err();
    says!(said, "lora.adapter has other weights than when", "--allow-change lora.adapter");
}
