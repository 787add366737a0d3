//! The bias that balances experts stays what it is under adapters, and where it is frozen by name.

use std::collections::BTreeMap;

use backend_dist::shard::HostTensor;
use models::lora::LoraConfig;
use models::{DeepSeekV3, DeepSeekV3Config};
use safetensors::Dtype;

use super::experts::config;
use super::*;
use crate::checkpoint::{CheckpointError, Kind, Slice};
use crate::engine::ParamGroups;

type Weights = BTreeMap<String, HostTensor>;
const BIAS: &str = "layers.1.mlp.router.expert_bias";

/// Two steps, and the weights after them.
fn trained(
    layout: &str,
    folder: &Path,
    engine: EngineConfig,
    build: impl Fn(&Rank, Part) -> Result<DeepSeekV3, BoxError> + Send + Sync + 'static,
) -> Weights {
    let (mesh, data) = (Mesh::new(layout.parse().unwrap()).unwrap(), (data(900, 1), data(200, 2)));
    let run = Pretraining::new(mesh, engine, 2, data, config().dims(), build)
        .directory(folder.join("run"))
        .checkpoints(saving(folder, Some(2), false))
        .finish(global_weights);
    succeeds(&run, layout);
    run.finished().unwrap().expect("rank 0 has the weights")
}

/// Adapters of a layer that is on every rank.
fn adapted(params: ParamBuilder) -> Result<DeepSeekV3, BoxError> {
    let lora = LoraConfig { target_modules: vec!["o_proj".into()], ..LoraConfig::default() };
    let plan = Arc::new(lora.plan(&config().hf_names())?);
    Ok(DeepSeekV3::build(&config(), params.with_lora(&plan, None))?)
}

fn with_adapters(rank: &Rank, part: Part) -> Result<DeepSeekV3, BoxError> {
    adapted(ParamBuilder::new(rank, FloatDType::F64, 7).with_part(part))
}

/// Whether a bias is no longer that of the base, which is zero.
fn moved(weights: &Weights) -> bool {
    let biases: Vec<&HostTensor> =
        weights.iter().filter(|(name, _)| name.ends_with(".expert_bias")).map(|(_, bias)| bias).collect();
    assert!(!biases.is_empty());
    biases.iter().any(|bias| bias.data.iter().any(|value| *value != 0.0))
}

fn any_moves(weights: &Weights, of: &str) -> bool {
    let mut adapters = weights.iter().filter(|(name, _)| name.ends_with(of));
    adapters.any(|(_, tensor)| tensor.data.iter().any(|value| *value != 0.0))
}

/// The adapter that was exported was not the model that was trained: files of adapters have no bias.
#[test]
fn adapters_leave_the_bias_of_the_base() {
    assert!(config().moe_router_bias_update_rate > 0.0);
    for layout in ["TP1", "DP2 EP2", "PP2"] {
        let folder = tempfile::tempdir().unwrap();
        assert!(moved(&trained(layout, folder.path(), engine(), builder(&config(), FloatDType::F64))), "{layout}");
        let folder = tempfile::tempdir().unwrap();
        let weights = trained(layout, folder.path(), engine(), with_adapters);
        assert!(any_moves(&weights, "lora_B.weight") && !moved(&weights), "{layout}");
        // As for the other frozen weights.
        let saved = Checkpoint::open(saved_at(folder.path(), 2)).unwrap();
        assert!(saved.tensors().iter().all(|tensor| tensor.name.contains(".lora_")), "{layout}");
    }
}

#[test]
fn a_bias_that_is_frozen_by_name_does_not_move() {
    let after = |frozen: &'static str| {
        let folder = tempfile::tempdir().unwrap();
        let groups = ParamGroups { frozen: vec![frozen.into()], ..ParamGroups::default() };
        let engine = EngineConfig { groups, ..engine() };
        let build = move |rank: &Rank, part| {
            let params = ParamBuilder::new(rank, FloatDType::F64, 7).with_part(part).with_frozen(&[frozen.into()]);
            Ok(DeepSeekV3::build(&config(), params)?)
        };
        let weights = trained("DP2 EP2", folder.path(), engine, build);
        // With the other weights, as all that is frozen by name.
        assert!(Checkpoint::open(saved_at(folder.path(), 2)).unwrap().holds(Kind::Weight, BIAS));
        moved(&weights)
    };
    assert_eq!(["*.expert_bias", "*.mlp.router.*", "*.mlp.router.weight"].map(after), [false, false, true]);
}

/// Such checkpoints have the bias, which is either the base's, or what no file of adapters holds.
#[test]
fn a_checkpoint_of_adapters_whose_bias_has_moved_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    trained("TP1", folder.path(), engine(), with_adapters);
    let saved = Checkpoint::open(saved_at(folder.path(), 2)).unwrap();
    let (mesh, DeepSeekV3Config { n_routed_experts, .. }) = (Mesh::new("TP1".parse().unwrap()).unwrap(), config());
    let resumed = |bias: f64| {
        let folder = tempfile::tempdir().unwrap();
        let saver = Saver::new(folder.path(), 1, SaverOptions::default()).unwrap();
        let results = backend_dist::launch::launch(&mesh, &[Device::flex()], |rank| {
            let build = |part| with_adapters(&rank, part);
            let mut engine = RankEngine::new(&rank, &config().dims(), build, engine())?;
            let data: Vec<u8> = vec![bias.to_le_bytes(); n_routed_experts].concat();
            let (shape, ranges) = (vec![n_routed_experts], vec![0..n_routed_experts]);
            let (kind, name, dtype) = (Kind::Weight, BIAS.to_string(), Dtype::F64);
            let slice = Slice { kind, name, global_shape: shape, ranges, dtype, data: data.into() };
            engine.restore(&saved)?;
            saver.submit(0, [engine.snapshot(), vec![slice]].concat(), saved.state())?;
            saver.wait()?;
            Ok(engine.restore(&Checkpoint::open(folder.path())?))
        });
        results.unwrap().remove(0)
    };
    assert!(resumed(0.0).is_ok());
    let error = resumed(0.05).unwrap_err();
    assert!(matches!(&error, CheckpointError::Frozen { name, .. } if name == BIAS), "{error}");
    says!(error, "export --adapter", "lora.adapter");
}
