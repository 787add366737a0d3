//! Pixels to a model's input, as the image processors of Hugging Face transformers do it.

use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use super::decode::RgbImage;
use super::error::ImageError;
use super::resample::{Filter, resize};
use super::sample::unreadable;

/// What a `preprocessor_config.json`, or the `processor_config.json` of newer folders, of ViT, CLIP, SigLIP or LLaVA says.
///
/// ```
/// use host::data::images::{ImageProcessor, RgbImage};
///
/// let file = serde_json::json!({"image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": 8},
///     "crop_size": {"height": 8, "width": 8}});
/// let processor = ImageProcessor::from_json(&file)?;
/// let grey = RgbImage { width: 20, height: 10, pixels: vec![128; 600] };
/// let pixels = processor.process(&grey);
/// assert_eq!((processor.output(), pixels.len()), (Some([8, 8]), 3 * 8 * 8));
/// # Ok::<(), host::data::images::ImageError>(())
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

/// The keys of a file. Null says nothing, as in transformers.
struct Keys(Map<String, Value>);

impl Keys {
    /// The value of a key, which is taken out.
    fn take<T: DeserializeOwned>(&mut self, key: &str, legal: &str) -> Result<Option<T>, ImageError> {
        let Some(value) = self.0.remove(key) else { return Ok(None) };
        let refused = |_| ImageError::Config(format!("`{key}` is {value}; legal: {legal}"));
        serde_json::from_value(value.clone()).map(Some).map_err(refused)
    }

    /// That all keys were taken, or change no number.
    fn finish(mut self) -> Result<(), ImageError> {
        for key in ["do_convert_rgb", "processor_class", "_valid_processor_keys", "data_format"] {
            self.0.remove(key);
        }
        match self.0.iter().next() {
            None => Ok(()),
            Some((key, value)) => Err(ImageError::Config(format!("`{key}` is {value}; legal: no such key"))),
        }
    }
}

/// A size in any of the forms that files have.
#[derive(Clone, Copy, Deserialize)]
#[serde(untagged, deny_unknown_fields)]
enum SizeKeys {
    Side(usize),
    Both { height: usize, width: usize },
    Shortest { shortest_edge: usize },
}

/// Where files say nothing (`image_processing_vit.py`, `image_processing_clip.py`, `image_processing_siglip.py`).
struct Defaults {
    filter: Filter,
    size: Size,
    /// Whether a size of one number is both sides.
    to_square: bool,
    crops: bool,
    mean: [f64; 3],
    std: [f64; 3],
}

const VIT: Defaults = Defaults {
    filter: Filter::Bilinear,
    size: Size::Both([224; 2]),
    to_square: true,
    crops: false,
    mean: [0.5; 3],
    std: [0.5; 3],
};
const SIGLIP: Defaults = Defaults { filter: Filter::Bicubic, to_square: false, ..VIT };
const CLIP: Defaults = Defaults {
    filter: Filter::Bicubic,
    size: Size::Shortest(224),
    to_square: false,
    crops: true,
    mean: [0.48145466, 0.4578275, 0.40821073],
    std: [0.26862954, 0.26130258, 0.27577711],
};

/// Files of folders that say how pixels are made of an image.
const FILES: [&str; 2] = ["preprocessor_config.json", "processor_config.json"];

impl ImageProcessor {
    /// The file of a folder that says how pixels are made of an image, if it has one.
    ///
    /// # Errors
    /// Names the files that it might have.
    pub fn file_of(folder: &Path) -> Result<PathBuf, String> {
        let file = FILES.iter().map(|name| folder.join(name)).find(|path| path.exists());
        file.ok_or_else(|| format!("{} has no {}", folder.display(), FILES.join(" or ")))
    }

    /// Reads a file, and gives its JSON too. The error is without its path.
    ///
    /// # Errors
    /// As [`from_json`](Self::from_json); if the file cannot be read or is no JSON.
    pub fn read(file: &Path) -> Result<(Value, Self), ImageError> {
        let text = std::fs::read(file).map_err(unreadable(file))?;
        let json = serde_json::from_slice(&text).map_err(|error| ImageError::Config(error.to_string()))?;
        let read = Self::from_json(&json)?;
        Ok((json, read))
    }

