//! Keys that control how long a run is and how its batch grows.

use super::*;

/// A number of every step, as it was written.
fn of_steps(folder: &Path, key: &str) -> Vec<String> {
    let log = std::fs::read_to_string(folder.join("run/steps.jsonl")).unwrap();
    let lines = log.lines().map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap());
    lines.filter(|line| line["kind"] == "train").map(|line| line[key].to_string()).collect()
}

/// The tensors of the newest checkpoint.
fn tensors(folder: &Path) -> Vec<(String, Vec<u8>)> {
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
    let folder = tempfile::tempdir().unwrap();
    text(folder.path());
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
        let other = tempfile::tempdir().unwrap();
        text(other.path());
        let last = run(&config(other.path(), &[&ramp[..], layout].concat())).unwrap().last.unwrap();
        assert!((last.loss - one.loss).abs() < 1e-10 * one.loss, "{layout:?}: {last:?} {one:?}");
        for (loss, expected) in of_steps(other.path(), "loss").iter().zip(of_steps(folder.path(), "loss")) {
            let (loss, expected): (f64, f64) = (loss.parse().unwrap(), expected.parse().unwrap());
            assert!((loss - expected).abs() < 1e-10 * expected, "{layout:?}: {loss} {expected}");
        }
    }

    let parts = tempfile::tempdir().unwrap();
    text(parts.path());
    let interval = config(parts.path(), &[&ramp[..], &[("training.exit-interval", "2")]].concat());
    let reports: Vec<TrainReport> = (0..3).map(|_| run(&interval).unwrap()).collect();
    assert_eq!(
        reports.iter().map(|report| (report.exited, report.stopped)).collect::<Vec<_>>(),
        [(true, false), (true, false), (false, false)]
    );
    assert_eq!(of_steps(parts.path(), "loss"), of_steps(folder.path(), "loss"));
    assert!(tensors(parts.path()) == tensors(folder.path()));
    let other = config(parts.path(), &[&ramp[..], &[("training.rampup-batch-size", "8 4 24")]].concat());
    let refused = Plan::new(&other, &[]).unwrap_err().to_string();
    assert!(refused.contains("training.rampup-batch-size was [4,4,24] when the checkpoint was saved"), "{refused}");
}

/// The weights of the newest checkpoint, by the names that an export has, and whether they have moments.
fn weights(folder: &Path, config: &RunConfig) -> std::collections::BTreeMap<String, (Vec<f64>, bool)> {
    let checkpoint = Checkpoint::open(folder.join("run/checkpoints")).unwrap();
    let names = config.model.config.hf_names();
    let read = |(name, shape): (&str, Vec<usize>)| {
        let moments = checkpoint.holds(crate::checkpoint::Kind::FirstMoment, name);
        let whole: Vec<_> = shape.iter().map(|size| 0..*size).collect();
        (name.to_string(), (WeightSource::read(&checkpoint, name, &shape, &whole).unwrap(), moments))
    };
    names.iter().map(|(name, tensor)| read((name, tensor.our_shape()))).collect()
}

const GROUPS: [(&str, &str); 4] = [
    ("training.dtype", "f64"),
    ("param-groups.lr-scale", "{ \"embed_tokens.*\" = 0.5, \"*norm.weight\" = 2 }"),
    ("param-groups.weight-decay-scale", "{ \"*.mlp.*\" = 0 }"),
    ("param-groups.frozen", "layers.0.attention.*, layers.1.input_layernorm.*"),
];

