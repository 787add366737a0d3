//! The moving average of the weights, and what is logged of gradients.

use super::controls::tensors;
use super::*;

/// Both kinds of weights of the newest checkpoint, by name.
fn averages(folder: &Path) -> Vec<(String, [Vec<f64>; 2])> {
    use crate::checkpoint::Kind;
    let checkpoint = Checkpoint::open(folder.join("run/checkpoints")).unwrap();
    let names = checkpoint.tensors().iter().filter(|tensor| tensor.kind == Kind::Average);
    let read = |name: &str, shape: &[usize]| {
        let whole: Vec<_> = shape.iter().map(|size| 0..*size).collect();
        [checkpoint.weights(), Kind::Average].map(|kind| checkpoint.read_f64(kind, name, shape, &whole).unwrap())
    };
    names.map(|tensor| (tensor.name.clone(), read(&tensor.name, &tensor.global_shape))).collect()
}

const AVERAGE: [(&str, &str); 3] =
    [("training.ema-decay", "0.75"), ("evaluation.ema", "true"), ("training.dtype", "f64")];

#[test]
fn the_average_follows_the_weights_in_every_layout_and_across_resumes() {
    // Step by step, with the weights of each; the average begins at the first ones, which a rate of 0 leaves.
    let steps = book();
    let by_step =
        config(steps.path(), &[&AVERAGE[..], &[("training.exit-interval", "1"), ("lr.warmup", "1")]].concat());
    let mut expected: Vec<(String, [Vec<f64>; 2])> = Vec::new();
    for step in 1..=6 {
        run(&by_step).unwrap();
        let now = averages(steps.path());
        assert!(!now.is_empty());
        if step == 1 {
            assert!(now.iter().all(|(_, [weights, average])| weights == average), "nothing has moved");
        }
        for ((name, [weights, average]), (_, [_, before])) in now.iter().zip(&expected) {
            for ((weight, average), before) in weights.iter().zip(average).zip(before) {
                assert!((0.75 * before + 0.25 * weight - average).abs() < 1e-15, "{name} in step {step}");
            }
        }
        assert_ne!(step > 1, now.iter().all(|(_, [weights, average])| weights == average), "step {step}");
        expected = now;
    }

    let one = book();
    let plain = [&AVERAGE[..], &[("lr.warmup", "1")]].concat();
    let last = run(&config(one.path(), &plain)).unwrap().last.unwrap();
    assert!(tensors(one.path()) == tensors(steps.path()), "resumed after every step");
    for layout in [
        &[("parallel.dp", "2"), ("parallel.zero", "1")][..],
        &[("parallel.dp", "2"), ("parallel.zero", "3")],
        &[("parallel.pp", "2"), ("parallel.dp", "2"), ("parallel.zero", "2")],
        &[("parallel.tp", "2"), ("parallel.sp", "true")],
    ] {
        let other = book();
        let report = run(&config(other.path(), &[&plain[..], layout].concat())).unwrap().last.unwrap();
        assert!((report.loss - last.loss).abs() < 1e-10 * last.loss, "{layout:?}: {report:?} {last:?}");
        for ((name, both), (_, expected)) in averages(other.path()).iter().zip(&expected) {
            let values = both.iter().flatten().zip(expected.iter().flatten());
            let far = values.map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
            assert!(far < 1e-9, "{layout:?}: {name} differs by {far}");
        }
    }
    // Training goes the way that it goes without evaluations of the average.
    let weights = book();
    let of_weights = run(&config(weights.path(), &[&plain[..], &[("evaluation.ema", "false")]].concat())).unwrap();
    assert!(tensors(weights.path()) == tensors(one.path()));
    assert!(of_weights.last.unwrap().loss < last.loss, "the average lags behind");
}

