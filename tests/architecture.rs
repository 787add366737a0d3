//! ARCHITECTURE.md says which module does not know which. This test reads these sentences, and the paths in the sources.
//!
//! A sentence is a line of a list: "`a` and `b` do not know `c`" or "Only `a` and `b` know `c`". A name is a path of
//! modules, and stands for everything below it.

use std::collections::{BTreeMap, BTreeSet};

use regex::Regex;
use tests::repository;
use tests::sources::{CRATES, Paths, modules, paths};

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

fn is_in(path: &str, module: &str) -> bool {
    path == module || path.strip_prefix(module).is_some_and(|rest| rest.starts_with("::"))
}

/// Where the sources do what a rule forbids.
fn against(rule: &Rule, modules: &BTreeMap<String, Paths>) -> Vec<String> {
    let (Rule::Never(subjects, objects) | Rule::Only(subjects, objects)) = rule;
    let of = |module: &str, names: &[String]| names.iter().any(|name| is_in(module, name));
    let forbidden = |module: &str| match rule {
        Rule::Never(..) => of(module, subjects),
        Rule::Only(..) => !of(module, subjects) && !of(module, objects),
    };
    let known = modules.iter().filter(|(module, _)| forbidden(module));
    known
        .flat_map(|(module, paths)| paths.found.iter().map(move |path| (module, path)))
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
            // A crate may have another crate as a module.
            let is_handed_on = || owner(name, &modules).is_some_and(|owner| !is_in(name, &owner));
            if !exists && !is_handed_on() {
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
        assert!(found.found.contains(path), "{path} is not among {:?}", found.found);
    }
    assert!(found.found.contains("burn_megatron::optim::now") && !found.found.contains("burn_megatron::learner"));

    let modules = BTreeMap::from([("burn_megatron::schedule".to_owned(), found)]);
    let never =
        rule("- `burn_megatron::schedule` does not know `burn_megatron::engine`. The engine knows `x`.").unwrap();
    assert_eq!(never, Rule::Never(vec!["burn_megatron::schedule".into()], vec!["burn_megatron::engine".into()]));
    assert_eq!(against(&never, &modules).len(), 2);
    let only = rule("- Only `burn_megatron::plan` knows `burn_megatron::data`.").unwrap();
    assert_eq!(against(&only, &modules).len(), 1);
    assert_eq!(rule("- A sentence of another kind."), None);
}

/// What a crate of the workspace cannot be built without, by the names in its `Cargo.toml` and in those of the crates of
/// the workspace that it needs.
fn needed_to_build(folder: &str, workspace: &toml::Table) -> BTreeSet<String> {
    let manifest: toml::Table = repository::read(&format!("{folder}/Cargo.toml")).parse().expect("TOML");
    let dependencies = manifest["dependencies"].as_table().expect("a table").iter();
    let is_optional = |given: &toml::Value| given.get("optional").and_then(toml::Value::as_bool) == Some(true);
    let mut found = BTreeSet::new();
    for (name, _) in dependencies.filter(|(_, given)| !is_optional(given)) {
        match workspace[name].get("path").and_then(toml::Value::as_str) {
            Some(path) => found.extend(needed_to_build(path, workspace)),
            None => drop(found.insert(name.clone())),
        }
    }
    found
}

#[test]
fn layouts_what_runs_on_the_host_and_the_planner_build_without_burn() {
    let workspace: toml::Table = repository::read("Cargo.toml").parse().expect("TOML");
    let workspace = workspace["workspace"]["dependencies"].as_table().expect("a table");
    let of = |folder| needed_to_build(folder, workspace);
    let is_of_burn = |name: &String| ["burn", "cubecl", "cudarc"].iter().any(|start| name.starts_with(start));
    for folder in ["backend-dist/layouts", "burn-megatron/host", "burn-megatron/planner"] {
        let wrong: Vec<_> = of(folder).into_iter().filter(is_of_burn).collect();
        assert!(wrong.is_empty(), "{folder} needs {wrong:?}");
    }
    assert!(
        of("burn-megatron/host").contains("rayon") && of("burn-megatron").contains("burn"),
        "own crates are followed"
    );
}

