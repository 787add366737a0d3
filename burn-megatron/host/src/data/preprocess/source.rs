//! Input files to documents that are not yet parsed.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::path::{Path, PathBuf};

use serde_json::Value;

use super::super::bom::skip_bom;
use super::super::ending::{JSON_LINES, ending};
use super::super::parquet;
use super::{Location, PreprocessError, Result};

/// What a document is in a text file. The documents of a file, one after the other, are the whole file: no newline is
/// lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "cli", derive(clap::ValueEnum))]
pub enum TextDocuments {
    /// Everything up to the end of the next blank lines.
    Paragraph,
    /// A line.
    Line,
    /// The file.
    File,
}

/// A document as its file has it.
pub(super) struct Record {
    pub location: Location,
    pub body: Body,
    /// Bytes read for it.
    pub bytes: u64,
}

pub(super) enum Body {
    Text(Vec<u8>),
    Json(Vec<u8>),
    Value(Value),
    /// What is wrong with it.
    Bad(String),
}

/// The documents of several files in order.
pub(super) struct Records {
    files: std::vec::IntoIter<PathBuf>,
    text: TextDocuments,
    open: Option<(PathBuf, Reader)>,
}

enum Reader {
    Lines {
        lines: Lines,
        unit: Unit,
    },
    /// Elements of an array, and the bytes each stands for.
    Array {
        values: std::iter::Enumerate<std::vec::IntoIter<Value>>,
        bytes_each: u64,
    },
    /// Rows, and the bytes each stands for.
    Table {
        rows: std::iter::Enumerate<parquet::Rows>,
        bytes_each: u64,
    },
}

#[derive(Clone, Copy)]
enum Unit {
    Json,
    Text(TextDocuments),
}

impl Records {
    pub fn new(files: Vec<PathBuf>, text: TextDocuments) -> Self {
        Self { files: files.into_iter(), text, open: None }
    }

    fn read_next(&mut self) -> Result<Option<Record>> {
        loop {
            if let Some((file, reader)) = &mut self.open {
                if let Some(record) = reader.next(file)? {
                    return Ok(Some(record));
                }
                self.open = None;
            }
            let Some(file) = self.files.next() else { return Ok(None) };
            let reader = Reader::open(&file, self.text)?;
            self.open = Some((file, reader));
        }
    }
}

impl Iterator for Records {
    type Item = Result<Record>;

    fn next(&mut self) -> Option<Self::Item> {
        self.read_next().transpose()
    }
}

impl Reader {
    fn open(path: &Path, text: TextDocuments) -> Result<Self> {
        let io = |cause| PreprocessError::Read { path: path.to_path_buf(), cause };
        let file = File::open(path).map_err(io)?;
        let size = file.metadata().map_err(io)?.len();
        let mut file = BufReader::with_capacity(1 << 20, file);
        skip_bom(&mut file).map_err(io)?;
        let unit = match &*ending(path) {
            "parquet" => {
                let rows = parquet::Rows::open(path).map_err(io)?;
                let bytes_each = size / rows.len().max(1);
                return Ok(Reader::Table { rows: rows.enumerate(), bytes_each });
            }
            name if JSON_LINES.contains(&name) => Unit::Json,
            "json" if !starts_array_of_documents(file.fill_buf().map_err(io)?) => Unit::Json,
            "json" => {
                let values: Vec<Value> = serde_json::from_reader(file).map_err(|error| PreprocessError::Document {
                    location: Location { file: path.to_path_buf(), line: error.line() as u64 },
                    what: error.to_string(),
                })?;
                let bytes_each = size / values.len().max(1) as u64;
                return Ok(Reader::Array { values: values.into_iter().enumerate(), bytes_each });
            }
            _ => Unit::Text(text),
        };
        Ok(Reader::Lines { lines: Lines { file, line: 0, ahead: None }, unit })
    }

    fn next(&mut self, file: &Path) -> Result<Option<Record>> {
        let io = |cause| PreprocessError::Read { path: file.to_path_buf(), cause };
        match self {
            Reader::Array { values, bytes_each } => Ok(values.next().map(|(i, value)| Record {
                location: Location { file: file.to_path_buf(), line: i as u64 + 1 },
                body: Body::Value(value),
                bytes: *bytes_each,
            })),
            Reader::Table { rows, bytes_each } => {
                let Some((i, row)) = rows.next() else { return Ok(None) };
                Ok(Some(Record {
                    location: Location { file: file.to_path_buf(), line: i as u64 + 1 },
                    body: row.map_err(io)?.map_or_else(Body::Bad, Body::Json),
                    bytes: *bytes_each,
                }))
            }
            Reader::Lines { lines, unit } => {
                let unread = match unit {
                    Unit::Json => lines.not_blank(),
                    Unit::Text(TextDocuments::Line) => lines.next(),
                    Unit::Text(TextDocuments::Paragraph) => lines.paragraph(),
                    Unit::Text(TextDocuments::File) => lines.rest(),
                };
                Ok(unread.map_err(io)?.map(|(line, bytes)| Record {
                    location: Location { file: file.to_path_buf(), line },
                    bytes: bytes.len() as u64,
                    body: if matches!(unit, Unit::Json) { Body::Json(bytes) } else { Body::Text(bytes) },
                }))
            }
        }
    }
}

