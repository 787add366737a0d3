//! Teams: one rank runs the program, the others follow.

use crate::cpu;
use backend_dist::collective::{all_gather, all_reduce, all_to_all, broadcast};
use backend_dist::comm::ReduceOp;
use backend_dist::gradients::{average_gradients, place_gradients};
use backend_dist::launch::{BoxError, Rank, launch};
use backend_dist::local::{Placements, Recent, to_local};
use backend_dist::logical::Placement::{Partial, Replicate, Shard, Varying};
use backend_dist::mesh::{Axis, Mesh};
use backend_dist::mesh_backend::{LogicalDevice, LogicalOptions, Redistribute, Teams, explain};
use backend_dist::parallelize::{Plan, parallelize};
use burn::nn::LinearConfig;
use burn::optim::GradientsParams;
use burn::tensor::{Device, Distribution, Tensor};
use std::time::{Duration, Instant};

/// The leaders' values, which are the same whether or not they run ahead.
fn led<T: Send + PartialEq + std::fmt::Debug>(
    layout: &str,
    program: impl Fn(&Rank, Device) -> Result<T, BoxError> + Sync,
) -> Result<Vec<T>, String> {
    let mesh = Mesh::new(layout.parse().unwrap()).unwrap();
    let [at_once, ahead] = [false, true].map(|ahead| {
        let options = LogicalOptions { run_ahead: Some(ahead), ..Default::default() };
        let teams = Teams::new(&mesh, Axis::Tp).across(Axis::Dp).options(options);
        let begun = Instant::now();
        let results = launch(&mesh, &[cpu()], |rank| teams.run(&rank, |device| program(&rank, device)));
        assert!(begun.elapsed() < Duration::from_secs(2));
        let values = results.map_err(|error| error.to_string())?;
        Ok::<_, String>(values.into_iter().flatten().collect::<Vec<T>>())
    });
    if let (Ok(at_once), Ok(ahead)) = (&at_once, &ahead) {
        assert_eq!(at_once, ahead);
    }
    at_once?;
    ahead
}

fn numbers<const D: usize>(x: Tensor<D>) -> Vec<f64> {
    x.into_data().iter::<f64>().collect()
}

fn counted(rows: usize, columns: usize, device: &Device) -> Tensor<2> {
    Tensor::<1, burn::tensor::Int>::arange(0..(rows * columns) as i64, device).float().reshape([rows, columns])
}

#[test]
fn the_leader_computes_with_shards_that_followers_hold() {
    for layout in ["TP1", "TP2", "TP4"] {
        let results = led(layout, |rank, device| {
            let x = counted(4, 4, &device);
            let columns = counted(4, 8, &device).redistribute(rank, Axis::Tp, Shard(1));
            let rows = counted(8, 4, &device).redistribute(rank, Axis::Tp, Shard(0));
            let y = x.clone().matmul(columns).matmul(rows);
            // Also from another thread.
            let other = y.clone();
            let sum = std::thread::scope(|scope| scope.spawn(move || numbers(other.sum())).join().unwrap());
            Ok((sum, numbers(y), explain(&device).times("all-reduce")))
        });
        let cpu = cpu();
        let y = counted(4, 4, &cpu).matmul(counted(4, 8, &cpu)).matmul(counted(8, 4, &cpu));
        let expected = (numbers(y.clone().sum()), numbers(y));
        for (sum, y, all_reduces) in results.unwrap() {
            assert_eq!((sum, y), expected, "{layout}");
            // The sum of a sum is one too.
            assert_eq!(all_reduces, if layout == "TP1" { 0 } else { 2 });
        }
    }
}

