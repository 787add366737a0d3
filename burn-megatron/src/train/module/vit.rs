//! ViT learns the classes of images.

use std::path::Path;

use burn::tensor::{Device, FloatDType};
use models::hf::HfModule;
use models::images::{Vit, VitConfig};
use serde_json::{Value, json};

use super::family::{Family, ModuleData};
use super::images::{Pixels, images};
use super::wrong;
use crate::config::ModuleConfig;
use crate::data::images::Target;
use crate::hf::{ModuleFolder, copy_small_files, read_config};
use crate::learner::VitBatch;
use crate::train::TrainError;

impl Family for Vit {
    fn data(config: &ModuleConfig, sizes: &VitConfig) -> Result<ModuleData<VitBatch>, TrainError> {
        let (pixels, classes) = (pixels(config, sizes)?, sizes.num_labels.unwrap_or(0));
        let class = |target: &Target| match target {
            Target::Label(class) if *class < classes => Ok(*class as i64),
            Target::Label(class) => {
                Err(format!("`label` is {class}; legal: 0 to {}, the classes of model.num-labels", classes - 1))
            }
            _ => Err("has no `label`, and vit learns the classes of images".into()),
        };
        let (image, dtype) = (pixels.image, pixels.dtype);
        images(config, pixels, class, move |classes: &[&i64], pixels, device| {
            let classes: Vec<i64> = classes.iter().map(|class| **class).collect();
            VitBatch::new(pixels, image, &classes, dtype, device)
        })
    }

    /// With a new head if the folder has none, or other classes.
    fn read(folder: &ModuleFolder, sizes: &VitConfig, dtype: FloatDType, device: &Device) -> Result<Self, TrainError> {
        let VitConfig { num_labels, pooler_output_size, .. } = folder.config::<Self>()?;
        let model: Self = folder.read(&VitConfig { num_labels, pooler_output_size, ..sizes.clone() }, dtype, device)?;
        Ok(if num_labels == sizes.num_labels { model } else { model.with_new_head(sizes, device) })
    }

    fn new_head(folder: &Path, sizes: &VitConfig) -> Result<Option<String>, TrainError> {
        let theirs = Self::from_hf(&read_config(folder)?).map_err(wrong)?.num_labels;
        let Some(classes) = sizes.num_labels.filter(|_| theirs != sizes.num_labels) else { return Ok(None) };
        let of_folder = theirs.map_or("no head".into(), |theirs| format!("{theirs} classes"));
        Ok(Some(format!("drawn anew for {classes} classes: {} has {of_folder}", folder.display())))
    }

    fn complete(config: &ModuleConfig, sizes: &VitConfig, exported: &Path) -> Result<(), TrainError> {
        if let Some(folder) = &config.model.hf {
            copy_small_files(folder, exported)?;
        }
        pixels(config, sizes)?.export(config, exported)
    }
}

fn pixels(config: &ModuleConfig, sizes: &VitConfig) -> Result<Pixels, TrainError> {
    let size = sizes.image_size;
    let default: Value = json!({"image_processor_type": "ViTImageProcessor", "size": {"height": size, "width": size}});
    Pixels::of(config, [sizes.num_channels, size], &default)
}