/// A scale of delayed scaling follows the weights that are trained, and not their average, whose amax is greater here.
#[test]
fn evaluating_the_average_leaves_the_scales_of_fp8() {
    let fp8 = [
        ("fp8.format", "hybrid"),
        ("fp8.recipe", "delayed"),
        ("fp8.amax-history-len", "1"),
        ("lr.warmup", "0"),
        ("optimizer.weight-decay", "10.0"),
    ];
    let trained = |evaluates: &str| {
        let folder = book();
        let own = [&AVERAGE[..], &fp8, &[("evaluation.ema", evaluates), ("evaluation.every", "2")]].concat();
        run(&config(folder.path(), &own)).unwrap();
        tensors(folder.path())
    };
    assert!(trained("true") == trained("false"));
}

/// bf16 with masters and with remainders, and without data-parallel ranks.
#[test]
fn the_average_of_narrow_weights_is_that_of_their_masters() {
    for extra in [
        &[("parallel.dp", "2"), ("parallel.zero", "2")][..],
        &[("parallel.dp", "4"), ("parallel.zero", "3"), ("parallel.zero-group", "2"), ("training.micro-batch", "1")],
        &[("optimizer.main-params-dtype", "bf16-remainder")],
    ] {
        let narrow = [&AVERAGE[..], &[("training.dtype", "bf16"), ("lr.warmup", "1")], extra].concat();
        let (whole, parts) = (book(), book());
        run(&config(whole.path(), &narrow)).unwrap();
        let halves = config(parts.path(), &[&narrow[..], &[("training.exit-interval", "4")]].concat());
        assert_eq!([run(&halves).unwrap().exited, run(&halves).unwrap().exited], [true, false]);
        assert!(tensors(parts.path()) == tensors(whole.path()), "{extra:?}");
        for (name, [weights, average]) in averages(whole.path()) {
            let far = weights.iter().zip(&average).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
            assert!(far > 0.0 && far < 0.05, "{extra:?} {name}: {far}");
        }
    }
}

#[test]
fn norms_of_layers_zeros_and_attention_logits_are_the_same_in_every_layout() {
    let asked = [
        ("training.dtype", "f64"),
        ("log.layer-norms", "true"),
        ("log.num-zeros-in-grad", "true"),
        ("log.max-attention-logit", "true"),
        ("training.steps", "2"),
    ];
    let mut first: Option<Vec<serde_json::Value>> = None;
    for layout in [
        &[][..],
        &[
            ("parallel.dp", "2"),
            ("parallel.zero", "2"),
            ("param-groups.lr-scale", "{ \"*.mlp.*\" = 2, \"lm_head.*\" = 2 }"),
        ],
        &[("parallel.pp", "2"), ("parallel.tp", "2")],
        &[("parallel.cp", "2"), ("parallel.dp", "2"), ("recompute.granularity", "full")],
        &[("parallel.dp", "4"), ("parallel.zero", "2"), ("parallel.zero-group", "2"), ("training.micro-batch", "1")],
    ] {
        let folder = book();
        run(&config(folder.path(), &[&asked[..], layout].concat())).unwrap();
        let log = std::fs::read_to_string(folder.path().join("run/steps.jsonl")).unwrap();
        let lines: Vec<serde_json::Value> = log.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        let steps: Vec<_> = lines.into_iter().filter(|line| line["kind"] == "train").collect();
        for step in &steps {
            let norms = step.as_object().unwrap().iter().filter(|(name, _)| name.starts_with("grad_norm/"));
            let norms: Vec<f64> = norms.map(|(_, norm)| norm.as_f64().unwrap()).collect();
            assert!(norms.len() >= 4, "{step}");
            let (sum, norm) = (norms.iter().map(|norm| norm * norm).sum::<f64>(), step["grad_norm"].as_f64().unwrap());
            assert!((sum.sqrt() - norm).abs() < 1e-12 * norm, "{step}");
        }
        let Some(expected) = &first else {
            first = Some(steps);
            continue;
        };
        // The first step has no update before it, which the groups change.
        for (name, value) in
            expected[0].as_object().unwrap().iter().filter(|(name, _)| name.contains("grad") || name.contains("logit"))
        {
            let (value, other) = (value.as_f64().unwrap(), steps[0][name].as_f64().unwrap());
            assert!(value > 0.0 && (value - other).abs() < 1e-10 * value, "{layout:?}: {name} {value} {other}");
        }
    }
}
