//! `--section.key value` for every key of a configuration.

use std::collections::HashSet;
use std::sync::LazyLock;

use clap::{Arg, ArgAction, ArgMatches, Command, FromArgMatches};

use super::layout::LayoutArgs;
use crate::config::{KEYS, Key, Kind, size_names};

/// Keys and values from the command line, in the order in which they apply.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Overrides(pub Vec<(String, String)>);

/// A key as a flag.
struct Flag {
    path: String,
    /// Other spellings of it.
    aliases: Vec<String>,
    /// The flag alone means `true`, as Megatron's do.
    is_switch: bool,
}

/// Every flag.
static FLAGS: LazyLock<Vec<Flag>> = LazyLock::new(|| {
    let keys = KEYS.iter().map(|key| {
        let aliases = key.aliases.iter().map(|alias| format!("{}.{alias}", key.section()));
        Flag {
            path: key.path.into(),
            aliases: aliases.chain(alone(key).map(String::from)).collect(),
            is_switch: key.kind == Kind::Flag && !key.aliases.is_empty(),
        }
    });
    let sizes = size_names().into_iter().map(|name| {
        let underscored = name.replace('-', "_");
        let aliases = (underscored != name).then(|| format!("model.{underscored}"));
        Flag { path: format!("model.{name}"), aliases: aliases.into_iter().collect(), is_switch: false }
    });
    keys.chain(sizes).collect()
});

/// The names of a key without its section, as Megatron writes them, that no other key has and that say what they are:
/// not `init`. Megatron's lists are written otherwise than ours.
fn alone(key: &'static Key) -> impl Iterator<Item = &'static str> {
    let is_own = |alias: &str| KEYS.iter().filter(|other| other.aliases.contains(&alias)).count() == 1;
    let is_clear = |alias: &str| alias.contains('-') || ["lr", "save"].contains(&alias);
    let aliases = key.aliases.iter().copied().filter(|_| key.kind != Kind::Paths);
    aliases.filter(move |alias| is_own(alias) && is_clear(alias))
}

/// Adds the flags. Names that the command has already stay those of its own flags.
impl clap::Args for Overrides {
    fn augment_args(command: Command) -> Command {
        let longs = command.get_arguments().flat_map(|argument| {
            let aliases = argument.get_all_aliases().unwrap_or_default().into_iter().map(String::from);
            argument.get_long().map(String::from).into_iter().chain(aliases)
        });
        let taken: HashSet<String> = longs.collect();
        let flag = |flag: &'static Flag| {
            let argument = Arg::new(flag.path.as_str())
                .long(flag.path.as_str())
                .aliases(flag.aliases.iter().filter(|alias| !taken.contains(*alias)).map(String::as_str))
                .value_name("VALUE")
                .allow_negative_numbers(true)
                .action(ArgAction::Append)
                .hide(true);
            if flag.is_switch { argument.num_args(0..=1).default_missing_value("true") } else { argument }
        };
        command.args(FLAGS.iter().map(flag))
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

impl FromArgMatches for Overrides {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let mut overrides = Vec::new();
        for Flag { path, .. } in FLAGS.iter() {
            let values = matches.get_many::<String>(path).into_iter().flatten();
            overrides.extend(values.map(|value| (path.clone(), value.clone())));
        }
        Ok(Self(overrides))
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

impl Overrides {
    /// The overrides with the layout flags, which mean `parallel` keys, on top.
    pub fn with_layout(mut self, layout: &LayoutArgs) -> Self {
        let size = |value: Option<usize>| value.map(|value| value.to_string());
        let flags = [
            ("tensor-parallel", size(layout.tensor_parallel)),
            ("sequence-parallel", layout.sequence_parallel.map(|value| value.to_string())),
            ("pipeline-parallel", size(layout.pipeline_parallel)),
            ("virtual-pipeline", size(layout.virtual_pipeline)),
            ("context-parallel", size(layout.context_parallel)),
            ("expert-parallel", size(layout.expert_parallel)),
            ("expert-tensor-parallel", size(layout.expert_tensor_parallel)),
            ("data-parallel", layout.data_parallel.map(|value| value.to_string())),
            ("zero", layout.zero.map(|stage| stage.to_string())),
            ("zero-group", size(layout.zero_group)),
        ];
        let given = flags.into_iter().filter_map(|(key, value)| Some((format!("parallel.{key}"), value?)));
        self.0.extend(given);
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Debug, Parser)]
    struct Line {
        #[command(flatten)]
        layout: LayoutArgs,
        #[command(flatten)]
        overrides: Overrides,
    }

    fn parse(line: &str) -> Result<Vec<(String, String)>, String> {
        let line = Line::try_parse_from(["x"].into_iter().chain(line.split_whitespace()));
        line.map(|line| line.overrides.with_layout(&line.layout).0).map_err(|error| error.to_string())
    }

    fn pairs(pairs: &[(&str, &str)]) -> Vec<(String, String)> {
        pairs.iter().map(|(key, value)| (key.to_string(), value.to_string())).collect()
    }

    #[test]
    fn every_key_is_a_flag_in_every_spelling() {
        let line = "--training.steps=5 --training.train-iters 6 --lr.min -1 --model.hidden_size 64 \
                    --parallel.tensor-model-parallel-size 4 --data-parallel-size 2 --sequence-parallel --cp-comm-type a2a \
                    --train-samples 48";
        let expected = pairs(&[
            ("parallel.tensor-parallel", "4"),
            ("context.comm-type", "a2a"),
            ("training.steps", "5"),
            ("training.steps", "6"),
            ("training.samples", "48"),
            ("lr.min", "-1"),
            ("model.hidden-size", "64"),
            ("parallel.sequence-parallel", "true"),
            ("parallel.data-parallel", "2"),
        ]);
        assert_eq!(parse(line), Ok(expected));
    }

    /// As Megatron writes them.
    #[test]
    fn other_spellings_are_flags_without_their_section() {
        let line = "--micro-batch-size 2 --hybrid-context-parallel --lr 1e-3 --async-save --async-save false --recompute-granularity full";
        let expected = pairs(&[
            ("context.dynamic", "true"),
            ("recompute.granularity", "full"),
            ("training.micro-batch", "2"),
            ("lr.max", "1e-3"),
            ("checkpoint.async", "true"),
            ("checkpoint.async", "false"),
        ]);
        assert_eq!(parse(line), Ok(expected));
        for unclear in ["--init 1", "--chat-template a.jinja", "--data-path a"] {
            says!(parse(unclear).unwrap_err(), "unexpected argument");
        }
    }

    #[test]
    fn unknown_keys_are_named_with_the_closest() {
        says!(parse("--training.step 5").unwrap_err(), "'--training.step'", "'--training.steps'");
    }
}
