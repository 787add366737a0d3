//! Layouts that a model allows, and the nearest to those that it does not.

use super::*;

const DIMS: ModelDims = ModelDims {
    vocab: 96,
    hidden: 48,
    heads: 12,
    kv_heads: 4,
    intermediate: 48,
    experts: None,
    layers: 2,
    max_positions: Some(64),
    states: None,
};

fn refuse(layout: &str, seq: usize) -> String {
    DIMS.check(&layout.parse().unwrap(), seq).unwrap_err().to_string()
}

#[test]
fn experts_are_divided_over_the_ranks_that_there_are() {
    let dims = ModelDims { experts: Some(ExpertDims { count: 6, intermediate: 20 }), ..DIMS };
    let refuse = |layout: &str| dims.check(&layout.parse().unwrap(), 60).unwrap_err().to_string();
    assert_eq!(refuse("DP4 EP4"), "expert-parallel 4 does not divide the model's experts (6); nearest legal: 2");
    assert_eq!(
        refuse("TP4 DP3 ETP3"),
        "expert-tensor-parallel 3 does not divide the model's expert width (20); nearest legal: 2, 4"
    );
    assert!(refuse("TP12").contains("expert-tensor-parallel 12 does not divide"), "the same as tensor parallel");
    for layout in ["DP6 EP6", "TP2 EP3 DP3", "TP4 ETP1 EP2", "TP12 ETP2 EP6"] {
        assert_eq!(dims.check(&layout.parse().unwrap(), 60), Ok(()), "{layout}");
    }
    assert_eq!(
        DIMS.check(&"DP2 EP2".parse().unwrap(), 60).unwrap_err().to_string(),
        "expert-parallel 2: the model has no experts; nearest legal: 1"
    );
}

#[test]
fn refusals_name_the_nearest_legal_values() {
    assert_eq!(
        refuse("TP5", 64),
        "tensor-parallel 5 does not divide the model's attention heads (12); nearest legal: 4, 12"
    );
    assert_eq!(
        refuse("TP3", 64),
        "tensor-parallel 3 and 4 key-value heads: one must divide the other; nearest legal tensor-parallel: 2, 4"
    );
    assert_eq!(
        refuse("TP4 SP", 63),
        "sequence length 63 is not a multiple of tensor-parallel 4, which sequence parallelism needs; nearest legal: 60, 64"
    );
    assert_eq!(refuse("TP1", 65), "sequence length 65 exceeds the model's 64 learned positions; nearest legal: 64");
    assert_eq!(
        refuse("CP4", 60),
        "sequence length 60 is not a multiple of 8: context-parallel 4 splits it into 8 chunks, and sequence \
         parallelism splits a rank's chunks over the tensor parallel ranks; nearest legal: 56, 64"
    );
    assert!(refuse("TP4 SP CP2", 60).contains("not a multiple of 8"));
    assert!(refuse("DP2 EP2", 64).contains("expert-parallel 2"));
}

#[test]
fn legal_layouts_pass() {
    for layout in ["TP1", "TP2 SP", "TP4 SP DP2", "TP12", "CP3", "TP2 SP CP5"] {
        assert_eq!(DIMS.check(&layout.parse().unwrap(), 60), Ok(()), "{layout}");
    }
    assert_eq!(DIMS.check(&"TP4".parse().unwrap(), 63), Ok(()));
}
