//! Every sharding of the work gives the numbers of one rank that does all of it.

use super::*;

const STEPS: usize = 3;

pub(super) struct Outcome {
    pub weights: BTreeMap<String, HostTensor>,
    pub gradients: BTreeMap<String, HostTensor>,
    /// Of every rank, bit by bit.
    locals: Vec<Vec<f64>>,
    pub norms: Vec<f64>,
    pub memory: Vec<Memory>,
}

impl Outcome {
    /// Weights, norms and gradients of every rank.
    pub fn same_bits(&self, other: &Self) -> bool {
        (&self.locals, &self.norms, &self.gradients) == (&other.locals, &other.norms, &other.gradients)
    }
}

pub(super) fn train(
    case: Case,
    config: &OptimizerConfig,
    dtype: DType,
    micro_batch: usize,
    gradient: Gradient,
) -> Outcome {
    train_module::<Net>(case, config, dtype, micro_batch, gradient)
}

pub(super) fn train_module<N: Buckets>(
    case: Case,
    config: &OptimizerConfig,
    dtype: DType,
    micro_batch: usize,
    gradient: Gradient,
) -> Outcome {
    let ranks = case.run(|rank| {
        let mut worker = Worker::<N>::new(rank, case, config, dtype);
        let norms: Vec<f64> = (0..STEPS).map(|step| worker.step(step, micro_batch, gradient)).collect();
        let gradients = [0, 1].map(|bucket| worker.optimizer.gradients(bucket, 0.5)).concat();
        Ok((worker.weights(), norms, gradients, worker.optimizer.memory()))
    });
    let norms = ranks[0].1.clone();
    assert!(ranks.iter().all(|rank| rank.1 == norms), "all ranks know the same norm");
    let [locals, gradients]: [Vec<_>; 2] =
        [ranks.iter().map(|rank| rank.0.clone()).collect(), ranks.iter().map(|rank| rank.2.clone()).collect()];
    let (weights, gradients) = (assemble::<N>(case, &locals), assemble::<N>(case, &gradients));
    Outcome { weights, gradients, locals, norms, memory: ranks.into_iter().map(|rank| rank.3).collect() }
}

pub(super) fn cases() -> impl Iterator<Item = Case> {
    let sizes = [1, 2].into_iter().flat_map(|tp| (1..5).map(move |dp| (tp, dp)));
    let whole = sizes.flat_map(|(tp, dp)| (0..4).map(move |zero| Case { tp, dp, zero, ..Case::SINGLE }));
    let groups = [(1, 2, 1), (1, 4, 2), (2, 4, 2), (1, 6, 3)];
    let of = |(tp, dp, group)| (1..4).map(move |zero| Case { tp, dp, zero, group: Some(group), ..Case::SINGLE });
    whole.chain(groups.into_iter().flat_map(of))
}

/// With gradients whose sums are exact, every layout ends with the bits of one rank: weights, norms, in which every element
/// counts once, and gradients.
pub(super) fn equals_one_rank<N: Buckets>(config: OptimizerConfig, cases: impl Iterator<Item = Case>) {
    let single = train_module::<N>(Case::SINGLE, &config, DType::F64, SAMPLES, exact);
    let by_hand = single.gradients.values().flat_map(|tensor| &tensor.data).map(|g| g * g).sum::<f64>().sqrt();
    assert!((single.norms[STEPS - 1] - by_hand).abs() < 1e-12 * by_hand);
    for case in cases {
        for micro_batch in [1, SAMPLES] {
            let other = train_module::<N>(case, &config, DType::F64, micro_batch, exact);
            assert_eq!(other.weights, single.weights, "{case:?} {config:?}");
            assert_eq!(other.norms, single.norms, "{case:?}");
            assert_eq!(other.gradients, single.gradients, "{case:?}");
        }
    }
}

// ZeRO 0 to 3 over 1 to 4 data-parallel ranks and 1 or 2 tensor parallel ranks, and in groups of them. One optimizer per
// test, for the sake of threads.

#[test]
fn adamw_equals_one_rank() {
    equals_one_rank::<Net>(kinds()[0], cases());
}

#[test]
fn sgd_equals_one_rank() {
    equals_one_rank::<Net>(kinds()[1], cases());
}

#[test]
fn lion_equals_one_rank() {
    equals_one_rank::<Net>(kinds()[2], cases());
}

#[test]
fn muon_equals_one_rank() {
    equals_one_rank::<Net>(kinds()[3], cases());
}

