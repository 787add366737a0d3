//! Every rule on logits that are worked out by hand from its definition.

use super::*;
use crate::json_grammar::{JsonGrammar, TokenTexts};

const NOT: f64 = changes::NEVER;
const LOGITS: [f64; 5] = [1.0, -2.0, 3.0, 0.5, -1.0];

/// New tokens after those before, with `encoder` and a number of tokens that is asked for.
fn text((before, written): (&[i64], &[i64]), encoder: &[i64], max_new_tokens: usize) -> Seen {
    let mut seen = Seen::new(before, encoder, &[4, 9], max_new_tokens);
    written.iter().for_each(|token| seen.push(*token));
    seen
}

/// A prompt of two tokens and a text of two.
fn seen() -> Seen {
    text((&[2, 0], &[1, 1]), &[2, 0], 8)
}

fn after(rules: LogitsProcessors, seen: Seen) -> [f64; 5] {
    let mut logits = LOGITS;
    rules.changes(&seen, 1.0, logits.len()).apply(&mut logits);
    logits
}

fn none() -> LogitsProcessors {
    LogitsProcessors::default()
}

#[test]
fn without_rules_nothing_changes() {
    assert_eq!(after(none(), seen()), LOGITS);
}

/// A bias counts where the text ends with what is before the last token; sequences that end alike add up.
#[test]
fn biases_count_where_a_sequence_would_be_complete() {
    let sequence_bias = vec![
        (vec![3], 2.0),
        (vec![1, 1, 3], 0.25),
        (vec![0, 1, 2], 5.0),
        (vec![7], 1.0),
        (vec![2, 2, 0, 1, 1, 0], 9.0),
        // The whole text and one more counts too (transformers 5.24: it compares what is before the last token).
        (vec![2, 0, 1, 1, 4], 0.5),
    ];
    assert_eq!(after(LogitsProcessors { sequence_bias, ..none() }, seen()), [1.0, -2.0, 3.0, 2.75, -0.5]);
    let bad_words_ids = vec![vec![0], vec![1, 2], vec![2, 3], vec![4], vec![9, 9]];
    assert_eq!(after(LogitsProcessors { bad_words_ids, ..none() }, seen()), [NOT, -2.0, NOT, 0.5, -1.0]);
}

#[test]
fn tokens_of_the_prompt_come_more_often() {
    let seen = text((&[2, 0], &[1, 1]), &[2, 1, 2], 8);
    let rules = LogitsProcessors { encoder_repetition_penalty: Some(2.0), ..none() };
    assert_eq!(after(rules, seen), [1.0, -1.0, 6.0, 0.5, -1.0]);
}

#[test]
fn no_sequence_comes_twice() {
    let of = |no_repeat_ngram_size| after(LogitsProcessors { no_repeat_ngram_size, ..none() }, seen());
    assert_eq!(of(1), [NOT, NOT, NOT, 0.5, -1.0]);
    // `1 1` was there; `0 1 1` and `2 0 1` do not end like the text.
    assert_eq!(of(2), [1.0, NOT, 3.0, 0.5, -1.0]);
    assert_eq!(of(3), LOGITS);
    assert_eq!(of(9), LOGITS);
    // Of the prompt: `1 3` is in it, `1 1` only in the text.
    let seen = text((&[2, 0], &[1, 1]), &[1, 3, 1], 8);
    let rules = LogitsProcessors { encoder_no_repeat_ngram_size: 2, ..none() };
    assert_eq!(after(rules, seen), [1.0, -2.0, 3.0, NOT, -1.0]);
}

#[test]
fn a_text_ends_neither_too_early_nor_too_late() {
    let not_yet = [1.0, -2.0, 3.0, 0.5, NOT];
    let length = |min_length| after(LogitsProcessors { min_length, ..none() }, seen());
    assert_eq!([length(4), length(5)], [LOGITS, not_yet]);
    let new = |min_new_tokens| after(LogitsProcessors { min_new_tokens, ..none() }, seen());
    assert_eq!([new(2), new(3)], [LOGITS, not_yet]);
    // |-1| · (1.5² - 1) more with the second token after `start`.
    let decay =
        |start| after(LogitsProcessors { exponential_decay_length_penalty: Some((start, 1.5)), ..none() }, seen());
    assert_eq!([decay(2), decay(0)], [LOGITS, [1.0, -2.0, 3.0, 0.5, 0.25]]);
    let forced = || LogitsProcessors { forced_eos_token_id: vec![1, 4], ..none() };
    let last = text((&[2, 0], &[1, 1]), &[2, 0], 3);
    assert_eq!([after(forced(), seen()), after(forced(), last)], [LOGITS, [NOT, 0.0, NOT, NOT, 0.0]]);
}

