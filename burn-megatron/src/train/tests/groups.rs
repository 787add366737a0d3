//! Groups of parameters: factors of their own, and frozen ones.

use super::controls::tensors;
use super::*;

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
        let folder = book();
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
    let folder = book();
    let one_config = config(folder.path(), &GROUPS);
    let one = run(&one_config).unwrap().last.unwrap();
    let expected = weights(folder.path(), &one_config);
    for layout in [
        &[("parallel.dp", "2"), ("parallel.zero", "1")][..],
        &[("parallel.dp", "2"), ("parallel.zero", "3"), ("training.micro-batch", "1")],
        &[("parallel.pp", "2"), ("parallel.dp", "2")],
        &[("parallel.tp", "2"), ("parallel.sp", "true")],
    ] {
        let other = book();
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
    let (whole, parts) = (book(), book());
    run(&config(whole.path(), &bf16)).unwrap();
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

/// There is no backward pass through an embedding and first layers that are frozen: all others learn what they do where these
/// have gradients and do not move.
#[test]
fn layers_behind_frozen_ones_learn_the_same() {
    let after = |overrides: &[(&str, &str)]| {
        let folder = book();
        let own = [("training.dtype", "f64"), ("training.clip", "none"), ("optimizer.weight-decay", "0")];
        let config = config(folder.path(), &[&own[..], overrides].concat());
        run(&config).unwrap();
        weights(folder.path(), &config)
    };
    let still = after(&[("param-groups.lr-scale", "{ \"embed_tokens.*\" = 0, \"layers.0.*\" = 0 }")]);
    for layout in [
        &[][..],
        &[("parallel.pp", "2"), ("pipeline.schedule", "zb-h1")],
        &[("parallel.dp", "2"), ("parallel.zero", "3"), ("training.micro-batch", "1")],
        &[("recompute.granularity", "full"), ("parallel.tp", "2")],
    ] {
        let frozen = [&[("param-groups.frozen", "embed_tokens.*, layers.0.*")][..], layout].concat();
        for (name, (values, has_moments)) in after(&frozen) {
            assert_eq!(has_moments, !(name.starts_with("embed_tokens") || name.starts_with("layers.0.")), "{name}");
            let far = values.iter().zip(&still[&name].0).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
            assert!(far < 1e-9, "{layout:?}: {name} differs by {far}");
        }
    }
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
        let folder = book();
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
    let folder = book();
    let refuse =
        |overrides: &[(&str, &str)]| Plan::new(&config(folder.path(), overrides), &[]).unwrap_err().to_string();
    let said = refuse(&[("param-groups.frozen", "layer.0.mlp.up_proj.*")]);
    assert!(
        said.starts_with("param-groups.frozen: no parameter fits `layer.0.mlp.up_proj.*`; the nearest is `layers.0.mlp.up_proj.weight`"),
        "{said}"
    );
    assert!(refuse(&[("param-groups.frozen", "*")]).contains("leaves no parameter to train"));
    assert!(refuse(&[("param-groups.lr-scale", "{ \"layers.*\" = 2, \"*.mlp.*\" = 3 }")]).contains("both fit"));
    assert!(refuse(&[GROUPS[3], ("lora.rank", "4")]).contains("param-groups.frozen has no meaning with lora.rank"));
    let scaled = refuse(&[("param-groups.lr-scale", "{ \"*.q_proj.weight\" = 2 }"), ("lora.rank", "4")]);
    assert!(
        scaled.contains("lr-scale: no parameter fits `*.q_proj.weight`; the nearest is `layers.0.")
            && scaled.contains("lora_"),
        "{scaled}"
    );
    // Of adapters that there cannot be, no pattern is wrong.
    let plus = ("param-groups.lr-scale", "{ \"*.lora_B.weight\" = 16 }");
    let said = refuse(&[plus, ("lora.rank", "4"), ("lora.target-modules", "q_porj")]);
    assert!(said.starts_with("lora.target-modules: ") && !said.contains("lr-scale"), "{said}");
    assert!(matches!(run(&config(folder.path(), &[("param-groups.frozen", "*.q_proj.*")])), Err(TrainError::Failed)));
}
