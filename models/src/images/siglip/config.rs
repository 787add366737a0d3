//! The sizes of a SigLIP under Hugging Face's names, and its `config.json`.

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::config::ConfigError;
use crate::hf::{ConfigReader, HfError};
use crate::images::{ClipVisionConfig, VisionFamily, labels};

/// The sizes of a [`Siglip`](super::Siglip).
///
/// ```
/// use models::images::SiglipConfig;
///
/// for config in [SiglipConfig::tiny(), SiglipConfig { num_labels: None, ..SiglipConfig::tiny() }] {
///     assert_eq!(SiglipConfig::from_hf(&config.to_hf())?, config);
/// }
/// # Ok::<(), models::hf::HfError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SiglipConfig {
    /// The image tower.
    pub vision_config: ClipVisionConfig,
    /// Whether there is a pooling head.
    pub vision_use_head: bool,
    /// Classes of a model that classifies.
    pub num_labels: Option<usize>,
}

impl SiglipConfig {
    /// A few thousand parameters.
    pub fn tiny() -> Self {
        Self {
            vision_config: ClipVisionConfig { family: VisionFamily::Siglip, ..ClipVisionConfig::tiny() },
            vision_use_head: true,
            num_labels: Some(10),
        }
    }

    /// Whether the sizes make a model.
    ///
    /// # Errors
    /// Names the sizes that contradict each other, and the nearest legal ones.
    pub fn check(&self) -> Result<(), ConfigError> {
        self.vision_config.check()
    }

    /// Reads the `config.json` of `SiglipForImageClassification` or `SiglipVisionModel`. An absent key has transformers'
    /// default.
    ///
    /// # Errors
    /// Names the key that is unknown or asks for something this model does not do, or sizes that contradict each other.
    pub fn from_hf(file: &Value) -> Result<Self, HfError> {
        let config = ConfigReader::new(file)?;
        if config.text("model_type")? == Some("siglip_vision_model") {
            let (vision_config, vision_use_head) = ClipVisionConfig::with_head(file)?;
            return Ok(Self { vision_config, vision_use_head, num_labels: None });
        }
        config.expect_module("siglip")?;
        config.object("vision_config")?.ok_or_else(|| HfError::Missing { key: "vision_config".into() })?;
        let (vision_config, vision_use_head) =
            ClipVisionConfig::with_head(&file["vision_config"]).map_err(|error| error.inside("vision_config"))?;
        if vision_config.family != VisionFamily::Siglip {
            let error = config.unsupported("model_type", "clip_vision_model", "siglip_vision_model");
            return Err(error.inside("vision_config"));
        }
        let num_labels = Some(labels::read(&config)?);
        // A classifier has no text model.
        config.finish(&["initializer_factor", "text_config"])?;
        Ok(Self { vision_config, vision_use_head, num_labels })
    }

    /// The `config.json` of this model, in the form of transformers 5.
    pub fn to_hf(&self) -> Value {
        let mut vision = self.vision_config.to_hf();
        vision["vision_use_head"] = self.vision_use_head.into();
        let Some(classes) = self.num_labels else {
            vision["architectures"] = json!(["SiglipVisionModel"]);
            return vision;
        };
        let mut file = json!({
            "architectures": ["SiglipForImageClassification"],
            "model_type": "siglip",
            "vision_config": vision,
        });
        labels::write(&mut file, classes);
        file
    }
}
