//! Pixels to a model's input, as the image processors of Hugging Face transformers do it.

use serde::Deserialize;
use serde_json::Value;

use super::decode::RgbImage;
use super::error::ImageError;
use super::resample::{Filter, resize};

/// What a `preprocessor_config.json` of ViT, CLIP or LLaVA says.
///
/// ```
/// use burn_megatron::data::images::{ImageProcessor, RgbImage};
///
/// let file = serde_json::json!({"image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": 8},
///     "crop_size": {"height": 8, "width": 8}});
/// let processor = ImageProcessor::from_json(&file)?;
/// let grey = RgbImage { width: 20, height: 10, pixels: vec![128; 600] };
/// let pixels = processor.process(&grey);
/// assert_eq!((processor.output(), pixels.len()), (Some([8, 8]), 3 * 8 * 8));
/// # Ok::<(), burn_megatron::data::images::ImageError>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct ImageProcessor {
    resize: Option<(Size, Filter)>,
    /// Height and width.
    crop: Option<[usize; 2]>,
    rescale: Option<f64>,
    /// Mean and standard deviation of each channel.
    normalize: Option<[[f32; 3]; 2]>,
}

/// The size to which an image is scaled.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Size {
    /// Height and width.
    Both([usize; 2]),
    /// The shorter side; the other keeps the proportions.
    Shortest(usize),
}

/// The file. Keys that are not here are refused by name.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    #[serde(alias = "feature_extractor_type")]
    image_processor_type: String,
    do_resize: Option<bool>,
    size: Option<SizeKeys>,
    resample: Option<u64>,
    do_center_crop: Option<bool>,
    crop_size: Option<SizeKeys>,
    do_rescale: Option<bool>,
    rescale_factor: Option<f64>,
    do_normalize: Option<bool>,
    image_mean: Option<[f64; 3]>,
    image_std: Option<[f64; 3]>,
    #[serde(rename = "do_convert_rgb")]
    _do_convert_rgb: Option<bool>,
    #[serde(rename = "default_to_square")]
    _default_to_square: Option<bool>,
    #[serde(rename = "processor_class")]
    _processor_class: Option<String>,
    #[serde(rename = "_valid_processor_keys")]
    _keys: Option<Value>,
    #[serde(rename = "data_format")]
    _data_format: Option<String>,
}

/// A size in any of the forms that files have.
#[derive(Clone, Copy, Deserialize)]
#[serde(untagged)]
enum SizeKeys {
    Side(usize),
    Both { height: usize, width: usize },
    Shortest { shortest_edge: usize },
}

/// Where files say nothing (`image_processing_vit.py`, `image_processing_clip.py`).
struct Defaults {
    filter: Filter,
    size: Size,
    crops: bool,
    mean: [f64; 3],
    std: [f64; 3],
}

const VIT: Defaults =
    Defaults { filter: Filter::Bilinear, size: Size::Both([224; 2]), crops: false, mean: [0.5; 3], std: [0.5; 3] };
const CLIP: Defaults = Defaults {
    filter: Filter::Bicubic,
    size: Size::Shortest(224),
    crops: true,
    mean: [0.48145466, 0.4578275, 0.40821073],
    std: [0.26862954, 0.26130258, 0.27577711],
};

