//! Steps whose documents are dealt out.

use std::borrow::Cow;

use super::*;

#[test]
fn documents_are_rows_of_one_rank() {
    let fixed = job(llama3_8b(), "CP4 DP2 ZeRO1", ScheduleKind::NoPipeline, 3);
    assert!(matches!(fixed.dealt_out(), Cow::Borrowed(_)));
    // 12 rows of 1024 tokens over eight ranks.
    let asked = Job { dynamic: Some(600), ..fixed.clone() };
    let (dealt, fullest) = (asked.dealt_out(), asked.fullest_rows());
    assert_eq!(dealt.layout.to_string(), "DP8 ZeRO1");
    assert_eq!((dealt.schedule.micro_batches, dealt.seq, fullest.seq), (3, 512, 600));
    assert_eq!(dealt.global_batch() * dealt.seq, asked.global_batch() * asked.seq);
    assert_eq!((dealt.replicas(), dealt.layout.world_size()), (asked.replicas(), 8));
    // No row is longer than what a rank has in a step.
    let roomy = Job { dynamic: Some(1 << 20), ..fixed.clone() };
    assert_eq!((roomy.dealt_out().schedule.micro_batches, roomy.fullest_rows().seq), (1, 1536));
    let memory = |job: &Job| ladder::peak(&job.clone().on_gpus()).unwrap();
    assert!(memory(&roomy) > memory(&asked), "longer rows keep more");
    let plan = Plan::new(asked.on_gpus(), &h200()).unwrap();
    assert_eq!(plan.traffic[0].cp, 0);
    assert!(report::describe(&plan.job).ends_with(", dynamic:600"), "{}", report::describe(&plan.job));
}
