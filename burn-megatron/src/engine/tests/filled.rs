//! Held-out sequences of an MoE model that are padded: padding is not routed to experts.

use super::*;
use burn::tensor::FloatDType;
use models::layers::moe::{Capacity, DropPolicy};
use models::{Mixtral, MixtralConfig};

const ROW: usize = 8;

/// Experts that have room for no more than their local.
fn mixtral() -> MixtralConfig {
    let moe_capacity = Some(Capacity { factor: 1.0, policy: DropPolicy::Probs, pad: false });
    MixtralConfig { num_experts: 4, moe_capacity, ..MixtralConfig::tiny() }
}

/// Four sequences, of which the last two end after 3 and 6 predictions, padded with `fill`.
fn sequences(fill: i64) -> TokenBatch {
    let ids: Vec<i64> = (0..4 * (ROW as i64 + 1)).map(|place| place * 7919 % 101).collect();
    let mut batch = TokenBatch::from_sequences(&ids, ROW);
    let ends = [ROW, ROW, 3, 6];
    let counts = |place: usize| place % ROW < ends[place / ROW];
    for place in (0..4 * ROW).filter(|place| !counts(*place)) {
        (batch.tokens[place], batch.labels[place]) = (fill, fill);
    }
    batch.mask = Some((0..4 * ROW).map(counts).collect());
    batch
}

fn evaluate(layout: &str, micro: usize, batch: &TokenBatch) -> EvalReport {
    let mesh = Mesh::new(layout.parse().unwrap()).unwrap();
    let reports = launch(&mesh, &[Device::flex()], |rank: Rank| {
        let build = |part| {
            let params = ParamBuilder::new(&rank, FloatDType::F64, 7).with_part(part);
            Ok(Mixtral::build(&mixtral(), params)?)
        };
        let config = EngineConfig::new(micro, batch.sequences, LrConfig::constant(0.1));
        Ok(RankEngine::new(&rank, &mixtral().dims(), build, config)?.eval_step(batch)?)
    });
    reports.unwrap().remove(0)
}

/// The loss of each sequence as long as it is, by itself.
fn one_by_one(batch: &TokenBatch) -> f64 {
    let of_sequence = |(sequence, end): (usize, usize)| {
        let sequence = batch.slice(sequence..sequence + 1);
        let (tokens, labels) = (sequence.tokens[..end].to_vec(), sequence.labels[..end].to_vec());
        let batch = TokenBatch { sequences: 1, seq: end, tokens, labels, ..TokenBatch::default() };
        let report = evaluate("TP1", 1, &batch);
        report.loss * report.tokens as f64
    };
    batch.ends().into_iter().enumerate().map(of_sequence).sum::<f64>() / batch.counted() as f64
}

#[test]
fn the_loss_depends_neither_on_what_fills_rows_nor_on_rows_and_ranks() {
    // Not over tensor parallel ranks: each has capacity for its own share of the tokens.
    let expected = one_by_one(&sequences(0));
    for (layout, micro) in
        [("TP1", 1), ("TP1", 2), ("TP1", 4), ("DP2", 1), ("DP2", 2), ("DP2 EP2", 2), ("DP4 EP4", 1), ("PP2 DP2 EP2", 2)]
    {
        for fill in [0, 5] {
            let report = evaluate(layout, micro, &sequences(fill));
            assert_eq!(report.tokens, 25);
            assert!((report.loss - expected).abs() < 1e-12, "{layout} x{micro}: {} not {expected}", report.loss);
        }
    }
}

#[test]
fn sequences_end_after_their_last_prediction() {
    assert_eq!(sequences(0).ends(), [8, 8, 3, 6]);
    assert_eq!(TokenBatch { mask: None, ..sequences(0) }.ends(), [8; 4]);
    assert_eq!(TokenBatch { mask: Some(vec![false; 32]), ..sequences(0) }.ends(), [0; 4]);
}
