//! Plans on modules that stay where they are.

use super::{Plan, PlanError, attributes::attributes, check, parameters::parameters, plan::along};
use crate::logical::Placement::{self, Shard};
use burn::module::{Lora, Module};
use burn::nn::LinearConfig;
use burn::nn::transformer::{TransformerEncoder, TransformerEncoderConfig};
use burn::tensor::Device;
use std::collections::HashMap;

fn encoder(heads: usize) -> TransformerEncoder {
    TransformerEncoderConfig::new(12, 24, heads, 1).init(&Device::flex())
}

fn placements(plan: &Plan, heads: usize, ranks: usize) -> Result<HashMap<String, Placement>, PlanError> {
    let model = encoder(heads);
    plan.placements(&parameters(&model), &attributes(&model, &["n_heads", "n_heads_kv"]), ranks)
}

#[test]
fn types_are_sharded_as_in_megatron() {
    let placements = placements(&Plan::auto(), 4, 2).unwrap();
    let of = |path: &str| placements.get(&format!("layers.0.{path}")).copied();
    assert_eq!(of("mha.query.weight"), Some(Shard(1)));
    assert_eq!(of("mha.value.bias"), Some(Shard(0)));
    assert_eq!((of("mha.output.weight"), of("mha.output.bias")), (Some(Shard(0)), None));
    assert_eq!((of("pwff.linear_inner.bias"), of("pwff.linear_outer.weight")), (Some(Shard(0)), Some(Shard(0))));
    assert_eq!(of("norm_1.gamma"), None);
    assert_eq!(placements.len(), 10);
}

#[test]
fn patterns_win_over_types_and_later_ones_over_earlier_ones() {
    let plan = Plan::auto().replicate("pwff").columns("pwff.*_inner.weight").replicate("mha");
    let placements = placements(&plan, 4, 2).unwrap();
    assert_eq!(placements, HashMap::from([("layers.0.pwff.linear_inner.weight".to_string(), Shard(1))]));
}

/// By the path alone, the matrix of a sharded layer's adapter that is `[in, r]` would be sharded along r.
#[test]
fn adapters_are_sharded_as_what_they_adapt() {
    let model = encoder(4).apply_lora(Lora::new(3, 4.0));
    let plan = Plan::auto().rows("pwff.linear_inner");
    let heads = attributes(&model, &["n_heads", "n_heads_kv"]);
    let placements = plan.placements(&parameters(&model), &heads, 2).unwrap();
    let of = |path: &str| placements.get(&format!("layers.0.{path}")).copied();
    let adapter = |layer: &str| ["a", "b"].map(|part| of(&format!("{layer}.weight.lora.{part}")));
    assert_eq!((adapter("mha.query"), of("mha.query.weight")), ([None, Some(Shard(1))], Some(Shard(1))));
    assert_eq!(adapter("mha.output"), [Some(Shard(0)), None]);
    assert_eq!(adapter("pwff.linear_inner"), [Some(Shard(0)), None]);
    assert_eq!(along(&[12, 24], Shard(1), &[24]), Some(Shard(0)));
    let parts = |dim| Placement::in_parts(dim, &[2, 1]).unwrap();
    assert_eq!(
        (along(&[12, 24], parts(1), &[3, 24]), along(&[12, 24], parts(1), &[24])),
        (Some(parts(1)), Some(parts(0)))
    );
    assert_eq!((along(&[12, 24], Shard(0), &[24]), along(&[12, 24], Shard(0), &[12])), (None, None));
}

#[test]
fn an_unknown_name_is_refused_with_the_nearest_path() {
    let error = placements(&Plan::auto().rows("linear_outer|linear_iner"), 4, 2).unwrap_err();
    let text = error.to_string();
    assert!(text.contains("pattern `linear_iner` matches no parameter"), "{text}");
    assert!(text.contains("nearest is `layers.0.pwff.linear_inner."), "{text}");
}

