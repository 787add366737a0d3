use proptest::prelude::*;

use super::*;

fn mesh(text: &str) -> Mesh {
    Mesh::new(text.parse().unwrap()).unwrap()
}

/// The example that was checked against Megatron-LM's own `RankGenerator`: 16 ranks, TP2 CP2 DP2 PP2.
#[test]
fn dense_groups_are_megatrons() {
    let mesh = mesh("TP2 CP2 DP2 PP2");
    let starts = |axis, expected: &[&[usize]]| assert_eq!(mesh.groups(axis)[..expected.len()], *expected, "{axis}");
    assert_eq!(mesh.world_size(), 16);
    starts(Axis::Tp, &[&[0, 1], &[2, 3]]);
    starts(Axis::Cp, &[&[0, 2], &[1, 3], &[4, 6]]);
    starts(Axis::Dp, &[&[0, 4], &[1, 5]]);
    starts(Axis::DpCp, &[&[0, 2, 4, 6], &[1, 3, 5, 7], &[8, 10, 12, 14]]);
    starts(Axis::Pp, &[&[0, 8]]);
    starts(Axis::TpPp, &[&[0, 1, 8, 9]]);
    starts(Axis::TpCp, &[&[0, 1, 2, 3], &[4, 5, 6, 7]]);
    starts(Axis::TpDpCp, &[&[0, 1, 2, 3, 4, 5, 6, 7]]);
}

/// Megatron-LM's `--use-tp-pp-dp-mapping` has the order tp, cp, ep, pp, dp.
#[test]
fn pipeline_ranks_are_neighbours_with_the_tp_pp_dp_mapping() {
    let mesh = mesh("TP2 DP2 PP2").with_tp_pp_dp_mapping();
    assert_eq!(mesh.groups(Axis::Pp), [[0, 2], [1, 3], [4, 6], [5, 7]]);
    assert_eq!(mesh.groups(Axis::Dp), [[0, 4], [1, 5], [2, 6], [3, 7]]);
    assert!((0..8).all(|rank| mesh.rank_of(mesh.coords(rank)) == rank));
    let larger = mesh.resized("TP2 DP3 PP2".parse().unwrap()).unwrap();
    assert_eq!(larger.groups(Axis::Pp)[..2], [[0, 2], [1, 3]]);
}

/// The same machine with ETP1 EP4: EDP is 2 and the expert groups span tp and cp ("parallel folding").
#[test]
fn expert_groups_are_megatrons() {
    let mesh = mesh("TP2 CP2 DP2 PP2 ETP1 EP4");
    assert_eq!(mesh.axis_size(Axis::Edp), 2);
    assert_eq!(mesh.groups(Axis::Ep)[0], [0, 1, 2, 3]);
    assert_eq!(mesh.groups(Axis::Edp)[..2], [[0, 4], [1, 5]]);
}

/// 8 ranks, TP2 DP2 PP2 with ETP2 EP2: expert tensor parallel ranks are neighbours, then expert parallel ones, and the
/// four ranks of a stage hold all experts of its layers once.
#[test]
fn expert_tensor_parallel_ranks_are_the_fastest() {
    let mesh = mesh("TP2 DP2 PP2 EP2 ETP2");
    assert_eq!(mesh.groups(Axis::Etp), [[0, 1], [2, 3], [4, 5], [6, 7]]);
    assert_eq!(mesh.groups(Axis::Ep), [[0, 2], [1, 3], [4, 6], [5, 7]]);
    assert_eq!(mesh.groups(Axis::EtpEp), [[0, 1, 2, 3], [4, 5, 6, 7]]);
    assert_eq!(mesh.groups(Axis::EtpEpPp), [(0..8).collect::<Vec<_>>()]);
    assert_eq!(mesh.groups(Axis::Edp), (0..8).map(|rank| vec![rank]).collect::<Vec<_>>());
}

#[test]
fn experts_are_within_neighbours() {
    let within = |layout: &str, ranks| layout.parse::<ParallelLayout>().unwrap().has_experts_within(ranks);
    assert!(within("TP4 EP2 ETP2", 4) && within("TP2", 2) && within("TP2 DP2 ETP1", 2) && within("CP2 ETP2", 2));
    assert!(!within("DP2 EP2", 1) && !within("DP2 ETP2", 1) && !within("TP2 DP2 ETP4", 2) && !within("CP2 ETP2", 1));
}

#[test]
fn expert_tp_follows_tp() {
    let mesh = mesh("TP2 DP4 EP2");
    assert_eq!(mesh.groups(Axis::Etp), mesh.groups(Axis::Tp));
    assert_eq!(mesh.groups(Axis::Ep)[0], [0, 2]);
    assert_eq!(mesh.groups(Axis::Edp)[0], [0, 4]);
}

