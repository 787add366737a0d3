use proptest::prelude::*;

use super::*;
use crate::schedule::Placement;

fn loops(ranks: usize, chunks: usize) -> Placement {
    Placement::Loop { ranks, chunks }
}

fn expected(layers: usize, mtp_layers: usize, pipeline_parallel: usize) -> Expected {
    Expected { layers, mtp_layers, pipeline_parallel, virtual_pipeline: None }
}

fn counts(split: Split) -> Vec<usize> {
    split.layout().unwrap().layer_counts()
}

#[test]
fn equal_parts_as_megatron() {
    assert_eq!(counts(Split::equal(32, loops(4, 1))), [8; 4]);
    assert_eq!(counts(Split::equal(32, loops(4, 2))), [4; 8]);
    let counted = |layers, ranks, chunks, count_embedding, count_loss| Split {
        count_embedding,
        count_loss,
        ..Split::equal(layers, loops(ranks, chunks))
    };
    assert_eq!(counts(counted(30, 4, 1, true, true)), [7, 8, 8, 7]);
    assert_eq!(counts(counted(31, 4, 2, true, false)), [3, 4, 4, 4, 4, 4, 4, 4]);
    assert_eq!(counts(counted(2, 4, 1, true, true)), [0, 1, 1, 0]);
    assert_eq!(counts(counted(5, 1, 1, true, true)), [5]);
}

#[test]
fn ends_with_their_own_numbers() {
    let ends = |placement, first, last| Split { first, last, ..Split::equal(32, placement) };
    assert_eq!(counts(ends(loops(4, 1), Some(5), Some(7))), [5, 10, 10, 7]);
    assert_eq!(counts(ends(loops(4, 1), None, Some(5))), [9, 9, 9, 5]);
    assert_eq!(counts(ends(loops(2, 1), Some(20), None)), [20, 12]);
    assert_eq!(counts(ends(loops(2, 1), Some(20), Some(12))), [20, 12]);
    assert_eq!(counts(ends(loops(3, 2), Some(8), Some(4))), [4, 10, 2, 4, 10, 2]);
    // In a V the first rank has the first and the last stage.
    assert_eq!(counts(ends(Placement::V { ranks: 3 }, Some(8), Some(4))), [4, 10, 2, 2, 10, 4]);
}

#[test]
fn refused_splits_name_the_nearest() {
    let split = Split::equal(30, loops(4, 1));
    for (split, words) in [
        (
            split,
            "layers 30 do not divide over 4 ranks of 1 stages; nearest legal: layers 28, 32, or pipeline-layout Et*7|(t*8|)*2t*7L",
        ),
        (Split { count_loss: true, ..split }, "layers 30 and the loss do not divide"),
        (Split { first: Some(40), ..split }, "first-stage-layers 40 is more than the 30 layers"),
        (Split { first: Some(6), last: Some(40), ..split }, "last-stage-layers 40 is more than the 24 layers"),
        (
            Split { first: Some(6), count_loss: true, ..split },
            "first-stage-layers cannot be used together with count-loss",
        ),
        (
            Split { first: Some(7), last: Some(8), ..split },
            "less those of the first and last rank do not divide over 2 ranks of 1 stages; nearest legal: layers 29, 31",
        ),
        (Split { last: Some(8), ..Split::equal(8, loops(1, 1)) }, "last-stage-layers 8 needs pipeline-parallel 2"),
        (
            Split { first: Some(8), last: Some(8), ..Split::equal(17, loops(2, 1)) },
            "leave 1 of 17 layers for no rank in between; nearest legal: last-stage-layers 9",
        ),
        (
            Split { first: Some(7), ..Split::equal(32, loops(4, 2)) },
            "first-stage-layers 7 do not divide over the 2 stages of their rank; nearest legal: first-stage-layers 6, 8",
        ),
        (Split::equal(2, loops(4, 1)), "nearest legal: layers 4"),
    ] {
        let error = split.layout().unwrap_err().to_string();
        assert!(error.contains(words), "{error}");
    }
}

#[test]
fn megatrons_example() {
    let layout = StageLayout::parse("Et*3|(tt|)*29,m|L", &expected(61, 1, 16)).unwrap();
    let stages = layout.stages();
    assert_eq!(stages.len(), 32);
    assert_eq!(stages[0], Stage { embedding: true, layers: 0..3, mtp_layers: 0..0, loss: false });
    assert_eq!(stages[29].layers, 59..61);
    assert_eq!(stages[30], Stage { embedding: false, layers: 61..61, mtp_layers: 0..1, loss: false });
    assert_eq!(stages[31], Stage { embedding: false, layers: 61..61, mtp_layers: 1..1, loss: true });
    assert_eq!(layout.to_string(), "Ettt|(tt|)*29m|L");
}

