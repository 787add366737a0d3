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
bubble: 27.3 % of the step (37.5 % of the computing time); a step takes 33, as by the formula
activations in flight, maximum per rank: 4 3 2 1 micro-batches; received but not yet used: at most 2
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
    says!(error, "nearest legal: layers 6, 10");
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
    says!(report, "rank 0: embedding, layers 0-2\n  rank 1: layer 3, multi-token prediction, loss\n");
    says!(report, "2 1 micro-batches, 6 1 layers;");
    says!(report, "rank 1  ······F0");
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
        ("--gpu h200", "--gpu is for a run"),
        ("--tensor-parallel 2", "only --pipeline-parallel and --virtual-pipeline"),
        ("--training.steps 4", "--training.steps is for a run"),
    ] {
        let defaults = if flags.contains("--micro-batches") { "" } else { "--micro-batches 4" };
        says!(report(&format!("{defaults} {flags}")).unwrap_err(), words);
    }
}

/// Not the number of micro-batches, which a run's file has.
#[test]
fn without_a_file_the_file_is_asked_for() {
    for (flags, words) in [
        ("", "plan needs the CONFIG of a run"),
        ("--schedule 1f1b", "plan needs the CONFIG of a run"),
        ("--gpu h200", "--gpu is for a run: name its CONFIG"),
        ("--model.preset llama3-8b", "--model.preset is for a run: name its CONFIG"),
    ] {
        says!(report(flags).unwrap_err(), words);
    }
}

#[test]
fn a_schedule_of_ones_own_is_proven_and_simulated() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("mine.txt");
    let with = |text: &str, flags: &str| {
        fs::write(&file, text).unwrap();
        report(&format!("--schedule-file {} {flags}", file.display()))
    };
    // 1F1B whose last rank delays a weight gradient: the first rank has its gradient a pass earlier.
    let text = with("0F0 0F1 0B0 0B1\n1F0 1I0 1F1 1I1 1W0 1W1", "").unwrap();
    let expected = "\
, 2 ranks, micro-batches: 2
bubble: 14.3 % of the step (16.7 % of the computing time); a step takes 7
activations in flight, maximum per rank: 2 2 micro-batches; received but not yet used: at most 1
";
    assert_eq!(text, format!("{}{expected}", file.display()));
    let text = with("0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1", "--layers 6 --first-stage-layers 4 --draw").unwrap();
    says!(text, "rank 0: embedding, layers 0-3", "8 2 layers");
    says!(with("0F0 0B0\n1F0", "").unwrap_err(), "mine.txt: rank 1 never does: backward of micro-batch 0");
    says!(with("", "--schedule gpipe").unwrap_err(), "cannot be used with");
}

#[test]
fn transfers_that_stop_ranks_are_counted() {
    let report = report("--pipeline-parallel 4 --virtual-pipeline 2 --micro-batches 8 --transfer 1").unwrap();
    says!(report, "with transfers blocking both ranks: ");
    assert!(!report.contains("formula"), "{report}");
}

fn plan(line: &str) -> Result<String> {
    let args = Command::try_parse_from(["plan"].into_iter().chain(line.split_whitespace()))?.args;
    super::run::plan(&args).map(|(text, _)| text)
}

/// None is ignored.
#[test]
fn what_says_nothing_about_a_module_is_refused() {
    let module = |flags: &str| -> Result<String> {
        let line = ["plan", "--hf", "DIR"].into_iter().chain(flags.split_whitespace());
        let args = Command::try_parse_from(line)?.args;
        super::module::plan(&args, std::path::Path::new("DIR"))
    };
    let flags = "\
        --schedule 1f1b, --microbatch-group-size 2, --forward-only, --layers 4, --first-stage-layers 1, \
        --last-stage-layers 1, --count-embedding, --count-loss, --pipeline-layout EtL, --durations 1,1,1, \
        --transfer 1, --draw, --svg FILE, --gpus 8, --gpus-per-host 8, --link 400, --network 50, --documents 100, \
        --no-overlap, --all-ranks";
    for flags in flags.split(", ") {
        let flag = flags.split(' ').next().unwrap();
        says!(module(flags).unwrap_err(), "cannot be used with", flag);
    }
    let error = module("--training.micro-batch 4").unwrap_err().to_string();
    says!(error, "--training.micro-batch is a key of a CONFIG", "--micro-batch,");
    says!(module("--micro-batch 0").unwrap_err(), "--micro-batch 0", "nearest legal: 1");
}