#[test]
fn refusals_name_the_nearest_legal_values() {
    let refuse = |layout: ParallelLayout, world| layout.fill_world(world).and_then(Mesh::new).unwrap_err().to_string();
    let layout = ParallelLayout::default;
    assert_eq!(
        refuse(ParallelLayout { tp: 3, ..layout() }, 8),
        "tensor-parallel 3 does not divide world size 8; nearest legal: 2, 4"
    );
    assert_eq!(
        refuse(ParallelLayout { tp: 2, pp: 8, ..layout() }, 8),
        "pipeline-parallel 8 does not divide world size 8 / tensor-parallel 2; nearest legal: 4"
    );
    assert_eq!(
        refuse(ParallelLayout { dp: 4, ep: 3, ..layout() }, 4),
        "expert-parallel 3 does not divide 4 (ranks of a pipeline stage) / expert-tensor-parallel 1; nearest legal: 2, 4"
    );
    assert_eq!(
        refuse(ParallelLayout { cp: 0, ..layout() }, 4),
        "context-parallel 0 is not a number of ranks; nearest legal: 1"
    );
    assert!(refuse(ParallelLayout { vpp: 2, ..layout() }, 4).contains("pipeline-parallel 2 or more"));
    assert!("TP2 QP2".parse::<ParallelLayout>().unwrap_err().to_string().starts_with("`QP2` is not"));
    assert_eq!(
        "TP2 SP tp4".parse::<ParallelLayout>().unwrap_err().to_string(),
        "TP is twice in a layout; leave one out"
    );
}

/// ZeRO's groups: neighbours among the ranks that hold the same weights, in as many groups of those of the same experts.
#[test]
fn zero_groups_divide_the_ranks_that_hold_the_same() {
    let shards = |text: &str| {
        let layout: ParallelLayout = text.parse().unwrap();
        assert_eq!(layout.to_string(), text);
        [GridKind::Dense, GridKind::Expert].map(|grid| (layout.zero_shards(grid), layout.zero_stage(grid)))
    };
    assert_eq!(shards("DP4"), [(1, 0); 2]);
    assert_eq!(shards("CP2 DP4 ZeRO3"), [(8, 3); 2]);
    assert_eq!(shards("CP2 DP4 ZeRO3 Group2"), [(2, 3); 2]);
    assert_eq!(shards("DP4 ZeRO2 Group1"), [(1, 0); 2]);
    assert_eq!(shards("EP2 DP8 ZeRO1 Group4"), [(4, 1), (2, 1)]);
    assert_eq!(shards("EP4 DP8 ZeRO1 Group4"), [(4, 1), (1, 0)]);
    assert_eq!("dp4+zero3+group2".parse::<ParallelLayout>().unwrap().zero_group, Some(2));
    let refusal = |text: &str| text.parse::<ParallelLayout>().unwrap_err().to_string();
    assert_eq!(refusal("DP8 ZeRO1 Group3"), "zero-group 3 does not divide data-parallel 8; nearest legal: 2, 4");
    assert_eq!(
        refusal("CP2 DP2 ZeRO1 Group8"),
        "zero-group 8 does not divide 4 (data-parallel 2 · context-parallel 2); nearest legal: 4"
    );
    assert_eq!(
        refusal("DP8 EP4 ZeRO1 Group2"),
        "zero-group 2 makes 4 groups, and each holds whole experts: 4 must divide the 2 ranks that hold the same experts; \
         nearest legal: 4"
    );
    assert!(refusal("DP2 ZeRO1 Group0").starts_with("zero-group 0 is not a number of ranks"));
    assert!(refusal("DP2 Group2").ends_with("nearest legal: zero 1"));
}

#[test]
fn the_data_parallel_size_fills_the_world() {
    let layout = ParallelLayout { tp: 2, sp: true, ..Default::default() }.fill_world(8).unwrap();
    assert_eq!(layout.to_string(), "TP2 SP DP4");
    assert_eq!(ParallelLayout::default().to_string(), "TP1");
    assert_eq!("tp2+sp×DP4".parse::<ParallelLayout>().unwrap(), layout);
}

/// Any legal layout of at most 256 ranks.
fn layouts() -> impl Strategy<Value = ParallelLayout> {
    let size = || 1usize..=4;
    let index = any::<prop::sample::Index>;
    (size(), size(), size(), size(), index(), index(), 0u8..=3, index()).prop_map(
        |(tp, cp, dp, pp, etp, ep, zero, group)| {
            let divisors = |n: usize| (1..=n).filter(|x| n.is_multiple_of(*x)).collect::<Vec<_>>();
            let per_stage = tp * cp * dp;
            let etp = *etp.get(&divisors(per_stage));
            let ep = *ep.get(&divisors(per_stage / etp));
            let layout = ParallelLayout { tp, cp, dp, pp, etp: Some(etp), ep, zero, ..Default::default() };
            let groups = (0..=cp * dp).map(|size| ParallelLayout { zero_group: Some(size), ..layout.clone() });
            let legal: Vec<_> = std::iter::once(layout.clone()).chain(groups).filter(|l| l.check().is_ok()).collect();
            group.get(&legal).clone()
        },
    )
}