    /// Reads `preprocessor_config.json`, or `processor_config.json`, whose `image_processor` has the same keys.
    ///
    /// # Errors
    /// Names the key, its value, and what is legal.
    pub fn from_json(file: &Value) -> Result<Self, ImageError> {
        let refuse = |what: String| ImageError::Config(what);
        let file = file.get("image_processor").unwrap_or(file);
        let Value::Object(keys) = file else { return Err(refuse(format!("is {file}; legal: an object"))) };
        let mut keys =
            Keys(keys.iter().filter(|(_, value)| !value.is_null()).map(|(k, v)| (k.clone(), v.clone())).collect());
        let legal = "ViTImageProcessor, CLIPImageProcessor, SiglipImageProcessor";
        // Older files have the second key, some have both.
        let older: Option<String> = keys.take("feature_extractor_type", legal)?;
        let Some(kind) = keys.take("image_processor_type", legal)?.or(older) else {
            return Err(refuse(format!("`image_processor_type` is missing; legal: {legal}")));
        };
        let defaults = match kind.trim_end_matches("Fast") {
            "ViTImageProcessor" | "ViTFeatureExtractor" => VIT,
            "CLIPImageProcessor" | "CLIPFeatureExtractor" => CLIP,
            "SiglipImageProcessor" => SIGLIP,
            _ => return Err(refuse(format!("`image_processor_type` is {kind}; legal: {legal}"))),
        };
        let (yes_or_no, number) = ("true, false", "a number");
        let numbers = "three numbers, of red, green and blue";
        let filters = "1 (Lanczos), 2 (bilinear), 3 (bicubic)";
        let sides = "a number of pixels, `height` and `width`, or `shortest_edge`";
        let positive = |key: &str, [height, width]: [usize; 2]| match (1..=1 << 14).contains(&height.min(width)) {
            true if height.max(width) <= 1 << 14 => Ok([height, width]),
            _ => Err(refuse(format!("`{key}` is {height} × {width}; legal: 1 to 16384 pixels a side"))),
        };
        let to_square = keys.take("default_to_square", yes_or_no)?;
        let to_square = to_square.unwrap_or(defaults.to_square);
        let size = match keys.take("size", sides)? {
            None => defaults.size,
            Some(SizeKeys::Both { height, width }) => Size::Both(positive("size", [height, width])?),
            Some(SizeKeys::Side(side)) if to_square => Size::Both(positive("size", [side; 2])?),
            Some(SizeKeys::Side(side) | SizeKeys::Shortest { shortest_edge: side }) => {
                Size::Shortest(positive("size", [side; 2])?[0])
            }
        };
        let filter = match keys.take("resample", filters)? {
            None => defaults.filter,
            Some(number) => {
                Filter::of_number(number).ok_or_else(|| refuse(format!("`resample` is {number}; legal: {filters}")))?
            }
        };
        let crop = match keys.take("crop_size", "a number of pixels, or `height` and `width`")? {
            None => [224; 2],
            Some(SizeKeys::Both { height, width }) => positive("crop_size", [height, width])?,
            Some(SizeKeys::Side(side)) => positive("crop_size", [side; 2])?,
            Some(SizeKeys::Shortest { .. }) => {
                return Err(refuse("`crop_size` has `shortest_edge`; legal: `height` and `width`".into()));
            }
        };
        let mean = keys.take("image_mean", numbers)?.unwrap_or(defaults.mean);
        let std: [f64; 3] = keys.take("image_std", numbers)?.unwrap_or(defaults.std);
        if let Some(zero) = std.iter().find(|std| **std <= 0.0) {
            return Err(refuse(format!("`image_std` has {zero}; legal: numbers above 0")));
        }
        let normalize = [mean, std].map(|numbers| numbers.map(|number| number as f32));
        let factor = keys.take("rescale_factor", number)?.unwrap_or(1.0 / 255.0);
        let mut does = |key: &str, default: bool| -> Result<bool, ImageError> {
            Ok(keys.take(key, yes_or_no)?.unwrap_or(default))
        };
        let read = Self {
            resize: does("do_resize", true)?.then_some((size, filter)),
            crop: does("do_center_crop", defaults.crops)?.then_some(crop),
            rescale: does("do_rescale", true)?.then_some(factor),
            normalize: does("do_normalize", true)?.then_some(normalize),
        };
        keys.finish()?;
        Ok(read)
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
