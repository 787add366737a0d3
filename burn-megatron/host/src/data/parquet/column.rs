//! A column of a row group: values with their levels.
//!
//! Definition levels say which of the fields that a value lies in are there, repetition levels which list it continues
//! (the Dremel paper, and "Nested Encoding" of Parquet's documentation).

use std::collections::VecDeque;
use std::fs::File;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use parquet::basic::{ConvertedType, Type};
use parquet::column::reader::{ColumnReader, ColumnReaderImpl, get_column_reader};
use parquet::data_type::{ByteArray, DataType};
use parquet::errors::{ParquetError, Result};
use parquet::file::metadata::ColumnChunkMetaData;
use parquet::schema::types::ColumnDescPtr;

use super::pages::Pages;
use super::{damaged, invalid};

/// Rows that are read at a time.
const AT_A_TIME: usize = 64;

/// A value, null where its definition level is lower than its column's.
pub(super) struct Entry {
    pub definition: i16,
    pub repetition: i16,
    pub value: Option<Scalar>,
}

pub(super) enum Scalar {
    Boolean(bool),
    Integer(i64),
    Unsigned(u64),
    Float(f64),
    Bytes(ByteArray),
}

/// What is left of a column.
pub(super) struct Column {
    descriptor: ColumnDescPtr,
    reader: ColumnReader,
    read: VecDeque<Entry>,
}

impl Column {
    /// # Errors
    /// With the column's name, if it cannot be read.
    pub fn open(file: &Arc<File>, chunk: &ColumnChunkMetaData, rows: u64) -> io::Result<Self> {
        let descriptor = chunk.column_descr_ptr();
        let pages = Pages::new(file, chunk, rows).map_err(|error| named(&descriptor, error))?;
        let reader = get_column_reader(descriptor.clone(), Box::new(pages));
        Ok(Self { descriptor, reader, read: VecDeque::new() })
    }

    /// Name with those of the fields that it lies in.
    pub fn name(&self) -> String {
        self.descriptor.path().string()
    }

    /// Whether its bytes are text, as the file says.
    pub fn is_text(&self) -> bool {
        matches!(self.descriptor.converted_type(), ConvertedType::UTF8 | ConvertedType::JSON | ConvertedType::ENUM)
    }

    /// The next entry, which stays; none at the end.
    pub fn peek(&mut self) -> io::Result<Option<&Entry>> {
        if self.read.is_empty() {
            // The library's decoders trust the numbers of a page.
            let fill = catch_unwind(AssertUnwindSafe(|| fill(&mut self.reader, &self.descriptor)));
            let panicked = |_| Err(ParquetError::General("a page is damaged".into()));
            self.read = fill.unwrap_or_else(panicked).map_err(|error| named(&self.descriptor, error))?;
        }
        Ok(self.read.front())
    }

    /// The definition level of the next entry.
    pub fn definition(&mut self) -> io::Result<i16> {
        match self.peek()?.map(|entry| entry.definition) {
            Some(level) => Ok(level),
            None => Err(invalid(&format!("column {}: it ends before the last row", self.name()))),
        }
    }

    /// The next entry.
    pub fn take(&mut self) -> io::Result<Entry> {
        self.definition()?;
        Ok(self.read.pop_front().expect("it has a definition level"))
    }
}

fn named(descriptor: &ColumnDescPtr, error: ParquetError) -> io::Error {
    invalid(&format!("column {}: {}", descriptor.path().string(), damaged(error)))
}

fn fill(reader: &mut ColumnReader, descriptor: &ColumnDescPtr) -> Result<VecDeque<Entry>> {
    let to = descriptor.max_def_level();
    let unsigned = matches!(descriptor.converted_type(), ConvertedType::UINT_32 | ConvertedType::UINT_64);
    match reader {
        ColumnReader::BoolColumnReader(reader) => entries(reader, to, Scalar::Boolean),
        ColumnReader::Int32ColumnReader(reader) if unsigned => {
            entries(reader, to, |value| Scalar::Unsigned((value as u32).into()))
        }
        ColumnReader::Int64ColumnReader(reader) if unsigned => {
            entries(reader, to, |value| Scalar::Unsigned(value as u64))
        }
        ColumnReader::Int32ColumnReader(reader) => entries(reader, to, |value| Scalar::Integer(value.into())),
        ColumnReader::Int64ColumnReader(reader) => entries(reader, to, Scalar::Integer),
        ColumnReader::FloatColumnReader(reader) => entries(reader, to, |value| Scalar::Float(value.into())),
        ColumnReader::DoubleColumnReader(reader) => entries(reader, to, Scalar::Float),
        ColumnReader::ByteArrayColumnReader(reader) => entries(reader, to, Scalar::Bytes),
        _ => Err(ParquetError::General(format!("{} is not read", descriptor.physical_type()))),
    }
}

/// Whether [`fill`] reads the values of a type.
pub(super) fn is_read(physical: Type, converted: ConvertedType) -> bool {
    !matches!(physical, Type::INT96 | Type::FIXED_LEN_BYTE_ARRAY) && converted != ConvertedType::DECIMAL
}

fn entries<T: DataType>(
    reader: &mut ColumnReaderImpl<T>,
    full: i16,
    scalar: impl Fn(T::T) -> Scalar,
) -> Result<VecDeque<Entry>> {
    let (mut definitions, mut repetitions, mut values) = (Vec::new(), Vec::new(), Vec::new());
    let (_, _, levels) = reader.read_records(AT_A_TIME, Some(&mut definitions), Some(&mut repetitions), &mut values)?;
    let mut values = values.into_iter();
    let entry = |at: usize| {
        let definition = definitions.get(at).copied().unwrap_or(full);
        let value = if definition == full { values.next().map(&scalar) } else { None };
        Entry { definition, repetition: repetitions.get(at).copied().unwrap_or(0), value }
    };
    Ok((0..levels).map(entry).collect())
}
