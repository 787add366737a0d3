//! A step that is skipped leaves the bits of a run that never saw its samples; also across a resume.

use models::DeepSeekV3;

use super::*;
use crate::engine::{AnomalyAction, AnomalyConfig};

const STEPS: usize = 12;
/// The step, from 1, whose gradients are NaN.
const BAD: usize = 10;

/// Data without some batches of 8 samples before and in the bad step.
struct Without(Arc<dyn TokenDataset>, usize);

impl TokenDataset for Without {
    fn len(&self) -> usize {
        self.0.len() - self.1 * 8
    }

    fn seq_length(&self) -> usize {
        SEQ
    }

    fn sample(&self, index: usize) -> Sample {
        let gap = if index < (BAD - self.1) * 8 { 0 } else { self.1 * 8 };
        self.0.sample(index + gap)
    }
}

/// Tokens that no two batches have in common.
fn tokens() -> Arc<dyn TokenDataset> {
    let value = |index: usize| (index * index / 7 + index / 3) as i64 % 33;
    Arc::new(TokensInMemory::new((0..900).map(value).collect::<Vec<i64>>(), SEQ))
}

fn dropout() -> LlamaConfig {
    LlamaConfig { hidden_dropout: 0.1, attention_dropout: 0.1, ..llama() }
}

/// `steps` of them, with checkpoints after each.
fn pretraining<M: CausalLm + 'static>(
    config: &M::Config,
    layout: &str,
    folder: &Path,
    (train, steps): (Arc<dyn TokenDataset>, usize),
    non_finite: AnomalyAction,
) -> Pretraining<M> {
    let anomaly = AnomalyConfig { non_finite, ..AnomalyConfig::default() };
    pretraining_with(config, layout, folder, (train, steps), anomaly)
}

fn pretraining_with<M: CausalLm + 'static>(
    config: &M::Config,
    layout: &str,
    folder: &Path,
    (train, steps): (Arc<dyn TokenDataset>, usize),
    anomaly: AnomalyConfig,
) -> Pretraining<M> {
    let (mesh, data) = (Mesh::new(layout.parse().unwrap()).unwrap(), (train, data(200, 2)));
    let engine = EngineConfig { anomaly, ..engine() };
    Pretraining::new(mesh, engine, steps, data, config.dims(), builder(config, FloatDType::F64))
        .evaluate(5, 1)
        .directory(folder.join("run"))
        .checkpoints(saving(folder, Some(1), false))
}

fn nan() -> Faults {
    format!("nan@{BAD}").parse().unwrap()
}

fn skips<M: CausalLm + 'static>(config: &M::Config, layouts: &[&str]) {
    for layout in layouts {
        let run = |folder: &Path, is_bad, resume: Option<PathBuf>| {
            let mut run = match is_bad {
                true => pretraining::<M>(config, layout, folder, (tokens(), STEPS), AnomalyAction::Skip).inject(nan()),
                false => {
                    let data = Arc::new(Without(tokens(), 1));
                    pretraining::<M>(config, layout, folder, (data, STEPS - 1), AnomalyAction::Skip)
                }
            };
            if let Some(resume) = resume {
                run = run.resume(Resume::From(resume));
            }
            let run = run.finish(global_weights);
            succeeds(&run, layout);
            (run.finished().unwrap().expect("rank 0 has the weights"), trained_after(folder, 0))
        };
        let [whole, without, resumed] = std::array::from_fn(|_| tempfile::tempdir().unwrap());
        let (weights, steps) = run(whole.path(), true, None);
        let (expected, others) = run(without.path(), false, None);
        assert_eq!(weights, expected, "{layout}");
        let skipped: Vec<_> = steps.iter().filter(|step| step["skipped"] == true).map(|step| &step["step"]).collect();
        assert_eq!(skipped, [&serde_json::json!(BAD)]);
        let numbers = |step: &serde_json::Value| ["loss", "grad_norm", "lr"].map(|key| step[key].clone());
        assert_eq!(numbers(&steps[BAD]), numbers(&others[BAD - 1]), "{layout}: the step after it");
        let from = saved_at(whole.path(), 8);
        assert_eq!(run(resumed.path(), true, Some(from)).0, weights, "{layout}, resumed");
    }
}

#[test]
fn a_run_that_skips_a_batch_equals_one_that_never_saw_it() {
    skips::<DeepSeekV3>(&experts::config(), &["TP1", "TP2 SP DP2 ZeRO1", "PP2 DP2 EP2"]);
    skips::<Llama>(&dropout(), &["TP2", "PP2 DP2 ZeRO2", "DP2 ZeRO3"]);
}

#[test]
fn a_run_that_rolls_back_continues_from_its_checkpoint_with_the_samples_after_the_bad_step() {
    for layout in ["TP2", "PP2 DP2 ZeRO1"] {
        let [bad, without] = [true, false].map(|is_bad| {
            let folder = tempfile::tempdir().unwrap();
            let data: Arc<dyn TokenDataset> = if is_bad { tokens() } else { Arc::new(Without(tokens(), 2)) };
            let action = AnomalyAction::RollBack;
            let run = pretraining::<Llama>(&dropout(), layout, folder.path(), (data, STEPS), action);
            // After steps 4 and 8.
            let run = run.checkpoints(saving(folder.path(), Some(4), layout == "TP2"));
            let run = if is_bad { run.inject(nan()) } else { run };
            let run = run.finish(|rank, engine| Ok((global_weights(rank, engine)?, engine.position())));
            succeeds(&run, layout);
            let steps = trained_after(folder.path(), 0);
            (run.finished().unwrap(), steps.iter().map(|step| step["step"].as_u64().unwrap()).collect::<Vec<_>>())
        });
        assert_eq!((&bad.1, &without.1), (&(1..=12).collect(), &(1..=12).collect()), "{layout}: each step once");
        assert_eq!(bad.0.0, without.0.0, "{layout}");
        assert_eq!((bad.0.1.step, bad.0.1.updates, bad.0.1.skipped, bad.0.1.consumed), (12, 12, 16, 14 * 8));
    }
}