impl ImageProcessor {
    /// Reads `preprocessor_config.json`.
    ///
    /// # Errors
    /// Names the key, its value, and what is legal.
    pub fn from_json(file: &Value) -> Result<Self, ImageError> {
        let file: File = serde_json::from_value(file.clone()).map_err(|error| ImageError::Config(error.to_string()))?;
        let refuse = |what: String| ImageError::Config(what);
        let kind = file.image_processor_type.trim_end_matches("Fast");
        let defaults = match kind {
            "ViTImageProcessor" | "ViTFeatureExtractor" => VIT,
            "CLIPImageProcessor" | "CLIPFeatureExtractor" => CLIP,
            _ => {
                let legal = "ViTImageProcessor, CLIPImageProcessor";
                return Err(refuse(format!("`image_processor_type` is {kind}; legal: {legal}")));
            }
        };
        let positive = |key: &str, [height, width]: [usize; 2]| match (1..=1 << 14).contains(&height.min(width)) {
            true if height.max(width) <= 1 << 14 => Ok([height, width]),
            _ => Err(refuse(format!("`{key}` is {height} × {width}; legal: 1 to 16384 pixels a side"))),
        };
        let size = match (file.size, defaults.size) {
            (None, size) => size,
            (Some(SizeKeys::Both { height, width }), _) => Size::Both(positive("size", [height, width])?),
            (Some(SizeKeys::Side(side)), Size::Both(_)) => Size::Both(positive("size", [side; 2])?),
            (Some(SizeKeys::Side(side) | SizeKeys::Shortest { shortest_edge: side }), _) => {
                Size::Shortest(positive("size", [side; 2])?[0])
            }
        };
        let filter = match file.resample {
            None => defaults.filter,
            Some(number) => Filter::of_number(number).ok_or_else(|| {
                refuse(format!("`resample` is {number}; legal: 1 (Lanczos), 2 (bilinear), 3 (bicubic)"))
            })?,
        };
        let crop = match file.crop_size {
            None => [224; 2],
            Some(SizeKeys::Both { height, width }) => positive("crop_size", [height, width])?,
            Some(SizeKeys::Side(side)) => positive("crop_size", [side; 2])?,
            Some(SizeKeys::Shortest { .. }) => {
                return Err(refuse("`crop_size` has `shortest_edge`; legal: `height` and `width`".into()));
            }
        };
        let (mean, std) = (file.image_mean.unwrap_or(defaults.mean), file.image_std.unwrap_or(defaults.std));
        if let Some(zero) = std.iter().find(|std| **std <= 0.0) {
            return Err(refuse(format!("`image_std` has {zero}; legal: numbers above 0")));
        }
        let normalize = [mean, std].map(|numbers| numbers.map(|number| number as f32));
        Ok(Self {
            resize: file.do_resize.unwrap_or(true).then_some((size, filter)),
            crop: file.do_center_crop.unwrap_or(defaults.crops).then_some(crop),
            rescale: file.do_rescale.unwrap_or(true).then_some(file.rescale_factor.unwrap_or(1.0 / 255.0)),
            normalize: file.do_normalize.unwrap_or(true).then_some(normalize),
        })
    }

    /// Height and width of every output, if they do not depend on the image.
    pub fn output(&self) -> Option<[usize; 2]> {
        match (self.crop, self.resize) {
            (Some(crop), _) => Some(crop),
            (None, Some((Size::Both(size), _))) => Some(size),
            _ => None,
        }
    }

    /// `pixel_values [3, height, width]` of an image.
    pub fn process(&self, image: &RgbImage) -> Vec<f32> {
        let resized = self.resize.map(|(size, filter)| {
            let [height, width] = size.of(image);
            resize(image, width, height, filter)
        });
        let image = resized.as_ref().unwrap_or(image);
        let [height, width] = self.crop.unwrap_or([image.height, image.width]);
        // Half of what is too much is cut off at either side; where the image is too small there are zeros.
        let from = |have: usize, want: usize| (have as i64 - want as i64).div_euclid(2);
        let (top, left) = (from(image.height, height), from(image.width, width));
        let pixel = |channel: usize, y: usize, x: usize| {
            let at = |from: i64, index: usize, size: usize| {
                usize::try_from(from + index as i64).ok().filter(|index| *index < size)
            };
            let inside = at(top, y, image.height).zip(at(left, x, image.width));
            inside.map_or(0, |(y, x)| image.pixels[(y * image.width + x) * 3 + channel])
        };
        let value = |channel: usize, pixel: u8| {
            let scaled = self.rescale.map_or(f32::from(pixel), |factor| (f64::from(pixel) * factor) as f32);
            self.normalize.map_or(scaled, |[mean, std]| (scaled - mean[channel]) / std[channel])
        };
        let line = |channel: usize, y: usize| (0..width).map(move |x| (channel, y, x));
        let places = (0..3).flat_map(|channel| (0..height).flat_map(move |y| line(channel, y)));
        places.map(|(channel, y, x)| value(channel, pixel(channel, y, x))).collect()
    }
}

impl Size {
    /// Height and width of an image after scaling.
    fn of(self, image: &RgbImage) -> [usize; 2] {
        let (height, width) = (image.height, image.width);
        match self {
            Self::Both(size) => size,
            // transformers' `get_resize_output_image_size`: the quotient is a float, and truncated.
            Self::Shortest(side) => {
                let (short, long) = (height.min(width), height.max(width));
                let other = ((side * long) as f64 / short as f64) as usize;
                if width <= height { [other, side] } else { [side, other] }
            }
        }
    }
}
