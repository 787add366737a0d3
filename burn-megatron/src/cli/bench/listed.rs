//! The layouts that a call measures: those of `--layouts`, or the one of the flags.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use backend_dist::mesh::ParallelLayout;

use crate::cli::layout::{DataParallel, LayoutArgs};
use crate::cli::overrides::Overrides;

/// A layout of the list, and its keys.
pub(super) fn listed(text: &str) -> Result<(ParallelLayout, Vec<(String, String)>)> {
    let (dynamic, sizes): (Vec<&str>, Vec<&str>) =
        text.split_whitespace().partition(|word| word.starts_with("dynamic:"));
    let layout: ParallelLayout = sizes.join(" ").parse().with_context(|| format!("--layouts \"{text}\""))?;
    layout.check()?;
    let flags = LayoutArgs {
        tensor_parallel: Some(layout.tp),
        sequence_parallel: Some(layout.sp),
        context_parallel: Some(layout.cp),
        expert_parallel: Some(layout.ep),
        expert_tensor_parallel: layout.etp,
        pipeline_parallel: Some(layout.pp),
        virtual_pipeline: Some(layout.vpp),
        data_parallel: Some(DataParallel::Size(layout.dp)),
        zero: text.to_ascii_lowercase().contains("zero").then_some(layout.zero),
        zero_group: layout.zero_group,
    };
    let mut keys = Overrides::default().with_layout(&flags).0;
    if let [first, second, ..] = dynamic[..] {
        bail!("--layouts \"{text}\": {first} and {second}; only one can be the length");
    }
    if let [most] = dynamic[..] {
        let most = most.trim_start_matches("dynamic:");
        keys.extend(
            [("dynamic", "true"), ("max-tokens-per-rank", most)].map(|(k, v)| (format!("context.{k}"), v.into())),
        );
    }
    Ok((layout, keys))
}

/// `runs/a.json` of a layout: `runs/a-dp2-zero1.json`.
pub(super) fn of_layout(out: &Path, layout: &str) -> PathBuf {
    let stem = out.file_stem().unwrap_or_default().to_string_lossy();
    let slug = layout
        .to_ascii_lowercase()
        .split([' ', '+'])
        .filter(|word| !word.is_empty())
        .collect::<Vec<_>>()
        .join("-")
        .replace(':', "");
    out.with_file_name(format!("{stem}-{slug}.json"))
}

/// The number of ranks by the layout flags, if they name the data-parallel size.
pub(super) fn layout_ranks(layout: &LayoutArgs) -> Option<usize> {
    let sizes = [layout.tensor_parallel, layout.pipeline_parallel, layout.context_parallel];
    layout.data_parallel_size().map(|dp_ranks| sizes.into_iter().flatten().fold(dp_ranks, usize::saturating_mul))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_layout_of_the_list_fixes_the_zero_stage_only_if_it_names_one() {
        let keys = |text: &str| {
            let (layout, keys) = listed(text).unwrap();
            let zero = keys.iter().find(|(key, _)| key == "parallel.zero").map(|(_, stage)| stage.clone());
            (layout.to_string(), zero)
        };
        assert_eq!(keys(" DP2 ZeRO1"), ("DP2 ZeRO1".into(), Some("1".into())));
        assert_eq!(keys("DP2 zero0"), ("DP2".into(), Some("0".into())));
        assert_eq!(keys("TP2 SP DP2"), ("TP2 SP DP2".into(), None));
        let all = listed("CP2 DP2 EP2 ETP1").unwrap().1;
        for (key, value) in [("context-parallel", "2"), ("expert-parallel", "2"), ("expert-tensor-parallel", "1")] {
            assert!(all.contains(&(format!("parallel.{key}"), value.to_string())), "{key}");
        }
        let dynamic = listed("CP2 ZeRO1 dynamic:16384").unwrap();
        assert_eq!(dynamic.0.to_string(), "CP2 ZeRO1");
        for (key, value) in [("context.dynamic", "true"), ("context.max-tokens-per-rank", "16384")] {
            assert!(dynamic.1.contains(&(key.to_string(), value.to_string())), "{key}");
        }
        assert!(listed("CP2 dynamic:8 dynamic:16").is_err());
        assert!(listed("TP2 XP3").is_err() && listed("EP2").is_err());
        assert_eq!(of_layout(Path::new("runs/a.json"), " TP2 SP"), Path::new("runs/a-tp2-sp.json"));
        assert_eq!(of_layout(Path::new("a.json"), "CP2 dynamic:8"), Path::new("a-cp2-dynamic8.json"));
    }
}
