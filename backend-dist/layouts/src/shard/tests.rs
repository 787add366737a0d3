use proptest::prelude::*;

use super::*;
use crate::mesh::GridKind;

/// The same section on every rank of a group.
fn everywhere(size: usize, make: impl Fn(GroupPosition) -> Section) -> Vec<Section> {
    (0..size).map(|rank| make(GroupPosition { rank, size })).collect()
}

/// `(shape, dim, parts, padded, ranks)` of any legal shards.
fn any_shards() -> impl Strategy<Value = (Vec<usize>, usize, usize, usize, usize)> {
    (prop::collection::vec(1usize..6, 1..4), any::<prop::sample::Index>(), 1usize..5, 1usize..4, 0usize..3).prop_map(
        |(shape, dim, parts, copies, slack)| {
            let dim = dim.index(shape.len());
            let padded = shape[dim].next_multiple_of(parts) + slack * parts;
            (shape, dim, parts, padded, parts * copies)
        },
    )
}

proptest! {
    /// Slicing on every rank and assembling gives the tensor back, whatever the shards, the copies and the padding.
    #[test]
    fn slices_assemble((shape, dim, parts, padded, ranks) in any_shards()) {
        let global: Vec<f64> = (1..=shape.iter().product::<usize>()).map(|value| value as f64).collect();
        let sections = everywhere(ranks, |at| Section::split_padded("w", &shape, dim, parts, padded, at));
        let locals: Vec<Vec<f64>> = sections.iter().map(|section| section.slice(&global)).collect();
        let slices = sections.iter().zip(locals.iter().map(Vec::as_slice));
        let assembled = assemble(slices).unwrap();
        prop_assert_eq!(&assembled["w"], &HostTensor { shape: shape.clone(), data: global });
        // Everything but padding is a global element, and copies are exact.
        let covered: usize = sections.iter().filter(|s| s.is_owned()).map(|s| s.slice(&vec![1; s.global_shape.iter().product()]).iter().sum::<usize>()).sum();
        prop_assert_eq!(covered, shape.iter().product::<usize>());
    }

    /// Initial values do not depend on the layout, and padding is zero.
    #[test]
    fn initial_values_are_slices_of_one_tensor((shape, dim, parts, padded, ranks) in any_shards(), seed: u64) {
        let init = Init::Normal { std: 0.02 };
        let whole = Section::replicated("w", &shape, GroupPosition { rank: 0, size: 1 }).initial(init, seed);
        for section in everywhere(ranks, |at| Section::split_padded("w", &shape, dim, parts, padded, at)) {
            let local = section.initial(init, seed);
            prop_assert_eq!(&local, &section.slice(&whole));
            let middle = local.len() / 3..local.len() / 3 * 2;
            prop_assert_eq!(section.initial_part(init, seed, middle.clone(), |value| value), &local[middle]);
        }
    }

    /// A source that reads only the box of a section gives the same as slicing the whole tensor.
    #[test]
    fn padding_a_box_is_slicing((shape, dim, parts, padded, ranks) in any_shards()) {
        let data: Vec<f64> = (1..=shape.iter().product::<usize>()).map(|value| value as f64).collect();
        let global = HostTensor { shape: shape.clone(), data };
        for section in everywhere(ranks, |at| Section::split_padded("w", &shape, dim, parts, padded, at)) {
            let inside = global.read_box(&section.ranges());
            prop_assert_eq!(section.pad(&inside), section.slice(&global.data));
            prop_assert_eq!(section.unpad(&section.slice(&global.data)), inside);
        }
    }
}

/// Two key-value heads over four ranks: neighbours hold the same head and the first of them owns it.
#[test]
fn fewer_parts_than_ranks() {
    let sections = everywhere(4, |at| Section::split("k", &[2, 3], 0, 2, at));
    let parts: Vec<usize> = sections.iter().map(|section| section.split.unwrap().part).collect();
    assert_eq!(parts, [0, 0, 1, 1]);
    assert_eq!(sections.iter().map(Section::is_owned).collect::<Vec<_>>(), [true, false, true, false]);
}

#[test]
fn gradient_sums_are_where_ranks_hold_partial_gradients() {
    let at = GroupPosition { rank: 1, size: 4 };
    let qkv = vec![
        Section::split("q", &[8, 3], 0, 4, at),
        Section::split("k", &[2, 3], 0, 2, at),
        Section::split("v", &[2, 3], 0, 2, at),
    ];
    let qkv = ParamSpec::new(qkv, false);
    assert_eq!(qkv.local_shape(), [4, 3]);
    assert_eq!(
        qkv.gradient_sums(),
        [GradientSum { elements: 6..9, ranks: 2 }, GradientSum { elements: 9..12, ranks: 2 }]
    );
    let norm = || vec![Section::replicated("norm", &[3], at)];
    assert_eq!(ParamSpec::new(norm(), false).gradient_sums(), []);
    assert_eq!(ParamSpec::new(norm(), true).gradient_sums(), [GradientSum { elements: 0..3, ranks: 4 }]);
    assert!(qkv.weight_decay && !ParamSpec::new(norm(), false).weight_decay);
}

#[test]
fn a_missing_slice_is_an_error() {
    let sections = everywhere(2, |at| Section::split("w", &[4], 0, 2, at));
    let only = [1.0, 2.0];
    let error = assemble([(&sections[0], only.as_slice())]).unwrap_err();
    assert_eq!(error.to_string(), "global tensor `w`: 2 of 4 elements are on the given ranks");
}

/// The published 64-bit FNV-1a values of "" and "foobar".
#[test]
fn the_hash_is_fnv() {
    assert_eq!(stable_hash(""), 0xcbf2_9ce4_8422_2325);
    assert_eq!(stable_hash("foobar"), 0x8594_4171_f739_67e8);
}

#[test]
fn values_are_put_between_padding() {
    let padded_columns = Section::split_padded("c", &[2, 3], 1, 2, 4, GroupPosition { rank: 1, size: 2 });
    assert_eq!(padded_columns.pad(&[7, 8]), [7, 0, 8, 0]);
}

#[test]
fn units_are_ordered_as_a_forward_pass_uses_them() {
    let order =
        [Unit::Tied, Unit::Embedding, Unit::Layer(0), Unit::Layer(1), Unit::Experts(1), Unit::Layer(2), Unit::Head];
    assert!(order.is_sorted() && order.windows(2).all(|pair| pair[0] < pair[1]));
    assert_eq!(order.map(Unit::layer), [None, None, Some(0), Some(1), Some(1), Some(2), None]);
    assert_eq!([Unit::Layer(1), Unit::Experts(1)].map(Unit::grid), [GridKind::Dense, GridKind::Expert]);
}
