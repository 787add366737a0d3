use parking_lot::Mutex;
use std::sync::Arc;

use super::*;
use crate::data::TokenDataset;
use crate::plan::ladder;
use backend_dist::startup::Phase;
use models::recompute::Granularity;

const TIMING: Timing = Timing { warmup: 1, steps: 3, runs: 2, profile: 0 };

fn resolve(name: &str, overrides: &[(&str, &str)], ranks: usize, gib: u64) -> anyhow::Result<crate::config::RunConfig> {
    let overrides: Vec<_> = overrides.iter().map(|(key, value)| (key.to_string(), value.to_string())).collect();
    recipe::resolve(&recipe::find(name)?, &overrides, ranks, TIMING.total(), (gib > 0).then_some(gib << 30))
}

#[test]
fn the_spread_is_numpys() {
    // numpy.percentile([1, 2, 3, 4, 10], [0, 10, 50, 90, 100])
    let spread = Distribution::of([10.0, 1.0, 3.0, 2.0, 4.0]);
    let expected = Distribution { min: 1.0, p10: 1.4, p50: 3.0, p90: 7.6, max: 10.0 };
    for (a, b) in [(spread.p10, expected.p10), (spread.p90, expected.p90)] {
        assert!((a - b).abs() < 1e-12, "{spread:?}");
    }
    assert_eq!((spread.min, spread.p50, spread.max), (1.0, 3.0, 10.0));
    assert_eq!(Distribution::of([]), Distribution::default());
}

#[test]
fn recipes_use_all_ranks_and_give_up_only_what_they_must() {
    let roomy = resolve("llama3-8b", &[], 8, 139).unwrap();
    assert_eq!((roomy.parallel.to_string().as_str(), roomy.training.global_batch), ("DP8 ZeRO1", 16));
    assert_eq!(roomy.recompute.granularity, Granularity::None);
    let batch = |keys, ranks, gib| {
        let training = resolve("llama3-8b", keys, ranks, gib).unwrap().training;
        (training.micro_batch, training.global_batch)
    };
    // Two sequences per GPU and step, in one micro-batch if that needs no recomputation that two would avoid.
    assert_eq!([batch(&[], 8, 1000), batch(&[], 8, 146), batch(&[], 2, 139)], [(2, 16), (2, 16), (1, 4)]);
    // One micro-batch would fill 134.2 GiB, and plans take 95 % of 139.
    let whole = resolve("llama3-8b", &[], 8, 1000).unwrap().job().unwrap().on_gpus();
    assert_eq!(ladder::peak(&whole).unwrap() >> 20, 137_416);
    assert_eq!(batch(&[], 8, 139), (1, 16));
    let tensor: &[_] = &[("parallel.tensor-parallel", "2"), ("parallel.sequence-parallel", "true")];
    assert_eq!(batch(tensor, 2, 139), (2, 4));
    assert_eq!(batch(&[("parallel.zero", "2")], 2, 139), (1, 4));
    assert_eq!(batch(&[("training.micro-batch", "1")], 8, 1000), (1, 16));
    assert_eq!(batch(&[("training.global-batch", "8")], 8, 1000), (1, 8));
    let tight = resolve("llama3-8b", &[], 8, 60).unwrap();
    assert!(ladder::peak(&tight.job().unwrap().on_gpus()).unwrap() <= 60 << 30);
    assert_ne!((tight.parallel.zero, tight.recompute.granularity), (1, Granularity::None));
    says!(resolve("llama3-8b", &[], 1, 80).unwrap_err(), "llama3-8b does not fit into 80.0 GiB");
    assert_eq!(resolve("llama3-1b", &[], 1, 139).unwrap().parallel.to_string(), "TP1");
}

