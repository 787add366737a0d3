//! Something fails somewhere while a run trains and saves: it ends at once and says what, leaves nothing behind, and
//! the next run of the process resumes.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use backend_dist::launch::{BoxError, Rank};
use backend_dist::mesh::Mesh;
use burn::tensor::FloatDType;
use burn_megatron::checkpoint::{Checkpoint, SaveEvery, SaverOptions};
use burn_megatron::data::{Sample, TokenDataset, TokensInMemory};
use burn_megatron::engine::EngineConfig;
use burn_megatron::learner::{CheckpointOptions, Pretraining, Resume};
use burn_megatron::lr::LrConfig;
use models::{CausalLm, Llama, LlamaConfig, ModelConfig, ParamBuilder, Part};

use super::draw::Draw;

const SEQ: usize = 8;
const ROWS: usize = 8;

/// Where it fails.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Failure {
    Build,
    Training,
    Label,
    Validation,
    Saving,
    Finish,
    FinishPanics,
}

const ALL: [Failure; 7] = [
    Failure::Build,
    Failure::Training,
    Failure::Label,
    Failure::Validation,
    Failure::Saving,
    Failure::Finish,
    Failure::FinishPanics,
];

impl Failure {
    /// What the run's error must say.
    fn message(self) -> &'static str {
        match self {
            Self::Label => "label",
            Self::Saving => "step_",
            _ => "the plug was pulled",
        }
    }
}

/// Rows of which one brings trouble.
struct Rows {
    rows: TokensInMemory,
    bad: Option<(usize, Failure)>,
    checkpoints: PathBuf,
}

impl TokenDataset for Rows {
    fn len(&self) -> usize {
        self.rows.len()
    }

    fn seq_length(&self) -> usize {
        SEQ
    }

    fn sample(&self, index: usize) -> Sample {
        let mut sample = self.rows.sample(index);
        match self.bad.filter(|(row, _)| *row == index) {
            Some((_, Failure::Label)) => sample.labels[3] = 1 << 40,
            Some((_, Failure::Saving)) => {
                // A file system that is gone, although a save that is being written makes the folder again.
                while std::fs::write(&self.checkpoints, "").is_err() {
                    let _ = std::fs::remove_dir_all(&self.checkpoints);
                }
            }
            Some(_) => panic!("the plug was pulled at row {index}"),
            None => {}
        }
        sample
    }
}

fn run(folder: &Path, layout: &str, failure: Option<Failure>, draw: &mut Draw) -> Pretraining<Llama, u64> {
    let mesh = Mesh::new(layout.parse().unwrap()).unwrap();
    let config = LlamaConfig { vocab_size: 33, ..LlamaConfig::tiny() };
    let checkpoints = folder.join("checkpoints");
    let tokens: Vec<i64> = (0..ROWS * 8 * SEQ + 1).map(|index| (index * 7 % 33) as i64).collect();
    let rows = |bad| Rows { rows: TokensInMemory::new(tokens.clone(), SEQ), bad, checkpoints: checkpoints.clone() };
    let (bad, rank) = (draw.below(4 * ROWS), draw.below(mesh.world_size()));
    let of = |kinds: &[Failure]| failure.filter(|failure| kinds.contains(failure)).map(|failure| (bad, failure));
    let train: Arc<dyn TokenDataset> = Arc::new(rows(of(&[Failure::Training, Failure::Label, Failure::Saving])));
    let valid: Arc<dyn TokenDataset> = Arc::new(rows(of(&[Failure::Validation]).map(|(bad, how)| (bad % ROWS, how))));
    let build = move |here: &Rank, part: Part| -> Result<Llama, BoxError> {
        assert!(failure != Some(Failure::Build) || here.rank != rank, "the plug was pulled");
        Ok(Llama::build(&config, ParamBuilder::new(here, FloatDType::F32, 7).with_part(part))?)
    };
    let engine = EngineConfig::new(1, ROWS, LrConfig::constant(1e-3));
    let saver = SaverOptions { background: draw.percent(60), ..SaverOptions::default() };
    Pretraining::new(
        mesh,
        engine,
        6,
        (train, valid),
        LlamaConfig { vocab_size: 33, ..LlamaConfig::tiny() }.dims(),
        build,
    )
    .evaluate(2, 1)
    .directory(folder)
    .checkpoints(CheckpointOptions { root: checkpoints, every: SaveEvery::Steps(1), saver })
    .resume(Resume::IfPresent)
    .finish(move |here, engine| match failure.filter(|_| here.rank == rank) {
        Some(Failure::Finish) => Err("the plug was pulled".into()),
        Some(Failure::FinishPanics) => panic!("the plug was pulled"),
        _ => Ok(engine.steps()),
    })
}

fn launch(run: &Pretraining<Llama, u64>) -> Option<String> {
    let (training, learner) = run.supervised();
    training.with_application_logger(None).launch(learner).error.map(|error| error.to_string())
}

/// Files that a run leaves although they are neither checkpoints nor permanent.
fn leftovers(checkpoints: &Path) -> Vec<String> {
    let names = std::fs::read_dir(checkpoints).into_iter().flatten().map(|entry| entry.unwrap().file_name());
    let names = names.map(|name| name.to_string_lossy().into_owned());
    names.filter(|name| name != "latest" && name != ".lock" && !name.starts_with("step_")).collect()
}

#[test]
fn whatever_fails_ends_the_run_and_nothing_else() {
    for (seed, (failure, layout)) in
        (0..).zip(ALL.into_iter().zip(["TP2 DP2", "DP3", "PP2 DP2", "CP2 ZeRO3", "TP2 PP2"].into_iter().cycle()))
    {
        let (folder, draw) = (tempfile::tempdir().unwrap(), &mut Draw::new(seed));
        let layout = if failure == Failure::Label {
            "PP2 DP2"
        } else if layout == "DP3" {
            "DP4 ZeRO1"
        } else {
            layout
        };
        let (failing, start) = (run(folder.path(), layout, Some(failure), draw), Instant::now());
        let error = launch(&failing).unwrap_or_else(|| panic!("{failure:?} in {layout} did not fail"));
        assert!(start.elapsed() < Duration::from_secs(60), "{failure:?} in {layout} took {:?}", start.elapsed());
        assert!(error.contains(failure.message()), "{failure:?} in {layout}: {error}");
        assert!(failing.finished().is_none());
        drop(failing);
        let checkpoints = folder.path().join("checkpoints");
        if failure == Failure::Saving {
            std::fs::remove_file(&checkpoints).unwrap();
        }
        assert_eq!(leftovers(&checkpoints), [""; 0], "{failure:?} in {layout}");
        let again = run(folder.path(), layout, None, draw);
        assert_eq!(launch(&again), None, "{failure:?} in {layout}, again");
        assert_eq!(again.finished(), Some(6));
        assert_eq!(Checkpoint::open(&checkpoints).unwrap().state().step, 6);
    }
}
