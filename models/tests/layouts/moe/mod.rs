//! The MoE layer in all layouts, against formulas that compute every expert for every token.

mod layer;
mod plain;

use std::collections::BTreeMap;
use std::ops::Range;

use backend_dist::launch::BoxError;
use backend_dist::shard::{HostTensor, Init};
use models::WeightSource;
use models::layers::{
    Balance, BalanceOver, Capacity, Dispatcher, DropPolicy, ExpertGroups, ExpertKind, MoeConfig, RouterConfig,
    RouterDevice, Scores, SharedExperts,
};

use crate::harness::{assert_within, largest};

const HIDDEN: usize = 6;
const SAMPLES: usize = 4;
const EPS: f64 = 1e-5;
const LIMIT: f64 = 1e-10;

/// A layer and its configuration.
#[derive(Clone, Copy)]
struct Case {
    config: MoeConfig,
    seq: usize,
    /// [`models::MicroBatch::auxiliary`].
    auxiliary: f64,
}

/// What must not depend on the layout: output and gradient of the input, `[SAMPLES, seq, HIDDEN]`, and of the weights.
struct Found {
    out: Vec<f64>,
    x_grad: Vec<f64>,
    weights: BTreeMap<String, Vec<f64>>,
}

/// Noise; biases keep experts 4 and 5 from being chosen.
struct Weights;

impl WeightSource for Weights {
    fn read(&self, name: &str, shape: &[usize], ranges: &[Range<usize>]) -> Result<Vec<f64>, BoxError> {
        Ok(HostTensor { shape: shape.to_vec(), data: weight(name, shape.iter().product()) }.read_box(ranges))
    }
}

fn weight(name: &str, len: usize) -> Vec<f64> {
    let noise = |index: usize| Init::Normal { std: 0.5 }.value(7, name, index as u64);
    let never = |index: usize| if name.ends_with("expert_bias") && (4..6).contains(&index) { -100.0 } else { 0.0 };
    (0..len).map(|index| noise(index) + never(index)).collect()
}

/// An element of the input (`x`) or of what the output is multiplied with (`w`).
fn element(name: &str, [sample, position, feature]: [usize; 3]) -> f64 {
    let index = (sample * 1000 + position) * HIDDEN + feature;
    Init::Normal { std: 1.0 }.value(11, name, index as u64)
}

fn case(router: RouterConfig) -> Case {
    let init = Init::Normal { std: 0.5 };
    let config = MoeConfig {
        hidden: HIDDEN,
        intermediate: 4,
        experts: 8,
        kind: ExpertKind::SwiGlu,
        router,
        capacity: None,
        dispatcher: Dispatcher::AllToAll,
        shared: None,
        input: init,
        output: init,
    };
    Case { config, seq: 8, auxiliary: 0.7 }
}

fn balance(over: BalanceOver) -> Option<Balance> {
    Some(Balance { over, coefficient: 3.0 })
}

/// As Mixtral, with all losses.
fn mixtral() -> Case {
    case(RouterConfig { balance: balance(BalanceOver::MicroBatch), z_loss: 0.5, ..RouterConfig::new(2) })
}

/// As DeepSeek-V3, with a gate that it does not have; two neighbouring experts are never chosen.
fn deepseek() -> Case {
    let router = models::sized! { RouterConfig::new(3);
        scores: Scores::Sigmoid, groups: Some(ExpertGroups { groups: 4, top_k: 2, best: 2 }), scaling: 2.5,
        bias_rate: Some(1e-3), balance: balance(BalanceOver::Sequence)
    };
    let mut case = case(router);
    case.config.shared = Some(SharedExperts { intermediate: 8, gate: true });
    case
}

fn assert_layouts(case: Case, layouts: &[&str]) {
    for layout in layouts {
        for dispatcher in [Dispatcher::AllToAll, Dispatcher::AllGather] {
            let config = MoeConfig { dispatcher, ..case.config };
            let (found, micro_batches) = layer::run(&Case { config, ..case }, layout);
            assert_same(&format!("{layout} {dispatcher:?}"), &found, &plain::run(&case, micro_batches));
        }
        let (found, micro_batches) = layer::run_beside(&case, layout, 2, false);
        assert_same(&format!("{layout}, overlapped with the experts"), &found, &plain::run(&case, micro_batches));
    }
}

