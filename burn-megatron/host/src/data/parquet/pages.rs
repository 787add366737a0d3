//! Pages of a column, decompressed.
//!
//! The library reads them as if nothing were compressed: its own Zstandard needs a C compiler.

use std::fs::File;
use std::io::{self, Read};
use std::sync::Arc;

use brotli_decompressor::Decompressor;
use flate2::bufread::MultiGzDecoder;
use parquet::basic::{Compression, Encoding};
use parquet::column::page::{Page, PageMetadata, PageReader};
use parquet::errors::{ParquetError, Result};
use parquet::file::metadata::ColumnChunkMetaData;
use parquet::file::serialized_reader::SerializedPageReader;

use super::super::zstd::ZstdFrames;
use super::{delta, lz4};

/// Bytes that Brotli reads at a time.
const BROTLI_BUFFER: usize = 1 << 16;

/// The pages of a column of a row group.
pub(super) struct Pages {
    stored: SerializedPageReader<File>,
    codec: Compression,
    /// Most bytes of a page.
    most: u64,
    /// The highest repetition level, and the highest definition level.
    levels: [i16; 2],
}

impl Pages {
    /// # Errors
    /// If the column does not lie in the file, or is compressed in a way that is not read.
    pub fn new(file: &Arc<File>, chunk: &ColumnChunkMetaData, rows: u64) -> Result<Self> {
        let codec = chunk.compression();
        use Compression::{BROTLI, GZIP, LZ4, LZ4_RAW, SNAPPY, UNCOMPRESSED, ZSTD};
        if !matches!(codec, UNCOMPRESSED | SNAPPY | GZIP(_) | ZSTD(_) | BROTLI(_) | LZ4 | LZ4_RAW) {
            let what = "is not read; write the file with snappy, zstd, gzip, brotli, lz4 or without compression";
            return Err(ParquetError::General(format!("{codec} {what}")));
        }
        let start = chunk.dictionary_page_offset().unwrap_or(chunk.data_page_offset());
        let end = u64::try_from(start).ok().zip(u64::try_from(chunk.compressed_size()).ok());
        let end = end.and_then(|(start, length)| start.checked_add(length));
        if end.is_none_or(|end| file.metadata().map_or(true, |file| end > file.len())) {
            return Err(ParquetError::General("the column is not inside the file, which was cut off".into()));
        }
        let most = u64::try_from(chunk.uncompressed_size()).unwrap_or(0).min(i32::MAX as u64);
        let levels = [chunk.column_descr().max_rep_level(), chunk.column_descr().max_def_level()];
        let stored = chunk.clone().into_builder().set_compression(UNCOMPRESSED).build()?;
        let stored = SerializedPageReader::new(file.clone(), &stored, rows as usize, None)?;
        Ok(Self { stored, codec, most, levels })
    }

    /// `bytes` of which the first `plain` are not compressed.
    fn decompress(&self, bytes: &[u8], plain: usize) -> Result<Vec<u8>> {
        let short = || ParquetError::General("a page is shorter than its levels".into());
        let (plain, packed) = bytes.split_at_checked(plain).ok_or_else(short)?;
        let mut out = plain.to_vec();
        // A page of nulls has no values.
        if packed.is_empty() {
            return Ok(out);
        }
        let source = io::BufReader::new(packed);
        match self.codec {
            Compression::SNAPPY => {
                let length = snap::raw::decompress_len(packed).map_err(io::Error::other)?;
                if length as u64 > self.most {
                    return Err(self.too_long());
                }
                out.extend(snap::raw::Decoder::new().decompress_vec(packed).map_err(io::Error::other)?);
            }
            Compression::GZIP(_) => self.drain(MultiGzDecoder::new(source), &mut out)?,
            Compression::BROTLI(_) => self.drain(Decompressor::new(source, BROTLI_BUFFER), &mut out)?,
            Compression::LZ4_RAW => out.extend(lz4::block(packed, self.most).ok_or_else(|| self.too_long())?),
            Compression::LZ4 => out.extend(lz4::hadoop(packed, self.most).ok_or_else(|| self.too_long())?),
            _ => self.drain(ZstdFrames::new(source), &mut out)?,
        }
        Ok(out)
    }

