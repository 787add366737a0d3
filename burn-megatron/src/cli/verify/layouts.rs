//! The layouts that `verify` tries.

use anyhow::{Context, bail};
use backend_dist::mesh::ParallelLayout;
use backend_dist::ops::fp8::MULTIPLE;
use backend_dist::process::Cluster;
use models::{FamilyConfig, ModelConfig};

use super::Args;
use crate::config::decoder_of;
use crate::engine::ContextConfig;
use crate::verify::{Candidate, Settings, candidates, different_in_fp8, is_any_in_fp8, pairwise};

/// The most ranks of a list in which every two options meet.
const PAIRWISE: usize = 8;

/// The most ranks, which are threads, of a layout.
const MOST_RANKS: usize = 1024;

/// Layouts to try.
pub(super) struct Layouts {
    pub tried: Vec<Candidate>,
    /// How many are left out, for each reason.
    pub left_out: Vec<(&'static str, usize)>,
}

/// The layouts of the flags, or all that fit, or some of these. Fails if one of the flags' layouts cannot be compared,
/// or there is none.
pub(super) fn layouts(
    args: &Args,
    config: &FamilyConfig,
    settings: &Settings,
    cluster: &Cluster,
) -> anyhow::Result<Layouts> {
    let refusal = allowance(config, settings)?;
    let listed = listed(args, config, settings, &|candidate| refusal(candidate).is_none())?;
    let mut layouts = allowed(shared_out(listed, args, cluster)?, args, refusal)?;
    layouts.tried = spread(layouts.tried, args.sample.unwrap_or(usize::MAX));
    Ok(layouts)
}

/// Those whose ranks can be assigned to the processes evenly.
fn shared_out(mut tried: Vec<Candidate>, args: &Args, cluster: &Cluster) -> anyhow::Result<Layouts> {
    if !args.layouts.is_empty() {
        for candidate in &tried {
            cluster.local_devices(&candidate.layout).with_context(|| format!("--layout \"{candidate}\""))?;
        }
        return Ok(Layouts { tried, left_out: Vec::new() });
    }
    let all = tried.len();
    tried.retain(|candidate| cluster.local_devices(&candidate.layout).is_ok());
    if tried.is_empty() {
        let count = cluster.count();
        bail!("nothing to verify: no layout of up to {} ranks has as many in each of {count} processes", args.ranks);
    }
    let why = "the number of ranks is no multiple of the processes";
    let left_out = Some((why, all - tried.len())).filter(|(_, count)| *count > 0).into_iter().collect();
    Ok(Layouts { tried, left_out })
}

/// Why a layout is left out with --fp8 or --lora-base, and the whole error.
type Refusal = (&'static str, String);

/// What --fp8 and --lora-base allow. Fails if that is nothing.
fn allowance(config: &FamilyConfig, settings: &Settings) -> anyhow::Result<impl Fn(&Candidate) -> Option<Refusal>> {
    let (decoder, names) = (decoder_of(config), config.hf_names());
    let (fp8, base, batch) = (settings.fp8, settings.base, [settings.global_batch, settings.seq]);
    if let Some(recipe) = fp8.filter(|recipe| !is_any_in_fp8(&decoder, batch, recipe)) {
        bail!(
            "nothing to verify: no GEMM of these sizes is in FP8, which takes multiples of {}; nearest legal: --size {}",
            recipe.multiple(),
            if recipe.multiple() == MULTIPLE { "wide" } else { "fp8-blocks" }
        );
    }
    if let Some(base) = base {
        base.check(&names, [1, 1]).context("nothing to verify with --lora-base; nearest legal: --size blocks")?;
    }
    Ok(move |candidate: &Candidate| {
        if let Some(why) = fp8.and_then(|recipe| different_in_fp8(&decoder, candidate, batch, &recipe)) {
            return Some((why, format!("has other numbers in FP8 than one device: {why}; leave it or --fp8 out")));
        }
        let layout = &candidate.layout;
        let error = base?.check(&names, [layout.tp, layout.expert_tp()]).err()?;
        Some(("a rank has no whole blocks of --lora-base", format!("has no whole blocks; --lora-{error}")))
    })
}

/// Those of a list that are allowed. Fails if a flag's is not, or none is.
fn allowed(
    Layouts { tried: list, left_out }: Layouts,
    args: &Args,
    refusal: impl Fn(&Candidate) -> Option<Refusal>,
) -> anyhow::Result<Layouts> {
    let mut layouts = Layouts { tried: Vec::new(), left_out };
    for candidate in list {
        let Some((why, error)) = refusal(&candidate) else {
            layouts.tried.push(candidate);
            continue;
        };
        if !args.layouts.is_empty() {
            bail!("--layout \"{candidate}\" {error}");
        }
        match layouts.left_out.iter_mut().find(|(reason, _)| *reason == why) {
            Some((_, count)) => *count += 1,
            None => layouts.left_out.push((why, 1)),
        }
    }
    if layouts.tried.is_empty() {
        let why = layouts.left_out.last().map_or("", |(why, _)| why);
        bail!("nothing to verify: all layouts are left out: {why}");
    }
    Ok(layouts)
}

/// The layouts of the flags, each checked, or all that fit.
fn listed(
    args: &Args,
    config: &FamilyConfig,
    settings: &Settings,
    legal: &dyn Fn(&Candidate) -> bool,
) -> anyhow::Result<Vec<Candidate>> {
    let (dims, seq) = (config.dims(), settings.seq);
    if args.layouts.is_empty() {
        dims.check(&Default::default(), seq)?;
        let fits = |layout: &ParallelLayout, context: &ContextConfig| {
            dims.check(layout, seq).is_ok() && context.check(layout, &dims).is_ok()
        };
        let (batch, experts) = ([settings.global_batch, seq], dims.experts.is_some());
        let list = match args.pairwise {
            true => pairwise(args.ranks.min(PAIRWISE), batch[0], dims.layers, experts, fits, legal),
            false => candidates(args.ranks, batch[0], dims.layers, experts, fits),
        };
        if list.is_empty() {
            bail!("nothing to verify: no layout of up to {} ranks fits", args.ranks);
        }
        if args.sample == Some(0) {
            bail!("nothing to verify: --sample 0; nearest legal: 1");
        }
        return Ok(list);
    }
    let parse = |text: &String| -> anyhow::Result<Candidate> {
        let candidate: Candidate = text.parse().with_context(|| format!("--layout \"{text}\""))?;
        candidate.layout.check()?;
        let ranks = candidate.layout.world_size();
        if ranks > MOST_RANKS {
            bail!("--layout \"{text}\" has {ranks} ranks, each of which is a thread; nearest legal: {MOST_RANKS}");
        }
        dims.check(&candidate.layout, seq)?;
        candidate.context.check(&candidate.layout, &dims)?;
        candidate.pipeline.resolve(&candidate.layout, dims.layers, candidate.accumulation)?;
        let parts = candidate.layout.dp * candidate.accumulation;
        if !args.global_batch.is_multiple_of(parts) {
            bail!(
                "--layout \"{text}\" divides a step into {parts} micro-batches; --global-batch {} is not a multiple",
                args.global_batch
            );
        }
        Ok(candidate)
    };
    args.layouts.iter().map(parse).collect()
}

/// `count` elements of the list at equal distances, or all.
pub(super) fn spread<T>(list: Vec<T>, count: usize) -> Vec<T> {
    let all = list.len();
    let is_taken = |index: usize| count >= all || (index * count) / all != ((index + 1) * count) / all;
    list.into_iter().enumerate().filter(|(index, _)| is_taken(*index)).map(|(_, element)| element).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sample_is_spread_over_the_list() {
        assert_eq!(spread((0..10).collect(), 3), [3, 6, 9]);
        assert_eq!(spread((0..10).collect(), 20).len(), 10);
        for count in 0..=10 {
            assert_eq!(spread((0..10).collect::<Vec<_>>(), count).len(), count);
        }
    }
}
