//! Images with a class, a text or a conversation, from lines of JSON and files, or from WebDataset's shards.
//!
//! ```
//! use host::data::images::{ImageDataset, Target};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let folder = tempfile::tempdir()?;
//! # let png = include_bytes!(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/images/small.png"));
//! # std::fs::write(folder.path().join("cat.png"), png)?;
//! let list = folder.path().join("train.jsonl");
//! std::fs::write(&list, r#"{"image": "cat.png", "label": 3}"#)?;
//! let images = ImageDataset::open(&list, false)?;
//! assert_eq!(images.target(0), &Target::Label(3));
//! assert_eq!(images.image(0)?.width, 13);
//!
//! std::fs::write(&list, "{\"image\": \"cat.png\", \"label\": 3}\n{\"image\": \"dog.png\", \"label\": 4}\n")?;
//! let refused = ImageDataset::open(&list, false).unwrap_err().to_string();
//! assert!(refused.contains("train.jsonl:2: image dog.png") && refused.contains("1 of 2"), "{refused}");
//! assert_eq!(ImageDataset::open(&list, true)?.skipped().len(), 1);
//! # Ok(())
//! # }
//! ```

mod dataset;
mod decode;
mod error;
mod lines;
mod processor;
mod resample;
mod sample;
mod set;
mod shard;
#[cfg(test)]
mod tests;
mod text;

pub use dataset::ImageDataset;
pub use decode::RgbImage;
pub use error::ImageError;
pub use processor::ImageProcessor;
pub use resample::{Filter, resize};
pub use sample::Target;
pub use set::ImageSet;
pub use text::{ImageText, ImageTokenizer};
