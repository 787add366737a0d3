//! Which slice of which global tensor a rank holds ([`layouts::shard`]), all parameters of a rank, and floats on the host
//! as data of tensors.

mod data;
mod registry;

pub use data::{element, into_data};
pub use layouts::element::Element;
pub use layouts::shard::{
    GradientSum, GroupPosition, HostFloats, HostTensor, Init, ParamSpec, RegistryError, Section, Split, Unit,
    WeightSource, copy_bytes, stable_hash,
};
pub use registry::Registry;
