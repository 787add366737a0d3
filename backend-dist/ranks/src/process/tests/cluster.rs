//! Several launches by the same processes.

use super::*;
use crate::process::Cluster;

/// The result of each "process".
fn run_all<T: Send>(processes: usize, work: impl Fn(&Cluster) -> Result<T, BoxError> + Sync) -> Vec<Result<T, String>> {
    each(processes, |world| {
        let cluster = Cluster::join(&world, &[]).unwrap().on(vec![Device::flex()]);
        cluster.run(|| work(&cluster)).map_err(|error| error.to_string())
    })
}

fn position(rank: Rank) -> Result<(usize, Vec<usize>), BoxError> {
    Ok((rank.rank, rank.group(Axis::World).all_gather_host(10 * rank.rank)))
}

#[test]
fn every_process_has_the_results_of_all_ranks_of_one_launch_after_the_other() {
    let meshes = [mesh(2, 1), mesh(2, 2), mesh(1, 4), mesh(2, 1)];
    let alone: Cluster = [Device::flex()].into();
    let work = |cluster: &Cluster| {
        Ok(meshes.iter().map(|mesh| cluster.launch_all(mesh, position)).collect::<Result<Vec<_>, _>>()?)
    };
    let expected = work(&alone).unwrap();
    assert_eq!(run_all(2, work), [Ok(expected.clone()), Ok(expected)]);
    let here = run_all(2, |cluster| Ok(cluster.launch(&mesh(2, 2), |rank| Ok(rank.rank))?));
    assert_eq!(here, [Ok(vec![0, 1]), Ok(vec![2, 3])]);
}

#[test]
fn a_launch_that_fails_is_not_the_last() {
    let seen = run_all(2, |cluster| {
        let failed = cluster.launch(&mesh(1, 2), |rank| match rank.rank {
            1 => Err("too large".into()),
            _ => Ok(rank.group(Axis::Dp).all_gather_host(rank.rank).len()),
        });
        let failed = failed.unwrap_err().to_string();
        cluster.check()?;
        Ok((failed.starts_with("rank 1 (dp 1) failed: too large"), cluster.launch_all(&mesh(1, 2), position)?.len()))
    });
    assert_eq!(seen, [Ok((true, 2)), Ok((true, 2))]);
}

#[test]
fn a_process_that_fails_between_launches_or_at_its_end_fails_all() {
    for (failing, launches) in [(0, 0), (1, 0), (0, 1), (1, 1)] {
        let seen = run_all(3, |cluster| {
            if cluster.process() == failing {
                return Err("no such file".into());
            }
            for _ in 0..launches {
                cluster.launch(&mesh(1, 3), position)?;
            }
            Ok(())
        });
        for (process, ended) in seen.into_iter().enumerate() {
            let own = if process == failing {
                "no such file".into()
            } else {
                format!("process {failing} failed: no such file")
            };
            assert_eq!(ended, Err(own), "{process}");
        }
    }
}

#[test]
fn a_process_that_is_gone_between_launches_is_named() {
    let seen = each(2, |world| {
        let cluster = Cluster::join(&world, &[]).unwrap().on(vec![Device::flex()]);
        let before = cluster.launch_all(&mesh(1, 2), position).map(|ranks| ranks.len());
        (
            before,
            if world.process == 0 {
                cluster.launch(&mesh(1, 2), position).unwrap_err().to_string()
            } else {
                String::new()
            },
        )
    });
    let text = &seen[0].1;
    assert!(text.starts_with("process 1 on ") && text.contains(" is gone: ") && !text.contains("rank"), "{text}");
    assert!(seen.iter().all(|(before, _)| *before == Ok(2)));
}

#[test]
fn ranks_that_cannot_be_shared_out_are_refused_before_a_launch() {
    let seen = run_all(2, |cluster| {
        let layouts =
            [ParallelLayout { tp: 2, dp: 2, ..Default::default() }, ParallelLayout { dp: 3, ..Default::default() }];
        Ok(layouts.map(|layout| cluster.local_devices(&layout).map_err(|error| error.to_string())))
    });
    for (process, seen) in seen.into_iter().enumerate() {
        let [four, three] = seen.unwrap();
        assert_eq!(four, Ok(2 * process..2 * process + 2));
        let text = three.unwrap_err();
        assert!(text.starts_with("3 ranks (DP3) cannot be shared out over 2 processes"), "{text}");
    }
}

#[test]
fn files_of_the_first_process_are_there_for_the_others() {
    let order = parking_lot::Mutex::new(Vec::new());
    run_all(3, |cluster| {
        cluster.first_then_others(|| {
            order.lock().push(cluster.process());
            Ok::<_, BoxError>(())
        })
    });
    assert_eq!(order.into_inner()[0], 0);
}
