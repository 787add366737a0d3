//! ARCHITECTURE.md says which module does not know which. This test reads these sentences, and the paths in the sources.
//!
//! A sentence is a line of a list: "`a` and `b` do not know `c`" or "Only `a` and `b` know `c`". A name is a path of
//! modules, and stands for everything below it.

use std::collections::{BTreeMap, BTreeSet};

use regex::Regex;
use syn::visit::{self, Visit};
use syn::{Attribute, ItemMod, ItemUse, Meta, UseTree};
use tests::repository;

/// The crates of the workspace, as their sources call them, and their folders.
const CRATES: [(&str, &str); 4] = [
    ("kernels_cubecl", "kernels-cubecl"),
    ("backend_dist", "backend-dist"),
    ("models", "models"),
    ("burn_megatron", "burn-megatron"),
];

/// A sentence about modules.
#[derive(Debug, PartialEq)]
enum Rule {
    /// None of the first knows any of the second.
    Never(Vec<String>, Vec<String>),
    /// Only the first know any of the second.
    Only(Vec<String>, Vec<String>),
}

/// The rule that a line of the document is, if it is one.
fn rule(line: &str) -> Option<Rule> {
    let name = Regex::new("`([a-z_:]+)`").expect("a pattern");
    let names = |text: &str| name.captures_iter(text).map(|found| found[1].to_owned()).collect::<Vec<_>>();
    let line = line.strip_prefix("- ")?;
    let never = [" does not know ", " do not know "].iter().find_map(|verb| line.split_once(verb));
    let only = || {
        let line = line.strip_prefix("Only ")?;
        [" knows ", " know "].iter().find_map(|verb| line.split_once(verb))
    };
    // What follows the sentence is its reason.
    let sentence = |text: &str| names(text.split(". ").next().unwrap_or(text));
    never
        .map(|(subject, object)| Rule::Never(names(subject), sentence(object)))
        .or_else(|| only().map(|(subject, object)| Rule::Only(names(subject), sentence(object))))
}

/// Collects the paths of a file, each from its crate on.
struct Paths {
    /// Where the reader is, from the crate on.
    module: Vec<String>,
    found: BTreeSet<String>,
}

impl Paths {
    fn add(&mut self, path: &[String]) {
        let mut module = self.module.clone();
        let mut rest = path;
        match path.first().map(String::as_str) {
            Some("crate") => {
                module.truncate(1);
                rest = &path[1..];
            }
            Some("self") => rest = &path[1..],
            Some("super") => {}
            _ => module.clear(),
        }
        while rest.first().is_some_and(|name| name == "super") {
            module.pop();
            rest = &rest[1..];
        }
        module.extend_from_slice(rest);
        self.found.insert(module.join("::"));
    }

    fn add_tree(&mut self, tree: &UseTree, start: &[String]) {
        let with = |name: String| [start, &[name]].concat();
        match tree {
            UseTree::Path(path) => self.add_tree(&path.tree, &with(path.ident.to_string())),
            UseTree::Name(name) => self.add(&with(name.ident.to_string())),
            UseTree::Rename(rename) => self.add(&with(rename.ident.to_string())),
            UseTree::Glob(_) => self.add(start),
            UseTree::Group(group) => group.items.iter().for_each(|tree| self.add_tree(tree, start)),
        }
    }
}

fn is_test(attributes: &[Attribute]) -> bool {
    let is = |attribute: &Attribute| match &attribute.meta {
        Meta::List(list) => list.path.is_ident("cfg") && list.tokens.to_string() == "test",
        _ => false,
    };
    attributes.iter().any(is)
}

impl Visit<'_> for Paths {
    fn visit_item_mod(&mut self, item: &ItemMod) {
        if !is_test(&item.attrs) {
            self.module.push(item.ident.to_string());
            visit::visit_item_mod(self, item);
            self.module.pop();
        }
    }

    fn visit_item_use(&mut self, item: &ItemUse) {
        if !is_test(&item.attrs) {
            self.add_tree(&item.tree, &[]);
        }
    }

    fn visit_path(&mut self, path: &syn::Path) {
        self.add(&path.segments.iter().map(|segment| segment.ident.to_string()).collect::<Vec<_>>());
        visit::visit_path(self, path);
    }
}