/// The examples in Megatron's own comments on its parser.
#[test]
fn repetitions_unroll_as_megatrons() {
    let same = |a: &str, b: &str| {
        assert_eq!(StageLayout::parse_unchecked(a).unwrap(), StageLayout::parse_unchecked(b).unwrap(), "{a}");
    };
    same("Et(tt|t|tt)*2,tL", "Ettt|t|tttt|t|tttL");
    same("E(t)*3|L", "Ettt|L");
    same("Et(t|t)*0L", "EtL");
    same("E|*3t|L", "E|||t|L");
    same("Et(t*2|)*3L", "Ettt|tt|tt|L");
    same("E,t,,t|,L", "Ett|L");
}

#[test]
fn refused_strings_say_where_and_why() {
    for (text, ranks, words) in [
        ("Etx|ttL", 2, "`x` cannot stand here at character 3; legal: E t m L"),
        ("E t|ttL", 2, "` ` cannot stand here at character 2"),
        ("E(t|tttL", 2, "a `(` is open"),
        ("E(t|)tttL", 2, "`)` without `*`"),
        ("E((t|)*2)*2tttL", 2, "`(` cannot stand here"),
        ("Et*|tttL", 2, "`*` without a number"),
        ("Et*99999|tttL", 2, "`*` without a number up to 10000"),
        ("*3E|tttL", 2, "`*` cannot stand here at character 1"),
        ("Et|t|ttL", 2, "has 3 stages, no multiple of pipeline-parallel 2; nearest legal: 2, 4"),
        ("Et|ttL", 2, "has 3 `t`, the model has 4"),
        ("Ett|tmtL", 2, "`m` comes after every `t`"),
        ("Ett|ttmL", 2, "has 1 `m`, the model has 0"),
        ("tEt|ttL", 2, "exactly one `E`"),
        ("EtEt|ttL", 2, "exactly one `E`"),
        ("Ett|tLt", 2, "exactly one `L`"),
        ("Ett|tt", 2, "exactly one `L`"),
        ("", 2, "exactly one `E`"),
        ("Ett|ttm|mL", 3, "every `m` belongs into the same stage"),
    ] {
        let error = StageLayout::parse(text, &expected(4, 0, ranks)).unwrap_err().to_string();
        assert!(error.contains(words), "{text}: {error}");
    }
    let error = StageLayout::parse("Ettt|tm|t|L", &expected(4, 1, 2)).unwrap_err().to_string();
    assert!(error.contains("`m` comes after"), "{error}");
    let error = StageLayout::parse("Ettt|tm||L", &expected(4, 1, 2)).unwrap_err().to_string();
    assert!(error.contains("`m` belongs into the last stage of a rank"), "{error}");
    let chunks = Expected { virtual_pipeline: Some(2), ..expected(4, 0, 2) };
    let error = StageLayout::parse("Ett|ttL", &chunks).unwrap_err().to_string();
    assert!(error.contains("has 1 stages per rank, virtual-pipeline is 2"), "{error}");
}

proptest! {
    #[test]
    fn strings_read_back(counts in prop::collection::vec(0_usize..6, 1..24), mtp in 0_usize..3) {
        let mut layout = StageLayout::from_layer_counts(&counts);
        layout.stages.last_mut().unwrap().mtp_layers = 0..mtp;
        let text = layout.to_string();
        let model = expected(counts.iter().sum(), mtp, counts.len());
        prop_assert_eq!(StageLayout::parse(&text, &model).unwrap(), layout, "{}", text);
    }

    #[test]
    fn every_layer_is_in_one_stage(
        layers in 1_usize..200, ranks in 1_usize..17, chunks in 1_usize..5, v: bool,
        ends in (prop::option::of(0_usize..40), prop::option::of(0_usize..40)), counted in any::<(bool, bool)>(),
    ) {
        let placement = if v { Placement::V { ranks } } else { Placement::Loop { ranks, chunks } };
        let split = Split {
            layers, placement, first: ends.0, last: ends.1, count_embedding: counted.0, count_loss: counted.1,
        };
        for layout in [split.layout(), Split { first: None, last: None, ..split }.layout()].into_iter().flatten() {
            prop_assert_eq!(layout.stages().len(), placement.stages());
            prop_assert_eq!(layout.layer_counts().iter().sum::<usize>(), layers);
        }
        if let Ok(layout) = split.layout() {
            let of = |rank| (0..placement.chunks()).map(|c| layout.layer_counts()[placement.stage(rank, c)]).sum::<usize>();
            prop_assert!(split.first.is_none_or(|first| first == of(0)));
            prop_assert!(split.last.is_none_or(|last| last == of(ranks - 1)));
        }
    }

    #[test]
    fn balanced_stages_differ_by_one_layer(layers in 0_usize..300, stages in 1_usize..40) {
        let counts = StageLayout::balanced(layers, stages).layer_counts();
        prop_assert_eq!(counts.iter().sum::<usize>(), layers);
        prop_assert!(counts.iter().max().unwrap() - counts.iter().min().unwrap() <= 1);
    }

    #[test]
    fn no_string_panics(text in "[EtmL|,()*0-9x]{0,24}") {
        _ = StageLayout::parse(&text, &expected(4, 0, 2));
    }
}
