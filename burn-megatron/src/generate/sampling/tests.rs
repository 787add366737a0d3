//! Which tokens each option leaves, and how often they come.

use super::*;

/// Logits of given probabilities.
fn logits(probabilities: &[f64]) -> Vec<f64> {
    probabilities.iter().map(|p| p.ln() + 3.0).collect()
}

/// The tokens that a filter keeps of such probabilities.
fn kept(probabilities: &[f64], filter: impl FnOnce(&mut Candidates)) -> Vec<usize> {
    let logits = logits(probabilities);
    let mut candidates = Candidates::all(&logits, logits[likeliest(&logits)], 1.0);
    filter(&mut candidates);
    candidates.tokens
}

fn top_k(probabilities: &[f64], k: usize) -> Vec<usize> {
    kept(probabilities, |all| all.keep_top_k(k))
}

fn top_p(probabilities: &[f64], p: f64) -> Vec<usize> {
    kept(probabilities, |all| all.keep_top_p(p))
}

/// How often each token comes in 20 000 draws.
fn shares(sampling: &Sampling, logits: &[f64]) -> Vec<f64> {
    let mut shares = vec![0.0; logits.len()];
    for index in 0..20_000 {
        shares[sampling.choose(logits, &[], index)] += 1.0 / 20_000.0;
    }
    shares
}

fn assert_shares(found: &[f64], expected: &[f64]) {
    let worst = found.iter().zip(expected).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
    assert!(worst < 0.012, "{found:?} instead of {expected:?}");
    assert!(found.iter().zip(expected).all(|(a, b)| *b > 0.0 || *a == 0.0), "{found:?} instead of {expected:?}");
}

#[test]
fn greedy_takes_the_first_of_the_likeliest() {
    assert_eq!(Sampling::greedy().choose(&[0.0, 2.0, 2.0, -30.0], &[], 5), 1);
    assert_eq!(Sampling::greedy().choose(&[f64::NEG_INFINITY, -4.0], &[], 5), 1);
}

#[test]
fn top_k_keeps_ties_with_the_last() {
    assert_eq!(top_k(&[0.1, 0.4, 0.2, 0.3], 2), [1, 3]);
    assert_eq!(top_k(&[0.2, 0.4, 0.2, 0.2], 2), [0, 1, 2, 3]);
    assert_eq!(top_k(&[0.1, 0.4, 0.2, 0.3], 1), [1]);
    assert_eq!(top_k(&[0.1, 0.4, 0.2, 0.3], 9), [0, 1, 2, 3]);
}

/// What transformers' `TopPLogitsWarper` keeps: its own test (`test_top_p_dist_warper`) keeps 0.5 and 0.3 of
/// 0.3, 0.1, 0.1, 0.5 at 0.8, and all but the last two of 0.15, 0.3, 0.3, 0.25 at 0.7 together with the crossing
/// one.
#[test]
fn top_p_keeps_the_smallest_set_that_reaches_the_share() {
    assert_eq!(top_p(&[0.3, 0.1, 0.1, 0.5], 0.79), [0, 3]);
    assert_eq!(top_p(&[0.3, 0.1, 0.1, 0.5], 0.81), [0, 1, 3]);
    assert_eq!(top_p(&[0.15, 0.3, 0.3, 0.25], 0.7), [1, 2, 3]);
    assert_eq!(top_p(&[0.25, 0.25, 0.25, 0.25], 0.5), [0, 1]);
    assert_eq!(top_p(&[0.25, 0.25, 0.25, 0.25], 0.51), [0, 1, 2]);
    assert_eq!(top_p(&[0.1, 0.9], 1e-9), [1]);
}

