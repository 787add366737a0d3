//! Zstandard, read only, without a C compiler.

use std::io::{self, BufRead, Read};

use ruzstd::decoding::errors::{FrameDecoderError, ReadFrameHeaderError};
use ruzstd::decoding::{BlockDecodingStrategy, FrameDecoder};

/// What the frames of a file hold, one after the other.
pub(super) struct ZstdFrames<R: BufRead> {
    source: R,
    frame: Option<Box<FrameDecoder>>,
}

impl<R: BufRead> ZstdFrames<R> {
    pub fn new(source: R) -> Self {
        Self { source, frame: None }
    }

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
