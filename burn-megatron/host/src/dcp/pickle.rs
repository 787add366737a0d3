//! Python's pickles as data (<https://docs.python.org/3/library/pickletools.html>, protocols 2 to 5). Nothing is ever
//! called: an object is its class, its arguments and its state.

use std::collections::HashMap;

use super::node::{Id, Node};
use super::unpickler::run;

/// A pickle that has been read.
#[derive(Debug)]
pub struct Pickle {
    nodes: Vec<Node>,
    top: Id,
    /// The bytes of tensors of one element, by the name of their storage.
    pub(super) storages: HashMap<String, Vec<u8>>,
}

/// A value of a pickle.
#[derive(Clone, Copy, Debug)]
pub struct Value<'a> {
    pickle: &'a Pickle,
    id: Id,
}

impl Pickle {
    /// Reads a pickle whose classes are all among `classes`, as `module.name`.
    ///
    /// # Errors
    /// If it is damaged, or has a class or an operation of no legal pickle; with the byte.
    pub fn read(bytes: &[u8], classes: &[&str]) -> Result<Self, String> {
        let (nodes, top) = run(bytes, Some(classes))?;
        Ok(Self { nodes, top, storages: HashMap::new() })
    }

    /// Reads a pickle of any classes, such as one of a program's own settings.
    ///
    /// # Errors
    /// If it is damaged, or has an operation of no legal pickle; with the byte.
    pub fn of_any(bytes: &[u8]) -> Result<Self, String> {
        let (nodes, top) = run(bytes, None)?;
        Ok(Self { nodes, top, storages: HashMap::new() })
    }

    /// What the pickle is of.
    pub fn value(&self) -> Value<'_> {
        Value { pickle: self, id: self.top }
    }
}

impl<'a> Value<'a> {
    fn node(self) -> &'a Node {
        &self.pickle.nodes[self.id]
    }

    fn at(self, id: Id) -> Self {
        Self { id, ..self }
    }

    /// A string, if it is one.
    pub fn text(self) -> Option<&'a str> {
        match self.node() {
            Node::Text(text) => Some(text),
            _ => None,
        }
    }

    /// An integer, if it is one.
    pub fn integer(self) -> Option<i64> {
        match self.node() {
            Node::Int(value) => Some(*value),
            _ => None,
        }
    }

    /// A boolean, if it is one.
    pub fn boolean(self) -> Option<bool> {
        match self.node() {
            Node::Bool(value) => Some(*value),
            _ => None,
        }
    }

    /// An integer or a float.
    pub(super) fn scalar(self) -> Option<f64> {
        match self.node() {
            Node::Int(value) => Some(*value as f64),
            Node::Float(value) => Some(*value),
            _ => None,
        }
    }

    /// The bytes of tensors of one element, by the name of their storage.
    pub(super) fn storages(self) -> &'a HashMap<String, Vec<u8>> {
        &self.pickle.storages
    }

    /// What a dictionary has under a name, or an object as an attribute.
    pub fn get(self, name: &str) -> Option<Self> {
        let entries = self.entries().or_else(|| self.state()?.entries())?;
        entries.into_iter().find(|(key, _)| key.text() == Some(name)).map(|(_, value)| value)
    }

    /// Whether it is `None`.
    pub fn is_none(self) -> bool {
        matches!(self.node(), Node::None)
    }

    /// Elements of a tuple or list.
    pub fn items(self) -> Option<Vec<Self>> {
        match self.node() {
            Node::Items(items) => Some(items.iter().map(|id| self.at(*id)).collect()),
            _ => None,
        }
    }

    /// Keys and values of a dictionary.
    pub fn entries(self) -> Option<Vec<(Self, Self)>> {
        match self.node() {
            Node::Dict(entries) => Some(entries.iter().map(|(key, value)| (self.at(*key), self.at(*value))).collect()),
            _ => None,
        }
    }

    /// The class that this is, or that an object is of.
    pub fn class(self) -> Option<&'a str> {
        match self.node() {
            Node::Class(class) | Node::Object { class, .. } => Some(class),
            _ => None,
        }
    }

    /// What an object was made from.
    pub fn arguments(self) -> Option<Vec<Self>> {
        match self.node() {
            Node::Object { arguments, .. } => self.at(*arguments).items(),
            _ => None,
        }
    }

    /// What an object was told after it was made.
    pub fn state(self) -> Option<Self> {
        match self.node() {
            Node::Object { state: Some(state), .. } => Some(self.at(*state)),
            _ => None,
        }
    }

    /// An attribute of an object.
    pub fn attribute(self, name: &str) -> Option<Self> {
        self.state()?.get(name)
    }

    /// The name of what a file has elsewhere.
    pub fn persistent(self) -> Option<Vec<Self>> {
        match self.node() {
            Node::Persistent(id) => self.at(*id).items(),
            _ => None,
        }
    }
}