/// What transformers' warpers of 5.24 keep of the same probabilities. The typical tokens need not have the likeliest among
/// them.
#[test]
fn entropy_and_cutoffs_keep_what_they_keep_in_transformers() {
    let (four, one) = ([0.5, 0.3, 0.15, 0.05], [0.01, 0.04, 0.9, 0.05]);
    let typical = |of: &[f64], p| kept(of, |all| all.keep_typical(p));
    assert_eq!([0.1, 0.5, 0.85].map(|p| typical(&four, p)), [vec![1], vec![0, 1], vec![0, 1, 2]]);
    assert_eq!([0.5, 0.8].map(|p| typical(&[0.4, 0.2, 0.2, 0.2], p)), [vec![1, 2, 3], vec![0, 1, 2, 3]]);
    assert_eq!(typical(&[0.97, 0.01, 0.01, 0.01], 0.5), [0]);
    let top_h = |of: &[f64], share| kept(of, |all| all.keep_top_h(share));
    assert_eq!([0.2, 0.65, 0.9].map(|share| top_h(&four, share)), [vec![0], vec![0, 1], vec![0, 1, 2]]);
    assert_eq!([0.4, 0.7].map(|share| top_h(&one, share)), [vec![2], vec![2, 3]]);
    let least = |least| kept(&four, |all| all.keep_probability(least));
    assert_eq!([0.1, 0.2, 0.6].map(least), [vec![0, 1, 2], vec![0, 1], vec![0]]);
    // The smaller of 0.1 and √0.1 / e^1.14, of 0.3 and √0.3 / e^1.14 = 0.175: what is drawn is among these.
    let plain = Sampling { temperature: 1.0, seed: 7, ..Sampling::greedy() };
    let eta = |eta_cutoff| shares(&Sampling { eta_cutoff, ..plain }, &logits(&four));
    assert_shares(&eta(0.1), &[0.5 / 0.95, 0.3 / 0.95, 0.15 / 0.95, 0.0]);
    assert_shares(&eta(0.3), &[0.625, 0.375, 0.0, 0.0]);
    // They see what is left: of 0.5 and 0.3 the second has 0.375.
    let both = Sampling { top_k: Some(2), epsilon_cutoff: 0.35, ..plain };
    assert_shares(&shares(&both, &logits(&four)), &[0.625, 0.375, 0.0, 0.0]);
    assert_shares(&shares(&Sampling { typical_p: Some(0.1), ..plain }, &logits(&four)), &[0.0, 1.0, 0.0, 0.0]);
    assert_shares(&shares(&Sampling { top_h: Some(0.2), ..plain }, &logits(&four)), &[1.0, 0.0, 0.0, 0.0]);
}

#[test]
fn draws_follow_the_distribution() {
    let logits = logits(&[0.5, 0.3, 0.15, 0.05]);
    let plain = Sampling { temperature: 1.0, seed: 7, ..Sampling::greedy() };
    assert_shares(&shares(&plain, &logits), &[0.5, 0.3, 0.15, 0.05]);
    let two = Sampling { top_k: Some(2), ..plain };
    assert_shares(&shares(&two, &logits), &[0.625, 0.375, 0.0, 0.0]);
    let most = Sampling { top_p: Some(0.9), ..plain };
    assert_shares(&shares(&most, &logits), &[0.5 / 0.95, 0.3 / 0.95, 0.15 / 0.95, 0.0]);
    let near = Sampling { min_p: Some(0.25), ..plain };
    assert_shares(&shares(&near, &logits), &[0.5 / 0.95, 0.3 / 0.95, 0.15 / 0.95, 0.0]);
    // Temperature 0.5 squares the probabilities.
    let cold = Sampling { temperature: 0.5, ..plain };
    assert_shares(&shares(&cold, &logits), &[0.25 / 0.365, 0.09 / 0.365, 0.0225 / 0.365, 0.0025 / 0.365]);
}

