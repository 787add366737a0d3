//! What the kernels' own tests check on CubeCL's cpu runtime, to be checked on a GPU.

#[path = "../../kernels-cubecl/tests/attention/checks.rs"]
pub mod attention;
#[path = "../../kernels-cubecl/tests/draws/mod.rs"]
mod draws;
#[path = "../../kernels-cubecl/tests/pointwise/checks/mod.rs"]
pub mod pointwise;
#[path = "../../kernels-cubecl/tests/attention/reference.rs"]
pub mod reference;

use cubecl::prelude::Client;

/// The first GPU.
pub fn client() -> Client {
    cubecl::Device::Cuda(Default::default()).client()
}
