//! `burn-megatron reference`: the reference pages, made from the list of keys and from the command line itself.

use std::fmt::Write;
use std::fs;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;
use clap::{Arg, Command, CommandFactory};

use super::{Cli, print, refused};
use models::{FamilyConfig, ModelConfig};

use crate::config::{KEYS, Key, SECTIONS, module_presets};
use crate::refusal::Access;

/// Arguments of `reference`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Folder for configuration.md and command-line.md
    #[arg(value_name = "DIR")]
    folder: PathBuf,
}

/// Writes the pages.
pub fn run(args: Args) -> Result<ExitCode> {
    fs::create_dir_all(&args.folder).map_err(refused(Access::Write, &args.folder))?;
    for (name, text) in pages() {
        let file = args.folder.join(name);
        fs::write(&file, text).map_err(refused(Access::Write, &file))?;
        print(&format!("wrote {}\n", file.display()))?;
    }
    Ok(ExitCode::SUCCESS)
}

fn pages() -> [(&'static str, String); 2] {
    [("configuration.md", configuration()), ("command-line.md", command_line())]
}

/// Said at the top of both pages.
const GENERATED: &str = "<!-- Written by `burn-megatron reference docs/reference`; a test compares. -->\n\n";

fn configuration() -> String {
    let mut page = format!(
        "{GENERATED}# Configuration\n\nA run is described by one TOML file. Every key is also a flag of `train`, `plan` \
         and `bench`: `--SECTION.KEY VALUE`. The command line overrides the file, the file overrides the model's preset or \
         folder, and these override the defaults. Unknown keys, and keys that other keys leave without meaning, are \
         errors. `burn-megatron train RUN.toml --print-config` prints the resolved configuration.\n"
    );
    for (section, about) in SECTIONS {
        _ = write!(
            page,
            "\n## [{section}]\n\n{about}.\n\n| key | default | meaning | values | also called |\n|---|---|---|---|---|\n"
        );
        KEYS.iter().filter(|key| key.section() == section).for_each(|key| page += &key_row(key));
        if section == "model" {
            page += &sizes();
        }
    }
    page
}

fn key_row(key: &Key) -> String {
    let default = match key.default {
        "" => "derived".into(),
        default => format!("`{}`", cell(default)),
    };
    let aliases: Vec<String> = key.aliases.iter().map(|alias| format!("`{alias}`")).collect();
    let [meaning, legal] = [key.doc, &key.legal()].map(cell);
    format!("| `{}` | {default} | {meaning} | {legal} | {} |\n", key.name(), aliases.join(", "))
}

/// The sizes of the families, which are keys of `[model]` too.
fn sizes() -> String {
    let names = FamilyConfig::presets().into_iter().map(|(name, _)| name);
    let names = names.chain(module_presets().map(|(name, _)| name)).map(|name| format!("`{name}`"));
    let names: Vec<String> = names.collect();
    let mut text = format!(
        "\nPresets: {}.\n\nThe sizes of a model are keys of `[model]` too, under Hugging Face's names with `-` or `_`. A \
         model has the sizes of its family only.\n\n| size | meaning |\n|---|---|\n",
        names.join(", ")
    );
    for (name, meaning) in FamilyConfig::sizes() {
        _ = writeln!(text, "| `{}` | {} |", name.replace('_', "-"), cell(&meaning));
    }
    text
}

fn command_line() -> String {
    let mut root = Cli::command();
    root.build();
    let mut page = format!(
        "{GENERATED}# Command line\n\n`burn-megatron COMMAND --help` prints the same. `train`, `plan` and `bench` also take \
         every key of the [configuration](configuration.md) as a flag: `--SECTION.KEY VALUE`.\n\n| command | purpose |\n\
         |---|---|\n"
    );
    let commands: Vec<&Command> =
        root.get_subcommands().filter(|command| !command.is_hide_set() && command.get_name() != "help").collect();
    for command in &commands {
        let (name, about) = (command.get_name(), command.get_about().map(ToString::to_string).unwrap_or_default());
        _ = writeln!(page, "| [`{name}`](#{name}) | {} |", cell(&about));
    }
    commands.iter().for_each(|command| page += &command_section(command));
    page
}

fn command_section(command: &Command) -> String {
    let about = command.get_about().map(ToString::to_string).unwrap_or_default();
    let usage = command.clone().render_usage().to_string();
    let usage = usage.trim_start_matches("Usage: ");
    let mut text = format!("\n## {}\n\n{about}.\n\n```\n{usage}\n```\n", command.get_name());
    if let Some(more) = command.get_after_help() {
        _ = write!(text, "\n{more}\n");
    }
    let shown = |argument: &&Arg| !argument.is_hide_set() && argument.get_id() != "help";
    let mut headings: Vec<Option<&str>> = command.get_arguments().filter(shown).map(Arg::get_help_heading).collect();
    headings.sort_by_key(|heading| heading.is_some());
    headings.dedup();
    for heading in headings {
        if let Some(heading) = heading {
            _ = write!(text, "\n{heading}:\n");
        }
        text += "\n| argument | meaning | default | also called |\n|---|---|---|---|\n";
        let arguments = command.get_arguments().filter(shown).filter(|argument| argument.get_help_heading() == heading);
        arguments.for_each(|argument| text += &argument_row(argument));
    }
    text
}

fn argument_row(argument: &Arg) -> String {
    let takes_value = argument.get_action().takes_values();
    let values: Vec<String> = argument.get_value_names().unwrap_or_default().iter().map(ToString::to_string).collect();
    let name = match argument.get_long() {
        Some(long) if argument.is_require_equals_set() => format!("--{long}[={}]", values.join(" ")),
        Some(long) if takes_value => format!("--{long} {}", values.join(" ")),
        Some(long) => format!("--{long}"),
        None => values.join(" "),
    };
    let defaults: Vec<String> =
        argument.get_default_values().iter().map(|value| format!("`{}`", value.to_string_lossy())).collect();
    let defaults = if takes_value { defaults.join(" ") } else { String::new() };
    let possible: Vec<String> = argument
        .get_possible_values()
        .iter()
        .filter(|value| takes_value && !value.is_hide_set())
        .map(|value| match value.get_help() {
            Some(help) => format!("`{}` ({help})", value.get_name()),
            None => format!("`{}`", value.get_name()),
        })
        .collect();
    let help = argument.get_help().map(ToString::to_string).unwrap_or_default();
    let meaning = if possible.is_empty() { help } else { format!("{help}: {}", possible.join(", ")) };
    let aliases: Vec<String> =
        argument.get_all_aliases().unwrap_or_default().iter().map(|alias| format!("`--{alias}`")).collect();
    format!("| `{}` | {} | {defaults} | {} |\n", cell(&name), cell(&meaning), aliases.join(", "))
}

/// A text as a cell of a table.
fn cell(text: &str) -> String {
    text.replace('|', "\\|").replace('\n', " ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_committed_pages_are_these() {
        for (name, text) in pages() {
            let file = format!("{}/../docs/reference/{name}", env!("CARGO_MANIFEST_DIR"));
            let committed = fs::read_to_string(&file).unwrap_or_default();
            assert!(committed == text, "{file} differs: run `burn-megatron reference docs/reference`");
        }
    }

    #[test]
    fn every_key_and_command_is_on_a_page() {
        let [(_, keys), (_, commands)] = pages();
        for key in KEYS {
            assert!(keys.contains(&format!("| `{}` |", key.name())), "{}", key.path);
        }
        for command in Cli::command().get_subcommands().filter(|command| !command.is_hide_set()) {
            assert!(commands.contains(&format!("\n## {}\n", command.get_name())), "{}", command.get_name());
        }
        assert!(!commands.contains("## reference") && commands.contains("`--context-parallel-size`"), "{commands}");
    }
}
