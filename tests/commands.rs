//! The commands in the documents are understood by the command line as it is.

use burn_megatron::cli::Cli;
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

#[test]
fn commands_are_found_in_shell_blocks_only() {
    let text = "```sh\ntorchrun -n 2 burn-megatron train a.toml \\\n    --zero 1  # two processes\ncargo build\n```\n\
                ```text\nburn-megatron is a name\n```\nburn-megatron train b.toml\n";
    assert_eq!(commands(text), [["burn-megatron", "train", "a.toml", "--zero", "1"].map(String::from)]);
}
