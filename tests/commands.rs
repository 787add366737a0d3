//! The commands and the files of runs in the documents are understood as they are.

use burn_megatron::cli::Cli;
use burn_megatron::config::{ModuleConfig, RunConfig, SECTIONS};
use clap::Parser;
use clap::error::ErrorKind;
use tests::repository;

/// The arguments of every `burn-megatron` in the shell blocks of a document, also behind torchrun or srun.
fn commands(text: &str) -> Vec<Vec<String>> {
    let shell = |block: &&str| ["sh\n", "bash\n", "\n"].iter().any(|start| block.starts_with(start));
    let blocks = text.split("```").skip(1).step_by(2).filter(shell);
    let lines = blocks.flat_map(|block| block.replace("\\\n", " ").lines().map(str::to_owned).collect::<Vec<_>>());
    let words = lines.filter_map(|line| shlex::split(line.trim_start_matches("$ ")));
    let program =
        |words: Vec<String>| words.iter().position(|word| word == "burn-megatron").map(|at| words[at..].to_vec());
    // A synopsis, with `[OPTIONS]` or `<FILE>`, is no command.
    let complete = |words: &Vec<String>| words.len() > 1 && !words.iter().any(|word| word.contains(['[', '<']));
    words.filter_map(program).filter(complete).collect()
}

#[test]
fn the_documents_commands_are_understood() {
    let mut wrong = Vec::new();
    let mut count = 0;
    for path in repository::files(".md") {
        for words in commands(&repository::read(&path)) {
            count += 1;
            match Cli::try_parse_from(&words) {
                Err(error) if error.kind() != ErrorKind::DisplayHelp => {
                    wrong.push(format!("{path}: {}\n{error}", words.join(" ")));
                }
                _ => {}
            }
        }
    }
    assert!(count >= 30, "only {count} commands found");
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// The TOML blocks of a document that are files of runs, or parts of them.
fn runs(text: &str) -> impl Iterator<Item = &str> {
    let section = |line: &str| {
        line.trim().strip_prefix('[').and_then(|rest| rest.split_once(']')).map(|(name, _)| name.to_owned())
    };
    let is_known = |name: String| SECTIONS.iter().any(|(known, _)| *known == name);
    let blocks = text.split("```").skip(1).step_by(2).filter_map(|block| block.strip_prefix("toml\n"));
    blocks.filter(move |block| block.lines().find_map(section).is_some_and(is_known))
}

#[test]
fn the_documents_runs_are_understood() {
    let mut wrong = Vec::new();
    let mut count = 0;
    for path in repository::files(".md") {
        let document = repository::read(&path);
        for text in runs(&document) {
            count += 1;
            let read = match ModuleConfig::parse(&path, text, &[]) {
                Ok(None) => RunConfig::parse(&path, text, &[]).map(drop),
                module => module.map(drop),
            };
            let problems = read.err().map(|errors| errors.to_string()).unwrap_or_default();
            // Of a folder that is not there, keys alone can be known.
            let of_folder = text.contains("\nhf = ");
            let counts = |problem: &&str| !of_folder || problem.contains("unknown");
            wrong.extend(problems.lines().filter(counts).map(str::to_owned));
        }
    }
    assert!(count >= 15, "only {count} runs found");
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn commands_are_found_in_shell_blocks_only() {
    let text = "```sh\ntorchrun -n 2 burn-megatron train a.toml \\\n    --zero 1  # two processes\ncargo build\n```\n\
                ```text\nburn-megatron is a name\n```\nburn-megatron train b.toml\n";
    assert_eq!(commands(text), [["burn-megatron", "train", "a.toml", "--zero", "1"].map(String::from)]);
}
