//! No text, key or value makes a dry run panic, run out of memory or take long.

use std::path::Path;
use std::time::Instant;

use proptest::prelude::*;

use super::*;
use crate::plan::{self, gpus};
use crate::train;

/// Values at the edges of what kinds of keys take, and beyond.
const VALUES: [&str; 22] = [
    "0",
    "1",
    "-1",
    "3",
    "65537",
    "2147483648",
    "4294967296",
    "9223372036854775807",
    "18446744073709551615",
    "18446744073709551616",
    "1e308",
    "-1e-308",
    "nan",
    "inf",
    "true",
    "none",
    "auto",
    "",
    "[]",
    "[18446744073709551615, 1]",
    "E|t*18446744073709551615|L",
    "9223372036854775807 samples",
];

/// As `train --dry-run` and `plan` do. What is refused is fine.
fn dry_run(config: &RunConfig) {
    _ = train::Plan::new(config, &[]).map(|plan| plan.to_string());
    _ = config.check();
    let hardware = gpus::Hardware::of(gpus::find("h200").unwrap(), 2);
    let plan = config.job().ok().and_then(|job| plan::Plan::new(job.on_gpus(), &hardware).ok());
    if let Some(plan) = plan {
        assert!(plan.time.step > 0.0 && plan.memory[0].peak() > 0, "{:?}", config.parallel);
    }
    assert!(config.to_toml().contains("[model]"));
}

fn file(folder: &Path) -> String {
    let text = folder.join("text.txt");
    std::fs::write(&text, "some words\n").unwrap();
    format!("[data]\ntext = [{text:?}]\n[output]\ndirectory = {:?}\n", folder.join("run"))
}

#[test]
fn every_key_at_every_edge_is_planned_or_refused() {
    let folder = tempfile::tempdir().unwrap();
    let text = file(folder.path());
    let sizes = size_names().into_iter().map(|name| format!("model.{name}"));
    let keys: Vec<String> = KEYS.iter().map(|key| key.path.to_string()).chain(sizes).collect();
    for preset in ["tiny", "gpt-tiny", "mixtral-tiny", "deepseek-tiny"] {
        // Keys other than sizes mean the same for every model.
        for key in keys.iter().filter(|key| preset == "tiny" || key.starts_with("model.")) {
            for value in VALUES {
                let start = Instant::now();
                if let Ok(config) = parse(&text, &[("model.preset", preset), (key, value)]) {
                    dry_run(&config);
                }
                assert!(start.elapsed().as_secs() < 20, "{preset}: {key} = {value:?} took {:?}", start.elapsed());
            }
        }
    }
}

/// More with `BURN_MEGATRON_FUZZ_CASES`.
fn cases() -> u32 {
    std::env::var("BURN_MEGATRON_FUZZ_CASES").ok().and_then(|cases| cases.parse().ok()).unwrap_or(200)
}

/// Lines of TOML: keys of any section with any value, in quotes or not.
fn lines() -> impl Strategy<Value = String> {
    let line =
        (0..KEYS.len(), 0..VALUES.len(), any::<bool>(), ".{0,12}", 0u8..4).prop_map(|(key, value, quoted, any, of)| {
            let value = if of == 0 { any } else { VALUES[value].to_string() };
            let value = if quoted { format!("{value:?}") } else { value };
            format!("[{}]\n{} = {value}\n", KEYS[key].section(), KEYS[key].name())
        });
    prop::collection::vec(line, 0..4).prop_map(|lines| lines.concat())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(cases()))]

    #[test]
    fn any_text_is_read_or_refused(text in prop_oneof![any::<String>(), lines(), "[\\[\\]a-z.=\"'0-9# \n-]{0,80}"]) {
        if let Ok(config) = RunConfig::parse("run.toml", &text, &[]) {
            dry_run(&config);
        }
    }

    #[test]
    fn any_override_is_read_or_refused(key in 0..KEYS.len(), value in prop_oneof![any::<String>(), "[0-9a-z*|., -]{0,20}"]) {
        if let Ok(config) = RunConfig::parse("run.toml", "", &[(KEYS[key].path.into(), value)]) {
            dry_run(&config);
        }
    }
}
