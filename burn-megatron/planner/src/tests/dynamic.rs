//! Dynamic context parallelism.

use std::borrow::Cow;

use super::*;

#[test]
fn documents_are_rows_of_one_rank() {
    let fixed = job(llama3_8b(), "CP4 DP2 ZeRO1", ScheduleKind::NoPipeline, 3);
    assert!(matches!(fixed.with_dynamic_context(), Cow::Borrowed(_)));
    // 12 sequences of 1024 tokens over eight ranks.
    let asked = Job { dynamic: Some(600), ..fixed.clone() };
    let (dynamic, fullest) = (asked.with_dynamic_context(), asked.longest_sequences());
    assert_eq!(dynamic.layout.to_string(), "DP8 ZeRO1");
    assert_eq!((dynamic.schedule.micro_batches, dynamic.seq, fullest.seq), (3, 512, 600));
    assert_eq!(dynamic.global_batch() * dynamic.seq, asked.global_batch() * asked.seq);
    assert_eq!((dynamic.dp_ranks(), dynamic.layout.world_size()), (asked.dp_ranks(), 8));
    // No sequence is longer than a rank's tokens of a step.
    let roomy = Job { dynamic: Some(1 << 20), ..fixed.clone() };
    assert_eq!((roomy.with_dynamic_context().schedule.micro_batches, roomy.longest_sequences().seq), (1, 1536));
    let memory = |job: &Job| ladder::peak(&job.clone().on_gpus()).unwrap();
    assert!(memory(&roomy) > memory(&asked), "longer sequences save more");
    let plan = Plan::new(asked.on_gpus(), &h200()).unwrap();
    assert_eq!(plan.traffic[0].cp, 0);
    assert!(report::describe(&plan.job).ends_with(", dynamic:600"), "{}", report::describe(&plan.job));
}
