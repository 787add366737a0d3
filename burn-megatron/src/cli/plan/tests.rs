use std::fs;

use anyhow::Result;
use clap::Parser;

use super::{Args, Plan};
use crate::schedule::draw::{self, Colors};

#[derive(Parser)]
struct Command {
    #[command(flatten)]
    args: Args,
}

fn report(flags: &str) -> Result<String> {
    let args = Command::try_parse_from(["plan"].into_iter().chain(flags.split_whitespace()))?.args;
    Plan::of(&args)?.report(args.draw.then_some(Colors::Off))
}

#[test]
fn what_1f1b_costs() {
    let expected = "\
1f1b, 4 ranks, micro-batches: 8
bubble: 27.3 % of the step (37.5 % of the computing time); a step takes 33, as the formula says
activations in flight, most on each rank: 4 3 2 1 micro-batches; received and not used yet, at most 2
";
    assert_eq!(report("--schedule 1f1b --pipeline-parallel 4 --micro-batches 8").unwrap(), expected);
}

#[test]
fn megatrons_spellings_are_understood() {
    let ours = "--pipeline-parallel 2 --micro-batches 6 --virtual-pipeline 2 --microbatch-group-size 3 --layers 8 \
                    --count-loss --count-embedding";
    let theirs = "--pipeline-model-parallel-size 2 --micro-batches 6 --num-virtual-stages-per-pipeline-rank 2 \
                      --microbatch-group-size-per-virtual-pipeline-stage 3 --num-layers 8 \
                      --account-for-loss-in-pipeline-split --account-for-embedding-in-pipeline-split";
    let error = report(ours).unwrap_err().to_string();
    assert_eq!(report(theirs).unwrap_err().to_string(), error);
    assert!(error.contains("nearest legal: layers 6, 10"), "{error}");
    assert_eq!(
        report(&ours.replace("layers 8", "layers 6")).unwrap(),
        report(&theirs.replace("layers 8", "layers 6")).unwrap()
    );
}

#[test]
fn stages_are_listed_and_weighed() {
    let report = report("--pipeline-parallel 2 --micro-batches 4 --layers 5 --pipeline-layout Et*3|tmtL").unwrap_err();
    assert!(report.to_string().contains("`m` comes after every `t`"), "{report}");
    let flags =
        "--pipeline-parallel 2 --micro-batches 4 --layers 4 --mtp-num-layers 1 --pipeline-layout Et*3|tmL --draw";
    let report = self::report(flags).unwrap();
    assert!(
        report.contains("rank 0: embedding, layers 0-2\n  rank 1: layer 3, multi-token prediction, loss\n"),
        "{report}"
    );
    assert!(report.contains("2 1 micro-batches, 6 1 layers;"), "{report}");
    assert!(report.contains("rank 1  ······F0"), "{report}");
}

#[test]
fn what_does_not_fit_is_refused() {
    for (flags, words) in [
        ("--schedule zb", "none, gpipe, 1f1b, interleaved, zb-h1, zb-v"),
        ("--schedule none --pipeline-parallel 2", "pipeline-parallel 2 does not fit schedule none"),
        ("--durations 1,2", "--durations has 2 numbers"),
        ("--durations 0,1,1", "nearest legal: 1"),
        ("--transfer 99999999999", "too long"),
        ("--pipeline-layout EtL", "--layers"),
        ("--pipeline-parallel 4 --micro-batches 1000000", "nearest legal: 262144"),
        ("--layers 0", "nearest legal: layers 1"),
    ] {
        let defaults = if flags.contains("--micro-batches") { "" } else { "--micro-batches 4" };
        let error = report(&format!("{defaults} {flags}")).unwrap_err().to_string();
        assert!(error.contains(words), "{flags}: {error}");
    }
}

#[test]
fn transfers_that_stop_ranks_are_counted() {
    let report = report("--pipeline-parallel 4 --virtual-pipeline 2 --micro-batches 8 --transfer 1").unwrap();
    assert!(report.contains("with transfers stopping both ranks: "), "{report}");
    assert!(!report.contains("formula"), "{report}");
}

/// The pictures of docs/schedules.md are what the command there draws.
#[test]
fn the_pictures_in_the_documents_are_these() {
    for schedule in ["gpipe", "1f1b", "interleaved --virtual-pipeline 2", "zb-h1", "zb-v"] {
        let flags = format!("plan --pipeline-parallel 4 --micro-batches 8 --schedule {schedule}");
        let plan = Plan::of(&Command::parse_from(flags.split_whitespace()).args).unwrap();
        let name = plan.schedule.spec.kind;
        let file = format!("{}/../docs/schedules/{name}.svg", env!("CARGO_MANIFEST_DIR"));
        let svg = draw::svg(&plan.timeline, &plan.title(), &plan.bubble());
        assert!(fs::read_to_string(&file).unwrap() == svg, "{file} differs: draw it again, see docs/schedules.md");
    }
}