/// The paths that a source names, for the module `module`.
fn paths(module: &str, source: &str) -> BTreeSet<String> {
    let module = module.split("::").map(str::to_owned).collect();
    let mut paths = Paths { module, found: BTreeSet::new() };
    paths.visit_file(&syn::parse_file(source).expect("the sources are Rust"));
    paths.found
}

/// What every module of the workspace names, without tests.
fn modules() -> BTreeMap<String, BTreeSet<String>> {
    let mut all: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    let files = repository::files(".rs");
    for (name, folder) in CRATES {
        let start = format!("{folder}/src/");
        for (path, inside) in files.iter().filter_map(|path| Some((path, path.strip_prefix(&start)?))) {
            let mut module: Vec<&str> = inside.trim_end_matches(".rs").split('/').collect();
            if module.iter().any(|part| *part == "tests" || part.ends_with("_tests")) {
                continue;
            }
            if ["mod", "lib"].contains(module.last().expect("a path has an end")) {
                module.pop();
            }
            module.insert(0, name);
            let module = module.join("::");
            all.entry(module.clone()).or_default().extend(paths(&module, &repository::read(path)));
        }
    }
    all
}

fn is_in(path: &str, module: &str) -> bool {
    path == module || path.strip_prefix(module).is_some_and(|rest| rest.starts_with("::"))
}

/// Where the sources do what a rule forbids.
fn against(rule: &Rule, modules: &BTreeMap<String, BTreeSet<String>>) -> Vec<String> {
    let (Rule::Never(subjects, objects) | Rule::Only(subjects, objects)) = rule;
    let of = |module: &str, names: &[String]| names.iter().any(|name| is_in(module, name));
    let forbidden = |module: &str| match rule {
        Rule::Never(..) => of(module, subjects),
        Rule::Only(..) => !of(module, subjects) && !of(module, objects),
    };
    let known = modules.iter().filter(|(module, _)| forbidden(module));
    known
        .flat_map(|(module, paths)| paths.iter().map(move |path| (module, path)))
        .filter(|(_, path)| of(path, objects))
        .map(|(module, path)| format!("{module} names {path}"))
        .collect()
}

#[test]
fn no_module_knows_what_the_architecture_says_it_does_not_know() {
    let modules = modules();
    let document = repository::read("ARCHITECTURE.md");
    let rules: Vec<(&str, Rule)> = document.lines().filter_map(|line| Some((line, rule(line)?))).collect();
    assert!(rules.len() >= 10, "ARCHITECTURE.md has {} sentences of this kind", rules.len());
    let mut wrong = Vec::new();
    for (line, rule) in rules {
        let (Rule::Never(subjects, objects) | Rule::Only(subjects, objects)) = &rule;
        let own = |name: &&String| CRATES.iter().any(|(start, _)| is_in(name, start));
        for name in subjects.iter().chain(objects).filter(own) {
            let exists = modules.iter().any(|(module, _)| is_in(module, name));
            if !exists {
                wrong.push(format!("{line}\n    there is no module {name}"));
            }
        }
        wrong.extend(against(&rule, &modules).into_iter().map(|what| format!("{line}\n    {what}")));
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn a_forbidden_path_is_found_however_it_is_written() {
    let source = "
        use crate::engine::{self, step::Step};
        use super::plan;
        fn f() -> burn::tensor::Tensor<1> { crate::optim::now() }
        mod inner { use super::super::data; }
        #[cfg(test)]
        mod tests { use crate::learner; }";
    let found = paths("burn_megatron::schedule", source);
    for path in
        ["burn_megatron::engine::step::Step", "burn_megatron::plan", "burn_megatron::data", "burn::tensor::Tensor"]
    {
        assert!(found.contains(path), "{path} is not among {found:?}");
    }
    assert!(found.contains("burn_megatron::optim::now") && !found.contains("burn_megatron::learner"));

    let modules = BTreeMap::from([("burn_megatron::schedule".to_owned(), found)]);
    let never =
        rule("- `burn_megatron::schedule` does not know `burn_megatron::engine`. The engine knows `x`.").unwrap();
    assert_eq!(never, Rule::Never(vec!["burn_megatron::schedule".into()], vec!["burn_megatron::engine".into()]));
    assert_eq!(against(&never, &modules).len(), 2);
    let only = rule("- Only `burn_megatron::plan` knows `burn_megatron::data`.").unwrap();
    assert_eq!(against(&only, &modules).len(), 1);
    assert_eq!(rule("- A sentence of another kind."), None);
}
