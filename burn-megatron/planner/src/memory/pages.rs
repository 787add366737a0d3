//! Pages of the GPU allocator, after CubeCL's adaptive memory (cubecl-server, memory_management/dynamic).

/// What a page has besides the largest buffer, and the unit that its size is a multiple of.
const MIB: u64 = 1 << 20;
/// Of what tensors take, the share that is lost between them: gaps that no other tensor fits into. By measurement.
const GAPS: u64 = 32;

/// Bytes that pages take beyond those of the tensors in them, of which there are so many at the peak.
///
/// Every tensor that is not in a buffer of its own is a slice of a page, at the first place with room. Pages are as large
/// as the largest buffer that a run has had, and none is given back within a step, so there are as many whole pages as the
/// peak needs.
pub fn fragmentation(tensors: u64, largest: u64) -> u64 {
    if tensors == 0 {
        return 0;
    }
    let page = (largest + MIB).next_multiple_of(MIB);
    (tensors + tensors / GAPS).next_multiple_of(page) - tensors
}
