//! What a pickle consists of.

/// Where a value is in its pickle.
pub(super) type Id = usize;

#[derive(Clone, Debug)]
pub(super) enum Node {
    None,
    Int(i64),
    Float(f64),
    Bool(bool),
    Text(String),
    /// Bytes and sets: nothing that is needed.
    Other,
    /// A tuple or a list.
    Items(Vec<Id>),
    Class(String),
    Object {
        class: String,
        arguments: Id,
        state: Option<Id>,
    },
    Dict(Vec<(Id, Id)>),
    /// What a file has elsewhere, such as the storage of a tensor.
    Persistent(Id),
}
