//! What the modules of the workspace name, read from their sources without tests.

use std::collections::{BTreeMap, BTreeSet};

use syn::visit::{self, Visit};
use syn::{Attribute, ItemMod, ItemUse, Meta, UseTree, Visibility};

use crate::repository;

/// The crates of the workspace, as their sources call them, and their folders.
pub const CRATES: [(&str, &str); 10] = [
    ("kernels_cubecl", "kernels-cubecl"),
    ("layouts", "backend-dist/layouts"),
    ("gpu", "backend-dist/gpu"),
    ("ranks", "backend-dist/ranks"),
    ("ops", "backend-dist/ops"),
    ("backend_dist", "backend-dist"),
    ("models", "models"),
    ("host", "burn-megatron/host"),
    ("planner", "burn-megatron/planner"),
    ("burn_megatron", "burn-megatron"),
];

/// Collects the paths of a file, each from its crate on.
#[derive(Default)]
pub struct Paths {
    /// Where the reader is, from the crate on.
    module: Vec<String>,
    pub found: BTreeSet<String>,
    /// Those of `found` that the module itself needs: not what it only hands on by `pub use`.
    pub needed: BTreeSet<String>,
    /// What it hands on, by the name that it gives it.
    pub handed_on: BTreeMap<String, String>,
    /// The reader is in a `pub use`.
    hands_on: bool,
}

/// A path from its crate on, where `module` names it.
fn absolute(module: &[String], path: &[String]) -> Vec<String> {
    let mut module = module.to_vec();
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
    module
}

impl Paths {
    fn add(&mut self, path: &[String]) {
        let path = absolute(&self.module, path).join("::");
        if !self.hands_on {
            self.needed.insert(path.clone());
        }
        self.found.insert(path);
    }

    /// Notes that the file hands on `path`, of one of its own modules or of another, as `name`.
    fn hand_on(&mut self, path: &[String], name: String) {
        let own: Vec<String> = self.module.clone();
        self.add(path);
        let start = path[0].as_str();
        let is_crate = ["crate", "self", "super"].contains(&start) || CRATES.iter().any(|(name, _)| *name == start);
        let is_relative = !is_crate && path.len() > 1;
        let of_this = if is_relative { [own.as_slice(), path].concat() } else { absolute(&own, path) };
        self.handed_on.insert(name, of_this.join("::"));
    }

    fn add_tree(&mut self, tree: &UseTree, start: &[String]) {
        let with = |name: String| [start, &[name]].concat();
        match tree {
            UseTree::Path(path) => self.add_tree(&path.tree, &with(path.ident.to_string())),
            UseTree::Name(name) if self.hands_on => {
                let name = name.ident.to_string();
                self.hand_on(&with(name.clone()), name);
            }
            UseTree::Rename(rename) if self.hands_on => {
                self.hand_on(&with(rename.ident.to_string()), rename.rename.to_string());
            }
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
            self.hands_on = !matches!(item.vis, Visibility::Inherited);
            self.add_tree(&item.tree, &[]);
            self.hands_on = false;
        }
    }

    fn visit_path(&mut self, path: &syn::Path) {
        self.add(&path.segments.iter().map(|segment| segment.ident.to_string()).collect::<Vec<_>>());
        visit::visit_path(self, path);
    }
}

/// The paths that a source names, for the module `module`.
pub fn paths(module: &str, source: &str) -> Paths {
    let module = module.split("::").map(str::to_owned).collect();
    let mut paths = Paths { module, ..Paths::default() };
    paths.visit_file(&syn::parse_file(source).expect("the sources are Rust"));
    paths
}

/// What every module of the workspace names, without tests.
pub fn modules() -> BTreeMap<String, Paths> {
    let mut all: BTreeMap<String, Paths> = BTreeMap::new();
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
            all.insert(module.clone(), paths(&module, &repository::read(path)));
        }
    }
    all
}
