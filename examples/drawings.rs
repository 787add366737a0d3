//! Drawn shapes that the examples of images learn to tell apart.

use crate::Dice;

/// Pixels of a side.
pub const SIZE: usize = 16;

/// What is drawn.
pub const SHAPES: [&str; 4] = ["ring", "box", "cross", "slash"];

/// An image of one channel, and its class.
#[derive(Clone, Debug)]
pub struct Picture {
    /// `[channels, height, width]`.
    pub pixels: Vec<f32>,
    /// Of [`SHAPES`], or the label of a list.
    pub class: usize,
}

/// Shapes of random size and position on noisy backgrounds.
pub fn drawings(count: usize, seed: u64) -> Vec<Picture> {
    let mut dice = Dice(seed);
    let mut draw = |index: usize| {
        let class = index % SHAPES.len();
        let radius = 3.0 + 3.0 * dice.roll();
        let room = SIZE as f32 - 2.0 * radius;
        let (cx, cy) = (radius + dice.roll() * room, radius + dice.roll() * room);
        let is_ink = |x: usize, y: usize| {
            let (dx, dy) = (x as f32 - cx, y as f32 - cy);
            let (far, near) = (dx.abs().max(dy.abs()), dx.abs().min(dy.abs()));
            match class {
                0 => (dx.hypot(dy) - radius).abs() < 0.8,
                1 => (far - radius).abs() < 0.8,
                2 => far < radius && near < 0.8,
                _ => far < radius && (dx - dy).abs() < 1.1,
            }
        };
        let ink = |at: usize| if is_ink(at % SIZE, at / SIZE) { 1.0 } else { 0.0 };
        let pixels = (0..SIZE * SIZE).map(|at| ink(at) + 0.5 * dice.roll()).collect();
        Picture { pixels, class }
    };
    (0..count).map(&mut draw).collect()
}
