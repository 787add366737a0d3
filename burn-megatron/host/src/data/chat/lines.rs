//! Files of rows: JSON lines or one JSON array, plain or compressed, or Parquet.

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::sync::Arc;

use flate2::bufread::MultiGzDecoder;
use minijinja::value::Value;

use super::super::bom::skip_bom;
use super::super::ending::ending;
use super::super::parquet;
use super::super::zstd::ZstdFrames;
use super::error::{ChatError, Result};
use super::row::{Conversation, from_value, parse_row};

/// A row and where it is from.
#[derive(Clone, Debug)]
pub struct Row {
    /// Input file.
    pub file: Arc<Path>,
    /// Line of the file, element of its array, or row of its table, from 1.
    pub line: u64,
    body: Body,
}

#[derive(Clone, Debug)]
enum Body {
    Bytes(Vec<u8>),
    Value(Value),
    /// What is wrong with it.
    Bad(String),
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
            Body::Bad(what) => Err(what.clone()),
        }
    }

    /// The row as a value of templates. Fails if it is no JSON.
    pub(super) fn value(&self) -> Result<Value, String> {
        match &self.body {
            Body::Bytes(bytes) => serde_json::from_slice(bytes).map_err(|error| format!("not JSON: {error}")),
            Body::Value(value) => Ok(value.clone()),
            Body::Bad(what) => Err(what.clone()),
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
            Body::Bad(what) => return Err(what.clone()),
        };
        parsed.map_err(|error| format!("not JSON: {error}"))
    }

    /// An error of this row.
    pub fn refused(&self, what: String) -> ChatError {
        ChatError::Row { file: self.file.to_path_buf(), line: self.line, what }
    }
}

/// The rows of a file: a JSON object per line, or one array of them. Names that end in `.gz` and `.zst` are decompressed;
/// a `.parquet` file has a row of columns with the same names.
///
/// # Errors
/// If the file cannot be read, its array is not JSON, or its table is damaged.
pub fn rows(path: &Path) -> Result<Box<dyn Iterator<Item = Result<Row>>>> {
    let refused = |cause| ChatError::Read { path: path.into(), cause };
    if ending(path) == "parquet" {
        let (rows, file): (_, Arc<Path>) = (parquet::Rows::open(path).map_err(refused)?, path.into());
        let row = move |(index, row): (usize, _)| match row {
            Ok(row) => {
                let body = Result::map_or_else(row, Body::Bad, Body::Bytes);
                Ok(Row { file: file.clone(), line: index as u64 + 1, body })
            }
            Err(cause) => Err(ChatError::Read { path: file.to_path_buf(), cause }),
        };
        return Ok(Box::new(rows.enumerate().map(row)));
    }
    let file = BufReader::with_capacity(1 << 20, File::open(path).map_err(refused)?);
    let mut reader: Box<dyn BufRead> = match &*ending(path) {
        "gz" => Box::new(BufReader::new(MultiGzDecoder::new(file))),
        "zst" => Box::new(BufReader::new(ZstdFrames::new(file))),
        _ => Box::new(file),
    };
    let file: Arc<Path> = path.into();
    skip_bom(&mut reader).map_err(refused)?;
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
