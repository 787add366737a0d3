//! Lists and objects that templates make into texts as Python does: `{{ type | upper }}` and `list ~ ''` of Jinja call `str`.

use std::fmt;
use std::sync::Arc;

use minijinja::value::{DynObject, Enumerator, Object, ObjectRepr, Value, ValueKind};

use super::python::print;

/// A list or an object whose text is Python's.
#[derive(Debug)]
struct Texts(DynObject);

impl Object for Texts {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        self.0.repr()
    }

    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        self.0.get_value(key)
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        self.0.enumerate()
    }

    fn enumerator_len(self: &Arc<Self>) -> Option<usize> {
        self.0.enumerator_len()
    }

    fn render(self: &Arc<Self>, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&print(&Value::from_dyn_object(self.0.clone())))
    }
}

/// `value`, whose lists and objects are such, and all in them.
pub(super) fn with_texts(value: &Value) -> Value {
    let items = || value.try_iter().into_iter().flatten();
    let rebuilt: Value = match value.kind() {
        ValueKind::Seq => items().map(|item| with_texts(&item)).collect::<Vec<_>>().into(),
        ValueKind::Map => {
            items().map(|key| (key.clone(), with_texts(&value.get_item(&key).unwrap_or_default()))).collect()
        }
        _ => return value.clone(),
    };
    rebuilt.as_object().map_or_else(|| rebuilt.clone(), |object| Value::from_object(Texts(object.clone())))
}