#[test]
fn heads_and_sizes_that_do_not_divide_are_refused_with_the_nearest_legal_ones() {
    let text = placements(&Plan::auto(), 3, 2).unwrap_err().to_string();
    assert_eq!(
        text,
        "plan: `layers.0.mha` has 3 heads (`n_heads`), which 2 ranks of axis tp do not divide; 3 heads can be on 1 ranks"
    );
    let text = placements(&Plan::auto().replicate("mha"), 3, 5).unwrap_err().to_string();
    assert_eq!(
        text,
        "plan: `layers.0.pwff.linear_inner.weight` has 24 elements along dimension 1, which 5 ranks of axis tp do not \
         divide; the nearest sizes are 20 and 25, or .replicate(\"layers.0.pwff.linear_inner.weight\") after Plan::auto()"
    );
}

#[test]
fn parts_are_those_of_the_output_and_the_ranks_divide_each() {
    let of = |plan: Plan, ranks| placements(&plan.replicate("linear_outer"), 4, ranks);
    let inner = |sizes: &[usize]| Plan::default().columns_in("linear_inner", sizes);
    let layer = |at: fn(usize) -> Placement| {
        let of_field = |field: &str, dim| (format!("layers.0.pwff.linear_inner.{field}"), at(dim));
        HashMap::from([of_field("weight", 1), of_field("bias", 0)])
    };
    let thirds = of(Plan::default().columns_in_parts("linear_inner", 3), 4).unwrap();
    assert_eq!(thirds, layer(|dim| Placement::Strided { dim, blocks: 3 }));
    assert_eq!(of(inner(&[12, 8, 4]), 4).unwrap(), layer(|dim| Placement::in_parts(dim, &[3, 2, 1]).unwrap()));
    let error = |plan, ranks| of(plan, ranks).unwrap_err().to_string();
    let path = "plan: `layers.0.pwff.linear_inner.weight` has";
    assert_eq!(
        error(inner(&[12, 8, 4]), 8),
        format!(
            "{path} parts of [12, 8, 4] elements along dimension 1, and 8 ranks of axis tp do not divide 12; these parts can be \
             on 4 ranks"
        )
    );
    let sum = |parts: &str| format!("{path} 24 elements along dimension 1; the plan has parts of {parts} in sum.");
    assert!(error(inner(&[12, 8, 2]), 2).starts_with(&sum("[12, 8, 2] for it, 22")));
    let fifths = Plan::default().columns_in_parts("linear_inner", 5);
    assert!(error(fifths, 1).starts_with(&sum("[5, 5, 5, 5, 5] for it, 25")));
    assert!(error(inner(&[]), 1).starts_with(&sum("[] for it, 0")));
}

/// Else `ayer` would match all that a field `layers` has.
#[test]
fn a_field_of_a_larger_module_is_matched_and_named_by_its_own_paths() {
    let plan = Plan::default().columns("pwff.linear_inner").within("layers.0");
    assert_eq!(placements(&plan, 4, 2).unwrap().len(), 2);
    let text = placements(&Plan::default().columns("ayer").within("layers"), 4, 2).unwrap_err().to_string();
    assert!(text.contains("pattern `ayer` matches no parameter; the nearest is `0."), "{text}");
}

/// `a` is in `bias` as well.
#[test]
fn a_short_pattern_that_a_path_contains_by_chance_is_named() {
    let linear = LinearConfig::new(4, 1).init(&Device::flex());
    let text = check(&linear, &Plan::default().rows("weight").columns("x|a"), 2, false).unwrap_err().to_string();
    assert!(text.contains("pattern `x` matches no parameter"), "{text}");
    assert!(text.contains("`|` between alternatives and `*` for any characters"), "{text}");
    let text = check(&linear, &Plan::default().columns("a").rows("weight"), 2, false).unwrap_err().to_string();
    let expected = "`bias` has 1 elements along dimension 0, which 2 ranks of axis tp do not divide; the nearest size is 2, or \
                    .replicate(\"bias\") after pattern `a`, which the path contains";
    assert!(text.contains(expected), "{text}");
}

#[test]
fn one_rank_needs_nothing_to_shard() {
    let linear = LinearConfig::new(4, 4).init(&Device::flex());
    assert_eq!(check(&linear, &Plan::auto(), 1, false), Ok(()));
    assert!(matches!(check(&linear, &Plan::auto(), 2, false), Err(PlanError::Nothing { ranks: 2, .. })));
    assert!(matches!(check(&linear, &Plan::auto().rows("wieght"), 1, false), Err(PlanError::Unmatched { .. })));
}
