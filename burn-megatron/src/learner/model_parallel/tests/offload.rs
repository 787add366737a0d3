//! Runs with optimizer states in host memory, and their checkpoints.

use super::resume::{Weights, after, finish};
use super::*;

fn with_share(share: Option<f64>) -> EngineConfig {
    let adamw = AdamWConfig {
        weight_decay: 0.1,
        cpu_offload: share.is_some(),
        offload_fraction: share.unwrap_or(1.0),
        ..AdamWConfig::default()
    };
    EngineConfig { optimizer: adamw.into(), ..engine() }
}

fn run_of(layout: &str, engine: EngineConfig, folder: &Path, every: Option<u64>) -> Pretraining<Llama> {
    let (mesh, data) = (Mesh::new(layout.parse().unwrap()).unwrap(), (data(900, 1), data(200, 2)));
    Pretraining::new(mesh, engine, 12, data, llama().dims(), builder(&llama(), FloatDType::BF16))
        .directory(folder.join("run"))
        .checkpoints(saving(folder, every, false))
}

fn trained(layout: &str, share: Option<f64>) -> (tempfile::TempDir, Weights, Vec<serde_json::Value>) {
    let folder = tempfile::tempdir().unwrap();
    let (weights, log) = finish(run_of(layout, with_share(share), folder.path(), Some(5)), folder.path());
    (folder, weights, log)
}

/// A run with states in host memory ends with the bits of one without, and either continues the checkpoint of the other
/// bit for bit.
#[test]
fn states_in_host_memory_are_the_same_and_resume_with_and_without() {
    for (layout, share) in [("TP2 SP DP2 ZeRO1", 1.0), ("PP2 DP2 ZeRO3", 1.0), ("DP2", 0.5)] {
        let (plain, host) = (trained(layout, None), trained(layout, Some(share)));
        assert!(host.1 == plain.1, "{layout}");
        assert_eq!(after(&host.2, 0), after(&plain.2, 0), "{layout}");
        for (folder, share) in [(&host.0, Some(share)), (&host.0, None), (&plain.0, Some(share))] {
            let again = tempfile::tempdir().unwrap();
            let from = saved_at(folder.path(), 5);
            let run = run_of(layout, with_share(share), again.path(), None).resume(Resume::From(from));
            let (resumed, rest) = finish(run, again.path());
            assert_eq!(after(&rest, 0), after(&plain.2, 5), "{layout} {share:?}");
            assert!(resumed == plain.1, "{layout} {share:?}");
        }
    }
}

/// An average of the weights follows masters on the device.
#[test]
fn an_average_with_states_in_host_memory_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let engine = EngineConfig { ema_decay: Some(0.9), ..with_share(Some(1.0)) };
    let error = launch(&run_of("DP2", engine, folder.path(), None)).error.expect("it is refused").to_string();
    says!(error, "`ema_decay` with `cpu_offload`");
}