fn assert_same(what: &str, found: &Found, expected: &Found) {
    assert_within(&format!("{what}: output"), &found.out, &expected.out, LIMIT, 0.0);
    assert_within(&format!("{what}: gradient of the input"), &found.x_grad, &expected.x_grad, LIMIT, 0.0);
    assert!(found.weights.keys().eq(expected.weights.keys()), "{what}: {:?}", found.weights.keys());
    // Experts without tokens have no gradient.
    let floor = expected.weights.values().map(|values| largest(values)).fold(0.0, f64::max);
    for (name, values) in &found.weights {
        assert_within(&format!("{what}: gradient of {name}"), values, &expected.weights[name], LIMIT, floor);
    }
}

#[test]
fn one_rank_has_the_formulas() {
    assert_layouts(mixtral(), &["TP1"]);
    assert_layouts(deepseek(), &["TP1"]);
}

#[test]
fn experts_on_several_ranks() {
    assert_layouts(mixtral(), &["DP2 EP2", "DP4 EP4", "DP4 EP2", "DP4 EP2 ETP2", "DP2 ETP2"]);
    assert_layouts(deepseek(), &["DP4 EP4", "DP4 EP2 ETP2"]);
}

#[test]
fn tokens_cut_over_tensor_parallel_ranks() {
    assert_layouts(mixtral(), &["TP2 SP EP2 ETP1", "TP2 SP", "TP2 SP DP2 EP2", "TP2 EP2 ETP1", "TP2", "TP4 EP2 ETP2"]);
    assert_layouts(deepseek(), &["TP2 SP EP2 ETP1", "TP2 EP2 ETP1", "TP2 SP DP2 EP4 ETP1"]);
}

#[test]
fn tokens_cut_over_context_parallel_ranks() {
    assert_layouts(mixtral(), &["CP2 EP2", "TP2 SP CP2 EP4 ETP1", "CP2 DP2 EP4"]);
    assert_layouts(deepseek(), &["CP2 EP2", "TP2 CP2 EP2"]);
}

/// Without sequence parallelism the positions need not be a multiple of the ranks, and some ranks may have none.
/// Nemotron 3: squared ReLU in routed and shared experts, whose all-to-alls are overlapped too.
#[test]
fn experts_without_gates() {
    let mut case = deepseek();
    case.config.kind = ExpertKind::SquaredRelu;
    assert_layouts(case, &["TP1", "DP2 EP2", "DP4 EP2 ETP2", "TP2 SP EP2 ETP1", "TP2 EP2 ETP1", "CP2 EP2"]);
}

#[test]
fn any_number_of_positions() {
    for seq in [5, 1] {
        assert_layouts(Case { seq, ..mixtral() }, &["TP2 EP2 ETP1", "TP4 EP4 ETP1"]);
        assert_layouts(Case { seq, ..deepseek() }, &["TP4 EP4 ETP1"]);
    }
}

#[test]
fn all_kinds_of_scores() {
    for scores in [Scores::SoftmaxBeforeTopK, Scores::NormalisedSoftmax, Scores::PlainSigmoid] {
        assert_layouts(case(RouterConfig { scores, ..mixtral().config.router }), &["DP2 EP2"]);
    }
    assert_layouts(case(RouterConfig { scores: Scores::Sigmoid, ..RouterConfig::new(1) }), &["DP2 EP2"]);
    // DeepSeek-V2's.
    let (groups, scaling) = (Some(ExpertGroups { groups: 4, top_k: 2, best: 1 }), 16.0);
    let scores = Scores::SoftmaxBeforeTopK;
    assert_layouts(case(RouterConfig { scores, groups, scaling, ..mixtral().config.router }), &["DP2 EP2", "TP2 SP"]);
}

#[test]
fn balance_over_all_ranks() {
    let case = case(RouterConfig { balance: balance(BalanceOver::Global), ..RouterConfig::new(2) });
    assert_layouts(case, &["TP1", "DP2 EP2", "TP2 SP DP2 EP2"]);
}