const EXAMPLE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../examples/configs/llama3_8b_8gpus.toml");

#[test]
fn the_example_fits_eight_h100() {
    let text = plan(EXAMPLE).unwrap();
    says!(text, "8030261248 parameters", "DP8 ZeRO2, micro-batch 1, recompute selective on 8 x h100", "fits: ", "MFU ");
    assert!(!text.contains("nearest that fits"), "{text}");
}

#[test]
fn what_does_not_fit_is_told_with_the_nearest_that_does() {
    let text = plan(&format!("{EXAMPLE} --memory 40 --all-ranks --gpus 16")).unwrap();
    says!(text, "DOES NOT FIT", "of 40.0 GiB", "nearest that fits\n", "layouts on 16 x h100");
}

#[test]
fn measured_rates_and_other_layouts_change_the_plan() {
    let step = |flags: &str| {
        let text = plan(&format!("{EXAMPLE} {flags}")).unwrap();
        text.lines().find(|line| line.starts_with("step ")).unwrap().to_string()
    };
    assert_ne!(step("--tflops 300"), step(""));
    assert_eq!(step("--gpu H100"), step(""));
    assert_ne!(step("--gpu h200 --bandwidth 1000"), step("--gpu h200"));
    let flags = "--pipeline-parallel 2 --data-parallel 4 --schedule zb-h1 --first-stage-layers 15";
    says!(plan(&format!("{EXAMPLE} {flags}")).unwrap(), "PP2 DP4 ZeRO2 zb-h1", "(zb-h1, micro-batches: 32)");
}

/// The search has context parallelism, and both precisions on GPUs that have FP8.
#[test]
fn layouts_are_searched_in_both_precisions_and_over_sequences() {
    let long = "--training.seq-length 131072 --training.global-batch 8 --model.max-position-embeddings 131072";
    for gpus in [4, 8] {
        let text = plan(&format!("{EXAMPLE} --gpu h200 --gpus {gpus} --data-parallel 4 {long}")).unwrap();
        let mut best = text.lines().skip_while(|line| !line.starts_with("fastest of ")).skip(1);
        assert!(best.any(|line| line.contains(" CP")), "{text}");
    }
    let lists = |flags: &str| {
        let text = plan(&format!("{EXAMPLE} {flags}")).unwrap();
        (text.contains("the same with fp8.format = hybrid\n"), text.contains("the same without FP8\n"), text)
    };
    let (with, without, text) = lists("--gpu h200");
    assert!(with && !without && text.lines().last().unwrap().contains(", fp8"), "{text}");
    let (with, without, _) = lists("--gpu h200 --fp8.format hybrid");
    assert!(!with && without);
    let (with, without, _) = lists("--gpu a100-80gb");
    assert!(!with && !without, "no FP8");
}

#[test]
fn a_run_that_cannot_be_is_refused() {
    for (flags, words) in [
        ("--gpu h10", "legal: h100, "),
        ("--pipeline-parallel 3", "nearest legal: layers 30, 33"),
        ("--data-parallel 3", "nearest legal global batch: 126 or 129"),
        ("--micro-batches 4", "cannot be used with"),
        ("--link 0", "--link 0 is not a number above 0"),
        ("--optimizer.momentum 0.5", "only with sgd, muon"),
    ] {
        says!(plan(&format!("{EXAMPLE} {flags}")).unwrap_err(), words);
    }
    assert!(report("--gpus 8 --micro-batches 4").is_err());
    assert!(report("").unwrap_err().to_string().contains("--micro-batches"));
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
