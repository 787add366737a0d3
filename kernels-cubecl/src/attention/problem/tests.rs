use super::*;

fn shape() -> AttentionShape {
    AttentionShape {
        batch: 2,
        heads: 8,
        kv_heads: 2,
        queries: 300,
        keys: 300,
        head_dim: 128,
        value_dim: 128,
        causal: true,
        window: None,
    }
}

#[test]
fn what_no_kernel_computes_is_refused() {
    assert_eq!(shape().check_sizes(), Ok(()));
    assert_eq!(
        AttentionShape { head_dim: 80, ..shape() }.check_sizes(),
        Err(AttentionError::HeadDim { head_dim: 80, value_dim: 128 })
    );
    assert_eq!(
        AttentionShape { kv_heads: 3, ..shape() }.check_sizes(),
        Err(AttentionError::Heads { heads: 8, kv_heads: 3 })
    );
    assert_eq!(AttentionShape { batch: 0, ..shape() }.check_sizes(), Err(AttentionError::Empty("batch")));
    assert_eq!(AttentionShape { window: Some(0), ..shape() }.check_sizes(), Err(AttentionError::Empty("window")));
    let dropout = |p| CallOptions { dropout: Some(Dropout::whole(p, 1, &shape())), ..Default::default() };
    assert_eq!(shape().check_options(&dropout(0.1)), Ok(()));
    assert_eq!(shape().check_options(&dropout(1.0)), Err(AttentionError::Probability(1.0)));
}

#[test]
fn a_window_beyond_every_key_is_none() {
    let causal = |window| AttentionShape { window: Some(window), ..shape() };
    let has_window =
        |shape: &AttentionShape, options: &CallOptions| crate::attention::Variant::of(shape, options).window;
    assert!(has_window(&causal(299), &CallOptions::default()));
    assert!(!has_window(&causal(300), &CallOptions::default()));
    let further = CallOptions { first_query: Some(100), ..Default::default() };
    assert!(has_window(&causal(399), &further));
    assert!(!has_window(&causal(400), &further));
    let full = |window| AttentionShape { causal: false, keys: 200, ..causal(window) };
    assert!(has_window(&full(299), &CallOptions::default()));
    assert!(!has_window(&full(300), &CallOptions::default()));
}

#[test]
fn statistics_have_whole_blocks_of_rows() {
    assert_eq!(shape().padded_queries(), 384);
    assert_eq!(shape().statistics_len(), 2 * 8 * 384);
}

#[test]
fn a_causal_pass_counts_half_the_pairs() {
    let full = AttentionShape { causal: false, ..shape() }.forward_flops();
    assert_eq!(shape().forward_flops(), full / 2.0);
    assert_eq!(full, 4.0 * 2.0 * 8.0 * 128.0 * 300.0 * 300.0);
}

#[test]
fn a_window_counts_what_it_leaves() {
    let full = AttentionShape { causal: false, ..shape() };
    let flops = |shape: AttentionShape| shape.forward_flops() / (4.0 * 2.0 * 8.0 * 128.0);
    assert_eq!(flops(AttentionShape { window: Some(100), ..shape() }), 300.0 * 100.0 - 5000.0);
    assert_eq!(flops(AttentionShape { window: Some(100), ..full }), 2.0 * (300.0 * 100.0 - 5000.0));
    assert_eq!(flops(AttentionShape { window: Some(300), ..full }), 300.0 * 300.0);
}
