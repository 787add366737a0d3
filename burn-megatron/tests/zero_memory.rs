//! What ZeRO leaves on each rank, measured: bytes per weight as in table 1 of the ZeRO paper
//! (Rajbhandari et al., <https://arxiv.org/abs/1910.02054>), with f32 weights and with bf16 weights and f32 masters.

use backend_dist::launch::launch;
use backend_dist::memory::{RankAllocator, live, peak, reset_peak};
use backend_dist::mesh::{Axis, GridKind, Mesh, ParallelLayout};
use backend_dist::shard::{GroupPosition, ParamSpec, Section};
use burn::module::{Module, Param, ParamId};
use burn::tensor::{DType, Device, Tensor, TensorData};
use burn_megatron::optim::{BucketSpec, Optimizer, OptimizerConfig, ParamScale, Sharding, StepInfo};

#[global_allocator]
static ALLOCATOR: RankAllocator = RankAllocator(std::alloc::System);

/// Large enough that what describes a bucket, a few KiB, does not count.
const SHAPE: [usize; 2] = [256, 512];
const BUCKETS: usize = 32;
const WEIGHTS: usize = BUCKETS * SHAPE[0] * SHAPE[1];

#[derive(Module, Debug)]
struct Matrices {
    all: Vec<Param<Tensor<2>>>,
}

/// Bytes per weight after a step, and at most.
fn measure((zero, zero_group): (u8, Option<usize>), dp: usize, dtype: DType) -> Vec<(f64, f64)> {
    let mesh = Mesh::new(ParallelLayout { dp, zero, zero_group, ..ParallelLayout::default() }).unwrap();
    let run = |rank: backend_dist::launch::Rank| {
        let at = GroupPosition { rank: 0, size: 1 };
        let spec = |key| ParamSpec::new(vec![Section::replicated(format!("w{key}"), &SHAPE, at)], false);
        let buckets: Vec<_> = (0..BUCKETS)
            .map(|key| BucketSpec {
                key,
                params: vec![spec(key)],
                hidden: true,
                at_once: 1,
                scale: ParamScale::default(),
            })
            .collect();
        let tensor = |value: f32, shape: &[usize]| TensorData::new(vec![value; shape.iter().product()], shape);
        let before = live(rank.rank);
        let mut model = Matrices { all: Vec::new() };
        let config = OptimizerConfig::default();
        let sharding = |grid: GridKind| Sharding::of(&rank, grid);
        let single = |grid: GridKind, size| rank.subgroup(grid.tensor_parallel(), size);
        let mut optimizer =
            Optimizer::new(&config, buckets.clone(), sharding, single, (&Device::flex(), dtype), usize::MAX);
        for bucket in &buckets {
            let weights = Tensor::<2>::from_data(tensor(0.5, &SHAPE), (&Device::flex(), dtype));
            model.all.push(Param::initialized(ParamId::from(bucket.params[0].id), weights));
        }
        model = (0..BUCKETS).fold(model, |model, bucket| optimizer.shard(bucket, model));
        reset_peak(rank.rank);
        for _ in 0..2 {
            for bucket in (0..BUCKETS).cycle().take(2 * BUCKETS) {
                model = optimizer.gather(bucket, model);
                let grad = Tensor::from_data(tensor(0.25, &[SHAPE[0] * SHAPE[1]]), (&Device::flex(), dtype));
                optimizer.add(bucket, buckets[bucket].params[0].id, grad);
                model = optimizer.release(bucket, model);
                optimizer.complete(bucket);
            }
            (0..BUCKETS).for_each(|bucket| optimizer.reduce(bucket));
            optimizer.begin_step();
            let info = StepInfo { lr: 0.1, grad_scale: 1.0 };
            model = (0..BUCKETS).fold(model, |model, bucket| optimizer.step(bucket, model, &info));
        }
        rank.group(Axis::DpCp).barrier();
        let per_weight = |bytes: u64| (bytes - before) as f64 / WEIGHTS as f64;
        let bytes = (per_weight(live(rank.rank)), per_weight(peak(rank.rank)));
        drop(model);
        Ok(bytes)
    };
    launch(&mesh, &[Device::flex()], run).unwrap()
}

/// One test, because the counts are of the process.
#[test]
fn a_rank_holds_what_the_formulas_say() {
    let d = 4.0;
    let plain = [
        (DType::F32, 0, 4.0 + 4.0 + 8.0, 4.0 + 4.0 + 8.0),
        (DType::F32, 1, 4.0 + (4.0 + 8.0) / d, 4.0 + 4.0 + 8.0 / d),
        (DType::F32, 2, 4.0 + (4.0 + 8.0) / d, 4.0 + (4.0 + 8.0) / d),
        (DType::F32, 3, 16.0 / d, 16.0 / d),
        (DType::BF16, 0, 2.0 + 4.0 + 12.0, 2.0 + 4.0 + 12.0),
        (DType::BF16, 1, 2.0 + (4.0 + 12.0) / d, 2.0 + 4.0 + 12.0 / d),
        (DType::BF16, 2, 2.0 + (4.0 + 12.0) / d, 2.0 + (4.0 + 12.0) / d),
        (DType::BF16, 3, 16.0 / d, 16.0 / d),
    ];
    let grouped = [
        (DType::F32, 1, 4.0 + (4.0 + 8.0) / 2.0, 4.0 + 4.0 + 8.0 / 2.0),
        (DType::F32, 2, 4.0 + (4.0 + 8.0) / 2.0, 4.0 + (4.0 + 8.0) / 2.0),
        (DType::BF16, 3, 16.0 / 2.0, 16.0 / 2.0),
    ];
    let cases = plain.map(|case| (case, None)).into_iter().chain(grouped.map(|case| (case, Some(2))));
    for ((dtype, zero, rest, most), group) in cases {
        for (live, peak) in measure((zero, group), 4, dtype) {
            assert!((live / rest - 1.0).abs() < 0.02, "{dtype:?} ZeRO {zero}: {live} bytes per weight, not {rest}");
            // Gathered weights and gradients of one bucket, of 4 bytes per weight each, and copies on their way.
            let transient = 4.0 * 4.0 / BUCKETS as f64;
            let fits = most * 0.99 < peak && peak < most * 1.02 + transient;
            assert!(fits, "{dtype:?} ZeRO {zero}: at most {peak} bytes per weight, not {most}");
        }
    }
}