/// Checkpoints are of steps 4 and 8, the bad step is 10.
#[test]
fn a_roll_back_of_some_steps_passes_over_checkpoints_that_are_too_new() {
    let rolling = |back: u64, folder: &Path, bad: bool| {
        let data: Arc<dyn TokenDataset> = if bad { tokens() } else { Arc::new(Without(tokens(), 6)) };
        let config =
            AnomalyConfig { non_finite: AnomalyAction::RollBack, roll_back_steps: back, ..AnomalyConfig::default() };
        let run = pretraining_with::<Llama>(&dropout(), "DP2 ZeRO1", folder, (data, STEPS), config);
        let run = run.checkpoints(saving(folder, Some(4), true));
        if bad { run.inject(nan()) } else { run }
    };
    let [bad, without, none] = std::array::from_fn(|_| tempfile::tempdir().unwrap());
    let run = |folder: &tempfile::TempDir, is_bad| {
        let run = rolling(3, folder.path(), is_bad);
        let run = run.finish(|rank, engine| Ok((global_weights(rank, engine)?, engine.position())));
        succeeds(&run, "rolled back");
        run.finished().unwrap()
    };
    let ((weights, position), (expected, _)) = (run(&bad, true), run(&without, false));
    assert_eq!(weights, expected);
    assert_eq!((position.step, position.updates, position.skipped, position.consumed), (12, 12, 48, 18 * 8));
    let kept = |folder: &tempfile::TempDir| Checkpoint::list(folder.path().join("checkpoints")).unwrap();
    assert_eq!(Vec::from_iter(kept(&bad).into_keys()), [4, 8, 12], "saved again");
    let again = Checkpoint::open(saved_at(bad.path(), 8)).unwrap();
    assert_eq!(again.state().consumed_samples, (8 + 6) * 8);

    let error = launch(&rolling(7, none.path(), true)).error.unwrap();
    says!(error, "step 10 is bad, anomaly.roll-back-steps = 7, and", "has checkpoints of steps 4, 8; nearest legal: 6");
}

/// The run that resumes from step 4 gives steps 8 and 12 up: it goes back to its own checkpoints, or to the one that it began
/// with, wherever that is.
#[test]
fn a_roll_back_goes_to_no_checkpoint_of_a_run_that_was_given_up() {
    let run = |folder: &Path, (data, back): (Arc<dyn TokenDataset>, u64), every: u64, resume: Option<PathBuf>| {
        let non_finite = AnomalyAction::RollBack;
        let config = AnomalyConfig { non_finite, roll_back_steps: back, ..AnomalyConfig::default() };
        let run = pretraining_with::<Llama>(&dropout(), "DP2", folder, (data, STEPS), config);
        let run = run.checkpoints(saving(folder, Some(every), true));
        let run = if let Some(resume) = resume { run.resume(Resume::From(resume)).inject(nan()) } else { run };
        let run = run.finish(|rank, engine| Ok((global_weights(rank, engine)?, engine.position())));
        succeeds(&run, "rolled back");
        run.finished().unwrap()
    };
    // The bad step is 10; between steps 4 and 10 nothing is saved.
    let [given_up, elsewhere, without] = std::array::from_fn(|_| tempfile::tempdir().unwrap());
    run(given_up.path(), (tokens(), 0), 4, None);
    let (expected, _) = run(without.path(), (Arc::new(Without(tokens(), 6)), 0), 4, None);
    for folder in [elsewhere.path(), given_up.path()] {
        let (weights, position) = run(folder, (tokens(), 0), 11, Some(saved_at(given_up.path(), 4)));
        assert_eq!((position.step, position.skipped, position.consumed), (12, 6 * 8, 18 * 8), "back to step 4");
        assert_eq!(weights, expected);
    }
    // After steps 6 and 9; step 8 is another run's.
    let (_, position) = run(given_up.path(), (tokens(), 2), 3, Some(saved_at(given_up.path(), 4)));
    assert_eq!((position.step, position.skipped, position.consumed), (12, 4 * 8, 16 * 8), "back to step 6");
}

#[test]
fn a_run_that_finds_no_good_batch_stops() {
    let folder = tempfile::tempdir().unwrap();
    let (mesh, data) = (Mesh::new("DP2".parse().unwrap()).unwrap(), (tokens(), data(200, 2)));
    let anomaly = AnomalyConfig { non_finite: AnomalyAction::RollBack, max_consecutive: 3, ..AnomalyConfig::default() };
    let engine = EngineConfig { anomaly, lr: LrConfig::constant(1e300), ..engine() };
    let run = Pretraining::<Llama>::new(mesh, engine, STEPS, data, llama().dims(), builder(&llama(), FloatDType::F64))
        .directory(folder.path().join("run"))
        .checkpoints(saving(folder.path(), Some(1), false));
    let error = launch(&run).error.unwrap();
    says!(error, "no batch after step 1 was good: anomaly.max-consecutive = 3 roll-backs to it are done");
}

#[test]
fn a_run_that_does_not_skip_stops_with_the_step() {
    let folder = tempfile::tempdir().unwrap();
    let run =
        pretraining::<Llama>(&dropout(), "DP2", folder.path(), (tokens(), STEPS), AnomalyAction::Stop).inject(nan());
    says!(launch(&run).error.unwrap(), "gradient norm NaN in step 10 with loss ");
}
