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
    let (mesh, data) = (Mesh::new(layout.parse().unwrap()).unwrap(), (train, data(200, 2)));
    let engine = EngineConfig { anomaly: AnomalyConfig { non_finite, ..AnomalyConfig::default() }, ..engine() };
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
