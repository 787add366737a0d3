//! The forward pass of SigLIP's tower, pooling head and classifier.

use backend_dist::parallelize::Plan;
use burn::module::Module;
use burn::nn::{Initializer, Linear, LinearConfig};
use burn::tensor::{Device, Int, Tensor};

use super::config::SiglipConfig;
use super::head::PoolingHead;
use crate::encoders::cross_entropy;
use crate::images::ClipVision;

/// SigLIP's image tower, with what its file has behind it.
///
/// ```
/// use burn::tensor::{Device, Tensor};
/// use models::images::{Siglip, SiglipConfig};
///
/// let model = Siglip::new(&SiglipConfig::tiny(), &Device::flex());
/// let states = model.states(Tensor::ones([2, 3, 8, 8], &Device::flex()));
/// assert_eq!(states.dims(), [2, 4, 16]);
/// assert_eq!(model.pool(states.clone()).unwrap().dims(), [2, 16]);
/// assert_eq!(model.classify(states).unwrap().dims(), [2, 10]);
/// ```
#[derive(Module, Debug)]
pub struct Siglip {
    tower: ClipVision,
    head: Option<PoolingHead>,
    /// Of the mean of all patches: transformers' classifier does not use the pooling head.
    classifier: Option<Linear>,
    /// Channels, and height and width.
    #[module(skip)]
    image: [usize; 2],
}

impl Siglip {
    /// With initial weights from the generator of `device`, whose float type the parameters have.
    pub fn new(config: &SiglipConfig, device: &Device) -> Self {
        let vision = &config.vision_config;
        let hidden = vision.hidden_size;
        let normal = Initializer::Normal { mean: 0.0, std: (hidden as f64).sqrt().recip() };
        let classifier = |labels| LinearConfig::new(hidden, labels).with_initializer(normal.clone()).init(device);
        Self {
            tower: ClipVision::new(vision, device),
            head: config.vision_use_head.then(|| PoolingHead::new(vision, device)),
            classifier: config.num_labels.map(classifier),
            image: [vision.num_channels, vision.image_size],
        }
    }

    /// Which parameters tensor parallelism shards: attention by heads, MLPs by their inner features.
    pub fn plan() -> Plan {
        Plan::auto().columns("query|key|value|inner").rows("output|outer")
    }

    /// Channels, and the height and width, of an image.
    pub fn image(&self) -> [usize; 2] {
        self.image
    }

    /// Number of classes of a model that classifies.
    pub fn classes(&self) -> Option<usize> {
        self.classifier.as_ref().map(|layer| layer.weight.lazy_shape().dims::<2>()[1])
    }

    /// The normalised hidden states `[batch, patches, hidden]` of `pixels [batch, channels, image_size, image_size]`.
    pub fn states(&self, pixels: Tensor<4>) -> Tensor<3> {
        self.tower.states(pixels)
    }

    /// One vector `[batch, hidden]` of [`states`](Self::states), of a model with a pooling head.
    pub fn pool(&self, states: Tensor<3>) -> Option<Tensor<2>> {
        self.head.as_ref().map(|head| head.forward(states))
    }

    /// Logits `[batch, classes]` of [`states`](Self::states), of a model that classifies.
    pub fn classify(&self, states: Tensor<3>) -> Option<Tensor<2>> {
        let [batch, _, hidden] = states.dims();
        self.classifier.as_ref().map(|layer| layer.forward(states.mean_dim(1).reshape([batch, hidden])))
    }

    /// The mean cross-entropy `[1]` of `logits [batch, classes]`.
    pub fn loss(logits: Tensor<2>, classes: Tensor<1, Int>) -> Tensor<1> {
        cross_entropy(logits.unsqueeze_dim(1), classes.unsqueeze_dim(1))
    }
}
