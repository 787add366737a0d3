//! A field of the schema, and its JSON put together from columns.

use std::io;
use std::ops::Range;

use parquet::basic::{ConvertedType, Repetition};
use parquet::schema::types::Type;
use serde_json::json;

use super::column::{Column, Scalar, is_read};

/// A field, and what it lies in.
pub(super) struct Node {
    /// The definition level from which it is not null.
    there: i16,
    /// Columns that are read for it; the levels of the first say what there is of it.
    columns: Range<usize>,
    kind: Kind,
}

enum Kind {
    Scalar,
    /// Keys in quotes.
    Struct(Vec<(String, Node)>),
    /// A list has an element from its definition level, and continues at its repetition level. A map is a list of structs
    /// with `key` and `value`.
    List {
        element: Box<Node>,
        definition: i16,
        repetition: i16,
    },
}

/// The node of a whole row, and the columns of the file that it reads; none if there are none.
pub(super) fn root(schema: &Type) -> (Option<Node>, Vec<usize>) {
    let mut walk = Walk { leaf: 0, read: Vec::new() };
    (walk.fields(schema, 0, 0), walk.read)
}

struct Walk {
    /// The column of the file that is next.
    leaf: usize,
    read: Vec<usize>,
}

impl Walk {
    /// A field with levels of what it lies in; none if nothing of it is read.
    fn field(&mut self, field: &Type, definition: i16, repetition: i16) -> Option<Node> {
        let info = field.get_basic_info();
        match info.has_repetition().then(|| info.repetition()) {
            // A repeated field outside a LIST is a list of what it is.
            Some(Repetition::REPEATED) => {
                self.list(definition, repetition, |walk| walk.present(field, definition + 1, repetition + 1))
            }
            Some(Repetition::OPTIONAL) => self.present(field, definition + 1, repetition),
            _ => self.present(field, definition, repetition),
        }
    }

    /// A field from the definition level at which it is there.
    fn present(&mut self, field: &Type, there: i16, repetition: i16) -> Option<Node> {
        if let Type::PrimitiveType { physical_type, .. } = field {
            let (column, leaf) = (self.read.len(), self.leaf);
            self.leaf += 1;
            is_read(*physical_type, field.get_basic_info().converted_type()).then(|| {
                self.read.push(leaf);
                Node { there, columns: column..column + 1, kind: Kind::Scalar }
            })
        } else if let Some(repeated) = repeated(field) {
            self.list(there, repetition, |walk| match element(field, repeated) {
                Some(element) => walk.field(element, there + 1, repetition + 1),
                None => walk.present(repeated, there + 1, repetition + 1),
            })
        } else {
            self.fields(field, there, repetition)
        }
    }

    fn fields(&mut self, group: &Type, there: i16, repetition: i16) -> Option<Node> {
        let start = self.read.len();
        let field = |field: &std::sync::Arc<Type>| {
            Some((json!(field.name()).to_string(), self.field(field, there, repetition)?))
        };
        let fields: Vec<_> = group.get_fields().iter().filter_map(field).collect();
        let kind = Kind::Struct(fields);
        (self.read.len() > start).then_some(Node { there, columns: start..self.read.len(), kind })
    }

    fn list(&mut self, there: i16, repetition: i16, element: impl FnOnce(&mut Self) -> Option<Node>) -> Option<Node> {
        let start = self.read.len();
        let element = Box::new(element(self)?);
        let kind = Kind::List { element, definition: there + 1, repetition: repetition + 1 };
        Some(Node { there, columns: start..self.read.len(), kind })
    }
}

/// The repeated field of a list or map.
fn repeated(field: &Type) -> Option<&Type> {
    let list = [ConvertedType::LIST, ConvertedType::MAP, ConvertedType::MAP_KEY_VALUE];
    match field.get_fields() {
        [only] if list.contains(&field.get_basic_info().converted_type()) => {
            let info = only.get_basic_info();
            (info.has_repetition() && info.repetition() == Repetition::REPEATED).then_some(only)
        }
        _ => None,
    }
}

/// The element inside a list's repeated field; none if that is the element itself, in files of older writers ("Backward-
/// compatibility rules" of Parquet's logical types).
fn element<'a>(list: &Type, repeated: &'a Type) -> Option<&'a Type> {
    if repeated.is_primitive() || repeated.name() == "array" || repeated.name() == format!("{}_tuple", list.name()) {
        return None;
    }
    match repeated.get_fields() {
        [only] => Some(only),
        _ => None,
    }
}

impl Node {
    /// Writes the next value, and says whether it is more than null. What is wrong with it goes to `wrong`. Fails if
    /// the columns cannot be read.
    pub fn write(&self, columns: &mut [Column], json: &mut Vec<u8>, wrong: &mut Option<String>) -> io::Result<bool> {
        let level = columns[self.columns.start].definition()?;
        if level < self.there {
            json.extend(b"null");
            self.skip(columns)?;
            return Ok(false);
        }
        match &self.kind {
            Kind::Scalar => return scalar(&mut columns[self.columns.start], json, wrong),
            Kind::Struct(fields) => {
                json.push(b'{');
                for (key, field) in fields {
                    let before = json.len();
                    if json.last() != Some(&b'{') {
                        json.push(b',');
                    }
                    json.extend(key.bytes());
                    json.push(b':');
                    if !field.write(columns, json, wrong)? {
                        json.truncate(before);
                    }
                }
                json.push(b'}');
            }
            Kind::List { definition, .. } if level < *definition => {
                json.extend(b"[]");
                self.skip(columns)?;
            }
            Kind::List { element, repetition, .. } => {
                json.push(b'[');
                loop {
                    element.write(columns, json, wrong)?;
                    match columns[self.columns.start].peek()? {
                        Some(next) if next.repetition >= *repetition => json.push(b','),
                        _ => break,
                    }
                }
                json.push(b']');
            }
        }
        Ok(true)
    }

    fn skip(&self, columns: &mut [Column]) -> io::Result<()> {
        columns[self.columns.clone()].iter_mut().try_for_each(|column| column.take().map(drop))
    }
}

fn scalar(column: &mut Column, json: &mut Vec<u8>, wrong: &mut Option<String>) -> io::Result<bool> {
    let value = match column.take()?.value {
        Some(Scalar::Boolean(value)) => json!(value),
        Some(Scalar::Integer(value)) => json!(value),
        Some(Scalar::Unsigned(value)) => json!(value),
        Some(Scalar::Float(value)) => json!(value),
        Some(Scalar::Bytes(bytes)) => match std::str::from_utf8(bytes.data()) {
            Ok(text) => json!(text),
            Err(error) => {
                if column.is_text() {
                    let at = error.valid_up_to();
                    wrong.get_or_insert_with(|| format!("column {}: not UTF-8 at byte {at}", column.name()));
                }
                json!(null)
            }
        },
        None => json!(null),
    };
    serde_json::to_writer(json, &value)?;
    Ok(!value.is_null())
}
