//! The kernel, in PTX: it is loaded by the driver alone, without NVRTC and without a toolkit, and CubeCL has no loads and
//! stores with a scope.
//!
//! A thread has units of 8 bytes of the tensor. It stores each unit of its own tensor into the memory of every other
//! member as two 64-bit words: 32 bits of data and the number of the call each. Then it waits until the words of the
//! others have arrived in the memory of its own GPU, and sums all members' units in the order of their ranks, so that
//! all have the same bits.
//!
//! Why a reader never sees old or half-written data: a word is stored and loaded as a whole (`relaxed`, of scope `sys`),
//! so data that comes with the number of this call is of this call, without a fence. The same memory is written again
//! two calls later. A member does so after its call in between has ended, for which it has seen words of every other
//! member's call in between; and that began after the one before it had ended, with all its loads.
//!
//! Numbers are odd and of 32 bits, so they recur after 2^31 calls. Words of long ago must not be taken for new ones:
//! once in that time, and in the first two calls, each half of the memory is cleared in the call before the one that
//! uses it. Whoever sends has cleared its part before (`fence`), so the others' words of the next call come later.

use super::layout::HEADER;

/// An element type: its name, and how elements become sums and sums become elements.
struct Kind {
    name: &'static str,
    /// Elements of a unit, and log2 of it.
    elements: usize,
    shift: usize,
    /// Bits of an element.
    bits: usize,
    /// Type of a sum, of its register, and a zero that changes nothing it is added to.
    sum: &'static str,
    zero: &'static str,
    /// The elements `%e` of the words `%lo` and `%hi`, and the reverse.
    pack: &'static str,
    unpack: &'static str,
    /// The summands `%x` of `%lo` and `%hi`.
    decode: &'static str,
    /// `%lo` and `%hi` of the sums `%a`.
    encode: &'static str,
}

const HALVES: [&str; 2] =
    ["mov.b32 %lo, {%e0, %e1}; mov.b32 %hi, {%e2, %e3};", "mov.b32 {%e0, %e1}, %lo; mov.b32 {%e2, %e3}, %hi;"];

const KINDS: [Kind; 4] = [
    Kind {
        name: "bf16",
        elements: 4,
        shift: 2,
        bits: 16,
        sum: "f32",
        zero: "0f80000000",
        pack: HALVES[0],
        unpack: HALVES[1],
        // The upper half of an f32.
        decode: "shl.b32 %t, %lo, 16; mov.b32 %x0, %t; and.b32 %t, %lo, 0xffff0000; mov.b32 %x1, %t;
    shl.b32 %t, %hi, 16; mov.b32 %x2, %t; and.b32 %t, %hi, 0xffff0000; mov.b32 %x3, %t;",
        // To nearest, ties to even; cvt.rn.bf16 is of later GPUs. `round` has its four lines for each element.
        encode: "round",
    },
    Kind {
        name: "f16",
        elements: 4,
        shift: 2,
        bits: 16,
        sum: "f32",
        zero: "0f80000000",
        pack: HALVES[0],
        unpack: HALVES[1],
        decode: "mov.b32 {%e0, %e1}, %lo; mov.b32 {%e2, %e3}, %hi;
    cvt.f32.f16 %x0, %e0; cvt.f32.f16 %x1, %e1; cvt.f32.f16 %x2, %e2; cvt.f32.f16 %x3, %e3;",
        encode: "cvt.rn.f16.f32 %e0, %a0; cvt.rn.f16.f32 %e1, %a1; cvt.rn.f16.f32 %e2, %a2; cvt.rn.f16.f32 %e3, %a3;
    mov.b32 %lo, {%e0, %e1}; mov.b32 %hi, {%e2, %e3};",
    },
    Kind {
        name: "f32",
        elements: 2,
        shift: 1,
        bits: 32,
        sum: "f32",
        zero: "0f80000000",
        pack: "mov.b32 %lo, %e0; mov.b32 %hi, %e1;",
        unpack: "mov.b32 %e0, %lo; mov.b32 %e1, %hi;",
        decode: "mov.b32 %x0, %lo; mov.b32 %x1, %hi;",
        encode: "mov.b32 %lo, %a0; mov.b32 %hi, %a1;",
    },
    Kind {
        name: "f64",
        elements: 1,
        shift: 0,
        bits: 64,
        sum: "f64",
        zero: "0d8000000000000000",
        pack: "mov.b64 {%lo, %hi}, %e0;",
        unpack: "mov.b64 %e0, {%lo, %hi};",
        decode: "mov.b64 %x0, {%lo, %hi};",
        encode: "mov.b64 {%lo, %hi}, %a0;",
    },
];

