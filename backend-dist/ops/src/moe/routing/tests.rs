use super::*;
use burn::tensor::Device;

fn chosen(choice: &[[i32; 2]], experts: usize) -> ExpertChoice {
    let values: Vec<i32> = choice.iter().flatten().copied().collect();
    ExpertChoice::of(table(values, [choice.len(), 2], &Device::flex()), experts)
}

#[test]
fn the_best_are_chosen_the_first_of_equal_ones() {
    let scores = Tensor::from_data([[1.0, 3.0, 3.0, 3.0], [f32::NAN, 1.0, 0.0, -1.0], [0.0; 4]], &Device::flex());
    let plain = Selection { top_k: 2, groups: None };
    assert_eq!(ints(&choose(scores.clone(), None, 2, plain).table()), [1, 2, 1, 2, -1, -1]);
    let bias = Tensor::from_data([0.0, 0.0, 0.0, 9.0], &Device::flex());
    let grouped = Selection { top_k: 2, groups: Some([2, 1]) };
    assert_eq!(ints(&choose(scores, Some(bias), 3, grouped).table()), [2, 3, 2, 3, 2, 3]);
}

#[test]
fn counts_and_masks() {
    let chosen = chosen(&[[0, 2], [2, -1], [-1, -1], [1, 2]], 3);
    assert_eq!(
        TokenCounts::read(&[&chosen.count(1), &chosen.count(2)], || ()).0,
        [vec![1, 1, 3], vec![1, 0, 1, 0, 1, 2]]
    );
    let others: Vec<bool> = chosen.unused().into_data().iter::<bool>().collect();
    let of = |a, b, c| [a, b, c];
    let expected = [of(false, true, false), of(true, true, false), of(true, true, true), of(true, false, false)];
    assert_eq!(others, expected.concat());
}

#[test]
fn copies_stand_by_expert_and_token() {
    let chosen = chosen(&[[0, 2], [2, -1], [-1, -1], [1, 2]], 3);
    let starts = RowStarts { rows: vec![Some(0), None, Some(2)], shards: 1, each: 3, capacity: Some(2), count: 5 };
    let (copies, slots) = chosen.place(&chosen.count(1), &starts);
    let values = |map: &RowMap| {
        let (to, back) = map.tables();
        (ints(&to), ints(&back))
    };
    assert_eq!(values(&copies), (vec![0, -1, 0, 1, -1], vec![0, 2, 3, -1, -1, -1, -1, -1]));
    let of_slots = [0, -1, 2, -1, -1, 3, -1, -1, -1, -1, -1, -1];
    assert_eq!(values(&slots), (vec![0, -1, 2, 5, -1], of_slots.to_vec()));
}

#[test]
fn runs_are_copied() {
    let runs = [Run { to: 3, from: 0, len: 2 }, Run { to: 0, from: 3, len: 1 }, Run { to: 2, from: 1, len: 0 }];
    let others = [Run { to: 0, from: 1, len: 1 }];
    let maps = RowMap::of_runs(&[([4, 6], runs.to_vec()), ([2, 1], others.to_vec())], &Device::flex());
    let tables = maps.iter().map(RowMap::tables).map(|(to, back)| (ints(&to), ints(&back)));
    let expected = [(vec![3, -1, -1, 0, 1, -1], vec![3, 4, -1, 0]), (vec![1], vec![-1, 0])];
    assert_eq!(tables.collect::<Vec<_>>(), expected);
}

#[test]
fn rows_in_order_stand_where_their_starts_say() {
    let chosen = chosen(&[[0, 3], [1, 3], [2, 3], [0, 1]], 4);
    let order = RowOrder { shards: 1, each: 2, chunks: 2, count: 8 };
    let starts = order.starts(&[2, 2, 1, 3]);
    assert_eq!(starts.rows, [Some(0), Some(3), Some(2), Some(5)]);
    let cut = RowOrder { shards: 2, chunks: 1, ..order }.starts(&[2, 2, 1, 3]);
    assert_eq!(cut.rows, [0, 2, 8, 9, 4, 6, 12, 13].map(Some));
    let tables = |maps: (RowMap, RowMap)| [maps.0, maps.1].map(|map| ints(&map.tables().0));
    let counted = chosen.count(1);
    assert_eq!(tables(chosen.place_in_order(&counted, &order)), tables(chosen.place(&counted, &starts)));
}
