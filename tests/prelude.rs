//! Every type that the prelude has comes with an example in its documentation, which `cargo test --doc` compiles.

use std::collections::BTreeMap;

use syn::{Attribute, Expr, Ident, Item, Lit, Meta, UseTree};
use tests::repository;

/// What the prelude names, each with the folder and the module that it is from: `burn-megatron/host/src/lr` and `Span`.
fn names() -> Vec<(String, String)> {
    let file = syn::parse_file(&repository::read("burn-megatron/src/prelude.rs")).expect("Rust");
    let mut found = Vec::new();
    for item in file.items {
        let Item::Use(item) = item else { continue };
        flatten(&item.tree, &mut Vec::new(), &mut found);
    }
    found
}

fn flatten(tree: &UseTree, path: &mut Vec<String>, found: &mut Vec<(String, String)>) {
    match tree {
        UseTree::Path(further) => {
            path.push(further.ident.to_string());
            flatten(&further.tree, path, found);
            path.pop();
        }
        UseTree::Group(group) => group.items.iter().for_each(|tree| flatten(tree, path, found)),
        UseTree::Name(name) => {
            let folder = match path[0].as_str() {
                "crate" => "burn-megatron".to_owned(),
                other => other.replace('_', "-"),
            };
            let module = path.get(1).map(|module| format!("/{module}")).unwrap_or_default();
            found.push((format!("{folder}/src{module}"), name.ident.to_string()));
        }
        _ => panic!("a way to re-export that this test does not know"),
    }
}

/// Name and attributes of a type, and the name of a function.
fn parts(item: &Item) -> Option<(&Ident, Option<&[Attribute]>)> {
    Some(match item {
        Item::Struct(item) => (&item.ident, Some(&item.attrs)),
        Item::Enum(item) => (&item.ident, Some(&item.attrs)),
        Item::Trait(item) => (&item.ident, Some(&item.attrs)),
        Item::Type(item) => (&item.ident, Some(&item.attrs)),
        Item::Fn(item) => (&item.sig.ident, None),
        _ => return None,
    })
}

/// Whether a comment has code that is compiled.
fn has_example(attributes: &[Attribute]) -> bool {
    attributes.iter().any(|attribute| {
        let Meta::NameValue(meta) = &attribute.meta else { return false };
        let Expr::Lit(line) = &meta.value else { return false };
        let Lit::Str(line) = &line.lit else { return false };
        meta.path.is_ident("doc") && ["```", "```no_run"].contains(&line.value().trim())
    })
}

#[test]
fn every_type_of_the_prelude_has_an_example() {
    let files: BTreeMap<String, syn::File> = (repository::files(".rs").into_iter())
        .filter(|path| !path.contains("/tests"))
        .map(|path| (path.clone(), syn::parse_file(&repository::read(&path)).expect("Rust")))
        .collect();
    let names = names();
    assert!(names.len() > 30, "{names:?}");
    for (place, name) in names {
        let of_module = |path: &&String| path.strip_prefix(&place).is_some_and(|rest| rest.starts_with(['/', '.']));
        // What they hand on is a module of the same name in the crate `host`, or somewhere in the crates below
        // `backend_dist`; `models` hands on what is in `layouts`.
        let of_host = place.replace("burn-megatron/src", "burn-megatron/host/src");
        let below = |path: &&String| {
            let starts = match place.split('/').next() {
                Some("backend-dist") => ["backend-dist/layouts/src", "backend-dist/ranks/src"],
                Some("models") => ["backend-dist/layouts/src"; 2],
                _ => [of_host.as_str(); 2],
            };
            starts.iter().any(|start| path.strip_prefix(start).is_some_and(|rest| rest.starts_with(['/', '.'])))
        };
        let in_files = |is_searched: &dyn Fn(&&String) -> bool| -> Vec<_> {
            let items = files.iter().filter(|(path, _)| is_searched(path)).flat_map(|(_, file)| &file.items);
            items.filter_map(parts).filter(|(ident, _)| **ident == name).collect()
        };
        let found = Some(in_files(&of_module)).filter(|found| !found.is_empty()).unwrap_or_else(|| in_files(&below));
        // A macro's text has no items.
        if found.is_empty() && files.keys().filter(of_module).any(|path| is_in_macro(&repository::read(path), &name)) {
            continue;
        }
        assert_eq!(found.len(), 1, "{name} is in {place} once");
        assert!(found[0].1.is_none_or(has_example), "{name} of {place} has no example");
    }
}

/// Whether a text defines a type right after a doc comment with an example.
fn is_in_macro(text: &str, name: &str) -> bool {
    let Some(at) = text.find(&format!("pub enum {name} ")) else { return false };
    let above = text[..at].lines().rev().map(str::trim).filter(|line| !line.is_empty());
    above.take_while(|line| line.starts_with("///") || line.starts_with("#[")).any(|line| line.starts_with("/// ```"))
}