#[test]
fn shares_are_reduced_over_data_parallel_ranks() {
    for layout in ["TP2 DP2", "TP2 DP3", "TP4 DP2", "TP1 DP2"] {
        let results = led(layout, |rank, device| {
            let dp = rank.group(Axis::Dp);
            let x = (counted(4, 8, &device) + dp.rank() as f64).redistribute(rank, Axis::Tp, Shard(1));
            let placements = Placements::of(&x);
            let local = to_local(x);
            // What one rank has is whole, and its own share.
            let is_shared = rank.group(Axis::Tp).size() > 1;
            let expected = if is_shared { Varying } else { Shard(1) };
            assert_eq!((local.placement(Axis::Tp), local.dims()[0]), (expected, 4));
            // What is computed from shares, and from others, are shares.
            let flat = local.clone().reshape([-1]) * 2.0 + Tensor::<1>::ones([1], &device);
            assert!(!is_shared || flat.placement(Axis::Tp) == Varying);
            let sum = all_reduce(flat, ReduceOp::Sum, &dp).reshape(local.dims());
            let all = all_gather(local.clone(), 0, &dp);
            assert_eq!(all.dims()[0], 4 * dp.size());
            let first = placements.from_local(broadcast(local.clone(), 0, &dp));
            // Every rank sends one row to the first, and what is left to the last.
            let mut send = vec![0; dp.size()];
            (send[0], send[dp.size() - 1]) = (1, 3);
            let receive = vec![send[dp.rank()]; dp.size()];
            let rows = all_to_all(local, &send, &receive, &dp);
            assert_eq!(rows.dims()[0], receive.iter().sum::<usize>());
            Ok((numbers(placements.from_local(sum)), numbers(first)))
        });
        let results = results.unwrap();
        let ranks = results.len() as f64;
        let shifts = (0..results.len()).map(|rank| rank as f64).sum::<f64>();
        for (sum, first) in results {
            let expected: Vec<f64> = (0..32).map(|i| 2.0 * (ranks * f64::from(i) + shifts) + ranks).collect();
            assert_eq!(sum, expected, "{layout}");
            assert_eq!(first, (0..32).map(f64::from).collect::<Vec<_>>(), "{layout}");
        }
    }
}

#[test]
fn gradients_come_to_where_their_parameters_are() {
    let results = led("TP2", |rank, device| {
        let device = device.autodiff();
        let layer = LinearConfig::new(4, 4).init(&device);
        let layer = parallelize(layer, rank, &Plan::default().columns("weight"))?;
        // Rows are sharded, so the gradients are sums over ranks.
        let x = Tensor::<2>::ones([6, 4], &device).redistribute(rank, Axis::Tp, Shard(0));
        let (weight, bias) = (layer.weight.val(), layer.bias.clone().unwrap());
        let loss = (x.clone() * bias.val().unsqueeze()).sum() + x.matmul(weight).sum();
        let grads = GradientsParams::from_grads(loss.backward(), &layer);
        assert_eq!(grads.get::<1>(bias.id).unwrap().placement(Axis::Tp), Partial);
        let grads = place_gradients(&layer, grads, &rank.group(Axis::Tp));
        let (of_weight, of_bias) = (grads.get::<2>(layer.weight.id).unwrap(), grads.get::<1>(bias.id).unwrap());
        assert_eq!((of_weight.placement(Axis::Tp), of_bias.placement(Axis::Tp)), (Shard(1), Replicate));
        Ok([numbers(of_weight), numbers(of_bias)].concat())
    });
    assert_eq!(results.unwrap(), [vec![6.0; 20]]);
}

/// As in a training loop by hand, which knows nothing of sums.
#[test]
fn gradients_that_are_sums_are_averaged_whole() {
    let results = led("TP2 DP2", |rank, device| {
        let device = device.autodiff();
        let layer = parallelize(LinearConfig::new(4, 4).init(&device), rank, &Plan::default().columns("weight"))?;
        let x = Tensor::<2>::ones([6, 4], &device).redistribute(rank, Axis::Tp, Shard(0)) * (rank.coords.dp as f64);
        let (weight, bias) = (layer.weight.val(), layer.bias.clone().unwrap());
        let loss = (x.clone() * bias.val().unsqueeze()).sum() + x.matmul(weight).sum();
        let grads = GradientsParams::from_grads(loss.backward(), &layer);
        let grads = average_gradients(&layer, grads, &rank.group(Axis::Dp));
        let (of_weight, of_bias) = (grads.get::<2>(layer.weight.id).unwrap(), grads.get::<1>(bias.id).unwrap());
        assert_eq!((of_weight.placement(Axis::Tp), of_bias.placement(Axis::Tp)), (Shard(1), Replicate));
        Ok([numbers(of_weight), numbers(of_bias)].concat())
    });
    assert_eq!(results.unwrap(), [vec![3.0; 20], vec![3.0; 20]]);
}

