//! Clipping by the global gradient norm (megatron/core/optimizer/clip_grads.py).

/// The factor that gradients of norm `total_norm` are multiplied with so that their norm is at most `max_norm`:
/// `max_norm / (total_norm + 1e-6)` where that is below 1, else exactly 1. `None` and non-positive limits do not clip.
pub fn clip_factor(max_norm: Option<f64>, total_norm: f64) -> f64 {
    match max_norm {
        Some(limit) if limit > 0.0 => (limit / (total_norm + 1e-6)).min(1.0),
        _ => 1.0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clips_only_above_the_limit() {
        assert_eq!(clip_factor(Some(1.0), 0.5), 1.0);
        assert_eq!(clip_factor(Some(1.0), 4.0), 1.0 / 4.000001);
        assert_eq!(clip_factor(None, 4.0), 1.0);
        assert_eq!(clip_factor(Some(0.0), 4.0), 1.0);
        // At the limit itself the 1e-6 makes the factor smaller than one, as in Megatron.
        assert!(clip_factor(Some(1.0), 1.0) < 1.0);
    }
}
