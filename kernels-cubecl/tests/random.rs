//! Random numbers of CubeCL's cpu runtime against the host's, bit for bit. `burn-megatron doctor --kernels` does the
//! same on a GPU.

#[path = "libcalls/mod.rs"]
mod libcalls;

use cubecl::prelude::*;
use cubecl_runtime::runtime::Runtime;
use half::{bf16, f16};
use kernels_cubecl::pointwise::PointwiseError;
use kernels_cubecl::pointwise::flat::FloatType;
use kernels_cubecl::random::{Normal, ShardPosition, normal, standard_normal, words};

const DRAW: Normal = Normal { seed: 0x1234_5678_9abc_def0, stream: 0xfedc_ba98_7654_3210, std: 0.02 };

fn client() -> Client {
    cubecl::cpu::CpuRuntime::client(&Default::default())
}

/// The host's values: rounded to f32 and then to 16 bits.
fn expected(place: ShardPosition, len: usize) -> Vec<f64> {
    let value = |at: usize| {
        let (row, column) = ((at / place.width) as u64, at % place.width);
        let index = place.first + row * place.stride + column as u64;
        if column < place.used { DRAW.std * standard_normal(words(DRAW.seed, DRAW.stream, index)) } else { 0.0 }
    };
    (0..len).map(value).collect()
}

fn drawn(float: Option<FloatType>, place: ShardPosition, len: usize) -> Vec<u8> {
    let client = client();
    let out = client.empty(len * float.map_or(8, FloatType::size));
    normal(&client, &out, float, len, place, DRAW).unwrap();
    client.read_one(out).unwrap().to_vec()
}

#[test]
fn kernel_and_host_draw_the_same_bits() {
    let whole = ShardPosition { first: 0, stride: 5000, width: 5000, used: 5000 };
    let columns = ShardPosition { first: 128, stride: 512, width: 128, used: 128 };
    let padded = ShardPosition { first: 3000, stride: 6000, width: 1000, used: 900 };
    let behind = ShardPosition { first: (1 << 32) - 7, stride: 1 << 33, width: 1000, used: 1000 };
    for (place, len) in [(whole, 5000), (columns, 4096), (padded, 3000), (behind, 4000)] {
        let values = expected(place, len);
        let f32s: Vec<f32> = values.iter().map(|value| *value as f32).collect();
        let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        assert!(drawn(None, place, len) == bytes, "f64, {place:?}");
        let bytes: Vec<u8> = f32s.iter().flat_map(|value| value.to_le_bytes()).collect();
        assert!(drawn(Some(FloatType::F32), place, len) == bytes, "f32, {place:?}");
        let bytes: Vec<u8> = f32s.iter().flat_map(|value| bf16::from_f32(*value).to_le_bytes()).collect();
        assert!(drawn(Some(FloatType::Bf16), place, len) == bytes, "bf16, {place:?}");
        let bytes: Vec<u8> = f32s.iter().flat_map(|value| f16::from_f32(*value).to_le_bytes()).collect();
        assert!(drawn(Some(FloatType::F16), place, len) == bytes, "f16, {place:?}");
    }
}

#[test]
fn what_does_not_fit_is_refused() {
    let (client, place) = (client(), ShardPosition { first: 0, stride: 8, width: 8, used: 8 });
    let out = client.empty(64);
    let refused = normal(&client, &out, None, 9, place, DRAW);
    assert_eq!(refused, Err(PointwiseError::Buffer { name: "out", found: 64, expected: 72 }));
    for place in [ShardPosition { used: 9, ..place }, ShardPosition { width: 0, used: 0, ..place }] {
        assert!(matches!(normal(&client, &out, None, 8, place, DRAW), Err(PointwiseError::Length { .. })), "{place:?}");
    }
}