/// Every data parallel rank drops among its own tokens, as one rank does among those of a micro-batch.
#[test]
fn full_experts_drop_tokens() {
    for (factor, policy, pad) in
        [(1.0, DropPolicy::Probs, false), (0.6, DropPolicy::Position, false), (1.3, DropPolicy::Probs, true)]
    {
        for mut case in [mixtral(), deepseek()] {
            case.config.capacity = Some(Capacity { factor, policy, pad });
            assert_layouts(case, &["TP1", "DP2 EP2", "DP4 EP2 ETP2"]);
        }
    }
}

#[test]
fn recomputation_changes_no_bit() {
    for layout in ["TP1", "DP2 EP2"] {
        let (kept, again) = (layer::run(&mixtral(), layout).0, layer::run_again(&mixtral(), layout).0);
        assert!(kept.out == again.out && kept.x_grad == again.x_grad && kept.weights == again.weights, "{layout}");
    }
    let [kept, again] = [false, true].map(|again| layer::run_beside(&mixtral(), "DP2 EP2", 2, again).0);
    assert!(kept.out == again.out && kept.x_grad == again.x_grad && kept.weights == again.weights);
}

/// An expert is in one chunk, so its gradients have the bits of all experts at once.
#[test]
fn pieces_of_experts_change_no_gradient_of_theirs() {
    let case = Case { auxiliary: 0.0, ..mixtral() };
    let plain = layer::run(&case, "DP2 EP2").0;
    for pieces in [1, 3, 9] {
        let found = layer::run_beside(&case, "DP2 EP2", pieces, false).0;
        for (name, values) in plain.weights.iter().filter(|(name, _)| name.contains("experts.")) {
            assert!(found.weights[name] == *values, "{pieces} pieces: {name}");
        }
        assert_same(&format!("{pieces} pieces"), &found, &plain);
    }
}

/// The operations that GPUs route with, here on tables that are read by the host and written back.
fn assert_places(case: Case, layouts: &[&str]) {
    for layout in layouts {
        for dispatcher in [Dispatcher::AllToAll, Dispatcher::AllGather] {
            let run = |place| {
                let router = RouterConfig { device: place, ..case.config.router };
                layer::run(&Case { config: MoeConfig { dispatcher, router, ..case.config }, ..case }, layout).0
            };
            let (host, device) = (run(RouterDevice::Host), run(RouterDevice::Device));
            let same = host.out == device.out && host.x_grad == device.x_grad && host.weights == device.weights;
            assert!(same, "{layout} {dispatcher:?}");
        }
    }
}

#[test]
fn routing_by_counts_changes_no_bit() {
    let layouts = ["TP1", "DP2 EP2", "DP4 EP2 ETP2", "DP2 ETP2", "TP2 SP EP2 ETP1"];
    // A shared expert is computed at another time, and gradients are added in another order.
    let mut deepseek = deepseek();
    deepseek.config.shared = None;
    assert_places(mixtral(), &layouts);
    assert_places(deepseek, &layouts);
    assert_places(Case { seq: 1, ..deepseek }, &["TP4 EP4 ETP1"]);
    for scores in [Scores::SoftmaxBeforeTopK, Scores::NormalisedSoftmax, Scores::PlainSigmoid, Scores::Sigmoid] {
        let balance = balance(if scores == Scores::Sigmoid { BalanceOver::Sequence } else { BalanceOver::Global });
        assert_places(case(RouterConfig { scores, balance, ..RouterConfig::new(2) }), &["DP2 EP2"]);
    }
}

#[test]
fn routing_by_counts_with_shared_experts() {
    let mut case = deepseek();
    case.config.router.device = RouterDevice::Device;
    assert_layouts(case, &["TP1", "DP4 EP2 ETP2", "TP2 SP EP2 ETP1", "TP2 EP2 ETP1", "CP2 EP2"]);
}

#[test]
fn routing_by_counts_drops_the_same_tokens() {
    for (factor, pad) in [(0.6, false), (1.3, true)] {
        let mut case = mixtral();
        case.config.capacity = Some(Capacity { factor, policy: DropPolicy::Position, pad });
        assert_places(case, &["TP1", "DP2 EP2", "DP4 EP2 ETP2"]);
    }
}
