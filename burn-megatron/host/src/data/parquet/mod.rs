//! Parquet files as rows of JSON: what JSON lines with the same data have.
//!
//! A null of a row or of a struct is left out, as if its key were missing: a column of structs has every field in every row,
//! and a chat template takes `tool_calls` that are there for calls. TRL does the same (`remove_none_values`).
//! Columns of types that JSON does not have (decimals, fixed-length bytes, bytes that are no text) are left out too.

mod column;
mod delta;
mod lz4;
mod node;
mod pages;

use std::fs::File;
use std::io;
use std::path::Path;
use std::sync::Arc;

use parquet::errors::ParquetError;
use parquet::file::metadata::{ParquetMetaData, ParquetMetaDataReader};

use column::Column;
use node::Node;

/// The rows of a file in order: the text of a JSON object each, or what is wrong with a row; an error ends the file.
pub(super) struct Rows {
    file: Arc<File>,
    metadata: ParquetMetaData,
    root: Node,
    /// Of all columns, those that the root reads.
    leaves: Vec<usize>,
    /// The row group that is next.
    group: usize,
    columns: Vec<Column>,
    left: u64,
}

impl Rows {
    /// # Errors
    /// If the file cannot be read, or is no Parquet.
    pub fn open(path: &Path) -> io::Result<Self> {
        let file = File::open(path)?;
        if file.metadata()?.is_dir() {
            return Err(io::ErrorKind::IsADirectory.into());
        }
        let metadata = ParquetMetaDataReader::new().parse_and_finish(&file).map_err(damaged)?;
        let (root, leaves) = node::root(metadata.file_metadata().schema());
        let Some(root) = root else {
            return Err(invalid(
                "none of its columns has a type that JSON has: text, numbers, booleans, lists, structs",
            ));
        };
        Ok(Self { file: file.into(), metadata, root, leaves, group: 0, columns: Vec::new(), left: 0 })
    }

    /// How many rows there are, as the file says.
    pub fn len(&self) -> u64 {
        self.metadata.file_metadata().num_rows().try_into().unwrap_or(0)
    }

    fn read_next(&mut self) -> io::Result<Option<Result<Vec<u8>, String>>> {
        while self.left == 0 {
            let Some(group) = self.metadata.row_groups().get(self.group) else { return Ok(None) };
            let rows = group.num_rows().try_into().map_err(|_| invalid("a row group has fewer than 0 rows"))?;
            if group.columns().len() != self.metadata.file_metadata().schema_descr().num_columns() {
                return Err(invalid(&format!("row group {} has not all columns", self.group)));
            }
            let open = |leaf: &usize| Column::open(&self.file, group.column(*leaf), rows);
            self.columns = self.leaves.iter().map(open).collect::<io::Result<_>>()?;
            (self.left, self.group) = (rows, self.group + 1);
        }
        self.left -= 1;
        let (mut json, mut wrong) = (Vec::new(), None);
        self.root.write(&mut self.columns, &mut json, &mut wrong)?;
        Ok(Some(wrong.map_or(Ok(json), Err)))
    }
}

impl Iterator for Rows {
    type Item = io::Result<Result<Vec<u8>, String>>;

    fn next(&mut self) -> Option<Self::Item> {
        self.read_next().transpose()
    }
}

fn invalid(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}

/// The library's errors, without its name in front.
fn damaged(error: ParquetError) -> io::Error {
    match error {
        ParquetError::General(what) | ParquetError::EOF(what) | ParquetError::NYI(what) => invalid(&what),
        other => invalid(&other.to_string()),
    }
}
