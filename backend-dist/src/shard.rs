//! Which slice of which global tensor a rank holds ([`layouts::shard`]), all parameters of a rank, and floats on the host.

mod floats;
mod registry;

pub use floats::{HostFloats, copy_bytes};
pub use layouts::shard::{
    GradientSum, GroupPosition, HostTensor, Init, ParamSpec, RegistryError, Section, Split, Unit, stable_hash,
};
pub use registry::Registry;
