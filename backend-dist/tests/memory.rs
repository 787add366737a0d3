//! The memory of ranks, with the counting allocator.

use backend_dist::collective::{all_gather, all_reduce, broadcast, recv, reduce_scatter, send};
use backend_dist::comm::ReduceOp;
use backend_dist::launch::{Rank, launch};
use backend_dist::memory::{self, RankAllocator};
use backend_dist::mesh::{Axis, Mesh, ParallelLayout};
use burn::tensor::{DType, Device, Tensor};
use parking_lot::Mutex;

#[global_allocator]
static ALLOCATOR: RankAllocator = RankAllocator(std::alloc::System);

/// The counts are those of the process.
static ALONE: Mutex<()> = Mutex::new(());

fn on_ranks<T: Send>(tp: usize, f: impl Fn(Rank) -> T + Sync) -> Vec<T> {
    let _alone = ALONE.lock();
    let mesh = Mesh::new(ParallelLayout { tp, ..Default::default() }).unwrap();
    let live = || (0..tp).map(memory::live).sum::<u64>();
    let before = live();
    let results = launch(&mesh, &[Device::flex()], |rank| Ok(f(rank))).unwrap();
    assert!(live() <= before + BOOKKEEPING, "ranks that have ended hold {} bytes", live() - before);
    results
}

/// Bytes of the value of `f`, and the peak meanwhile.
fn held<T>(rank: &Rank, f: impl FnOnce() -> T) -> (u64, u64, T) {
    let before = memory::live(rank.rank);
    memory::reset_peak(rank.rank);
    let value = f();
    (memory::live(rank.rank) - before, memory::peak(rank.rank) - before, value)
}

const ELEMENTS: usize = 1 << 16;
const BYTES: u64 = 4 * ELEMENTS as u64;

fn ones(rank: &Rank, rows: usize) -> Tensor<2> {
    Tensor::ones([rows, ELEMENTS], &rank.device) * (rank.rank + 1) as f32
}

/// The transport's bookkeeping: names of groups, lists of collectives.
const BOOKKEEPING: u64 = 4096;

fn about(counted: u64, expected: u64) -> bool {
    counted >= expected && counted - expected <= BOOKKEEPING
}

#[test]
fn a_tensor_is_its_rank_s() {
    let counts = on_ranks(2, |rank| {
        let rows = 1 + rank.rank;
        let (live, peak, x) = held(&rank, || Tensor::<2>::zeros([rows, ELEMENTS], &rank.device));
        let (_, peak_of_sum, _) = held(&rank, || x.clone() + 1.0);
        drop(x);
        assert_eq!(held(&rank, || ()).0, 0);
        (live, peak, peak_of_sum)
    });
    for (rank, (live, peak, peak_of_sum)) in counts.into_iter().enumerate() {
        let bytes = BYTES * (1 + rank as u64);
        assert_eq!((live, peak_of_sum), (bytes, bytes));
        assert!(peak >= bytes, "Burn may copy what it fills");
    }
}

/// Every rank holds the result of a collective as if its memory was separate, however the transport shares it.
#[test]
fn results_of_collectives_are_counted_on_every_rank() {
    on_ranks(4, |rank| {
        let tp = rank.group(Axis::Tp);
        let check = |name: &str, rows: u64, f: &dyn Fn(Tensor<2>) -> Tensor<2>| {
            let input = ones(&rank, 4);
            let (live, peak, output) = held(&rank, || f(input.clone()));
            assert!(about(live, rows * BYTES), "{name} on rank {}: {live} bytes", rank.rank);
            assert!(about(peak, rows * BYTES), "{name} on rank {}: at most {peak} bytes", rank.rank);
            assert!(output.into_data().iter::<f32>().sum::<f32>() > 0.0);
        };
        check("all-reduce", 4, &|x| all_reduce(x, ReduceOp::Sum, &tp));
        check("all-gather", 16, &|x| all_gather(x, 0, &tp));
        check("reduce-scatter", 1, &|x| reduce_scatter(x, 0, &tp));
        check("broadcast", 4, &|x| broadcast(x, 2, &tp));
    });
}

#[test]
fn what_was_sent_moves_from_rank_to_rank() {
    on_ranks(2, |rank| {
        let tp = rank.group(Axis::Tp);
        let (live, _, received) = held(&rank, || match tp.rank() {
            0 => {
                send(ones(&rank, 3), 1, &tp);
                None
            }
            _ => Some(recv::<2>([3, ELEMENTS], DType::F32, &rank.device, 0, &tp)),
        });
        tp.barrier();
        match received {
            None => assert!(memory::live(0) < BYTES, "the sender holds nothing any more"),
            Some(received) => {
                assert!(about(live, 3 * BYTES), "{live} bytes");
                drop(received);
            }
        }
        tp.barrier();
    });
}