#[test]
fn groups_of_parameters_have_their_rates_and_frozen_ones_stay_what_they_were() {
    let after_one_step = |overrides: &[(&str, &str)]| {
        let folder = tempfile::tempdir().unwrap();
        text(folder.path());
        let config = config(
            folder.path(),
            &[overrides, &[("training.steps", "1"), ("optimizer.weight-decay", "0.5"), ("training.clip", "none")]]
                .concat(),
        );
        run(&config).unwrap();
        weights(folder.path(), &config)
    };
    let (first, plain) = (after_one_step(&[GROUPS[0], ("lr.max", "0")]), after_one_step(&GROUPS[..1]));
    let groups = after_one_step(&GROUPS);
    let mut kinds = [0; 4];
    for (name, (values, has_moments)) in &groups {
        let frozen = name.contains("layers.0.attention") || name.contains("layers.1.input_layernorm");
        assert_eq!(*has_moments, !frozen, "{name}");
        // AdamW's first step goes as far as the learning rate; what is decayed loses half of that of itself.
        let kind = [frozen, name.contains("embed_tokens"), name.contains("norm.weight"), true]
            .iter()
            .position(|is| *is)
            .unwrap();
        kinds[kind] += 1;
        for ((value, plain), first) in values.iter().zip(&plain[name].0).zip(&first[name].0) {
            let moved = plain - first;
            let expected = match kind {
                0 => 0.0,
                1 => 0.5 * moved,
                2 => 2.0 * moved,
                _ if name.contains(".mlp.") => moved + 1e-2 * 0.5 * first,
                _ => moved,
            };
            assert!((value - first - expected).abs() < 1e-13, "{name}: {first} {plain} {value}");
            assert!(kind != 0 || value == first, "{name}");
        }
    }
    assert!(kinds.iter().all(|count| *count > 0), "{kinds:?}");
}

#[test]
fn groups_are_the_same_in_every_layout_and_across_resumes() {
    let folder = tempfile::tempdir().unwrap();
    text(folder.path());
    let one_config = config(folder.path(), &GROUPS);
    let one = run(&one_config).unwrap().last.unwrap();
    let expected = weights(folder.path(), &one_config);
    for layout in [
        &[("parallel.dp", "2"), ("parallel.zero", "1")][..],
        &[("parallel.dp", "2"), ("parallel.zero", "3"), ("training.micro-batch", "1")],
        &[("parallel.pp", "2"), ("parallel.dp", "2")],
        &[("parallel.tp", "2"), ("parallel.sp", "true")],
    ] {
        let other = tempfile::tempdir().unwrap();
        text(other.path());
        let config = config(other.path(), &[&GROUPS[..], layout].concat());
        let last = run(&config).unwrap().last.unwrap();
        assert!((last.loss - one.loss).abs() < 1e-10 * one.loss, "{layout:?}: {last:?} {one:?}");
        for (name, (values, has_moments)) in weights(other.path(), &config) {
            assert_eq!(has_moments, expected[&name].1);
            let far = values.iter().zip(&expected[&name].0).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
            assert!(far < 1e-9, "{layout:?}: {name} differs by {far}");
        }
    }

    // In bf16, whose frozen weights have no masters.
    let bf16 = [&GROUPS[..], &[("training.dtype", "bf16"), ("parallel.dp", "2"), ("parallel.zero", "1")]].concat();
    let [whole, parts] = std::array::from_fn(|_| tempfile::tempdir().unwrap());
    text(whole.path());
    run(&config(whole.path(), &bf16)).unwrap();
    text(parts.path());
    let halves = config(parts.path(), &[&bf16[..], &[("training.exit-interval", "3")]].concat());
    assert_eq!([run(&halves).unwrap().exited, run(&halves).unwrap().exited], [true, false]);
    assert!(tensors(parts.path()) == tensors(whole.path()));
    let checkpoint = Checkpoint::open(whole.path().join("run/checkpoints")).unwrap();
    let (frozen, kinds): (Vec<_>, Vec<_>) = checkpoint
        .tensors()
        .iter()
        .filter(|tensor| tensor.name.contains("layers.0.attention"))
        .map(|tensor| (tensor.dtype, tensor.kind))
        .unzip();
    assert!(!frozen.is_empty() && frozen.iter().all(|dtype| *dtype == safetensors::Dtype::BF16), "{frozen:?}");
    assert!(kinds.iter().all(|kind| *kind == crate::checkpoint::Kind::Weight), "{kinds:?}");
}

#[test]
fn frozen_experts_are_saved_by_the_ranks_that_hold_them() {
    let experts = [
        ("model.preset", "mixtral-tiny"),
        ("training.dtype", "f64"),
        ("param-groups.frozen", "layers.0.mlp.experts.*"),
        ("training.steps", "2"),
    ];
    let [one, two] = [&[][..], &[("parallel.dp", "2"), ("parallel.expert-parallel", "2")]].map(|layout| {
        let folder = tempfile::tempdir().unwrap();
        text(folder.path());
        let config = config(folder.path(), &[&experts[..], layout].concat());
        run(&config).unwrap();
        weights(folder.path(), &config)
    });
    for (name, (values, has_moments)) in &one {
        assert_eq!(*has_moments, !(name.contains("layers.0.") && name.contains(".experts.")), "{name}");
        let far = values.iter().zip(&two[name].0).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
        assert!(far < 1e-9, "{name} differs by {far}");
    }
}