/// The names of the kernels, by element type: bf16, f16, f32, f64.
pub(crate) fn names() -> [String; 4] {
    KINDS.map(|kind| format!("all_reduce_{}", kind.name))
}

/// The module of all kernels.
pub(crate) fn module() -> String {
    let kernels: String = KINDS.iter().map(kernel).collect();
    format!(".version 7.0\n.target sm_70\n.address_size 64\n{kernels}")
}

/// `line(i)` for each element of a unit.
fn each(kind: &Kind, line: impl Fn(usize) -> String) -> String {
    (0..kind.elements).map(|i| format!("    {}\n", line(i))).collect()
}

/// The unit `%i` of the member's own tensor, in `%lo` and `%hi`; zeros after its end.
fn load(kind: &Kind) -> String {
    let Kind { bits, shift, pack, .. } = kind;
    let bytes = bits / 8;
    let loads = each(kind, |i| {
        format!(
            "mov.b{bits} %e{i}, 0; add.u32 %t, %first, {i}; setp.lt.u32 %q, %t, %count;
    @%q ld.global.b{bits} %e{i}, [%at + {}];",
            i * bytes
        )
    });
    format!(
        "    shl.b32 %first, %i, {shift};
    mul.wide.u32 %at, %i, 8; add.u64 %at, %at, %from;
{loads}    {pack}
"
    )
}

fn encode(kind: &Kind) -> String {
    if kind.encode != "round" {
        return format!("    {}\n", kind.encode);
    }
    let rounded = each(kind, |i| {
        format!(
            "mov.b32 %t, %a{i}; shr.u32 %u, %t, 16; and.b32 %u, %u, 1; add.u32 %u, %u, 0x7fff; add.u32 %t, %t, %u;
    setp.nan.f32 %q, %a{i}, %a{i}; selp.b32 %t, 0x7fff0000, %t, %q; shr.u32 %t, %t, 16; cvt.u16.u32 %e{i}, %t;"
        )
    });
    format!("{rounded}    {}\n", kind.pack)
}

