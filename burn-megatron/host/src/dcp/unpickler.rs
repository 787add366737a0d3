//! Reads the operations of a pickle.

use std::collections::HashMap;

use super::node::{Id, Node};
use super::opcodes::*;

/// All values of a pickle, and which of them it is of. Its classes must be among `classes`, if there are any. Fails if
/// it is damaged, or has a class or an operation of no legal pickle; with the byte.
pub(super) fn run(bytes: &[u8], classes: Option<&[&str]>) -> Result<(Vec<Node>, Id), String> {
    let mut machine = Machine {
        bytes,
        at: 0,
        classes,
        nodes: Vec::new(),
        stack: Vec::new(),
        marks: Vec::new(),
        memo: HashMap::new(),
    };
    loop {
        let at = machine.at;
        match machine.step() {
            Ok(None) => {}
            Ok(Some(top)) => return Ok((machine.nodes, top)),
            Err(what) => return Err(format!("pickle, byte {at}: {what}")),
        }
    }
}

/// Python's unpickler, which only takes notes.
struct Machine<'a> {
    bytes: &'a [u8],
    at: usize,
    classes: Option<&'a [&'a str]>,
    nodes: Vec<Node>,
    stack: Vec<Id>,
    marks: Vec<usize>,
    memo: HashMap<usize, Id>,
}

impl<'a> Machine<'a> {
    /// One operation; the value after the last.
    fn step(&mut self) -> Result<Option<Id>, String> {
        match self.unsigned(1)? as u8 {
            PROTO => match self.unsigned(1)? {
                2..=5 => {}
                other => return Err(format!("protocol {other}; legal: 2 to 5")),
            },
            FRAME => self.skip(8)?,
            STOP => return self.pop().map(Some),
            NONE => self.push(Node::None),
            TRUE => self.push(Node::Bool(true)),
            FALSE => self.push(Node::Bool(false)),
            BININT => self.unsigned(4).map(|value| self.push(Node::Int((value as u32 as i32).into())))?,
            BININT1 => self.int(1)?,
            BININT2 => self.int(2)?,
            LONG1 => self.long(1)?,
            LONG4 => self.long(4)?,
            BINFLOAT => {
                // The only number that is big-endian.
                let bits = self.take(8)?.iter().fold(0, |bits, byte| bits << 8 | u64::from(*byte));
                self.push(Node::Float(f64::from_bits(bits)));
            }
            SHORT_BINUNICODE => self.unicode(1)?,
            BINUNICODE => self.unicode(4)?,
            BINUNICODE8 => self.unicode(8)?,
            SHORT_BINBYTES | SHORT_BINSTRING => self.blob(1)?,
            BINBYTES => self.blob(4)?,
            BINBYTES8 | BYTEARRAY8 => self.blob(8)?,
            EMPTY_TUPLE | EMPTY_LIST => self.push(Node::Items(Vec::new())),
            EMPTY_SET => self.push(Node::Other),
            EMPTY_DICT => self.push(Node::Dict(Vec::new())),
            MARK => self.marks.push(self.stack.len()),
            TUPLE1 => self.tuple(1)?,
            TUPLE2 => self.tuple(2)?,
            TUPLE3 => self.tuple(3)?,
            TUPLE | LIST => self.marked().map(|items| self.push(Node::Items(items)))?,
            FROZENSET => self.marked().map(|_| self.push(Node::Other))?,
            DICT => self.marked().and_then(pairs).map(|entries| self.push(Node::Dict(entries)))?,
            APPEND => self.pop().and_then(|item| self.extend(vec![item]))?,
            APPENDS => self.marked().and_then(|items| self.extend(items))?,
            ADDITEMS => drop(self.marked()?),
            SETITEM => {
                let (value, key) = (self.pop()?, self.pop()?);
                self.set(vec![(key, value)])?;
            }
            SETITEMS => self.marked().and_then(pairs).and_then(|entries| self.set(entries))?,
            GLOBAL => {
                let (module, name) = (self.line()?, self.line()?);
                self.class(module, name)?;
            }
            STACK_GLOBAL => {
                let (name, module) = (self.pop_text()?, self.pop_text()?);
                self.class(&module, &name)?;
            }
            REDUCE | NEWOBJ => self.pop().and_then(|arguments| self.object(arguments))?,
            NEWOBJ_EX => {
                let (_keywords, arguments) = (self.pop()?, self.pop()?);
                self.object(arguments)?;
            }
            BUILD => {
                let (told, any) = (self.pop()?, self.classes.is_none());
                match self.top()? {
                    Node::Object { state, .. } => *state = Some(told),
                    _ if any => {}
                    _ => return Err("a state for what is no object".into()),
                }
            }
            BINPERSID => self.pop().map(|id| self.push(Node::Persistent(id)))?,
            POP => drop(self.pop()?),
            POP_MARK => drop(self.marked()?),
            DUP => {
                let id = *self.stack.last().ok_or("nothing to repeat")?;
                self.stack.push(id);
            }
            MEMOIZE => self.remember(self.memo.len())?,
            BINPUT => self.unsigned(1).and_then(|key| self.remember(key))?,
            LONG_BINPUT => self.unsigned(4).and_then(|key| self.remember(key))?,
            BINGET => self.recall(1)?,
            LONG_BINGET => self.recall(4)?,
            other => return Err(format!("operation {other:#04x} is not one of data")),
        }
        Ok(None)
    }

