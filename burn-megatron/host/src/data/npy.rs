//! Writing integer matrices as numpy's `.npy` files, format version 1.0.

use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::Path;

/// Writes the rows of a matrix, all of `columns` values, as an int64 array of shape `(rows, columns)`.
///
/// # Errors
/// When the file cannot be written, or a row is an error.
///
/// # Panics
/// When a row has another length.
pub fn write_i64(
    path: &Path,
    rows: impl ExactSizeIterator<Item = io::Result<Vec<i64>>>,
    columns: usize,
) -> io::Result<()> {
    let mut file = BufWriter::new(File::create(path)?);
    let mut header = format!("{{'descr': '<i8', 'fortran_order': False, 'shape': ({}, {columns}), }}", rows.len());
    // Magic, version and length take 10 bytes; the data must start at a multiple of 64, after a newline.
    let padding = (10 + header.len() + 1).next_multiple_of(64) - (10 + header.len() + 1);
    header.extend(std::iter::repeat_n(' ', padding));
    header.push('\n');
    file.write_all(b"\x93NUMPY\x01\x00")?;
    file.write_all(&(header.len() as u16).to_le_bytes())?;
    file.write_all(header.as_bytes())?;
    for row in rows {
        let row = row?;
        assert_eq!(row.len(), columns, "length of a row");
        for value in row {
            file.write_all(&value.to_le_bytes())?;
        }
    }
    file.flush()
}
