//! Answers to flags of other names, Megatron-LM's and keys without their section, and to negative numbers.

use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{Command, CommandFactory, Error, FromArgMatches};

use super::Cli;
use crate::config::{find_anywhere, of_megatron, size_names};

/// Megatron-LM's flags that are no alias of a key, and their equivalents.
const FLAGS: &[(&str, &str)] = &[
    ("rotary-base", "--model.rope-theta X"),
    ("rotary-seq-len-interpolation-factor", "--model.rope-scaling '{ rope_type = \"linear\", factor = X }'"),
    ("untie-embeddings-and-output-weights", "--model.tie-word-embeddings false"),
    ("swiglu", "--model.preset NAME or --model.family llama"),
    ("squared-relu", "--model.preset NAME or --model.family nemotron_h"),
    ("normalization", "--model.preset NAME or --model.family NAME"),
    ("position-embedding-type", "--model.preset NAME or --model.family NAME"),
    ("bf16", "--training.dtype bf16"),
    ("fp16", "--training.dtype f16"),
    ("load", "--checkpoint.resume PATH; without it a run resumes from its own checkpoint.directory"),
    ("data-path", "--data.prefixes PREFIX,.. and --data.weights W,.."),
    ("train-data-path", "--data.prefixes PREFIX,.. and --data.weights W,.."),
    ("valid-data-path", "--data.validation PREFIX,.. and --data.validation-weights W,.."),
    ("test-data-path", "--data.test PREFIX,.. and --data.test-weights W,.."),
    ("tokenizer-model", "--data.tokenizer FILE"),
    ("use-distributed-optimizer", "--zero 1"),
    ("data-parallel-sharding-strategy", "--zero 1, 2 or 3"),
    ("num-distributed-optimizer-instances", "--zero-group N, the data-parallel ranks of an instance, with --zero"),
    ("recompute-activations", "--recompute.granularity selective"),
    ("lr-warmup-samples", "--lr.warmup \"N samples\""),
    ("lr-decay-samples", "--lr.decay \"N samples\""),
    ("exit-signal-handler", "nothing: SIGTERM saves and ends a run"),
    ("exit-on-signal", "nothing: SIGTERM saves and ends a run"),
    ("layout", LAYOUT),
    ("batch-size", "--training.global-batch N"),
    ("epochs", "--training.steps N or --training.samples N"),
    ("gpus", "--data-parallel auto"),
    ("world-size", "--data-parallel auto"),
    ("config", "the file without a flag: `train run.toml`"),
    ("tokenizer-type", "--data.tokenizer FILE"),
    ("mock-data", "`bench`, whose tokens are random"),
    ("overlap-grad-reduce", "nothing: gradient reduction always overlaps with the backward pass"),
    ("overlap-param-gather", "nothing: weight gathering always overlaps with the update and the forward pass"),
];

/// A layout, of which `verify` takes a short form.
const LAYOUT: &str = "--tensor-parallel N, --data-parallel N and so on, a flag for each size";

/// Commands whose flags are the keys of a configuration.
const WITH_KEYS: [&str; 3] = ["train", "plan", "bench"];

/// Commands without keys that run in a layout, and how they are told.
const WITH_LAYOUT: [(&str, &str); 4] =
    [("generate", "--tensor-parallel N"), ("chat", "--tensor-parallel N"), ("forward", LAYOUT), ("eval", LAYOUT)];

/// Commands that take a layout in words.
const WITH_WORDS: [&str; 2] = ["serve", "verify"];

/// The command line, or the end of the program with what is wrong with it.
pub fn parse() -> Cli {
    let command = std::env::args_os().nth(1).unwrap_or_default();
    try_parse(std::env::args_os()).unwrap_or_else(|error| answered(error, &command.to_string_lossy()).exit())
}

/// Parses a command line. Negative numbers are values, so that the message is about their value.
fn try_parse<I: IntoIterator<Item = T>, T: Into<std::ffi::OsString> + Clone>(words: I) -> Result<Cli, Error> {
    let command = with_negative_numbers(Cli::command());
    command.try_get_matches_from(words).and_then(|matches| Cli::from_arg_matches(&matches)).map_err(counted)
}