#[test]
fn what_is_asked_for_is_taken() {
    let keys = [("parallel.tensor-parallel", "2"), ("parallel.pipeline-parallel", "2"), ("parallel.zero", "0")];
    let config = resolve("llama3-8b", &keys, 8, 40).unwrap();
    assert_eq!(config.parallel.to_string(), "TP2 PP2 DP2");
    assert_eq!((config.training.global_batch, config.training.steps), (16, 7));
    assert_eq!(config.pipeline.layout.as_deref(), Some("Et*17|t*15L"), "the output layer costs two layers");
    let equal = resolve("llama3-8b", &[&keys[..], &[("pipeline.layout", "none")]].concat(), 8, 40).unwrap();
    assert_eq!(equal.pipeline.layout, None);
    let error = resolve("tiny", &[("parallel.tensor-parallel", "4")], 6, 0).unwrap_err().to_string();
    says!(error, "6 ranks are not a multiple of the 4");
    says!(recipe::find("llama3-9b").unwrap_err(), "llama3-9b", "llama3-8b, llama3-1b, tiny");
}

#[test]
fn random_tokens_are_the_models_and_the_same_every_time() {
    let data = SyntheticTokens::new(50, 16, 8);
    let row = data.sample(3);
    assert_eq!(row, data.sample(3));
    assert_ne!(row, data.sample(4));
    assert_eq!(row.tokens[1..], row.labels[..15]);
    assert!((0..8).flat_map(|index| data.sample(index).tokens).all(|token| (0..50).contains(&token)));
}

#[test]
fn a_measurement_is_of_the_engine_and_keeps_what_repeats_it() {
    let config = resolve("tiny", &[("parallel.tensor-parallel", "2"), ("lr.max", "1e-2")], 4, 0).unwrap();
    let data = Arc::new(SyntheticTokens::new(256, 64, 1000));
    let told = Mutex::new(Vec::new());
    let hear = |step: usize, loss: f64, _: f64| told.lock().push((step, loss));
    let seen = measure(&config, data, &[burn::tensor::Device::flex()].into(), TIMING, &hear).unwrap();
    let told = told.into_inner();
    assert_eq!(told.iter().map(|(step, _)| *step).collect::<Vec<_>>(), (1..=7).collect::<Vec<_>>());
    assert_eq!((seen.runs.len(), seen.steps.len(), seen.steps[0].len(), seen.ranks.len()), (2, 2, 3, 4));

    let planned = ladder::peak(&config.job().unwrap());
    let setup = Setup::of("tiny", &config, "random tokens");
    let device = Device { name: "CPU rank".into(), peak: Some(1e12), ..Device::default() };
    let record = Record::new(&config, setup, device, TIMING, planned, None, seen);
    assert_eq!((record.first_loss, record.last_loss), (told[0].1, told[6].1));
    assert!(record.last_loss < record.first_loss, "{told:?}");
    let run = &record.runs[0];
    let expected = (3 * config.tokens_per_step()) as f64 / run.seconds / 4.0;
    assert!((run.tokens_per_second_per_rank / expected - 1.0).abs() < 1e-12);
    assert!(run.seconds >= 0.9 * run.steps.iter().sum::<f64>(), "{run:?}");
    let flops = record.tokens_per_second_per_rank * record.flops_per_token / 1e12;
    assert!((record.teraflops_per_rank / flops - 1.0).abs() < 1e-12);
    assert!(record.mfu_full_attention.unwrap() > record.mfu.unwrap());

    let kept: Record = serde_json::from_str(&serde_json::to_string(&record).unwrap()).unwrap();
    assert_eq!((&kept.setup, kept.timing, &kept.origin), (&record.setup, record.timing, &record.origin));
    assert!((kept.runs[1].seconds / record.runs[1].seconds - 1.0).abs() < 1e-12);
    let again = crate::config::RunConfig::parse("again.toml", &kept.setup.config, &[]).unwrap();
    assert_eq!(again.parallel, config.parallel);
    let (table, row) = (text(&record), markdown(&record));
    says!(table, "TP2 DP2", "in the last");
    assert!(table.contains("started in ") && record.startup.phases.contains_key(&Phase::Step), "{table}");
    let columns = |line: &str| line.matches(" | ").count();
    let lines: Vec<&str> = row.lines().collect();
    assert_eq!((lines.len(), columns(lines[0])), (3, columns(lines[2])), "{row}");
}

