//! The cache of keys and values: a decoder reads each position once.

use std::ops::Range;

use burn::tensor::Tensor;

use super::gated_delta::GatedDeltaState;

/// Keys and values of the positions that one rank's part of a model has read, for every layer.
///
/// Memory for all positions is allocated with the first ones; later ones are written in place.
#[derive(Debug)]
pub struct KvCache {
    capacity: usize,
    len: usize,
    layers: Vec<LayerCache>,
}

impl KvCache {
    /// An empty cache with room for `capacity` positions.
    pub fn new(capacity: usize) -> Self {
        Self { capacity, len: 0, layers: Vec::new() }
    }

    /// Positions read so far.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether nothing was read yet.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Positions that the cache has room for.
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// Forgets all positions; the memory stays allocated.
    pub fn clear(&mut self) {
        self.len = 0;
    }

    /// Counts `new` positions as read and says which they are.
    ///
    /// # Panics
    /// If there is no room for them.
    pub fn advance(&mut self, new: usize) -> Range<usize> {
        let (first, capacity) = (self.len, self.capacity);
        assert!(first + new <= capacity, "{first} of {capacity} positions of the cache are taken, {new} more came");
        self.len += new;
        first..self.len
    }

    /// The part of one layer.
    pub fn layer(&mut self, index: usize) -> &mut LayerCache {
        while self.layers.len() <= index {
            self.layers.push(LayerCache { capacity: self.capacity, tensors: None, state: None });
        }
        &mut self.layers[index]
    }
}

/// Keys and values of one layer, or the state of its linear attention.
#[derive(Debug)]
pub struct LayerCache {
    capacity: usize,
    /// `[capacity, b, kv_heads, d]` each; padded to some position.
    tensors: Option<[Tensor<4>; 2]>,
    state: Option<GatedDeltaState>,
}

impl LayerCache {
    /// Writes keys and values `[n, b, kv_heads, d]` of the `n` positions `at`; returns those of all positions up to
    /// there.
    ///
    /// # Panics
    /// If they record gradients: the cache would hold the graph of everything read so far.
    pub fn append(&mut self, at: &Range<usize>, new: [Tensor<4>; 2]) -> [Tensor<4>; 2] {
        assert!(!new[0].is_autodiff(), "a cache needs a model that records no gradients: take `model.valid()`");
        let empty = |like: &Tensor<4>| {
            let [_, batch, heads, head_dim] = like.dims();
            Tensor::zeros([self.capacity, batch, heads, head_dim], (&like.device(), like.dtype()))
        };
        // Taken out, so that nothing else holds them and they are written in place.
        let [keys, values] = self.tensors.take().unwrap_or_else(|| [empty(&new[0]), empty(&new[1])]);
        let [new_keys, new_values] = new;
        let all = [keys.slice_assign([at.clone()], new_keys), values.slice_assign([at.clone()], new_values)];
        let read = all.clone().map(|tensor| tensor.narrow(0, 0, at.end));
        self.tensors = Some(all);
        read
    }

    /// The state in front of the positions `at`; nothing at the beginning, whatever was read before.
    pub(super) fn take_state(&mut self, at: &Range<usize>) -> Option<GatedDeltaState> {
        self.state.take().filter(|_| at.start > 0)
    }

    /// Keeps the state behind the positions that were read.
    pub(super) fn put_state(&mut self, state: Option<GatedDeltaState>) {
        self.state = state;
    }
}
