//! Optimizer states in 16 bits, through layouts and checkpoints.

use super::resume::{Weights, after, finish};
use super::*;
use crate::checkpoint::{Checkpoint, Kind, RunState, Saver, SaverOptions};
use crate::engine::RankEngine;
use crate::optim::{MainParamsDtype, StateDtype};

fn small() -> EngineConfig {
    let optimizer = AdamWConfig {
        weight_decay: 0.1,
        exp_avg_dtype: StateDtype::Bf16,
        exp_avg_sq_dtype: StateDtype::Bf16,
        main_params_dtype: MainParamsDtype::Bf16Remainder,
        ..AdamWConfig::default()
    };
    EngineConfig { optimizer: optimizer.into(), ..engine() }
}

fn built(rank: &Rank, part: models::Part, seed: u64) -> Result<Llama, BoxError> {
    let config = LlamaConfig { vocab_size: 33, ..LlamaConfig::tiny() };
    Ok(Llama::build(&config, ParamBuilder::new(rank, FloatDType::BF16, seed).with_part(part))?)
}

fn run_of(layout: &str, folder: &Path, every: Option<u64>) -> Pretraining<Llama> {
    let mesh = Mesh::new(layout.parse().unwrap()).unwrap();
    let (dims, tokens) = (LlamaConfig::tiny().dims(), (data(900, 1), data(200, 2)));
    let saver = SaverOptions::default();
    Pretraining::new(mesh, small(), 12, tokens, dims, |rank: &Rank, part| built(rank, part, 7))
        .directory(folder.join("run"))
        .checkpoints(CheckpointOptions { root: folder.join("checkpoints"), every: every.into(), saver })
}

fn trained(layout: &str) -> (tempfile::TempDir, Weights, Vec<serde_json::Value>) {
    let folder = tempfile::tempdir().unwrap();
    let (weights, log) = finish(run_of(layout, folder.path(), Some(5)), folder.path());
    (folder, weights, log)
}

/// ZeRO and pipelines shard the states in other ways, and end with the same bits; so does a run that was stopped.
#[test]
fn states_in_16_bits_are_the_same_in_pipelines_under_zero_and_after_a_stop() {
    let (folder, weights, log) = trained("DP2");
    for layout in ["DP2 ZeRO1", "PP2 DP2 ZeRO1"] {
        assert!(trained(layout).1 == weights, "{layout}");
    }
    let again = tempfile::tempdir().unwrap();
    let from = Checkpoint::list(folder.path().join("checkpoints")).unwrap()[&5].clone();
    let (resumed, rest) = finish(run_of("DP2", again.path(), None).resume(Resume::From(from)), again.path());
    assert_eq!(after(&rest, 0), after(&log, 5));
    assert!(resumed == weights);
}

/// What any layout saves is what it has read, in 8 bytes a parameter: weights, remainders and moments.
#[test]
fn states_in_16_bits_are_saved_by_one_layout_and_read_by_another() {
    let (folder, ..) = trained("TP2 SP DP2 ZeRO1");
    let saved = Checkpoint::open(folder.path().join("checkpoints")).unwrap();
    let count = |kind: Kind| {
        let of_kind = saved.tensors().iter().filter(|tensor| tensor.kind == kind);
        of_kind.map(|tensor| tensor.global_shape.iter().product::<usize>()).sum::<usize>()
    };
    let elements = count(Kind::Weight);
    assert_eq!([Kind::Remainder, Kind::FirstMoment, Kind::SecondMoment].map(count), [elements; 3]);
    assert_eq!(count(Kind::Master), 0);
    assert!(saved.tensors().iter().all(|tensor| tensor.dtype.bitsize() == 16));
    for layout in ["TP1", "DP4 ZeRO3", "TP4 SP", "PP2 DP2 ZeRO2", "DP4 ZeRO1 Group2"] {
        let mesh = Mesh::new(layout.parse().unwrap()).unwrap();
        let again = tempfile::tempdir().unwrap();
        let saver = Saver::new(again.path(), mesh.world_size(), SaverOptions::default()).unwrap();
        backend_dist::launch::launch(&mesh, &[burn::tensor::Device::flex()], |rank| {
            let dims = LlamaConfig { vocab_size: 33, ..LlamaConfig::tiny() }.dims();
            let mut engine = RankEngine::new(&rank, &dims, |part| built(&rank, part, 99), small())?;
            engine.restore(&saved)?;
            let state = RunState { layout: mesh.layout().clone(), ..saved.state().clone() };
            Ok(saver.submit(rank.rank, engine.snapshot(), &state)?)
        })
        .unwrap();
        saver.wait().unwrap();
        let written = Checkpoint::open(again.path()).unwrap();
        assert_eq!(saved.tensors().len(), written.tensors().len(), "{layout}");
        for tensor in saved.tensors() {
            let whole: Vec<_> = tensor.global_shape.iter().map(|&size| 0..size).collect();
            let values = |of: &Checkpoint| of.read(tensor.kind, &tensor.name, &tensor.global_shape, &whole).unwrap();
            assert!(values(&saved) == values(&written), "{layout}: {}/{}", tensor.kind, tensor.name);
        }
    }
}
