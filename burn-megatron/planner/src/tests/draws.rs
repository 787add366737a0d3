//! Time of GRPO's draws against what must be read for a token.

use super::*;

fn draws(layout: &str, sequences: usize, completions: Completions) -> DrawTime {
    let job = job(llama3_8b(), layout, ScheduleKind::NoPipeline, sequences).on_gpus();
    let post_training = PostTraining { completions: Some(completions), ..PostTraining::default() };
    let job = Job { micro_batch: 1, post_training, ..job };
    Plan::new(job, &h200()).unwrap().draws.unwrap()
}

#[test]
fn a_token_takes_what_reading_weights_and_cache_takes() {
    let all = Completions { longest: 512, reference: false, scored: false, iterations: 1 };
    let (few, many) = (draws("TP1", 8, all), draws("TP1", 64, all));
    // 7.5 billion weights without the embedding, in bf16; the cache has 128 KiB a position.
    let weights = 7.5e9 * 2.0 / h200().bandwidth;
    let cache = (64 - 8) as f64 * 768.0 * 131_072.0 / h200().bandwidth;
    assert!(few.token > weights && few.token < 1.2 * weights, "{few:?} {weights}");
    assert!((many.token - few.token - cache).abs() < 0.2 * cache, "{many:?} {cache}");
    assert_eq!((few.tokens, few.sequences, few.scores, few.steps), (511, 8, 0.0, 1));
    assert!((few.total() - few.prompts - 511.0 * few.token).abs() < 1e-9);
    // Two ranks read half of the weights each, and wait for each other; those of ZeRO 3 come from the other.
    assert!(draws("TP2", 8, all).token < few.token);
    assert!(draws("DP2 ZeRO3", 8, all).token > few.token + 7.5e9 / h200().link);
    // The reference model's log-probabilities, and the policy's own where several steps learn from a draw.
    let scored = draws("TP1", 8, Completions { scored: true, iterations: 2, ..all });
    let once = draws("TP1", 8, Completions { scored: true, ..all });
    assert!(once.scores > 0.0 && (scored.scores - 2.0 * once.scores).abs() < 1e-9);
    assert_eq!(scored.steps, 2);
}
