//! Files of rows: JSON lines or one JSON array, plain or compressed.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::path::Path;
use std::sync::Arc;

use flate2::bufread::MultiGzDecoder;
use minijinja::value::Value;
use ruzstd::decoding::errors::{FrameDecoderError, ReadFrameHeaderError};
use ruzstd::decoding::{BlockDecodingStrategy, FrameDecoder};

use super::error::ChatError;
use super::row::{Conversation, from_value, parse_row};

/// A row and where it is from.
#[derive(Clone, Debug)]
pub struct Row {
    /// Input file.
    pub file: Arc<Path>,
    /// Line of the file, or element of its array, from 1.
    pub line: u64,
    body: Body,
}

#[derive(Clone, Debug)]
enum Body {
    Bytes(Vec<u8>),
    Value(Value),
}

impl Row {
    /// What it says.
    ///
    /// # Errors
    /// The key and what is wrong with it.
    pub fn conversation(&self) -> Result<Conversation, String> {
        match &self.body {
            Body::Bytes(bytes) => parse_row(bytes),
            Body::Value(value) => from_value(value),
        }
    }

    /// The row as a value of templates.
    ///
    /// # Errors
    /// If it is no JSON.
    pub(super) fn value(&self) -> Result<Value, String> {
        match &self.body {
            Body::Bytes(bytes) => serde_json::from_slice(bytes).map_err(|error| format!("not JSON: {error}")),
            Body::Value(value) => Ok(value.clone()),
        }
    }

    /// The row as JSON.
    ///
    /// # Errors
    /// If it is none.
    pub fn json(&self) -> Result<serde_json::Value, String> {
        let parsed = match &self.body {
            Body::Bytes(bytes) => serde_json::from_slice(bytes),
            Body::Value(value) => serde_json::to_value(value),
        };
        parsed.map_err(|error| format!("not JSON: {error}"))
    }

    /// An error of this row.
    pub fn refused(&self, what: String) -> ChatError {
        ChatError::Row { file: self.file.to_path_buf(), line: self.line, what }
    }
}

/// The rows of a file: a JSON object per line, or one array of them. Names that end in `.gz` and `.zst` are decompressed.
///
/// # Errors
/// If the file cannot be read, or its array is not JSON.
pub fn rows(path: &Path) -> Result<Box<dyn Iterator<Item = Result<Row, ChatError>>>, ChatError> {
    let refused = |cause| ChatError::Read { path: path.into(), cause };
    let file = BufReader::with_capacity(1 << 20, File::open(path).map_err(refused)?);
    let mut reader: Box<dyn BufRead> = match path.extension().and_then(|extension| extension.to_str()) {
        Some("gz") => Box::new(BufReader::new(MultiGzDecoder::new(file))),
        Some("zst") => Box::new(BufReader::new(ZstdFrames { source: file, frame: None })),
        _ => Box::new(file),
    };
    let file: Arc<Path> = path.into();
    let start = reader.fill_buf().map_err(refused)?;
    if start.iter().find(|byte| !byte.is_ascii_whitespace()) == Some(&b'[') {
        let all: Vec<Value> = serde_json::from_reader(reader).map_err(|error| match error.is_io() {
            true => refused(error.into()),
            false => {
                ChatError::Row { file: path.into(), line: error.line() as u64, what: format!("not JSON: {error}") }
            }
        })?;
        let row =
            move |(index, value)| Ok(Row { file: file.clone(), line: index as u64 + 1, body: Body::Value(value) });
        return Ok(Box::new(all.into_iter().enumerate().map(row)));
    }
    let lines = reader.split(b'\n').enumerate().filter_map(move |(index, line)| {
        let row = |bytes| Row { file: file.clone(), line: index as u64 + 1, body: Body::Bytes(bytes) };
        match line {
            Ok(bytes) if bytes.iter().all(u8::is_ascii_whitespace) => None,
            Ok(bytes) => Some(Ok(row(bytes))),
            Err(cause) => Some(Err(ChatError::Read { path: file.to_path_buf(), cause })),
        }
    });
    Ok(Box::new(lines))
}

/// The frames of a Zstandard file, one after the other.
struct ZstdFrames<R: BufRead> {
    source: R,
    frame: Option<Box<FrameDecoder>>,
}

impl<R: BufRead> ZstdFrames<R> {
    /// Begins the next frame; false at the end of the file.
    fn next_frame(&mut self) -> io::Result<bool> {
        while !self.source.fill_buf()?.is_empty() {
            let mut frame = Box::new(FrameDecoder::new());
            match frame.init(&mut self.source) {
                Ok(()) => {
                    self.frame = Some(frame);
                    return Ok(true);
                }
                Err(FrameDecoderError::ReadFrameHeaderError(ReadFrameHeaderError::SkipFrame { length, .. })) => {
                    io::copy(&mut (&mut self.source).take(length.into()), &mut io::sink())?;
                }
                Err(error) => return Err(io::Error::new(io::ErrorKind::InvalidData, error)),
            }
        }
        Ok(false)
    }
}

impl<R: BufRead> Read for ZstdFrames<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        loop {
            if let Some(frame) = &mut self.frame {
                while frame.can_collect() < buffer.len() && !frame.is_finished() {
                    let more = BlockDecodingStrategy::UptoBytes(buffer.len() - frame.can_collect());
                    let decoded = frame.decode_blocks(&mut self.source, more);
                    decoded.map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))?;
                }
                let read = frame.read(buffer)?;
                if read > 0 || buffer.is_empty() {
                    return Ok(read);
                }
                self.frame = None;
            }
            if !self.next_frame()? {
                return Ok(0);
            }
        }
    }
}
