//! Vision models: image classification with [`Vit`] and [`Siglip`], and [`Llava`], a language model to which images are tokens.
//!
//! These are plain Burn modules of burn-nn's layers and tensor operations, with nothing parallel in them. A logical device
//! gives them every layout that any Burn module has; each has a `plan` that says which parameters tensor parallelism shards.
//!
//! ```
//! use backend_dist::{launch::launch, mesh::{Axis, Mesh}, mesh_backend::LogicalDevice, parallelize::parallelize};
//! use burn::tensor::{Device, Tensor};
//! use models::images::{Vit, VitConfig};
//!
//! launch(&Mesh::new("TP2".parse()?)?, &[Device::flex()], |rank| {
//!     let model = Vit::new(&VitConfig::tiny(), &rank.logical_device(&[Axis::Tp]));
//!     let model = parallelize(model, &rank, &Vit::plan())?;
//!     let logits = model.forward(Tensor::ones([2, 3, 8, 8], &rank.logical_device(&[Axis::Tp])));
//!     assert_eq!(logits.dims(), [2, 10]);
//!     Ok(())
//! })?;
//! # Ok::<(), backend_dist::launch::BoxError>(())
//! ```

mod attention;
mod block;
pub mod clip;
mod labels;
pub mod llava;
mod presets;
pub mod siglip;
pub mod vit;

pub use block::{Block, Mlp};
pub use clip::{ClipVision, ClipVisionConfig, VisionFamily};
pub use labels::write as set_classes;
pub use llava::{Llava, LlavaConfig};
pub use presets::presets;
pub use siglip::{PoolingHead, Siglip, SiglipConfig};
pub use vit::{Vit, VitConfig};

use burn::nn::conv::Conv2d;
use burn::tensor::Tensor;

/// The sequence of an image, `[batch, positions, hidden]`: a learned vector for the whole, if there is one, the patches, and
/// positions. `class` and `positions` are `[1, 1, hidden]` and `[1, positions, hidden]`, `pixels` is `[batch, channels, h, w]`.
fn patch_sequence(patches: &Conv2d, class: Option<Tensor<3>>, positions: Tensor<3>, pixels: Tensor<4>) -> Tensor<3> {
    let batch = pixels.dims()[0];
    let patches = patches.forward(pixels).flatten(2, 3).swap_dims(1, 2);
    let sequence = match class {
        Some(class) => Tensor::cat(vec![class.repeat_dim(0, batch), patches], 1),
        None => patches,
    };
    sequence + positions
}