fn with_negative_numbers(command: Command) -> Command {
    let takes_negative = |argument: clap::Arg| {
        let takes = argument.get_action().takes_values() && !argument.is_positional();
        if takes { argument.allow_negative_numbers(true) } else { argument }
    };
    command.mut_args(takes_negative).mut_subcommands(with_negative_numbers)
}

/// The error of a negative number in the place of a count, with the legal values.
fn counted(mut error: Error) -> Error {
    let is_negative = match error.get(ContextKind::InvalidValue) {
        Some(ContextValue::String(value)) => value.parse::<f64>().is_ok_and(|value| value < 0.0),
        _ => false,
    };
    // The parser of a flag may have said itself what is legal.
    let is_count = error.to_string().contains("invalid digit");
    if is_negative && is_count && error.kind() == ErrorKind::ValueValidation {
        let legal = "it takes a whole number that is not negative; nearest legal: 0 or 1".to_string();
        error.insert(ContextKind::Suggested, ContextValue::StyledStrs(vec![legal.into()]));
    }
    error
}

/// The error of a flag that has another name in this command, with that name. No unknown flag is meant as a value.
fn answered(mut error: Error, command: &str) -> Error {
    let Some(ContextValue::String(flag)) = error.get(ContextKind::InvalidArg) else { return error };
    if error.kind() != ErrorKind::UnknownArgument {
        return error;
    }
    let ours = match WITH_KEYS.contains(&command) {
        true => ours(flag),
        false if WITH_WORDS.contains(&command) => {
            let is_size = name(flag).ends_with("-parallel") || name(flag) == "zero";
            is_size.then(|| "--layout \"TP2 SP DP2\", with the sizes of all".to_string())
        }
        false => {
            let told = WITH_LAYOUT.iter().find(|(with, _)| *with == command && name(flag) == "layout");
            told.map(|(_, flags)| flags.to_string())
        }
    };
    error.remove(ContextKind::Suggested);
    if let Some(ours) = ours {
        error.remove(ContextKind::SuggestedArg);
        error.insert(ContextKind::Suggested, ContextValue::StyledStrs(vec![format!("here it is {ours}").into()]));
    }
    error
}

/// A flag without dashes and value.
fn name(flag: &str) -> &str {
    flag.trim_start_matches('-').split('=').next().unwrap_or_default()
}

