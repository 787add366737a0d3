//! Writes pickles of protocol 2: what `torch` reads without calling anything but the classes of its checkpoints.

use super::opcodes::*;

/// A pickle that is being written.
pub struct Pickler(Vec<u8>);

impl Default for Pickler {
    fn default() -> Self {
        Self::new()
    }
}

impl Pickler {
    /// A pickle of nothing yet.
    pub fn new() -> Self {
        Self(vec![PROTO, 2])
    }

    /// The bytes.
    pub fn finish(mut self) -> Vec<u8> {
        self.0.push(STOP);
        self.0
    }

    /// `None`.
    pub fn none(&mut self) {
        self.0.push(NONE);
    }

    /// A boolean.
    pub fn boolean(&mut self, value: bool) {
        self.0.push(if value { TRUE } else { FALSE });
    }

    /// A float.
    pub fn float(&mut self, value: f64) {
        self.0.push(BINFLOAT);
        self.0.extend(value.to_be_bytes());
    }

    /// A string.
    pub fn text(&mut self, text: &str) {
        self.0.push(BINUNICODE);
        self.0.extend((text.len() as u32).to_le_bytes());
        self.0.extend(text.as_bytes());
    }

    /// An integer.
    pub fn integer(&mut self, value: u64) {
        match i32::try_from(value) {
            Ok(value) => {
                self.0.push(BININT);
                self.0.extend(value.to_le_bytes());
            }
            Err(_) => {
                // Nine bytes: the highest bit is the sign.
                self.0.extend([LONG1, 9]);
                self.0.extend(value.to_le_bytes());
                self.0.push(0);
            }
        }
    }

    /// A class of a module.
    pub fn class(&mut self, module: &str, name: &str) {
        self.0.push(GLOBAL);
        self.0.extend(format!("{module}\n{name}\n").bytes());
    }

    /// A tuple of what `items` writes.
    pub fn tuple(&mut self, items: impl FnOnce(&mut Self)) {
        self.0.push(MARK);
        items(self);
        self.0.push(TUPLE);
    }

    /// A list of what `items` writes.
    pub fn list(&mut self, items: impl FnOnce(&mut Self)) {
        self.0.extend([EMPTY_LIST, MARK]);
        items(self);
        self.0.push(APPENDS);
    }

    /// A dictionary; `entries` writes keys and values in turn.
    pub fn dict(&mut self, entries: impl FnOnce(&mut Self)) {
        self.0.extend([EMPTY_DICT, MARK]);
        entries(self);
        self.0.push(SETITEMS);
    }

    /// What a function or a class makes of arguments, which `arguments` writes.
    pub fn call(&mut self, module: &str, name: &str, arguments: impl FnOnce(&mut Self)) {
        self.class(module, name);
        self.tuple(arguments);
        self.0.push(REDUCE);
    }

    /// An object with a state.
    pub fn object(&mut self, module: &str, name: &str, state: impl FnOnce(&mut Self)) {
        self.class(module, name);
        self.0.extend([EMPTY_TUPLE, NEWOBJ]);
        state(self);
        self.0.push(BUILD);
    }

    /// What the file has elsewhere, under a tuple that `name` writes.
    pub fn persistent(&mut self, name: impl FnOnce(&mut Self)) {
        self.tuple(name);
        self.0.push(BINPERSID);
    }

    /// A tuple of integers.
    pub fn integers(&mut self, values: impl IntoIterator<Item = usize>) {
        self.tuple(|pickler| values.into_iter().for_each(|value| pickler.integer(value as u64)));
    }

    /// A `torch.Size`.
    pub fn size(&mut self, sizes: impl IntoIterator<Item = usize>) {
        self.call("torch", "Size", |pickler| pickler.integers(sizes));
    }
}