/// The module that defines what a path names, if it is one of these: whoever hands it on does not count.
fn owner(path: &str, modules: &BTreeMap<String, Paths>) -> Option<String> {
    let mut path = path.to_owned();
    // A name may be handed on from module to module.
    for _ in 0..8 {
        let names: Vec<&str> = path.split("::").collect();
        let (module, rest) = (1..=names.len()).rev().find_map(|end| {
            let module = names[..end].join("::");
            modules.contains_key(&module).then(|| (module, names[end..].to_vec()))
        })?;
        let next = rest.first().and_then(|name| modules[&module].handed_on.get(*name));
        match next {
            Some(next) => path = [&[next.as_str()], &rest[1..]].concat().join("::"),
            None => return Some(module),
        }
    }
    None
}

/// The modules that one needs, directly or by others.
fn reached<'a>(from: &'a str, edges: &BTreeMap<&'a str, BTreeSet<&'a str>>) -> BTreeSet<&'a str> {
    let (mut seen, mut left) = (BTreeSet::new(), Vec::from([from]));
    while let Some(module) = left.pop() {
        left.extend(edges[module].iter().filter(|other| seen.insert(**other)));
    }
    seen
}

/// The groups of modules each of which needs all others, directly or by others. What a module and those below it need of
/// each other does not count.
fn circles(modules: &BTreeMap<String, Paths>) -> Vec<BTreeSet<&str>> {
    let needs = |module: &str| -> BTreeSet<&str> {
        let owners = modules[module].needed.iter().filter_map(|path| owner(path, modules));
        let others = owners.filter(|other| !is_in(other, module) && !is_in(module, other));
        others.filter_map(|other| modules.get_key_value(&other).map(|(name, _)| name.as_str())).collect()
    };
    let edges: BTreeMap<&str, BTreeSet<&str>> = modules.keys().map(|module| (module.as_str(), needs(module))).collect();
    let all: BTreeMap<&str, BTreeSet<&str>> = edges.keys().map(|module| (*module, reached(module, &edges))).collect();
    let mutual = |module: &&str| -> BTreeSet<&str> {
        all[module].iter().filter(|other| all[*other].contains(module)).copied().collect()
    };
    let circles: BTreeSet<BTreeSet<&str>> = edges.keys().map(mutual).collect();
    circles.into_iter().filter(|circle| !circle.is_empty()).collect()
}

#[test]
fn modules_need_each_other_in_one_direction() {
    let modules = modules();
    let found = circles(&modules);
    assert!(found.is_empty(), "modules that need each other in a circle; move what both need below them:\n{found:#?}");
}

#[test]
fn a_circle_is_found_behind_what_modules_hand_on() {
    let module = |name: &str, source: &str| (name.to_owned(), paths(name, source));
    let of = |c: &str| {
        BTreeMap::from([
            module("models", "pub use a::{A, B as Renamed};"),
            module("models::a", "use crate::b::Second;\nuse super::d::D;\npub struct A;"),
            module("models::b", "pub use c::Second;\nmod inner { use super::super::d; }"),
            module("models::b::c", c),
            module("models::d", "pub struct D;"),
        ])
    };
    let straight = of("use super::Other;\nuse crate::d::D;\npub struct Second;");
    assert_eq!(circles(&straight), Vec::<BTreeSet<&str>>::new());
    let round = of("use crate::Renamed;\npub struct Second;");
    assert_eq!(circles(&round), [BTreeSet::from(["models::a", "models::b::c"])]);
    let inline = of("pub fn second() -> crate::a::A { crate::a::A }");
    assert_eq!(circles(&inline), [BTreeSet::from(["models::a", "models::b::c"])]);
}