/// The temperature comes before top-p: squared, the first of 0.5, 0.3, 0.2 has 0.66 of the whole.
#[test]
fn top_p_sees_probabilities_after_temperature_and_top_k() {
    let logits = logits(&[0.5, 0.3, 0.2]);
    let cold = Sampling { temperature: 0.5, top_p: Some(0.6), seed: 3, ..Sampling::greedy() };
    assert_shares(&shares(&cold, &logits), &[1.0, 0.0, 0.0]);
    // Of the two that top-k leaves, the first has 0.625.
    let both = Sampling { temperature: 1.0, top_k: Some(2), ..cold };
    assert_shares(&shares(&both, &logits), &[1.0, 0.0, 0.0]);
}

/// Squared, the second of 0.5, 0.3, 0.2 has 0.36 of the first; the likeliest is always kept.
#[test]
fn min_p_is_a_share_of_the_likeliest_after_temperature() {
    let logits = logits(&[0.5, 0.3, 0.2]);
    let cold = Sampling { temperature: 0.5, min_p: Some(0.35), seed: 3, ..Sampling::greedy() };
    assert_shares(&shares(&cold, &logits), &[0.25 / 0.34, 0.09 / 0.34, 0.0]);
    assert_shares(&shares(&Sampling { min_p: Some(0.37), ..cold }, &logits), &[1.0, 0.0, 0.0]);
    assert_shares(&shares(&Sampling { min_p: Some(1.0), ..cold }, &logits), &[1.0, 0.0, 0.0]);
}

#[test]
fn the_penalty_is_one_however_often_a_token_was_there() {
    let logits = [2.0, 1.5, -1.0, -1.2];
    let of = |by: f64| Sampling { repetition_penalty: by, ..Sampling::greedy() };
    let mut penalised = logits;
    of(1.3).penalise(&mut penalised, [0, 2, 7].into_iter());
    assert_eq!(penalised, [2.0 / 1.3, 1.5, -1.3, -1.2]);
    assert_eq!(of(1.3).choose(&logits, &[0, 0, 0], 0), 0);
    assert_eq!(of(1.4).choose(&logits, &[0, 0], 0), 1);
    // Below 1 tokens are said again, drawn or not.
    let drawn = Sampling { temperature: 0.01, ..of(0.5) };
    assert_eq!([of(0.5), drawn].map(|of| of.choose(&logits, &[1], 3)), [1, 1]);
}

#[test]
fn values_out_of_range_are_named() {
    let refuse = |sampling: Sampling| sampling.check().unwrap_err().to_string();
    let plain = Sampling::default();
    assert!(refuse(Sampling { temperature: -1.0, ..plain }).starts_with("temperature -1 is not 0"));
    assert!(refuse(Sampling { temperature: f64::NAN, ..plain }).starts_with("temperature NaN"));
    assert_eq!(refuse(Sampling { top_k: Some(0), ..plain }), "top-k 0 is not at least 1");
    assert_eq!(refuse(Sampling { top_p: Some(1.5), ..plain }), "top-p 1.5 is not above 0 and at most 1");
    assert_eq!(refuse(Sampling { top_p: Some(0.0), ..plain }), "top-p 0 is not above 0 and at most 1");
    assert_eq!(refuse(Sampling { typical_p: Some(0.0), ..plain }), "typical-p 0 is not above 0 and at most 1");
    assert_eq!(refuse(Sampling { eta_cutoff: 1.0, ..plain }), "eta-cutoff 1 is not at least 0 and below 1");
    assert_eq!(refuse(Sampling { min_p: Some(1.5), ..plain }), "min-p 1.5 is not 0 to 1");
    let penalty = |repetition_penalty| Sampling { repetition_penalty, ..plain };
    assert_eq!(refuse(penalty(0.0)), "repetition-penalty 0 is not 0.01 to 100 (1 changes nothing)");
    assert!(refuse(penalty(f64::NAN)).starts_with("repetition-penalty NaN"));
    assert_eq!(Sampling { top_p: Some(1.0), min_p: Some(0.0), ..penalty(100.0) }.check(), Ok(()));
}
