//! Buffers that a failed run has left while other GPUs may still read or write them: they stay until their own GPU has come
//! to rest.

use parking_lot::Mutex;

static KEPT: Mutex<Vec<(usize, Box<dyn Send>)>> = Mutex::new(Vec::new());

/// Keeps what holds memory of the GPU with this index.
pub(crate) fn keep(gpu: usize, holder: impl Send + 'static) {
    KEPT.lock().push((gpu, Box::new(holder)));
}

/// Drops what was kept of this GPU.
pub(crate) fn release(gpu: usize) {
    let mut kept = KEPT.lock();
    let released: Vec<_> = kept.extract_if(.., |(of, _)| *of == gpu).collect();
    // What is dropped may keep something in turn.
    drop(kept);
    drop(released);
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    #[test]
    fn what_a_gpu_has_left_is_released_with_that_gpu() {
        // No other test has GPUs with these indices.
        let [ours, others] = [1000, 1001];
        let [a, b] = [Arc::new(()), Arc::new(())];
        keep(ours, a.clone());
        keep(others, b.clone());
        keep(ours, a.clone());
        release(ours);
        assert_eq!([&a, &b].map(Arc::strong_count), [1, 2]);
        release(others);
        assert_eq!(Arc::strong_count(&b), 1);
    }
}
