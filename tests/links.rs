//! Links of the documents lead somewhere: files, sections, and source files that are named in passing. The README's
//! program is that of the example.

use std::collections::BTreeSet;
use std::path::{Component, Path, PathBuf};

use regex::Regex;
use tests::repository;

/// The documents, without those that other systems or `bench` wrote.
fn documents() -> Vec<String> {
    repository::files(".md").into_iter().filter(|path| !path.contains("/golden/")).collect()
}

/// The text without fenced code.
fn prose(text: &str) -> String {
    let mut code = false;
    let mut lines = Vec::new();
    for line in text.lines() {
        if line.trim_start().starts_with("```") {
            code = !code;
        } else if !code {
            lines.push(line);
        }
    }
    lines.join("\n")
}

/// The anchors that GitHub and mdBook give to the headings.
fn anchors(text: &str) -> BTreeSet<String> {
    let mut all = BTreeSet::new();
    for line in prose(text).lines().filter(|line| line.starts_with('#')) {
        let title = line.trim_start_matches('#').trim().to_lowercase();
        let kept = title.chars().filter(|c| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_'));
        let anchor: String = kept.map(|c| if c == ' ' { '-' } else { c }).collect();
        let again = (1..).map(|n| format!("{anchor}-{n}")).find(|other| !all.contains(other));
        all.insert(if all.contains(&anchor) { again.expect("numbers do not end") } else { anchor });
    }
    all
}

/// `from`'s folder joined with a relative path, without `..`.
fn target(from: &str, link: &str) -> PathBuf {
    let mut path = PathBuf::new();
    for part in Path::new(from).parent().unwrap_or(Path::new("")).join(link).components() {
        match part {
            Component::ParentDir => drop(path.pop()),
            Component::CurDir => {}
            part => path.push(part),
        }
    }
    path
}

#[test]
fn links_lead_to_files_and_sections() {
    let link = Regex::new(r#"\]\(([^)\s]+)\)"#).expect("a pattern");
    let mut broken = Vec::new();
    for path in documents() {
        for found in link.captures_iter(&prose(&repository::read(&path))) {
            let link = &found[1];
            if link.contains("://") || link.starts_with("mailto:") {
                continue;
            }
            let (file, anchor) = link.split_once('#').map_or((link, None), |(file, anchor)| (file, Some(anchor)));
            let to = if file.is_empty() { PathBuf::from(&path) } else { target(&path, file) };
            if !repository::root().join(&to).exists() {
                broken.push(format!("{path}: there is no {}", to.display()));
            } else if let Some(anchor) = anchor
                && !anchors(&repository::read(&to.to_string_lossy())).contains(anchor)
            {
                broken.push(format!("{path}: {} has no section #{anchor}", to.display()));
            }
        }
    }
    assert!(broken.is_empty(), "{}", broken.join("\n"));
}

#[test]
fn source_files_that_documents_name_exist() {
    let crates = "kernels-cubecl|backend-dist|models|burn-megatron|examples|tests|benchmarks|docs|\\.ci";
    let name = Regex::new(&format!("`((?:{crates})/[A-Za-z0-9_./-]+)`")).expect("a pattern");
    let mut missing = Vec::new();
    for path in documents().into_iter().filter(|path| path != "CHANGELOG.md" && !path.starts_with("docs/log/")) {
        for found in name.captures_iter(&repository::read(&path)) {
            let here = target(&path, &found[1]);
            if !repository::root().join(&found[1]).exists() && !repository::root().join(here).exists() {
                missing.push(format!("{path}: {}", &found[1]));
            }
        }
    }
    assert!(missing.is_empty(), "documents name files that do not exist:\n{}", missing.join("\n"));
}

#[test]
fn every_page_is_in_the_book() {
    let summary = repository::read("docs/SUMMARY.md");
    let pages = documents().into_iter().filter_map(|path| path.strip_prefix("docs/").map(str::to_owned));
    let lost: Vec<String> =
        pages.filter(|page| page != "SUMMARY.md" && !summary.contains(&format!("({page})"))).collect();
    assert!(lost.is_empty(), "docs/SUMMARY.md does not name {}", lost.join(", "));
}

#[test]
fn the_readmes_program_is_that_of_the_example() {
    let (readme, example) = (repository::read("README.md"), repository::read("examples/text_classifier.rs"));
    let program = readme.split("```rust\n").nth(1).and_then(|rest| rest.split("```").next()).expect("a program");
    assert!(example.contains(program), "examples/text_classifier.rs has no such lines:\n{program}");
    assert!(readme.split_whitespace().count() <= 900, "README.md is longer than 900 words");
}

#[test]
fn anchors_are_those_of_github() {
    let text = "# A title: with `code`, and more\n## Same\n## Same\n```\n# no heading\n```\n";
    let expected = ["a-title-with-code-and-more", "same", "same-1"].map(String::from);
    assert_eq!(anchors(text), BTreeSet::from(expected));
    assert_eq!(target("docs/a/b.md", "../c.md"), Path::new("docs/c.md"));
}