    fn take(&mut self, count: usize) -> Result<&'a [u8], String> {
        let end = self.at.checked_add(count).filter(|end| *end <= self.bytes.len());
        let end = end.ok_or_else(|| format!("ends after {} bytes, {count} more are needed", self.bytes.len()))?;
        let taken = &self.bytes[self.at..end];
        self.at = end;
        Ok(taken)
    }

    fn skip(&mut self, count: usize) -> Result<(), String> {
        self.take(count).map(drop)
    }

    /// A little-endian number of 1 to 8 bytes.
    fn unsigned(&mut self, count: usize) -> Result<usize, String> {
        let bytes = self.take(count)?;
        Ok(bytes.iter().rev().fold(0, |value, byte| value << 8 | usize::from(*byte)))
    }

    fn push(&mut self, node: Node) {
        self.stack.push(self.nodes.len());
        self.nodes.push(node);
    }

    /// The topmost value above the last mark.
    fn pop(&mut self) -> Result<Id, String> {
        let floor = self.marks.last().copied().unwrap_or(0);
        self.stack.pop().filter(|_| self.stack.len() >= floor).ok_or_else(|| "a value is missing".into())
    }

    fn pop_text(&mut self) -> Result<String, String> {
        let id = self.pop()?;
        match &self.nodes[id] {
            Node::Text(text) => Ok(text.clone()),
            _ => Err("the name of a class is no text".into()),
        }
    }

    fn top(&mut self) -> Result<&mut Node, String> {
        let id = *self.stack.last().ok_or("a value is missing")?;
        Ok(&mut self.nodes[id])
    }

    /// All values above the last mark, which is removed.
    fn marked(&mut self) -> Result<Vec<Id>, String> {
        let mark = self.marks.pop().filter(|mark| *mark <= self.stack.len()).ok_or("a mark is missing")?;
        Ok(self.stack.split_off(mark))
    }

    fn tuple(&mut self, count: usize) -> Result<(), String> {
        let mut items = (0..count).map(|_| self.pop()).collect::<Result<Vec<Id>, _>>()?;
        items.reverse();
        self.push(Node::Items(items));
        Ok(())
    }

    fn int(&mut self, size: usize) -> Result<(), String> {
        self.unsigned(size).map(|value| self.push(Node::Int(value as i64)))
    }

    /// A number of any length in two's complement.
    fn long(&mut self, size: usize) -> Result<(), String> {
        let count = self.unsigned(size)?;
        if count > 8 {
            return self.other(count);
        }
        let bytes = self.take(count)?;
        let sign = if bytes.last().is_some_and(|byte| *byte >= 0x80) { -1 } else { 0 };
        let value = bytes.iter().rev().fold(sign, |value: i64, byte| value << 8 | i64::from(*byte));
        self.push(Node::Int(value));
        Ok(())
    }

    fn other(&mut self, count: usize) -> Result<(), String> {
        self.skip(count)?;
        self.push(Node::Other);
        Ok(())
    }

    fn blob(&mut self, size: usize) -> Result<(), String> {
        self.unsigned(size).and_then(|count| self.other(count))
    }

    fn unicode(&mut self, size: usize) -> Result<(), String> {
        let count = self.unsigned(size)?;
        let text = std::str::from_utf8(self.take(count)?).map_err(|error| error.to_string())?;
        self.push(Node::Text(text.into()));
        Ok(())
    }

    fn line(&mut self) -> Result<&'a str, String> {
        let rest = &self.bytes[self.at..];
        let end = rest.iter().position(|byte| *byte == b'\n').ok_or("a line has no end")?;
        self.at += end + 1;
        std::str::from_utf8(&rest[..end]).map_err(|error| error.to_string())
    }

    fn class(&mut self, module: &str, name: &str) -> Result<(), String> {
        let class = format!("{module}.{name}");
        if self.classes.is_some_and(|classes| !classes.contains(&class.as_str())) {
            return Err(format!("class {class} is none of those that such a file has"));
        }
        self.push(Node::Class(class));
        Ok(())
    }

    fn object(&mut self, arguments: Id) -> Result<(), String> {
        let id = self.pop()?;
        let class = match &self.nodes[id] {
            Node::Class(class) => class.clone(),
            // What a function has made, in a file that may have any.
            _ if self.classes.is_none() => String::new(),
            _ => return Err("an object without a class".into()),
        };
        let node = match class.as_str() {
            "collections.OrderedDict" => Node::Dict(Vec::new()),
            _ => Node::Object { class, arguments, state: None },
        };
        self.push(node);
        Ok(())
    }

    fn extend(&mut self, more: Vec<Id>) -> Result<(), String> {
        match self.top()? {
            Node::Items(items) => items.extend(more),
            // A class of its own that is a list.
            Node::Object { .. } => {}
            _ => return Err("elements for what is no list".into()),
        }
        Ok(())
    }

    fn set(&mut self, more: Vec<(Id, Id)>) -> Result<(), String> {
        match self.top()? {
            Node::Dict(entries) => entries.extend(more),
            Node::Object { .. } => {}
            _ => return Err("entries for what is no dictionary".into()),
        }
        Ok(())
    }

    fn remember(&mut self, key: usize) -> Result<(), String> {
        let id = *self.stack.last().ok_or("nothing to remember")?;
        self.memo.insert(key, id);
        Ok(())
    }

    fn recall(&mut self, size: usize) -> Result<(), String> {
        let key = self.unsigned(size)?;
        let id = *self.memo.get(&key).ok_or_else(|| format!("value {key} was never remembered"))?;
        self.stack.push(id);
        Ok(())
    }
}

fn pairs(items: Vec<Id>) -> Result<Vec<(Id, Id)>, String> {
    let (pairs, rest) = items.as_chunks::<2>();
    if rest.is_empty() {
        Ok(pairs.iter().map(|[key, value]| (*key, *value)).collect())
    } else {
        Err("a key without a value".into())
    }
}