proptest! {
    #[test]
    fn groups_partition_the_world(layout in layouts()) {
        let mesh = Mesh::new(layout).unwrap();
        for axis in Axis::ALL {
            let groups = mesh.groups(axis);
            prop_assert!(groups.iter().all(|group| group.len() == mesh.axis_size(axis) && group.is_sorted()));
            let mut members: Vec<usize> = groups.concat();
            members.sort_unstable();
            prop_assert_eq!(members, (0..mesh.world_size()).collect::<Vec<_>>());
            for group in &groups {
                prop_assert!(group.iter().all(|&rank| mesh.group_of(axis, rank) == *group));
            }
        }
    }

    #[test]
    fn both_grids_have_the_same_stages(layout in layouts()) {
        let mesh = Mesh::new(layout).unwrap();
        for rank in 0..mesh.world_size() {
            prop_assert_eq!(mesh.dense.position(rank)[3], mesh.expert.position(rank)[3]);
        }
        let pp = [false, false, false, true];
        for rank in 0..mesh.world_size() {
            prop_assert_eq!(mesh.dense.group(rank, pp), mesh.expert.group(rank, pp));
        }
    }

    /// Whoever holds a grid's parameters once, and the copies of each of them, are all ranks, each once.
    #[test]
    fn dp_ranks_and_model_parallel_ranks_are_the_world(layout in layouts()) {
        let mesh = Mesh::new(layout).unwrap();
        for grid in [GridKind::Dense, GridKind::Expert] {
            for rank in 0..mesh.world_size() {
                let holders = mesh.group_of(grid.model_parallel(), rank);
                let mut all: Vec<usize> =
                    holders.iter().flat_map(|&holder| mesh.group_of(grid.dp_ranks(), holder)).collect();
                all.sort_unstable();
                prop_assert_eq!(all, (0..mesh.world_size()).collect::<Vec<_>>());
                prop_assert!(mesh.group_of(grid.tensor_parallel(), rank).iter().all(|rank| holders.contains(rank)));
            }
            // The rank in the group of all experts of a layer is that of its experts, then that inside them.
            let all = |rank: usize| mesh.group_of(Axis::EtpEp, rank);
            for rank in 0..mesh.world_size() {
                let at = mesh.coords(rank);
                prop_assert_eq!(all(rank)[at.ep * mesh.axis_size(Axis::Etp) + at.etp], rank);
            }
        }
    }

    #[test]
    fn coordinates_round_trip(layout in layouts()) {
        let mesh = Mesh::new(layout).unwrap();
        for rank in 0..mesh.world_size() {
            prop_assert_eq!(mesh.rank_of(mesh.coords(rank)), rank);
            // A rank's position inside its group of an axis is its coordinate along that axis.
            let coords = mesh.coords(rank);
            for (axis, index) in [(Axis::Tp, coords.tp), (Axis::Dp, coords.dp), (Axis::Ep, coords.ep), (Axis::Edp, coords.edp)] {
                prop_assert_eq!(mesh.group_of(axis, rank)[index], rank);
            }
        }
    }

    /// Both grids have as many groups, and the ranks of a group of experts are in one group of the other parameters.
    #[test]
    fn zero_groups_of_both_grids_are_the_same_ranks(layout in layouts()) {
        let mesh = Mesh::new(layout.clone()).unwrap();
        if layout.zero > 0 {
            let groups = |grid: GridKind| mesh.axis_size(grid.dp_ranks()) / layout.zero_shards(grid);
            prop_assert_eq!(groups(GridKind::Dense), groups(GridKind::Expert));
        }
        let dense = |rank: usize| {
            let ranks = mesh.group_of(Axis::DpCp, rank);
            ranks.iter().position(|&other| other == rank).map(|at| at / layout.zero_shards(GridKind::Dense))
        };
        for experts in mesh.groups(Axis::Edp).iter().flat_map(|ranks| ranks.chunks(layout.zero_shards(GridKind::Expert))) {
            prop_assert!(experts.iter().all(|&rank| dense(rank) == dense(experts[0])));
        }
    }

    #[test]
    fn layouts_read_what_they_write(layout in layouts()) {
        prop_assert_eq!(layout.to_string().parse::<ParallelLayout>().unwrap(), layout);
    }
}