    fn drain(&self, reader: impl Read, out: &mut Vec<u8>) -> Result<()> {
        if reader.take(self.most + 1).read_to_end(out)? as u64 > self.most { Err(self.too_long()) } else { Ok(()) }
    }

    /// What the library's decoders take for granted, and allocate memory by.
    fn check(&self, page: &Page) -> Result<()> {
        let damaged = |what: String| Err(ParquetError::General(what));
        match page {
            // Every value of a dictionary takes a byte or more.
            Page::DictionaryPage { buf, num_values, .. } if *num_values as usize > buf.len() => {
                damaged(format!("a dictionary of {} bytes is said to have {num_values} values", buf.len()))
            }
            Page::DataPage { encoding, .. } | Page::DataPageV2 { encoding, .. } => match encoding {
                Encoding::PLAIN | Encoding::PLAIN_DICTIONARY | Encoding::RLE_DICTIONARY | Encoding::RLE => Ok(()),
                Encoding::BYTE_STREAM_SPLIT => Ok(()),
                Encoding::DELTA_BINARY_PACKED | Encoding::DELTA_LENGTH_BYTE_ARRAY | Encoding::DELTA_BYTE_ARRAY => {
                    let most = page.num_values().into();
                    match self.values(page).is_some_and(|values| delta::is_sound(*encoding, values, most)) {
                        true => Ok(()),
                        false => damaged(format!("a page is damaged, which is said to be {encoding}")),
                    }
                }
                other => damaged(format!("{other} is not read; write the file with dictionaries or plain values")),
            },
            Page::DictionaryPage { .. } => Ok(()),
        }
    }

    /// The values of a page, behind their levels. Levels of old files, which say no length, are not passed over.
    fn values<'a>(&self, page: &'a Page) -> Option<&'a [u8]> {
        match page {
            Page::DataPage { buf, def_level_encoding, rep_level_encoding, .. } => {
                let mut rest = &buf[..];
                for (level, encoding) in self.levels.iter().zip([rep_level_encoding, def_level_encoding]) {
                    if *level > 0 {
                        let length = rest.split_off(..4).filter(|_| *encoding == Encoding::RLE)?;
                        rest.split_off(..u32::from_le_bytes(*length.first_chunk()?) as usize)?;
                    }
                }
                Some(rest)
            }
            Page::DataPageV2 { buf, def_levels_byte_len, rep_levels_byte_len, .. } => {
                buf.get(*def_levels_byte_len as usize + *rep_levels_byte_len as usize..)
            }
            Page::DictionaryPage { .. } => None,
        }
    }

    fn too_long(&self) -> ParquetError {
        let most = self.most;
        ParquetError::General(format!(
            "a page is damaged, or has more than the {most} bytes that its column is said to have"
        ))
    }
}

impl PageReader for Pages {
    fn get_next_page(&mut self) -> Result<Option<Page>> {
        let Some(mut page) = self.stored.get_next_page()? else { return Ok(None) };
        match &mut page {
            _ if self.codec == Compression::UNCOMPRESSED => {}
            Page::DataPage { buf, .. } | Page::DictionaryPage { buf, .. } => *buf = self.decompress(buf, 0)?.into(),
            Page::DataPageV2 { buf, is_compressed, def_levels_byte_len, rep_levels_byte_len, .. } => {
                if *is_compressed {
                    let levels = *def_levels_byte_len as usize + *rep_levels_byte_len as usize;
                    *buf = self.decompress(buf, levels)?.into();
                }
            }
        }
        self.check(&page)?;
        Ok(Some(page))
    }

    fn peek_next_page(&mut self) -> Result<Option<PageMetadata>> {
        self.stored.peek_next_page()
    }

    fn skip_next_page(&mut self) -> Result<()> {
        self.stored.skip_next_page()
    }

    fn at_record_boundary(&mut self) -> Result<bool> {
        self.stored.at_record_boundary()
    }
}

impl Iterator for Pages {
    type Item = Result<Page>;

    fn next(&mut self) -> Option<Self::Item> {
        self.get_next_page().transpose()
    }
}
