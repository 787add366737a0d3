//! Casts to FP8 on CubeCL's cpu runtime, by arithmetic, against the host's bits: no GPU is needed. The GPU's
//! instruction and the transposes are checked by `gpu_check fp8`, on a GPU.
#![cfg(feature = "cpu")]

#[path = "libcalls/mod.rs"]
mod libcalls;

use cubecl::prelude::*;
use cubecl::server::Handle;
use cubecl_runtime::runtime::Runtime;
use half::bf16;
use kernels_cubecl::fp8::cast::{Conversion, cast};
use kernels_cubecl::fp8::codec::encode_host;
use kernels_cubecl::fp8::{Codec, Format, amax, groups};

fn client() -> Client {
    cubecl::cpu::CpuRuntime::client(&Default::default())
}

fn upload(client: &Client, values: &[bf16]) -> Handle {
    client.create_from_slice(&values.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<_>>())
}

fn read_f32(client: &Client, handle: &Handle) -> f32 {
    let bytes = client.read_one_unchecked(handle.clone());
    f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]])
}

#[test]
fn a_cast_has_the_bits_of_the_host() {
    let client = &client();
    let x: Vec<bf16> = (0..=u16::MAX).map(bf16::from_bits).collect();
    let (from, factor) = (upload(client, &x), client.create_from_slice(&37.5f32.to_le_bytes()));
    for format in [Format::E4m3, Format::E5m2] {
        let out = client.empty(x.len());
        let conversion = Conversion { format, codec: Codec::Arithmetic, rows: 256, columns: 256 };
        cast::<bf16>(client, &from, &factor, Some(&out), None, conversion).unwrap();
        let expected: Vec<u8> = x.iter().map(|x| encode_host(x.to_f32() * 37.5, format)).collect();
        assert!(client.read_one_unchecked(out).to_vec() == expected, "{format:?}");
    }
}

#[test]
fn the_amax_gives_the_scale() {
    let client = &client();
    let x: Vec<bf16> = (0..1000).map(|i| bf16::from_f32(((i * 37) % 101) as f32 - 60.0)).collect();
    let (from, found) = (upload(client, &x), client.empty(4));
    amax::amax::<bf16>(client, &from, &found, x.len()).unwrap();
    let [scale, inverse] = [client.empty(4), client.empty(4)];
    amax::scale(client, &found, [&scale, &inverse], 1, Format::E5m2, 2).unwrap();
    let expected = 57344.0 / 60.0 * 0.25;
    assert_eq!([&found, &scale, &inverse].map(|x| read_f32(client, x)), [60.0, expected, 1.0 / expected]);
}

#[test]
fn groups_have_their_own_amax() {
    let (client, columns) = (&client(), 48);
    let counts = [16, 0, 1440, 32];
    let x: Vec<bf16> = (0..1488 * columns).map(|i| bf16::from_f32(((i * 37) % 1009) as f32 - 400.0)).collect();
    let (from, amax) = (upload(client, &x), client.empty(16));
    groups::amax::<bf16>(client, &from, &amax, &counts, columns).unwrap();
    let mut rest = &x[..];
    let magnitudes = counts.map(|count| {
        let part = rest.split_off(..count * columns).unwrap();
        part.iter().map(|x| x.to_f32().abs()).fold(0.0, f32::max).to_le_bytes()
    });
    assert!(client.read_one_unchecked(amax).to_vec() == magnitudes.concat());
}
