//! Optimizer states in 16 and in 8 bits, through layouts and checkpoints.

use super::resume::{Weights, after, finish};
use super::*;
use crate::checkpoint::Kind;
use crate::engine::ParamGroups;
use crate::optim::{LionConfig, MainParamsDtype, MuonConfig, OptimizerConfig, SgdConfig, StateDtype};
use models::DeepSeekV3;

fn small(moments: StateDtype) -> EngineConfig {
    let optimizer = AdamWConfig {
        weight_decay: 0.1,
        exp_avg_dtype: moments,
        exp_avg_sq_dtype: moments,
        main_params_dtype: MainParamsDtype::Bf16Remainder,
        ..AdamWConfig::default()
    };
    EngineConfig { optimizer: optimizer.into(), ..engine() }
}

/// For moments in 8 bits, rows of two tensor-parallel ranks are whole blocks.
fn config(moments: StateDtype) -> LlamaConfig {
    match moments {
        StateDtype::Bits8 => LlamaConfig { hidden_size: 512, intermediate_size: 512, head_dim: 64, ..llama() },
        _ => llama(),
    }
}

fn run_of(layout: &str, moments: StateDtype, folder: &Path, every: Option<u64>) -> Pretraining<Llama> {
    let (mesh, data) = (Mesh::new(layout.parse().unwrap()).unwrap(), (data(900, 1), data(200, 2)));
    let config = config(moments);
    Pretraining::new(mesh, small(moments), 12, data, config.dims(), builder(&config, FloatDType::BF16))
        .directory(folder.join("run"))
        .checkpoints(saving(folder, every, false))
}

fn trained(layout: &str, moments: StateDtype) -> (tempfile::TempDir, Weights, Vec<serde_json::Value>) {
    let folder = tempfile::tempdir().unwrap();
    let (weights, log) = finish(run_of(layout, moments, folder.path(), Some(5)), folder.path());
    (folder, weights, log)
}

/// ZeRO and pipelines shard the states in other ways, and end with the same bits; so does a run that was stopped.
fn the_same_in_pipelines_under_zero_and_after_a_stop(moments: StateDtype) {
    let (folder, weights, log) = trained("DP2", moments);
    for layout in ["DP2 ZeRO1", "PP2 DP2 ZeRO1"] {
        assert!(trained(layout, moments).1 == weights, "{layout}");
    }
    let again = tempfile::tempdir().unwrap();
    let from = saved_at(folder.path(), 5);
    let (resumed, rest) = finish(run_of("DP2", moments, again.path(), None).resume(Resume::From(from)), again.path());
    assert_eq!(after(&rest, 0), after(&log, 5));
    assert!(resumed == weights);
}

#[test]
fn states_in_16_bits_are_the_same_in_pipelines_under_zero_and_after_a_stop() {
    the_same_in_pipelines_under_zero_and_after_a_stop(StateDtype::Bf16);
}

#[test]
fn states_in_8_bits_are_the_same_in_pipelines_under_zero_and_after_a_stop() {
    the_same_in_pipelines_under_zero_and_after_a_stop(StateDtype::Bits8);
}

/// What any layout saves is what it has read, in 8 bytes a parameter: weights, remainders and moments.
#[test]
fn states_in_16_bits_are_saved_by_one_layout_and_read_by_another() {
    let (folder, ..) = trained("TP2 SP DP2 ZeRO1", StateDtype::Bf16);
    let saved = Checkpoint::open(folder.path().join("checkpoints")).unwrap();
    let count = |kind: Kind| elements(&saved, kind);
    assert_eq!([Kind::Remainder, Kind::FirstMoment, Kind::SecondMoment].map(count), [count(Kind::Weight); 3]);
    assert_eq!(count(Kind::Master), 0);
    assert!(saved.tensors().iter().all(|tensor| tensor.dtype.bitsize() == 16));
    for layout in ["TP1", "DP4 ZeRO3", "TP4 SP", "PP2 DP2 ZeRO2", "DP4 ZeRO1 Group2"] {
        saves_what_it_read::<Llama>(
            &saved,
            layout,
            &config(StateDtype::Bf16),
            FloatDType::BF16,
            &small(StateDtype::Bf16),
        );
    }
}

