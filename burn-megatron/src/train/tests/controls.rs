//! Keys that control how long a run is and how its batch grows.

use super::*;

/// A number of every step, as it was written.
fn of_steps(folder: &Path, key: &str) -> Vec<String> {
    let log = std::fs::read_to_string(folder.join("run/steps.jsonl")).unwrap();
    let lines = log.lines().map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap());
    lines.filter(|line| line["kind"] == "train").map(|line| line[key].to_string()).collect()
}

/// The tensors of the newest checkpoint.
pub(super) fn tensors(folder: &Path) -> Vec<(String, Vec<u8>)> {
    let checkpoint = Checkpoint::open(folder.join("run/checkpoints")).unwrap();
    let all = checkpoint.tensors().iter().map(|tensor| {
        let (shape, whole) =
            (&tensor.global_shape, tensor.global_shape.iter().map(|size| 0..*size).collect::<Vec<_>>());
        (
            format!("{}/{}", tensor.kind, tensor.name),
            checkpoint.read(tensor.kind, &tensor.name, shape, &whole).unwrap().1,
        )
    });
    all.collect()
}

#[test]
fn a_ramp_of_the_batch_is_the_same_in_every_layout_and_across_resumes() {
    let ramp = [
        ("training.dtype", "f64"),
        ("training.micro-batch", "1"),
        ("training.global-batch", "16"),
        ("training.rampup-batch-size", "4 4 24"),
        ("training.samples", "60"),
        ("lr.warmup", "2"),
    ];
    let folder = book();
    let one = run(&config(folder.path(), &ramp)).unwrap().last.unwrap();
    let tokens = [4, 4, 8, 12, 16, 16].map(|sequences: usize| (sequences * 16).to_string());
    assert_eq!(of_steps(folder.path(), "tokens"), tokens);
    // The learning rate counts samples: 8 of the first two steps, then a cosine over 52.
    let rates: Vec<f64> = of_steps(folder.path(), "lr").iter().map(|rate| rate.parse().unwrap()).collect();
    let cosine = |consumed: f64| 0.5e-2 * (1.0 + (std::f64::consts::PI * (consumed - 8.0) / 52.0).cos());
    for (rate, expected) in rates.iter().zip([0.0, 0.5e-2, 1e-2, cosine(16.0), cosine(28.0), cosine(44.0)]) {
        assert!((rate - expected).abs() < 1e-15, "{rates:?}");
    }

    for layout in [
        &[("parallel.dp", "4")][..],
        &[("parallel.dp", "2"), ("parallel.zero", "3")],
        &[("parallel.pp", "2"), ("parallel.dp", "2"), ("parallel.zero", "1")],
        &[("parallel.tp", "2"), ("parallel.sp", "true"), ("training.micro-batch", "2")],
    ] {
        let other = book();
        let last = run(&config(other.path(), &[&ramp[..], layout].concat())).unwrap().last.unwrap();
        assert!((last.loss - one.loss).abs() < 1e-10 * one.loss, "{layout:?}: {last:?} {one:?}");
        for (loss, expected) in of_steps(other.path(), "loss").iter().zip(of_steps(folder.path(), "loss")) {
            let (loss, expected): (f64, f64) = (loss.parse().unwrap(), expected.parse().unwrap());
            assert!((loss - expected).abs() < 1e-10 * expected, "{layout:?}: {loss} {expected}");
        }
    }

    let parts = book();
    let interval = config(parts.path(), &[&ramp[..], &[("training.exit-interval", "2")]].concat());
    let reports: Vec<TrainReport> = (0..3).map(|_| run(&interval).unwrap()).collect();
    assert_eq!(
        reports.iter().map(|report| (report.exited, report.stopped)).collect::<Vec<_>>(),
        [(true, false), (true, false), (false, false)]
    );
    assert_eq!(of_steps(parts.path(), "loss"), of_steps(folder.path(), "loss"));
    assert!(tensors(parts.path()) == tensors(folder.path()));
    let other = config(parts.path(), &[&ramp[..], &[("training.rampup-batch-size", "8 4 24")]].concat());
    says!(Plan::new(&other, &[]).unwrap_err(), "training.rampup-batch-size was [4,4,24] when the checkpoint was saved");
}