/// Bits also agree where sums round: under ZeRO 1 always, under 2 and 3 with one micro-batch, in every precision.
#[test]
fn zero_adds_in_the_same_order() {
    for (config, dtype) in kinds().into_iter().zip([DType::F32, DType::BF16, DType::F16, DType::F32]) {
        for (tp, dp) in [(1, 3), (2, 2)] {
            for micro_batch in [1, SAMPLES] {
                let plain = train(Case { tp, dp, zero: 0, ..Case::SINGLE }, &config, dtype, micro_batch, rough);
                for zero in if micro_batch == 1 { 1..2 } else { 1..4 } {
                    let sharded = train(Case { tp, dp, zero, ..Case::SINGLE }, &config, dtype, micro_batch, rough);
                    assert_eq!(sharded.locals, plain.locals, "{dtype:?} ZeRO {zero} {config:?}");
                    assert_eq!((sharded.norms, sharded.gradients), (plain.norms.clone(), plain.gradients.clone()));
                }
            }
        }
    }
}

/// Groups sum first inside and then across, so their bits are those of plain ZeRO only where sums are exact, as above.
/// Among themselves ZeRO 1, 2 and 3 agree, and one group of all ranks is plain ZeRO.
#[test]
fn groups_of_every_stage_add_in_the_same_order() {
    for (config, dtype) in kinds().into_iter().zip([DType::F64, DType::BF16, DType::F16, DType::F32]) {
        let run = |zero, group| {
            let case = Case { tp: 1, dp: 4, zero, group, ..Case::SINGLE };
            let outcome = train(case, &config, dtype, SAMPLES, rough);
            (outcome.locals, outcome.norms, outcome.gradients)
        };
        let first = run(1, Some(2));
        assert!((2..4).all(|zero| run(zero, Some(2)) == first), "{dtype:?} {config:?}");
        assert!((1..4).all(|zero| run(zero, Some(4)) == run(0, None)), "{dtype:?} {config:?}");
    }
}

/// Bytes per element, on every rank, up to the padding of a shard.
#[test]
fn memory_follows_the_formulas() {
    let adamw = OptimizerConfig::default();
    let elements: usize = (7 + 1) * 3 + (8 + 3) * 6 + 5 * 8 + 5;
    let dp = 4;
    let part = |bytes: usize| bytes * elements.next_multiple_of(dp) / dp;
    let shards = |case: Case, dtype| train(case, &adamw, dtype, 1, exact).memory;
    // Over four data-parallel ranks each bucket is padded to a multiple of four: the layer from 111 to 112.
    let padded = elements + 1;
    let expected = [
        (DType::F32, 0, (4 * padded, 8 * padded, 0)),
        (DType::F32, 1, (4 * padded, part(8), 0)),
        (DType::F32, 2, (4 * 112 + part(4), part(8), 0)),
        (DType::F32, 3, (4 * 112 + part(4), part(8), part(4))),
        (DType::BF16, 0, (4 * padded, 8 * padded, 4 * padded)),
        (DType::BF16, 1, (4 * padded, part(8), part(4))),
        (DType::BF16, 3, (4 * 112 + part(4), part(8), part(4))),
    ];
    for (dtype, zero, (peak, states, values)) in expected {
        for memory in shards(Case { tp: 1, dp, zero, ..Case::SINGLE }, dtype) {
            assert_eq!((memory.grads_peak, memory.values), (peak as u64, values as u64), "{dtype:?} ZeRO {zero}");
            // The one element of padding, on one rank, has no second moment.
            let missing = states - memory.states as usize;
            assert!(missing == 0 || missing == 4, "{dtype:?} ZeRO {zero}: {missing}");
            assert_eq!(memory.grads as usize, if zero == 0 { peak } else { part(4) }, "after the step");
        }
    }
    for zero in 1..4 {
        for memory in shards(Case { tp: 1, dp, zero, group: Some(2), ..Case::SINGLE }, DType::F32) {
            // Halves of 112 and of 24 elements, with an element of padding in the second.
            let missing = 8 * padded / 2 - memory.states as usize;
            assert!(missing == 0 || missing == 4, "ZeRO {zero}: {missing}");
            assert_eq!(memory.grads as usize, 4 * padded / 2, "after the step");
        }
    }
    let muon = train(Case::SINGLE, &kinds()[3], DType::F64, 1, exact).memory[0];
    let matrices = (8 + 3) * 6 + 5 * 8;
    assert_eq!(muon.states as usize, 8 * (matrices + 2 * (elements - matrices)), "one moment of a hidden matrix");
}