fn kernel(kind: &Kind) -> String {
    let Kind { name, elements, shift, bits, sum, zero, unpack, decode, .. } = kind;
    let (load, encode) = (load(kind), encode(kind));
    let bytes = bits / 8;
    let zeros = each(kind, |i| format!("mov.{sum} %a{i}, {zero};"));
    let adds = each(kind, |i| format!("add.rn.{sum} %a{i}, %a{i}, %x{i};"));
    let stores = each(kind, |i| {
        format!(
            "add.u32 %t, %first, {i}; setp.lt.u32 %q, %t, %count;
    @%q st.global.b{bits} [%at + {}], %e{i};",
            i * bytes
        )
    });
    format!(
        "
.visible .entry all_reduce_{name}(
    .param .u64 from_, .param .u64 to_, .param .u64 stop_, .param .u32 count_, .param .u32 rank_, .param .u32 size_,
    .param .u32 region_, .param .align 8 .b8 members_[64])
{{
    .reg .pred %p, %q;
    .reg .b32 %thread, %blocks, %me, %threads, %count, %units, %rank, %size, %region, %call, %flag, %slot, %other, %i, %r;
    .reg .b32 %first, %lo, %hi, %f0, %f1, %spins, %senders, %t, %u;
    .reg .b64 %from, %to, %stop, %own, %members, %at, %w0, %w1, %d, %part, %slots, %zero;
    .reg .b{bits} %e<{elements}>;
    .reg .{sum} %x<{elements}>, %a<{elements}>;

    ld.param.u64 %from, [from_]; ld.param.u64 %to, [to_]; ld.param.u64 %stop, [stop_];
    ld.param.u32 %count, [count_]; ld.param.u32 %rank, [rank_]; ld.param.u32 %size, [size_];
    ld.param.u32 %region, [region_];
    mov.u64 %members, members_;
    mul.wide.u32 %at, %rank, 8; add.u64 %at, %at, %members; ld.param.u64 %own, [%at];

    mov.u32 %thread, %tid.x; mov.u32 %t, %ntid.x; mov.u32 %u, %ctaid.x; mov.u32 %blocks, %nctaid.x;
    mad.lo.u32 %me, %u, %t, %thread;
    mul.lo.u32 %threads, %t, %blocks;
    add.u32 %units, %count, {last}; shr.u32 %units, %units, {shift};
    // Numbers of calls, from 0; regions have 16 bytes for each unit.
    ld.relaxed.gpu.global.u32 %call, [%own];
    shl.b32 %flag, %call, 1; or.b32 %flag, %flag, 1;
    and.b32 %slot, %call, 1;
    mul.wide.u32 %part, %region, 16;
    cvt.u64.u32 %slots, %size; mul.lo.u64 %slots, %slots, %part;

    and.b32 %t, %call, 0x7ffffffe; setp.ne.u32 %p, %t, 0; @%p bra SEND;
    setp.ge.u32 %p, %me, %units; @%p bra END;
    min.u32 %senders, %threads, %units;
    xor.b32 %other, %slot, 1;
    cvt.u64.u32 %d, %other; mad.lo.u64 %d, %d, %slots, %own;
    mul.lo.u32 %u, %size, %region;
    mov.u64 %zero, 0;
    mov.u32 %i, %me;
CLEAR:
    setp.ge.u32 %p, %i, %u; @%p bra CLEARED;
    mul.wide.u32 %at, %i, 16; add.u64 %at, %at, %d;
    st.relaxed.sys.global.v2.u64 [%at + {HEADER}], {{%zero, %zero}};
    add.u32 %i, %i, %senders;
    bra CLEAR;
CLEARED:
    fence.acq_rel.sys;

SEND:
    // Of a region of this slot: where this member's is, in the memory of each.
    cvt.u64.u32 %d, %slot; mul.lo.u64 %slots, %d, %slots;
    cvt.u64.u32 %d, %rank; mad.lo.u64 %d, %d, %part, %slots;
    mov.u32 %i, %me;
SEND_UNIT:
    setp.ge.u32 %p, %i, %units; @%p bra SUM;
{load}    mov.b64 %w0, {{%lo, %flag}}; mov.b64 %w1, {{%hi, %flag}};
    mov.u32 %r, 0;
SEND_TO:
    setp.eq.u32 %p, %r, %rank; @%p bra SENT_TO;
    mul.wide.u32 %at, %r, 8; add.u64 %at, %at, %members; ld.param.u64 %at, [%at];
    add.u64 %at, %at, %d;
    mad.wide.u32 %at, %i, 16, %at;
    st.relaxed.sys.global.v2.u64 [%at + {HEADER}], {{%w0, %w1}};
SENT_TO:
    add.u32 %r, %r, 1;
    setp.lt.u32 %p, %r, %size; @%p bra SEND_TO;
    add.u32 %i, %i, %threads;
    bra SEND_UNIT;

SUM:
    mov.u32 %i, %me;
    mov.u32 %spins, 0;
SUM_UNIT:
    setp.ge.u32 %p, %i, %units; @%p bra END;
{zeros}    mov.u32 %r, 0;
SUM_OF:
    setp.ne.u32 %p, %r, %rank; @%p bra SUM_OTHER;
{load}    bra ADD;
SUM_OTHER:
    cvt.u64.u32 %d, %r; mad.lo.u64 %d, %d, %part, %slots; add.u64 %d, %d, %own;
    mad.wide.u32 %at, %i, 16, %d;
POLL:
    ld.relaxed.sys.global.v2.u64 {{%w0, %w1}}, [%at + {HEADER}];
    mov.b64 {{%lo, %f0}}, %w0; mov.b64 {{%hi, %f1}}, %w1;
    setp.eq.u32 %p, %f0, %flag; setp.eq.and.u32 %p, %f1, %flag, %p; @%p bra ADD;
    add.u32 %spins, %spins, 1; and.b32 %t, %spins, 1023; setp.ne.u32 %p, %t, 0; @%p bra POLL;
    ld.relaxed.sys.global.u32 %t, [%stop]; setp.eq.u32 %p, %t, 0; @%p bra POLL;
    bra END;
ADD:
    {decode}
{adds}    add.u32 %r, %r, 1;
    setp.lt.u32 %p, %r, %size; @%p bra SUM_OF;
{encode}    {unpack}
    shl.b32 %first, %i, {shift};
    mul.wide.u32 %at, %i, 8; add.u64 %at, %at, %to;
{stores}    add.u32 %i, %i, %threads;
    bra SUM_UNIT;

END:
    // The last block counts the call: all have read its number.
    bar.sync 0;
    setp.ne.u32 %p, %thread, 0; @%p bra DONE;
    atom.acq_rel.gpu.global.add.u32 %t, [%own + 4], 1;
    sub.u32 %u, %blocks, 1; setp.ne.u32 %p, %t, %u; @%p bra DONE;
    add.u32 %call, %call, 1;
    st.relaxed.gpu.global.u32 [%own + 4], 0;
    st.relaxed.gpu.global.u32 [%own], %call;
DONE:
    ret;
}}
",
        last = elements - 1,
    )
}
