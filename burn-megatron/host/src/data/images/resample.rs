//! Resizing as Pillow does it (`src/libImaging/Resample.c`), to the bit: each pass rounds to bytes, and weights have 22 bits
//! after the point. The models' image processors resize with Pillow.

use super::decode::RgbImage;

/// Bits of a weight after the point: a sum of weighted bytes needs 8 more, and two against overflow.
const PRECISION: u32 = 32 - 8 - 2;

/// A filter, under the number that Pillow and `preprocessor_config.json` have for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Filter {
    /// 1: windowed sinc of three lobes.
    Lanczos,
    /// 2: triangle.
    Bilinear,
    /// 3: Keys' cubic with a = -0.5.
    Bicubic,
}

impl Filter {
    /// Pillow's numbers.
    pub fn of_number(number: u64) -> Option<Self> {
        match number {
            1 => Some(Self::Lanczos),
            2 => Some(Self::Bilinear),
            3 => Some(Self::Bicubic),
            _ => None,
        }
    }

    /// Beyond this distance the filter is zero.
    fn support(self) -> f64 {
        match self {
            Self::Lanczos => 3.0,
            Self::Bilinear => 1.0,
            Self::Bicubic => 2.0,
        }
    }

    fn weight(self, x: f64) -> f64 {
        let x = x.abs();
        match self {
            _ if x >= self.support() => 0.0,
            Self::Lanczos => sinc(x) * sinc(x / 3.0),
            Self::Bilinear => 1.0 - x,
            Self::Bicubic if x < 1.0 => (1.5 * x - 2.5) * x * x + 1.0,
            Self::Bicubic => (((x - 5.0) * x + 8.0) * x - 4.0) * -0.5,
        }
    }
}

fn sinc(x: f64) -> f64 {
    let x = x * std::f64::consts::PI;
    if x == 0.0 { 1.0 } else { x.sin() / x }
}

/// What one output is made of: the first input, and the weights of it and those after it.
struct Window {
    first: usize,
    weights: Vec<i64>,
}

/// The windows of `out` outputs over `count` inputs. Where an image shrinks the filter is stretched, so that every input
/// counts.
fn windows(count: usize, out: usize, filter: Filter) -> Vec<Window> {
    let scale = count as f64 / out as f64;
    let stretch = scale.max(1.0);
    let (support, shrink) = (filter.support() * stretch, 1.0 / stretch);
    let window = |index: usize| {
        let center = (index as f64 + 0.5) * scale;
        // Pillow truncates; both are within the image then.
        let first = (center - support + 0.5).max(0.0) as usize;
        let end = ((center + support + 0.5) as usize).min(count);
        let weights: Vec<f64> =
            (first..end).map(|input| filter.weight((input as f64 - center + 0.5) * shrink)).collect();
        let sum: f64 = weights.iter().sum();
        let fixed = |weight: &f64| {
            let weight = if sum == 0.0 { *weight } else { *weight / sum };
            let scaled = weight * f64::from(1 << PRECISION);
            (if weight < 0.0 { scaled - 0.5 } else { scaled + 0.5 }) as i64
        };
        Window { first, weights: weights.iter().map(fixed).collect() }
    };
    (0..out).map(window).collect()
}

/// The byte of a weighted sum.
fn byte(values: impl Iterator<Item = (i64, u8)>) -> u8 {
    let half = 1 << (PRECISION - 1);
    let sum: i64 = half + values.map(|(weight, value)| weight * i64::from(value)).sum::<i64>();
    (sum >> PRECISION).clamp(0, 255) as u8
}

/// The image at another size.
pub fn resize(image: &RgbImage, width: usize, height: usize, filter: Filter) -> RgbImage {
    let wide = if width == image.width { image.clone() } else { resize_width(image, width, filter) };
    if height == wide.height { wide } else { resize_height(&wide, height, filter) }
}

fn resize_width(image: &RgbImage, width: usize, filter: Filter) -> RgbImage {
    let windows = windows(image.width, width, filter);
    let mut pixels = Vec::with_capacity(width * image.height * 3);
    for line in image.pixels.chunks_exact(image.width * 3) {
        for Window { first, weights } in &windows {
            let of = |channel: usize| {
                byte(weights.iter().zip(line[first * 3 + channel..].iter().step_by(3)).map(|(w, v)| (*w, *v)))
            };
            pixels.extend([of(0), of(1), of(2)]);
        }
    }
    RgbImage { width, height: image.height, pixels }
}

fn resize_height(image: &RgbImage, height: usize, filter: Filter) -> RgbImage {
    let stride = image.width * 3;
    let mut pixels = Vec::with_capacity(stride * height);
    for Window { first, weights } in windows(image.height, height, filter) {
        let of = |at: usize| {
            byte(weights.iter().zip(image.pixels[first * stride + at..].iter().step_by(stride)).map(|(w, v)| (*w, *v)))
        };
        pixels.extend((0..stride).map(of));
    }
    RgbImage { width: image.width, height, pixels }
}