/// `[[`, `[{` and `["` start one array of documents; `[1, 2]` is a line that holds one document.
fn starts_array_of_documents(start: &[u8]) -> bool {
    let mut bytes = start.iter().filter(|byte| !byte.is_ascii_whitespace());
    bytes.next() == Some(&b'[') && matches!(bytes.next(), Some(b'[' | b'{' | b'"' | b']'))
}

/// Lines with their newlines and their numbers from 1.
struct Lines {
    file: BufReader<File>,
    line: u64,
    ahead: Option<(u64, Vec<u8>)>,
}

type Numbered = (u64, Vec<u8>);

impl Lines {
    fn next(&mut self) -> io::Result<Option<Numbered>> {
        if let Some(ahead) = self.ahead.take() {
            return Ok(Some(ahead));
        }
        let mut bytes = Vec::new();
        if self.file.read_until(b'\n', &mut bytes)? == 0 {
            return Ok(None);
        }
        self.line += 1;
        Ok(Some((self.line, bytes)))
    }

    fn not_blank(&mut self) -> io::Result<Option<Numbered>> {
        while let Some((line, bytes)) = self.next()? {
            if !is_blank(&bytes) {
                return Ok(Some((line, bytes)));
            }
        }
        Ok(None)
    }

    fn paragraph(&mut self) -> io::Result<Option<Numbered>> {
        let Some((line, mut bytes)) = self.next()? else { return Ok(None) };
        let (mut some_text, mut ended) = (!is_blank(&bytes), false);
        while let Some((number, next)) = self.next()? {
            let blank = is_blank(&next);
            if ended && !blank {
                self.ahead = Some((number, next));
                break;
            }
            some_text |= !blank;
            ended = some_text && blank;
            bytes.extend(next);
        }
        Ok(Some((line, bytes)))
    }

    fn rest(&mut self) -> io::Result<Option<Numbered>> {
        let mut bytes = Vec::new();
        self.file.read_to_end(&mut bytes)?;
        Ok((!bytes.is_empty()).then_some((1, bytes)))
    }
}

fn is_blank(line: &[u8]) -> bool {
    line.iter().all(u8::is_ascii_whitespace)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn read(name: &str, content: &str, text: TextDocuments) -> Vec<(u64, String)> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(name);
        fs::write(&path, content).unwrap();
        let body = |body| match body {
            Body::Text(bytes) | Body::Json(bytes) => String::from_utf8(bytes).unwrap(),
            Body::Value(value) => value.to_string(),
            Body::Bad(what) => what,
        };
        Records::new(vec![path], text).map(|record| record.unwrap()).map(|r| (r.location.line, body(r.body))).collect()
    }

    fn pairs(expected: &[(u64, &str)]) -> Vec<(u64, String)> {
        expected.iter().map(|(line, text)| (*line, text.to_string())).collect()
    }

    #[test]
    fn text_is_split_without_losing_anything() {
        let text = "\na\nb\n\n \nc\n\nd";
        let paragraphs = read("x.txt", text, TextDocuments::Paragraph);
        assert_eq!(paragraphs, pairs(&[(1, "\na\nb\n\n \n"), (6, "c\n\n"), (8, "d")]));
        let lines = read("x.txt", text, TextDocuments::Line);
        assert_eq!(lines.len(), 8);
        assert_eq!(lines.into_iter().map(|(_, line)| line).collect::<String>(), text);
        assert_eq!(read("x.md", text, TextDocuments::File), pairs(&[(1, text)]));
    }

    #[test]
    fn json_is_a_line_or_an_element_each() {
        let lines = read("x.jsonl", "{\"a\": 1}\n\n[1, 2]\n", TextDocuments::File);
        assert_eq!(lines, pairs(&[(1, "{\"a\": 1}\n"), (3, "[1, 2]\n")]));
        assert_eq!(read("x.json", "[1, 2]\n[3]\n", TextDocuments::File).len(), 2);
        assert_eq!(read("x.json", " [[1, 2], [3]]\n", TextDocuments::File), pairs(&[(1, "[1,2]"), (2, "[3]")]));
    }
}