#[test]
fn tokens_are_suppressed_everywhere_or_first() {
    let rules = LogitsProcessors { suppress_tokens: vec![0, 8, -1], ..none() };
    assert_eq!(after(rules, seen()), [NOT, -2.0, 3.0, 0.5, -1.0]);
    let begin = LogitsProcessors { begin_suppress_tokens: vec![2], ..none() };
    let (first, without_2) = (|| text((&[2, 0, 1, 1], &[]), &[2, 0], 8), [1.0, -2.0, NOT, 0.5, -1.0]);
    assert_eq!(after(begin.clone(), seen()), LOGITS);
    assert_eq!(after(begin.clone(), first()), without_2);
    // One token before, and a forced one: the first choice is that of the one after.
    let forced = LogitsProcessors { forced_bos_token_id: Some(2), ..begin };
    assert_eq!(after(forced.clone(), text((&[0], &[]), &[2, 0], 8)), [NOT, NOT, 0.0, NOT, NOT]);
    assert_eq!(after(forced.clone(), text((&[0], &[2]), &[2, 0], 8)), without_2);
    assert_eq!(after(forced, first()), without_2, "a longer prompt forces nothing");
    let rules = LogitsProcessors { allowed_token_ids: vec![1, 3, 99, -1], ..none() };
    assert_eq!(after(rules, seen()), [NOT, -2.0, NOT, 0.5, NOT]);
}

/// OpenAI's: once for a token that is there, and once for each time. The prompt does not count.
#[test]
fn penalties_count_new_tokens() {
    let rules = LogitsProcessors { presence_penalty: 0.5, frequency_penalty: 0.25, ..none() };
    assert_eq!(after(rules, seen()), [1.0, -3.0, 3.0, 0.5, -1.0]);
}

/// A text ends where the grammar lets it, and nowhere else: no token is left where none may follow.
#[test]
fn a_guide_leaves_what_a_text_may_go_on_with() {
    let guided = |texts: [&str; 5], rules: LogitsProcessors| {
        let tokens = Arc::new(TokenTexts::new(texts.map(|text| text.as_bytes().to_vec())));
        let rules = LogitsProcessors { guide: Some(Arc::new(Guide::new(JsonGrammar::object(), tokens))), ..rules };
        move |written: &[i64]| after(rules.clone(), text((&[], written), &[2, 0], written.len() + 1))
    };
    let texts = ["{", "}", "[", " }", ""];
    let whole = guided(texts, none());
    assert_eq!(whole(&[]), [1.0, NOT, NOT, NOT, NOT]);
    assert_eq!(whole(&[0]), [NOT, -2.0, NOT, 0.5, NOT]);
    let end = [NOT, NOT, NOT, NOT, -1.0];
    assert_eq!(whole(&[0, 3]), end);
    assert_eq!(guided(["{", "[", "", "", ""], none())(&[0]), [NOT; 5], "no token closes it");
    // A stop token with a text does not end one that is not whole.
    assert_eq!(guided(["{", "}", "[", "", "}"], none())(&[0]), [NOT, -2.0, NOT, NOT, NOT]);
    // Lengths and forced tokens that the grammar has no room for.
    let longer = guided(texts, LogitsProcessors { min_length: 9, min_new_tokens: 9, ..none() });
    assert_eq!(longer(&[0, 3]), end);
    let forced = guided(texts, LogitsProcessors { forced_eos_token_id: vec![4], ..none() });
    assert_eq!(forced(&[0]), whole(&[0]));
    assert_eq!(forced(&[0, 3]), [NOT, NOT, NOT, NOT, 0.0]);
}

#[test]
fn rules_that_forbid_tokens_have_names() {
    let rules = LogitsProcessors {
        allowed_token_ids: vec![0, 1],
        suppress_tokens: vec![0, 1],
        frequency_penalty: 1.0,
        min_length: 4,
        no_repeat_ngram_size: 2,
        ..none()
    };
    let names = ["no_repeat_ngram_size", "suppress_tokens and begin_suppress_tokens", "allowed_token_ids"];
    assert_eq!((rules.forbidding(&seen(), LOGITS.len()), after(rules, seen())), (names.to_vec(), [NOT; 5]));
}

#[test]
fn numbers_that_leave_no_logits_are_refused_by_name() {
    let refused = |rules: LogitsProcessors| rules.check().unwrap_err();
    let bias = |by| LogitsProcessors { sequence_bias: vec![(vec![1], 0.5), (vec![3, 4], by)], ..none() };
    assert_eq!(bias(-1e30).check(), Ok(()));
    assert_eq!(refused(bias(f64::NAN)), "sequence_bias = NaN of [3, 4] is not a number from -1e30 to 1e30");
    assert!(refused(bias(f64::INFINITY)).starts_with("sequence_bias = inf"));
    let presence = LogitsProcessors { presence_penalty: f64::INFINITY, ..none() };
    assert!(refused(presence).starts_with("presence_penalty = inf is not a number"));
    let frequency = LogitsProcessors { frequency_penalty: f64::NAN, ..none() };
    assert!(refused(frequency).starts_with("frequency_penalty = NaN is not a number"));
    let encoder = |by| LogitsProcessors { encoder_repetition_penalty: Some(by), ..none() };
    assert_eq!(refused(encoder(0.0)), "encoder_repetition_penalty = 0 is not a number above 0 (1 changes nothing)");
    assert!(refused(encoder(f64::NAN)).starts_with("encoder_repetition_penalty = NaN"));
    let decay = LogitsProcessors { exponential_decay_length_penalty: Some((0, 0.0)), ..none() };
    assert!(refused(decay).starts_with("the factor of exponential_decay_length_penalty = 0 is not"));
}