/// A byte for each moment, and a scale for 256. Where blocks are the same in both layouts codes and scales are; these
/// are all layouts here.
#[test]
fn states_in_8_bits_are_saved_by_one_layout_and_read_by_another() {
    let moments = StateDtype::Bits8;
    let (folder, ..) = trained("TP2 SP DP2 ZeRO1", moments);
    let saved = Checkpoint::open(folder.path().join("checkpoints")).unwrap();
    let count = |kind: Kind| elements(&saved, kind);
    assert_eq!([Kind::FirstMoment, Kind::SecondMoment].map(count), [count(Kind::Weight); 2]);
    assert_eq!([Kind::FirstScale, Kind::SecondScale].map(count), [count(Kind::Weight) / 256; 2]);
    let codes = saved.tensors().iter().filter(|tensor| tensor.kind == Kind::FirstMoment);
    assert!(codes.into_iter().all(|tensor| tensor.dtype == safetensors::Dtype::U8));
    for layout in ["TP1", "DP4 ZeRO3", "PP2 DP2 ZeRO2", "DP4 ZeRO1 Group2"] {
        saves_what_it_read::<Llama>(&saved, layout, &config(moments), FloatDType::BF16, &small(moments));
    }
}

fn elements(saved: &Checkpoint, kind: Kind) -> usize {
    let of_kind = saved.tensors().iter().filter(|tensor| tensor.kind == kind);
    of_kind.map(|tensor| tensor.global_shape.iter().product::<usize>()).sum()
}

fn bytes_are_known<M: CausalLm + 'static>(layout: &str, config: &M::Config, dtype: FloatDType, engine: &EngineConfig) {
    let mesh = Mesh::new(layout.parse().unwrap()).unwrap();
    let ranks = backend_dist::launch::launch(&mesh, &[Device::flex()], |rank| {
        let params = || ParamBuilder::new(&rank, dtype, 7).with_frozen(&engine.groups.frozen);
        let build = |part| Ok(M::build(config, params().with_part(part))?);
        let engine = RankEngine::new(&rank, &config.dims(), build, engine.clone())?;
        let written: usize = engine.snapshot().iter().map(|slice| slice.data.len()).sum();
        Ok((written as u64, engine.checkpoint_bytes()))
    });
    let ranks = ranks.unwrap();
    let written: u64 = ranks.iter().map(|(written, _)| written).sum();
    let what = format!("{layout} {dtype:?} {:?}", engine.optimizer);
    assert!(ranks.iter().all(|(_, known)| *known == written), "{what}: {written} bytes, not {ranks:?}");
}

/// Every optimizer was taken for AdamW, and what is frozen by name for trained: runs were refused for lack of a disk
/// that they do not need.
#[test]
fn the_bytes_of_a_checkpoint_are_known_before_it_is_written() {
    let sgd = |momentum| OptimizerConfig::Sgd(SgdConfig { momentum, ..SgdConfig::default() });
    let (lion, muon) = (OptimizerConfig::Lion(LionConfig::default()), OptimizerConfig::Muon(MuonConfig::default()));
    let adamw = [StateDtype::F32, StateDtype::Bf16, StateDtype::Bits8].map(|moments| small(moments).optimizer);
    for optimizer in [sgd(0.0), sgd(0.9), lion, muon].into_iter().chain(adamw) {
        let with = EngineConfig { optimizer, weight_decay: WeightDecayConfig::default(), ..engine() };
        bytes_are_known::<Llama>("TP2 SP DP2 ZeRO1", &llama(), FloatDType::BF16, &with);
        bytes_are_known::<Llama>("PP2 DP2 ZeRO3", &llama(), FloatDType::F32, &with);
        let groups = ParamGroups { frozen: vec!["*.experts.*".into(), "embed_*".into()], ..ParamGroups::default() };
        let with = EngineConfig { groups, ema_decay: Some(0.9), ..with };
        bytes_are_known::<DeepSeekV3>("DP2 EP2", &super::experts::config(), FloatDType::BF16, &with);
    }
    bytes_are_known::<Llama>("DP2", &config(StateDtype::Bits8), FloatDType::BF16, &small(StateDtype::Bits8));
    bytes_are_known::<Llama>("TP2", &llama(), FloatDType::F64, &engine());
}
