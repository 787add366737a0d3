//! What moves the bias that balances experts: tokens after dropping, and nothing where it is frozen.

use std::ops::Range;

use backend_dist::launch::{BoxError, Rank};
use backend_dist::shard::{HostTensor, Unit, WeightSource};
use burn::tensor::Device;

use super::*;
use crate::layers::moe::config::ExpertKind;
use crate::layers::moe::stats::RouterStats;
use crate::layers::moe::{BiasCounts, RouterRecords};

/// Tokens whose best expert is each of four.
const ROUTED: [usize; 4] = [10, 5, 3, 2];

/// A router that sends a token to the expert of its greatest feature.
struct Identity;

impl WeightSource for Identity {
    fn read(&self, name: &str, shape: &[usize], ranges: &[Range<usize>]) -> Result<Vec<f64>, BoxError> {
        let is_one = |index: usize| name.ends_with("router.weight") && index.is_multiple_of(shape[0] + 1);
        let data = (0..shape.iter().product()).map(|index| f64::from(u8::from(is_one(index)))).collect();
        Ok(HostTensor { shape: shape.to_vec(), data }.read_box(ranges))
    }
}

/// Records of a pass over [`ROUTED`] tokens of one expert each.
fn records(capacity: Option<Capacity>, device: RouterDevice, frozen: &[String]) -> (BiasCounts, RouterStats) {
    let rank = Rank::single(Device::flex());
    let config = MoeConfig {
        hidden: 4,
        intermediate: 4,
        experts: 4,
        kind: ExpertKind::SwiGlu,
        router: RouterConfig { scores: Scores::Sigmoid, bias_rate: Some(0.5), device, ..RouterConfig::new(1) },
        capacity,
        dispatcher: Dispatcher::AllToAll,
        shared: None,
        input: Init::ZEROS,
        output: Init::ZEROS,
    };
    let mut params = ParamBuilder::new(&rank, FloatDType::F32, 1).with_source(&Identity).with_frozen(frozen);
    params.begin(Unit::Layer(0));
    let router = Router::new(&mut params, "layers.0.mlp.router", &config).unwrap();
    let (bias, stats) = (BiasCounts::default(), RouterStats::default());
    let routers = RouterRecords { bias: Some(bias.clone()), stats: Some(stats.clone()), replay: None };
    let batch = MicroBatch { routers, ..MicroBatch::default() };
    let experts = ROUTED.iter().enumerate().flat_map(|(expert, count)| vec![expert; *count]);
    let rows: Vec<f32> = experts.flat_map(|own| (0..4).map(move |at| f32::from(u8::from(at == own)))).collect();
    let tokens = rows.len() / 4;
    let x = Tensor::from_data(TensorData::new(rows, [tokens, 4]), params.device());
    let (_, behind, ()) = router.forward(x.clone(), Tokens::of(0..tokens, tokens, 1, &batch), &batch, |_| ());
    router.after_experts(x, behind, &batch);
    (bias, stats)
}

/// It moved by the tokens before dropping: the second expert, which is as full as the first, did not.
#[test]
fn the_bias_moves_by_the_tokens_that_experts_have_room_for() {
    let capacity = |policy, pad| Some(Capacity { factor: 1.0, policy, pad });
    for (capacity, device) in [
        (capacity(DropPolicy::Probs, false), RouterDevice::Host),
        (capacity(DropPolicy::Position, false), RouterDevice::Host),
        (capacity(DropPolicy::Position, true), RouterDevice::Host),
        (capacity(DropPolicy::Position, false), RouterDevice::Device),
    ] {
        let (bias, stats) = records(capacity, device, &[]);
        let [counts] = &bias.take()[..] else { panic!("one layer") };
        assert_eq!(counts.tokens, [5, 5, 3, 2], "{capacity:?} {device:?}");
        assert_eq!(counts.steps(), [-0.5, -0.5, 0.5, 0.5]);
        let reported = &stats.take()[0];
        assert_eq!((&reported.tokens[..], reported.dropped), (&[10, 5, 3, 2][..], 5));
    }
    let (bias, _) = records(None, RouterDevice::Auto, &[]);
    assert_eq!(bias.take()[0].steps(), [-0.5, 0.0, 0.5, 0.5]);
}

#[test]
fn nothing_moves_a_frozen_bias() {
    let counted = |pattern: &str| {
        let (bias, stats) = records(None, RouterDevice::Auto, &[pattern.into()]);
        assert_eq!(stats.take()[0].tokens, [10, 5, 3, 2]);
        !bias.take().is_empty()
    };
    assert_eq!(["*.expert_bias", "layers.0.*", "*.router.weight"].map(counted), [false, false, true]);
}