#[test]
fn documents_of_unequal_lengths_are_assigned_and_reported() {
    let keys = [
        ("parallel.context-parallel", "2"),
        ("training.global-batch", "4"),
        ("training.micro-batch", "1"),
        ("data.reset-attention-mask", "true"),
        ("data.reset-position-ids", "true"),
    ];
    let by_length = [("context.dynamic", "true"), ("context.max-tokens-per-rank", "32")];
    let lengths: DocumentLengths = "lognormal:12,1.1".parse().unwrap();
    let data = Arc::new(SyntheticTokens::new(256, 64, 28).with_documents(Some(lengths)));
    let starts = data.sample(5).documents.unwrap();
    assert!(starts[0] == 0 && starts.is_sorted() && starts.len() > 1 && *starts.last().unwrap() < 64, "{starts:?}");
    let run = |more: &[(&str, &str)]| {
        let config = resolve("tiny", &[keys.as_slice(), more].concat(), 2, 0).unwrap();
        let seen =
            measure(&config, data.clone(), &[burn::tensor::Device::flex()].into(), TIMING, &|_, _, _| ()).unwrap();
        let documents = DocumentReport::of(&config, &*data, 4 * TIMING.warmup, 6, false);
        let setup = Setup::of("tiny", &config, "random tokens");
        Record::new(&config, setup, Device::default(), TIMING, None, documents, seen)
    };
    let short = [keys.as_slice(), &[("context.dynamic", "true"), ("context.max-tokens-per-rank", "8")]].concat();
    let refused = DocumentReport::check(&resolve("tiny", &short, 2, 0).unwrap(), &*data, TIMING.total()).unwrap_err();
    assert!(refused.length > 16 && refused.nearest > 8, "{refused}");
    let (dynamic, fixed) = (run(&by_length), run(&[]));
    // The same tokens teach the same, whoever computes them.
    assert!((dynamic.first_loss - fixed.first_loss).abs() < 1e-5, "{} {}", dynamic.first_loss, fixed.first_loss);
    assert!((dynamic.last_loss - fixed.last_loss).abs() < 1e-3, "{} {}", dynamic.last_loss, fixed.last_loss);
    assert!(dynamic.setup.layout.ends_with(", dynamic:32"), "{}", dynamic.setup.layout);
    let [of, other] = [&dynamic, &fixed].map(|record| record.documents.as_ref().unwrap());
    assert_eq!((of.per_step, of.longest, other.padding), (other.per_step, other.longest, 0.0));
    let names = |report: &DocumentReport| report.simulated.iter().map(|(name, _)| name.clone()).collect::<Vec<_>>();
    assert_eq!(
        (names(of), names(other)),
        (
            ["dynamic:32", "CP2 DP1", "CP1 DP2"].map(String::from).to_vec(),
            ["CP2 DP1", "CP1 DP2"].map(String::from).to_vec()
        )
    );
    assert!(of.simulated.iter().all(|(_, time)| *time >= 1.0), "{of:?}");
    assert!(of.padding < 0.1 && of.of_a_token > of.mean, "{of:?}");
    assert!(
        dynamic.flops_per_token
            < Record::new(
                &resolve("tiny", &keys, 2, 0).unwrap(),
                dynamic.setup.clone(),
                Device::default(),
                TIMING,
                None,
                None,
                Measured::default()
            )
            .flops_per_token
    );
    assert!(text(&dynamic).contains("simulated step"), "{}", text(&dynamic));
    let twice = Record { tokens_per_second_per_rank: 2.0 * dynamic.tokens_per_second_per_rank, ..dynamic.clone() };
    let compared = together(&[dynamic, twice]);
    assert!(compared.lines().nth(1).unwrap().contains("  1.000  "), "{compared}");
    assert!(compared.lines().nth(2).unwrap().contains("  2.000  "), "{compared}");
}
