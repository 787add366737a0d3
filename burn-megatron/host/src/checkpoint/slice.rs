//! What a rank hands over to be saved.

use std::fmt;
use std::ops::{Deref, Range};
use std::sync::Arc;

use safetensors::Dtype;
use serde::{Deserialize, Serialize};

use super::boxes;

/// What the values of a tensor are to the training run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Kind {
    /// The weights that the model computes with.
    #[serde(rename = "weight")]
    Weight,
    /// The optimizer's own copy of the weights, where it is more precise than the model's.
    #[serde(rename = "master")]
    Master,
    /// The 16 bits that a bf16 weight lacks of its fp32 master: with both there is no [`Kind::Master`].
    #[serde(rename = "master_remainder")]
    Remainder,
    /// Adam's running mean of the gradient.
    #[serde(rename = "exp_avg")]
    FirstMoment,
    /// Adam's running mean of the squared gradient.
    #[serde(rename = "exp_avg_sq")]
    SecondMoment,
    /// What codes of the mean are multiplied by, where it is saved in 8 bits: of each element, or of 256 elements of a row.
    #[serde(rename = "exp_avg_scale")]
    FirstScale,
    /// The same of the mean of squares.
    #[serde(rename = "exp_avg_sq_scale")]
    SecondScale,
    /// The exponential moving average of the weights.
    #[serde(rename = "ema")]
    Average,
}

impl Kind {
    /// The scales of a moment.
    pub fn scales(self) -> Option<Self> {
        match self {
            Self::FirstMoment => Some(Self::FirstScale),
            Self::SecondMoment => Some(Self::SecondScale),
            _ => None,
        }
    }

    /// The name in files.
    pub fn name(self) -> &'static str {
        match self {
            Self::Weight => "weight",
            Self::Master => "master",
            Self::Remainder => "master_remainder",
            Self::FirstMoment => "exp_avg",
            Self::SecondMoment => "exp_avg_sq",
            Self::FirstScale => "exp_avg_scale",
            Self::SecondScale => "exp_avg_sq_scale",
            Self::Average => "ema",
        }
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Bytes that are copied from a GPU, perhaps still.
pub trait Copied: fmt::Debug + Send + Sync {
    /// How many they are; waits for nothing.
    fn count(&self) -> usize;

    /// Waits until they are there.
    ///
    /// # Errors
    /// If the GPU has failed.
    fn wait(&self) -> Result<(), String>;

    /// Waits for them too.
    fn bytes(&self) -> &[u8];
}

/// The bytes of a slice.
#[derive(Clone, Debug)]
pub enum SliceData {
    /// In memory of their own.
    Own(Vec<u8>),
    /// In a copy of GPU memory, which may still be under way: whoever reads them waits for it.
    Copied(Arc<dyn Copied>),
}

impl SliceData {
    /// How many they are; waits for nothing.
    pub fn len(&self) -> usize {
        match self {
            Self::Own(bytes) => bytes.len(),
            Self::Copied(bytes) => bytes.count(),
        }
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Waits until they are there. Fails if the GPU has failed.
    pub(super) fn wait(&self) -> Result<(), String> {
        match self {
            Self::Own(_) => Ok(()),
            Self::Copied(bytes) => bytes.wait(),
        }
    }

    /// The bytes in memory of their own, which waits for a copy that is under way.
    ///
    /// # Errors
    /// If the GPU has failed.
    pub fn into_own(self) -> Result<Self, String> {
        self.wait()?;
        Ok(match self {
            Self::Copied(bytes) => Self::Own(bytes.bytes().to_vec()),
            own => own,
        })
    }
}

impl From<Vec<u8>> for SliceData {
    fn from(bytes: Vec<u8>) -> Self {
        Self::Own(bytes)
    }
}

impl Deref for SliceData {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match self {
            Self::Own(bytes) => bytes,
            Self::Copied(bytes) => bytes.bytes(),
        }
    }
}

impl PartialEq for SliceData {
    fn eq(&self, other: &Self) -> bool {
        **self == **other
    }
}

/// A box of a global tensor, to be saved.
#[derive(Clone, Debug, PartialEq)]
pub struct Slice {
    /// What the values are.
    pub kind: Kind,
    /// Name of the global tensor.
    pub name: String,
    /// Shape of the global tensor.
    pub global_shape: Vec<usize>,
    /// The box, one range per dimension. A box without elements is not written.
    pub ranges: Vec<Range<usize>>,
    /// Type of the elements; whole bytes each.
    pub dtype: Dtype,
    /// The values, row-major and little-endian.
    pub data: SliceData,
}

impl Slice {
    /// The key in a safetensors file: kind and name, and the box when it is not the whole tensor. For example
    /// `weight/layers.0.attention.q_proj.weight[0:512,0:1024]`.
    pub fn key(&self) -> String {
        let range =
            if self.ranges == boxes::whole(&self.global_shape) { String::new() } else { boxes::text(&self.ranges) };
        format!("{}/{}{range}", self.kind, self.name)
    }

    /// Why the slice cannot be written, if it cannot.
    pub(super) fn flaw(&self) -> Option<String> {
        if self.name.is_empty() || self.name.contains(char::is_control) {
            return Some(format!("`{}` is not a name of a tensor", self.name.escape_default()));
        }
        if !boxes::fits(&self.ranges, &self.global_shape) {
            let range = boxes::text(&self.ranges);
            return Some(format!("the box {range} is not inside the global shape {:?}", self.global_shape));
        }
        let bits = self.dtype.bitsize();
        if !bits.is_multiple_of(8) {
            return Some(format!("elements of type {} are not whole bytes; nearest legal: U8", self.dtype));
        }
        let expected = boxes::len(&self.ranges) * bits / 8;
        if self.data.len() != expected {
            return Some(format!("{} bytes are given, the box of {} takes {expected}", self.data.len(), self.dtype));
        }
        None
    }
}
