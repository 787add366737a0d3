//! What the ranks of a team hold of a model, with the counting allocator.

use parking_lot::Mutex;

use backend_dist::launch::launch;
use backend_dist::logical::Placement;
use backend_dist::memory::{self, RankAllocator};
use backend_dist::mesh::{Axis, Mesh, ParallelLayout};
use backend_dist::mesh_backend::{Redistribute, Teams};
use backend_dist::parallelize::{Plan, parallelize_on};
use burn::nn::LinearConfig;
use burn::optim::{AdamWConfig, GradientsParams};
use burn::tensor::{Device, Tensor};

#[global_allocator]
static ALLOCATOR: RankAllocator = RankAllocator(std::alloc::System);

/// Names, tables and queues.
const BOOKKEEPING: u64 = 1 << 15;

fn about(counted: u64, expected: u64) -> bool {
    counted >= expected && counted - expected <= BOOKKEEPING
}

/// Bytes that each rank holds of a model whose parameters have `elements` elements: its parameters, and with AdamW's
/// moments after a step.
fn held_by_team(tp: usize) -> (u64, Vec<[u64; 2]>) {
    let linear = |from, to| LinearConfig::new(from, to).with_bias(false).init(&Device::flex().autodiff());
    let model = vec![linear(512, 1024), linear(1024, 512)];
    let elements = 2 * 512 * 1024;
    // Drawn now, and not on a rank.
    assert!(model.iter().all(|layer| layer.weight.val().dims().iter().product::<usize>() == elements / 2));
    let model = Mutex::new(Some(model));
    let mesh = Mesh::new(ParallelLayout { tp, ..Default::default() }).unwrap();
    let teams = Teams::new(&mesh, Axis::Tp);
    let plan = Plan::default().columns("0.weight").rows("1.weight");
    let held = launch(&mesh, &[Device::flex()], |rank| {
        teams.run(&rank, |device| {
            // What is read from all ranks is read after all that they were told before.
            let live = || {
                Tensor::<1>::ones([tp], &device).redistribute(&rank, Axis::Tp, Placement::Shard(0)).into_data();
                (0..tp).map(memory::live).collect::<Vec<_>>()
            };
            let before = live();
            let device = device.clone().autodiff();
            let mut model = parallelize_on(model.lock().take().unwrap(), &device, &rank, &plan)?;
            let placed = live();
            let mut optimizer = AdamWConfig::new().init();
            let x = Tensor::<2>::ones([2, 512], &device);
            let loss = model[1].forward(model[0].forward(x)).sum();
            let grads = GradientsParams::from_grads(loss.backward(), &model);
            model = optimizer.step(1e-3, model, grads);
            let stepped = live();
            drop(model);
            Ok((0..tp).map(|rank| [placed[rank] - before[rank], stepped[rank] - before[rank]]).collect())
        })
    });
    (4 * elements as u64, held.unwrap().remove(0).unwrap())
}

#[test]
fn a_team_shards_parameters_and_moments() {
    for tp in [2, 4] {
        let (bytes, held) = held_by_team(tp);
        let share = bytes / tp as u64;
        for (rank, [placed, stepped]) in held.into_iter().enumerate() {
            assert!(about(placed, share), "rank {rank} of {tp}: {placed} bytes of {bytes}");
            // The parameters and two moments of each; a thread keeps the memory of its last GEMM.
            let most = 3 * share + BOOKKEEPING + memory::gemm_workspace();
            assert!(stepped >= 3 * share, "rank {rank} of {tp}: {stepped} bytes of {bytes} after a step");
            assert!(stepped <= most, "rank {rank} of {tp}: {stepped} bytes of {bytes} after a step");
        }
    }
}