/// The two copies of a tied weight: their gradients are summed over the ranks that hold them, or on one rank.
#[test]
fn tied_weights_get_the_sum_of_their_gradients() {
    for zero in 0..4 {
        let case = Case { tp: 2, dp: 2, zero, ..Case::SINGLE };
        let sums = case.run(|rank| {
            // Tensor parallel ranks stand in for the first and the last stage.
            let stage = rank.group(Axis::Tp);
            let own = Section {
                copies: 1,
                copy: stage.rank(),
                ..Section::replicated("e", &[3], GroupPosition { rank: 0, size: 1 })
            };
            let spec = || BucketSpec {
                key: 0,
                params: vec![ParamSpec::new(vec![own.clone()], false)],
                hidden: false,
                at_once: 1,
                scale: ParamScale::default(),
            };
            let sharding = |grid: GridKind| Sharding::of(&rank, grid);
            let config = OptimizerConfig::default();
            let buckets = vec![spec(), spec()];
            let mut optimizer = Optimizer::new(
                &config,
                buckets,
                sharding,
                |_, _| Group::single(),
                (&Device::flex(), DType::F64),
                usize::MAX,
            );
            for bucket in 0..2 {
                let grad = [1.0, 10.0, 100.0].map(|g| g * (1 + bucket + 2 * stage.rank()) as f64);
                let id = optimizer.spec(bucket).params[0].id;
                optimizer.add(
                    bucket,
                    id,
                    Tensor::from_data(TensorData::new(grad.to_vec(), [3]), (&Device::flex(), DType::F64)),
                );
                optimizer.complete(bucket);
                optimizer.reduce(bucket);
            }
            optimizer.sum_tied(0, &stage);
            let over_stages = optimizer.gradients(0, 1.0);
            // The copy of the second stage is not counted.
            let norm = optimizer.norm(1.0, &holders(&rank));
            optimizer.sum_tied_here(0, 1);
            Ok((over_stages, norm, optimizer.gradients(0, 1.0), optimizer.gradients(1, 1.0)))
        });
        for (rank, (over_stages, norm, first, second)) in sums.into_iter().enumerate() {
            let stage = (rank % 2) as f64;
            assert_eq!(over_stages, [8.0, 80.0, 800.0]);
            assert!((norm - (8.0f64.powi(2) + 4.0f64.powi(2)).sqrt() * 10101f64.sqrt()).abs() < 1e-9);
            let both = 8.0 + 2.0 * (2.0 + 2.0 * stage);
            assert_eq!((&first, &second), (&[1.0, 10.0, 100.0].map(|g| g * both).to_vec(), &first));
        }
    }
}

#[test]
fn a_skipped_step_leaves_no_gradient_and_one_bad_rank_tells_all() {
    for zero in 0..4 {
        let case = Case { tp: 1, dp: 2, zero, ..Case::SINGLE };
        let results = case.run(|rank| {
            let mut worker = Worker::<Net>::new(rank.clone(), case, &OptimizerConfig::default(), DType::F64);
            let before = worker.weights();
            for (bucket, spec) in worker.specs.iter().enumerate() {
                for param in &spec.params {
                    let bad = rank.rank == 1 && param.name() == "norm";
                    let grad = local_gradient(param, |_, place| if bad && place == 4 { f64::INFINITY } else { 1.0 });
                    worker.optimizer.add(bucket, param.id, grad);
                }
                worker.optimizer.complete(bucket);
                worker.optimizer.reduce(bucket);
            }
            let norm = worker.optimizer.norm(1.0, &holders(&rank));
            worker.optimizer.skip();
            assert_eq!((worker.weights(), worker.optimizer.updates()), (before, 0));
            worker.step(0, 3, exact);
            Ok((norm, worker.weights()))
        });
        let clean = train_once(Case { zero, ..case });
        for (norm, weights) in results {
            assert_eq!(norm, f64::INFINITY);
            assert_eq!(weights, clean, "ZeRO {zero}");
        }
    }
}

fn train_once(case: Case) -> Vec<f64> {
    let step = |rank| {
        let mut worker = Worker::<Net>::new(rank, case, &OptimizerConfig::default(), DType::F64);
        worker.step(0, 3, exact);
        Ok(worker.weights())
    };
    case.run(step).remove(0)
}

/// Under ZeRO 3 parameters are there between `gather` and `release`, and stay leaves of autodiff.
#[test]
fn weights_come_and_go_under_zero_3() {
    let case = Case { tp: 1, dp: 2, zero: 3, ..Case::SINGLE };
    case.run(|rank| {
        let Worker::<Net> { net, mut optimizer, specs, .. } =
            Worker::new(rank, case, &OptimizerConfig::default(), DType::F64);
        let whole: Net = super::net(&specs, DType::F64);
        assert_eq!((net.qk.val().dims(), net.norm.val().dims()), ([0, 0], [0]));
        let net = optimizer.gather(1, net);
        assert_eq!(net.embedding.val().dims(), [0, 0], "the other bucket");
        assert!(net.qk.val().is_require_grad());
        assert_eq!(net.qk.val().into_data(), whole.qk.val().into_data());
        let mut grads = (net.qk.val().sum() * 2.0).backward();
        optimizer.accumulate(1, &net, &mut grads);
        let net = optimizer.release(1, net);
        assert_eq!(net.qk.val().dims(), [0, 0]);
        assert!(net.qk.val().is_require_grad());
        optimizer.complete(1);
        optimizer.reduce(1);
        // Two data-parallel ranks; no gradient of the other parameters is zero.
        let expected: Vec<f64> = (0..111).map(|place| if place < 66 { 4.0 } else { 0.0 }).collect();
        assert_eq!(optimizer.gradients(1, 1.0), expected);
        Ok(())
    });
}
