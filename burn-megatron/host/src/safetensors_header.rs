//! The header of a safetensors file (<https://github.com/huggingface/safetensors#format>), read at its position.

use std::io;

use safetensors::SafeTensorError;
use safetensors::tensor::Metadata;

use crate::positioned::PositionedFile;

/// Most bytes of a header, as in the `safetensors` crate.
const MOST: u64 = 100_000_000;

/// What a file says of its tensors, which fill it to its end.
#[derive(Debug)]
pub struct Header {
    /// Name, type, shape and bytes of every tensor.
    pub tensors: Metadata,
    /// Where in the file the tensors begin: what their bytes are counted from.
    pub start: u64,
}

/// Why a header cannot be read.
#[derive(Debug)]
pub enum HeaderFault {
    /// The system refuses.
    Io(io::Error),
    /// The file is no safetensors file, or not a whole one.
    Damaged {
        /// What is wrong.
        error: SafeTensorError,
        /// The text of the header as far as it is known.
        text: Vec<u8>,
    },
}

impl Header {
    /// Reads the header of a file.
    ///
    /// # Errors
    /// If the file cannot be read or is not a whole safetensors file.
    pub fn read(file: &PositionedFile) -> Result<Self, HeaderFault> {
        let damaged = |error| HeaderFault::Damaged { error, text: Vec::new() };
        if file.size() < 8 {
            return Err(damaged(SafeTensorError::HeaderTooSmall));
        }
        let mut length = [0; 8];
        file.read_into(0, &mut length).map_err(HeaderFault::Io)?;
        let length = u64::from_le_bytes(length);
        if length > MOST {
            return Err(damaged(SafeTensorError::HeaderTooLarge));
        }
        let start = 8 + length;
        if start > file.size() {
            return Err(damaged(SafeTensorError::InvalidHeaderLength));
        }
        let text = file.read(8, length as usize).map_err(HeaderFault::Io)?;
        match parse(&text, file.size() - start) {
            Ok(tensors) => Ok(Self { tensors, start }),
            Err(error) => Err(HeaderFault::Damaged { error, text }),
        }
    }
}

/// The tensors of a header, which `bytes` bytes follow.
fn parse(text: &[u8], bytes: u64) -> Result<Metadata, SafeTensorError> {
    use SafeTensorError::{InvalidHeader, InvalidHeaderDeserialization, MetadataIncompleteBuffer};
    let text = std::str::from_utf8(text).map_err(InvalidHeader)?;
    let tensors: Metadata = serde_json::from_str(text).map_err(InvalidHeaderDeserialization)?;
    if tensors.data_len() as u64 == bytes { Ok(tensors) } else { Err(MetadataIncompleteBuffer) }
}