/// The equivalent of an unknown flag.
fn ours(flag: &str) -> Option<String> {
    let name = name(flag);
    if !flag.starts_with('-') {
        return Some(match name {
            "true" | "false" => format!("FLAG={name}, in one word"),
            _ => "--SECTION.KEY A,B for a list, in one word".into(),
        });
    }
    let foreign = FLAGS.iter().find(|(foreign, _)| *foreign == name).map(|(_, ours)| ours.to_string());
    let key = || find_anywhere(name).map(|key| format!("--{} VALUE", key.path));
    let renamed = || of_megatron(name).map(|size| format!("--model.{size} N"));
    let size = || size_names().contains(&name.to_string()).then(|| format!("--model.{name} VALUE"));
    foreign.or_else(renamed).or_else(key).or_else(size)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn megatrons_flags_are_answered_with_ours() {
        let said = |flag: &str| {
            let words = ["burn-megatron", "train", "run.toml"].into_iter().chain(flag.split(' '));
            let error = try_parse(words).unwrap_err();
            answered(error, "train").to_string()
        };
        for (flag, ours) in [
            ("--num-layers", "--model.num-hidden-layers N"),
            ("--num-query-groups=8", "--model.num-key-value-heads N"),
            ("--layout", "--tensor-parallel N, --data-parallel N"),
            ("--config", "the file without a flag"),
            ("--world-size=8", "--data-parallel auto"),
            ("--mock-data", "`bench`"),
            ("--seq-length", "--training.seq-length VALUE"),
            ("--scheduler", "--lr.form VALUE"),
            ("--hidden-size", "--model.hidden-size VALUE"),
            ("--bf16", "--training.dtype bf16"),
            ("--exit-signal-handler", "nothing: SIGTERM saves"),
            ("--exit-on-signal", "nothing: SIGTERM saves"),
            ("--valid-data-path", "--data.validation PREFIX,.. and --data.validation-weights W,.."),
        ] {
            assert!(said(flag).contains(&format!("here it is {ours}")), "{}", said(flag));
        }
        assert!(said("--sequence-parallel true").contains("here it is FLAG=true, in one word"));
        assert!(said("--data.prefixes a b").contains("here it is --SECTION.KEY A,B for a list, in one word"));
        assert!(said("--training.stepz").contains("--training.steps"), "as clap has it: {}", said("--training.stepz"));
    }

    #[test]
    fn an_unknown_flag_is_not_taken_for_a_value() {
        let said = |line: &str| {
            let error = try_parse(format!("burn-megatron {line}").split(' ')).unwrap_err();
            answered(error, line.split(' ').next().unwrap()).to_string()
        };
        for line in ["train run.toml --no-such-thing", "inspect prefix --no-such-thing", "eval --hf x --no-such-thing"]
        {
            assert!(!said(line).contains("as a value"), "{}", said(line));
        }
        for (command, _) in WITH_LAYOUT {
            assert!(said(&format!("{command} --hf x --layout TP2")).contains("here it is --tensor-parallel N"));
        }
        for line in ["serve --hf x --tensor-parallel 2", "verify --zero 1"] {
            assert!(said(line).contains("here it is --layout \"TP2 SP DP2\""), "{}", said(line));
        }
        assert!(!said("verify --colour red").contains("here it is"));
    }

    #[test]
    fn one_layout_is_a_list_of_layouts() {
        for line in ["bench tiny --layout TP2", "replay golden --layout TP2", "verify --layouts TP2"] {
            let parsed = format!("{:?}", try_parse(format!("burn-megatron {line}").split(' ')).unwrap());
            assert!(parsed.contains("layouts: [\"TP2\"]") || parsed.contains("layouts: Some(\"TP2\")"), "{parsed}");
        }
    }

    /// Of all three commands, also where a command has a flag of that name.
    #[test]
    fn megatrons_spellings_of_keys_are_flags() {
        for (line, expected) in [
            ("train run.toml --train-samples 48", "(\"training.samples\", \"48\")"),
            ("train run.toml --micro-batch-size 2", "(\"training.micro-batch\", \"2\")"),
            ("train run.toml --pipeline-model-parallel-layout E|t", "(\"pipeline.layout\", \"E|t\")"),
            ("plan run.toml --end-weight-decay 0.1", "(\"optimizer.weight-decay\", \"0.1\")"),
            ("bench tiny --hybrid-context-parallel", "(\"context.dynamic\", \"true\")"),
        ] {
            let parsed = try_parse(format!("burn-megatron {line}").split(' ')).unwrap();
            assert!(format!("{parsed:?}").contains(expected), "{parsed:?}");
        }
        assert_eq!(ours("--train-samples").as_deref(), Some("--training.samples VALUE"));
    }

    #[test]
    fn a_negative_number_is_answered_with_the_legal_ones() {
        for line in ["generate --hf x --prompt y --seed -1", "plan x.toml --gpus -8", "bench tiny --steps=-1"] {
            let error = try_parse(format!("burn-megatron {line}").split(' ')).unwrap_err().to_string();
            assert!(error.contains("not negative") && !error.contains("unexpected argument"), "{line}: {error}");
        }
        assert!(try_parse(["burn-megatron", "train", "run.toml", "--lr.min", "-1"]).is_ok(), "the key says more");
        let error = try_parse(["burn-megatron", "verify", "--tolerance", "-1"]).unwrap_err().to_string();
        assert_eq!(error.matches("nearest legal").count(), 1, "{error}");
    }

    #[test]
    fn what_stands_for_a_foreign_flag_exists() {
        for (_, ours) in FLAGS.iter().filter(|(_, ours)| ours.starts_with("--")) {
            let flag = ours.split(' ').next().unwrap_or_default();
            let error = try_parse(["burn-megatron", "train", "run.toml", &format!("{flag}=1")]);
            assert!(!error.is_err_and(|error| error.kind() == ErrorKind::UnknownArgument), "{ours}");
        }
    }
}
