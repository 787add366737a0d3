//! Python's pickles as data (<https://docs.python.org/3/library/pickletools.html>, protocols 2 to 5). Nothing is ever
//! called: an object is its class, its arguments and its state.

use super::node::{Id, Node};
use super::unpickler::run;

/// A pickle that has been read.
#[derive(Debug)]
pub(super) struct Pickle {
    nodes: Vec<Node>,
    top: Id,
}

/// A value of a pickle.
#[derive(Clone, Copy, Debug)]
pub(super) struct Value<'a> {
    pickle: &'a Pickle,
    id: Id,
}

impl Pickle {
    /// Reads a pickle whose classes are all among `classes`, as `module.name`.
    ///
    /// # Errors
    /// If it is damaged, or has a class or an operation of no legal pickle; with the byte.
    pub fn read(bytes: &[u8], classes: &[&str]) -> Result<Self, String> {
        let (nodes, top) = run(bytes, classes)?;
        Ok(Self { nodes, top })
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

    pub fn text(self) -> Option<&'a str> {
        match self.node() {
            Node::Text(text) => Some(text),
            _ => None,
        }
    }

    pub fn integer(self) -> Option<i64> {
        match self.node() {
            Node::Int(value) => Some(*value),
            _ => None,
        }
    }

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
        let entries = self.state()?.entries()?;
        entries.into_iter().find(|(key, _)| key.text() == Some(name)).map(|(_, value)| value)
    }

    /// The name of what a file has elsewhere.
    pub fn persistent(self) -> Option<Vec<Self>> {
        match self.node() {
            Node::Persistent(id) => self.at(*id).items(),
            _ => None,
        }
    }
}
