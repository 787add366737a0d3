//! Files of images to pixels.

use zune_core::bytestream::ZCursor;
use zune_core::colorspace::ColorSpace;
use zune_core::options::DecoderOptions;
use zune_jpeg::JpegDecoder;
use zune_png::PngDecoder;

/// An image in red, green and blue.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RgbImage {
    /// Pixels of a line.
    pub width: usize,
    /// Lines.
    pub height: usize,
    /// `[height, width, 3]`.
    pub pixels: Vec<u8>,
}

/// How files of images begin, and what they are called.
const KINDS: [(&[u8], &str); 8] = [
    (b"\x89PNG\r\n\x1a\n", "PNG"),
    (b"\xff\xd8\xff", "JPEG"),
    (b"GIF8", "GIF"),
    (b"RIFF", "WebP"),
    (b"BM", "BMP"),
    (b"II*\0", "TIFF"),
    (b"MM\0*", "TIFF"),
    (b"<svg", "SVG"),
];

/// What decodes here.
const LEGAL: &str = "PNG and JPEG";

/// Bytes by which [`expect_kind`] knows a file.
pub(super) const HEAD: usize = 8;

/// The kind of image that a file is, by its first bytes, if it decodes here. The error says what the file is instead.
pub(super) fn expect_kind(head: &[u8]) -> Result<&'static str, String> {
    match KINDS.iter().find(|(magic, _)| head.starts_with(magic)).map(|(_, kind)| *kind) {
        Some(kind @ ("PNG" | "JPEG")) => Ok(kind),
        Some(kind) => Err(format!("is a {kind} image; {LEGAL} are read: convert it")),
        None if head.is_empty() => Err("is empty".into()),
        None => Err(format!("is no image that this program knows; {LEGAL} are read")),
    }
}

impl RgbImage {
    /// The pixels of a PNG or JPEG file. Grey images get three equal channels and transparency is dropped, as with Pillow's
    /// `convert("RGB")`. Of 16 bits the upper 8 are kept, also where Pillow does something else with grey images. The
    /// orientation of EXIF is not applied: pixels are as they are stored. The largest image has 16384 pixels a side.
    ///
    /// # Errors
    /// Says what is wrong with the file.
    pub fn decode(bytes: &[u8]) -> Result<Self, String> {
        let (kind, data) = (expect_kind(&bytes[..bytes.len().min(HEAD)])?, ZCursor::new(bytes));
        // The decoder's errors have line breaks at their ends.
        let damaged = |error: String| format!("is a damaged {kind} image ({}); replace it", error.trim());
        let nothing = || damaged("it has no size".into());
        if kind == "JPEG" {
            let options = DecoderOptions::default().jpeg_set_out_colorspace(ColorSpace::RGB).set_strict_mode(true);
            let mut decoder = JpegDecoder::new_with_options(data, options);
            let pixels = decoder.decode().map_err(|error| damaged(error.to_string()))?;
            let (width, height) =
                decoder.info().map(|info| (info.width.into(), info.height.into())).ok_or_else(nothing)?;
            return Ok(Self { width, height, pixels });
        }
        let options = DecoderOptions::default().png_set_strip_to_8bit(true).png_set_confirm_crc(true);
        let mut decoder = PngDecoder::new_with_options(data, options);
        let decoded = decoder.decode().map_err(|error| damaged(format!("{error:?}")))?;
        let ((width, height), space) = (decoder.dimensions().ok_or_else(nothing)?, decoder.colorspace());
        let pixels = decoded.u8().ok_or_else(nothing)?;
        let channels = space.ok_or_else(nothing)?.num_components();
        let rgb = |pixel: &[u8]| if channels < 3 { [pixel[0]; 3] } else { [pixel[0], pixel[1], pixel[2]] };
        Ok(Self { width, height, pixels: pixels.chunks_exact(channels).flat_map(rgb).collect() })
    }
}