#[test]
fn collectives_along_an_axis_that_the_device_does_not_know_name_what_does() {
    let mesh = Mesh::new("TP2 DP2".parse().unwrap()).unwrap();
    let run = launch(&mesh, &[cpu()], |rank| {
        let device = rank.logical_device(&[Axis::Tp]).autodiff();
        let layer = LinearConfig::new(4, 4).init(&device);
        let loss = layer.forward(Tensor::<2>::ones([2, 4], &device)).sum();
        let grads = GradientsParams::from_grads(loss.backward(), &layer);
        average_gradients(&layer, grads, &rank.group(Axis::Dp));
        Ok(())
    });
    let text = run.unwrap_err().to_string();
    assert!(
        text.contains("over dp: the device knows the axes tp; nearest legal: `Teams` with `.across(..)` this axis"),
        "{text}"
    );
}

#[test]
fn what_a_step_leaves_is_whole() {
    let results = led("TP2", |rank, device| {
        let recent = Recent::on(&device);
        let x = counted(4, 4, &device).redistribute(rank, Axis::Tp, Shard(1)).exp();
        let sum = x.clone().sum();
        assert_eq!((x.placement(Axis::Tp), sum.placement(Axis::Tp)), (Shard(1), Partial));
        recent.make_whole(&Vec::<burn::nn::Linear>::new(), &GradientsParams::new());
        assert_eq!((x.placement(Axis::Tp), sum.placement(Axis::Tp)), (Replicate, Replicate));
        let before = explain(&device);
        assert_eq!(numbers(x.sum()), numbers(sum));
        assert!(explain(&device).since(&before).collectives.is_empty());
        Ok(())
    });
    results.unwrap();
}

#[test]
fn random_numbers_are_those_of_the_seed_in_every_layout() {
    let draw = |layout: &str| {
        led(layout, |rank, device| {
            device.seed(7 + rank.coords.dp as u64);
            let x = Tensor::<2>::random([4, 4], Distribution::Default, &device);
            Ok(numbers(x.redistribute(rank, Axis::Tp, Shard(0))))
        })
    };
    let alone = draw("TP1 DP2").unwrap();
    assert_ne!(alone[0], alone[1]);
    assert_eq!(draw("TP4 DP2").unwrap(), alone);
}

#[test]
fn a_program_that_fails_ends_its_followers_with_its_error() {
    let text = led("TP2 DP2", |rank, device| {
        let x = counted(4, 4, &device).redistribute(rank, Axis::Tp, Shard(0));
        if rank.coords.dp == 1 {
            return Err("no more data".into());
        }
        let sum = all_reduce(to_local(x), ReduceOp::Sum, &rank.group(Axis::Dp));
        Ok(numbers(sum))
    });
    assert!(text.unwrap_err().starts_with("rank 2 (dp 1, tp 0) failed: no more data"));
    let text = led("TP2", |_, device| -> Result<(), BoxError> {
        let _ = counted(4, 4, &device);
        panic!("into a wall")
    });
    assert!(text.unwrap_err().contains("into a wall"));
}

#[test]
fn a_follower_that_fails_ends_its_leader() {
    let mesh = Mesh::new("TP2".parse().unwrap()).unwrap();
    let teams = Teams::new(&mesh, Axis::Tp);
    let run = launch(&mesh, &[cpu()], |rank| {
        if rank.rank == 1 {
            return Err("no memory".into());
        }
        teams.run(&rank, |device| {
            let x = counted(4, 4, &device).redistribute(&rank, Axis::Tp, Shard(0));
            Ok(numbers(x))
        })
    });
    let text = run.unwrap_err().to_string();
    assert!(text.contains("rank 1 (tp 1) failed: no memory"), "{text}");
}