#[test]
fn patterns_that_fit_nothing_or_a_part_of_a_parameter_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    text(folder.path());
    let refuse =
        |overrides: &[(&str, &str)]| Plan::new(&config(folder.path(), overrides), &[]).unwrap_err().to_string();
    let said = refuse(&[("param-groups.frozen", "layer.0.mlp.up_proj.*")]);
    assert!(
        said.starts_with("param-groups.frozen: no parameter fits `layer.0.mlp.up_proj.*`; the nearest is `layers.0.mlp.up_proj.weight`"),
        "{said}"
    );
    assert!(refuse(&[("param-groups.frozen", "*")]).contains("leaves no parameter to train"));
    assert!(refuse(&[("param-groups.lr-scale", "{ \"layers.*\" = 2, \"*.mlp.*\" = 3 }")]).contains("both fit"));
    assert!(refuse(&[GROUPS[3], ("lora.rank", "4")]).contains("param-groups has no meaning with lora.rank"));
    assert!(matches!(run(&config(folder.path(), &[("param-groups.frozen", "*.q_proj.*")])), Err(TrainError::Failed)));
}

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
    let steps = tempfile::tempdir().unwrap();
    text(steps.path());
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

    let one = tempfile::tempdir().unwrap();
    text(one.path());
    let plain = [&AVERAGE[..], &[("lr.warmup", "1")]].concat();
    let last = run(&config(one.path(), &plain)).unwrap().last.unwrap();
    assert!(tensors(one.path()) == tensors(steps.path()), "resumed after every step");
    for layout in [
        &[("parallel.dp", "2"), ("parallel.zero", "1")][..],
        &[("parallel.dp", "2"), ("parallel.zero", "3")],
        &[("parallel.pp", "2"), ("parallel.dp", "2"), ("parallel.zero", "2")],
        &[("parallel.tp", "2"), ("parallel.sp", "true")],
    ] {
        let other = tempfile::tempdir().unwrap();
        text(other.path());
        let report = run(&config(other.path(), &[&plain[..], layout].concat())).unwrap().last.unwrap();
        assert!((report.loss - last.loss).abs() < 1e-10 * last.loss, "{layout:?}: {report:?} {last:?}");
        for ((name, both), (_, expected)) in averages(other.path()).iter().zip(&expected) {
            let values = both.iter().flatten().zip(expected.iter().flatten());
            let far = values.map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
            assert!(far < 1e-9, "{layout:?}: {name} differs by {far}");
        }
    }
    // Training goes the way that it goes without evaluations of the average.
    let weights = tempfile::tempdir().unwrap();
    text(weights.path());
    let of_weights = run(&config(weights.path(), &[&plain[..], &[("evaluation.ema", "false")]].concat())).unwrap();
    assert!(tensors(weights.path()) == tensors(one.path()));
    assert!(of_weights.last.unwrap().loss < last.loss, "the average lags behind");
}

/// bf16 with masters and with remainders, and without data-parallel ranks.
#[test]
fn the_average_of_narrow_weights_is_that_of_their_masters() {
    for extra in [
        &[("parallel.dp", "2"), ("parallel.zero", "2")][..],
        &[("parallel.dp", "2"), ("parallel.zero", "3")],
        &[("optimizer.main-params-dtype", "bf16-remainder")],
    ] {
        let narrow = [&AVERAGE[..], &[("training.dtype", "bf16"), ("lr.warmup", "1")], extra].concat();
        let [whole, parts] = std::array::from_fn(|_| tempfile::tempdir().unwrap());
        text(whole.path());
        run(&config(whole.path(), &narrow)).unwrap();
        text(parts.path());
        let halves = config(parts.path(), &[&narrow[..], &[("training.exit-interval", "4")]].concat());
        assert_eq!([run(&halves).unwrap().exited, run(&halves).unwrap().exited], [true, false]);
        assert!(tensors(parts.path()) == tensors(whole.path()), "{extra:?}");
        for (name, [weights, average]) in averages(whole.path()) {
            let far = weights.iter().zip(&average).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
            assert!(far > 0.0 && far < 0.05, "{extra:?} {name}: {far}");
        }
    }
}
