//! The kernel that sums, adds the sum to the residual stream and takes the RMSNorm of that, in PTX as [`ptx`](super::ptx)
//! is and with its protocol: words of 32 bits of data and the number of the call, two halves of the memory in turn.
//!
//! A block has a row, and a thread up to four vectors of eight elements of it: those that it has in the kernel of norms in
//! `kernels_cubecl` (`pointwise::norm`), whose bits the result has. So the sum of all members is rounded, the sum with the
//! stream again, squares are added in fp32 in that kernel's order (a thread's own one after the other, those of a warp by
//! butterfly, those of warps one after the other), and the row is scaled before it is multiplied by the weight.
//!
//! In a member's region the k-th units of all vectors of a row are next to each other, so that a warp stores and loads 512
//! bytes at once. Once the run has failed, threads continue with what is there, so that all come to the barrier.
//!
//! While the rows wait for other GPUs nothing reads this one's memory. So further blocks ask for what the next kernel reads
//! first, the rows of a weight, to be brought to the L2 cache, and end (`cp.async.bulk.prefetch`, since Hopper).

use super::layout::{CHUNK, HEADER};

/// Most vectors of a thread, of eight elements each.
pub(crate) const VECTORS: usize = 4;

/// Most threads of a row.
pub(crate) const THREADS: usize = 512;

/// An element type: how many words of 32 bits a vector has.
struct Kind {
    words: usize,
    /// The elements `b` of the word `w`, from `first` on.
    decode: fn(w: &str, b: &str, first: usize) -> String,
    /// The reverse, rounded to nearest even.
    encode: fn(w: &str, b: &str, first: usize) -> String,
}

const KINDS: [Kind; 3] = [
    Kind {
        words: 4,
        // The upper half of an f32.
        decode: |w, b, i| {
            let j = i + 1;
            format!("shl.b32 %t, {w}, 16; mov.b32 {b}{i}, %t; and.b32 %t, {w}, 0xffff0000; mov.b32 {b}{j}, %t;")
        },
        encode: |w, b, i| format!("cvt.rn.bf16x2.f32 {w}, {b}{}, {b}{i};", i + 1),
    },
    Kind {
        words: 4,
        decode: |w, b, i| format!("mov.b32 {{%h0, %h1}}, {w}; cvt.f32.f16 {b}{i}, %h0; cvt.f32.f16 {b}{}, %h1;", i + 1),
        encode: |w, b, i| format!("cvt.rn.f16x2.f32 {w}, {b}{}, {b}{i};", i + 1),
    },
    Kind {
        words: 8,
        decode: |w, b, i| format!("mov.b32 {b}{i}, {w};"),
        encode: |w, b, i| format!("mov.b32 {w}, {b}{i};"),
    },
];

/// The name of the kernel in its module.
pub(crate) const NAME: &str = "sum_and_norm";

/// The module of the kernel for elements of type `kind` (bf16, f16, f32) and so many vectors of a thread, with a weight to
/// which one is added or not, on a GPU of at least this compute capability: 8 rounds two f32 to bf16 by one instruction, 9
/// prefetches.
pub(crate) fn module((kind, vectors, plus_one): (usize, usize, bool), capability: i32) -> String {
    assert!((1..=VECTORS).contains(&vectors), "{vectors} vectors of a thread");
    let prefetches = capability >= 9;
    let target = if prefetches { ".version 8.0\n.target sm_90" } else { ".version 7.0\n.target sm_80" };
    format!("{target}\n.address_size 64\n{}", kernel(&KINDS[kind], vectors, plus_one, prefetches))
}

/// `line(i)` for each `i` below `count`.
fn each(count: usize, line: impl Fn(usize) -> String) -> String {
    (0..count).map(|i| format!("    {}\n", line(i))).collect()
}

impl Kind {
    /// Elements of a word.
    fn of_word(&self) -> usize {
        8 / self.words
    }

    /// The eight elements `to` from `first` on of vector `v` in the registers `from`.
    fn decoded(&self, from: &str, v: usize, to: &str, first: usize) -> String {
        each(self.words, |k| (self.decode)(&self.word(from, v, k), to, first + k * self.of_word()))
    }

    fn encoded(&self, to: &str, v: usize, from: &str, first: usize) -> String {
        each(self.words, |k| (self.encode)(&self.word(to, v, k), from, first + k * self.of_word()))
    }

    /// Word `k` of vector `v`.
    fn word(&self, registers: &str, v: usize, k: usize) -> String {
        format!("{registers}{}", v * self.words + k)
    }

    /// `line(four words, their offset)` for each 16 bytes of vector `v`.
    fn access(&self, registers: &str, v: usize, line: impl Fn(&str, usize) -> String) -> String {
        each(self.words / 4, |half| {
            let four: Vec<_> = (0..4).map(|k| self.word(registers, v, 4 * half + k)).collect();
            line(&format!("{{{}}}", four.join(", ")), 16 * half)
        })
    }

    fn load(&self, registers: &str, v: usize, from: &str, offset: &str) -> String {
        let loads = self.access(registers, v, |four, at| format!("ld.global.v4.b32 {four}, [%at + {at}];"));
        format!("    add.u64 %at, {from}, {offset}{v};\n{loads}")
    }

    fn store(&self, registers: &str, v: usize, to: &str) -> String {
        let stores = self.access(registers, v, |four, at| format!("@%in{v} st.global.v4.b32 [%at + {at}], {four};"));
        format!("    add.u64 %at, {to}, %o{v};\n{stores}")
    }
}

fn kernel(kind: &Kind, vectors: usize, plus_one: bool, prefetches: bool) -> String {
    let Kind { words, .. } = kind;
    let (bytes, units) = (4 * words, words / 2);
    let (all_words, all_elements) = (vectors * words, vectors * 8);
    let of_each = |lines: &dyn Fn(usize) -> String| (0..vectors).map(lines).collect::<String>();
    let places = each(vectors, |v| {
        // Past the end of the row its last vector is read again.
        format!(
            "mad.lo.u32 %t, %threads, {v}, %thread; setp.lt.u32 %in{v}, %t, %width; min.u32 %t, %t, %last;
    mul.wide.u32 %c{v}, %t, {bytes}; mad.lo.u32 %u, %row, %width, %t; mul.wide.u32 %o{v}, %u, {bytes};
    mul.lo.u32 %u, %row, %width; mad.lo.u32 %u, %u, {units}, %t; mul.wide.u32 %s{v}, %u, 16;"
        )
    });
    let inputs = of_each(&|v| {
        kind.load("%own", v, "%from", "%o")
            + &kind.load("%x", v, "%stream", "%o")
            + &kind.load("%g", v, "%weight", "%c")
    });
    let sends = of_each(&|v| {
        let sends = each(units, |k| {
            let [low, high] = [0, 1].map(|half| kind.word("%own", v, 2 * k + half));
            format!(
                "mov.b64 %w0, {{{low}, %flag}}; mov.b64 %w1, {{{high}, %flag}};
    @%in{v} st.relaxed.sys.global.v2.u64 [%at + {HEADER}], {{%w0, %w1}}; add.u64 %at, %at, %step;"
            )
        });
        format!("    add.u64 %at, %to, %s{v};\n{sends}")
    });
    let zeros = each(all_elements, |i| format!("mov.f32 %a{i}, 0f80000000;"));
    let own = each(all_words, |i| format!("mov.b32 %n{i}, %own{i};"));
    let polls = of_each(&|v| {
        let polls = each(units, |k| {
            let (w0, w1) = (2 * (v * units + k), 2 * (v * units + k) + 1);
            format!("ld.relaxed.sys.global.v2.u64 {{%w{w0}, %w{w1}}}, [%at + {HEADER}]; add.u64 %at, %at, %step;")
        });
        format!("    add.u64 %at, %d, %s{v};\n{polls}")
    });
    let checks = of_each(&|v| {
        each(*words, |k| {
            let i = v * words + k;
            format!("mov.b64 {{%n{i}, %t}}, %w{i}; xor.b32 %t, %t, %flag; or.b32 %missing, %missing, %t;")
        })
    });
    let adds = of_each(&|v| {
        let adds = each(8, |i| format!("add.rn.f32 %a{0}, %a{0}, %b{i};", 8 * v + i));
        kind.decoded("%n", v, "%b", 0) + &adds
    });
    let totals = of_each(&|v| {
        let first = 8 * v;
        let add = each(8, |i| format!("add.rn.f32 %b{i}, %b{i}, %a{};", first + i));
        let squares = each(8, |i| format!("@%in{v} fma.rn.f32 %squares, %a{0}, %a{0}, %squares;", first + i));
        kind.encoded("%n", v, "%a", first)
            + &kind.decoded("%n", v, "%a", first)
            + &kind.decoded("%x", v, "%b", 0)
            + &add
            + &kind.encoded("%n", v, "%b", 0)
            + &kind.store("%n", v, "%sum")
            + &kind.decoded("%n", v, "%a", first)
            + &squares
    });
    let butterfly = each(5, |i| {
        format!(
            "mov.b32 %t, %squares; shfl.sync.bfly.b32 %t, %t, {}, 31, 0xffffffff;
    mov.b32 %f, %t; add.rn.f32 %squares, %squares, %f;",
            1 << i
        )
    });
    let parts = each(THREADS / 32, |i| {
        format!("mov.f32 %f{i}, 0f00000000; setp.lt.u32 %p, {i}, %warps; @%p ld.shared.f32 %f{i}, [parts + {}];", 4 * i)
    });
    let total = each(THREADS / 32 - 1, |i| format!("add.rn.f32 %f0, %f0, %f{};", i + 1));
    let normed = of_each(&|v| {
        let first = 8 * v;
        let scale =
            each(8, |i| format!("mul.rn.f32 %a{0}, %a{0}, %factor; mul.rn.f32 %a{0}, %a{0}, %b{i};", first + i));
        let weight = each(if plus_one { 8 } else { 0 }, |i| format!("add.rn.f32 %b{i}, %b{i}, 0f3f800000;"));
        kind.decoded("%g", v, "%b", 0)
            + &weight
            + &scale
            + &kind.encoded("%n", v, "%a", first)
            + &kind.store("%n", v, "%normed")
    });
    let prefetch = match prefetches {
        true => format!("cp.async.bulk.prefetch.L2.global [%at], {CHUNK};"),
        false => String::new(),
    };
    format!(
        "
.visible .entry {NAME}(
    .param .u64 from_, .param .u64 stream_, .param .u64 weight_, .param .u64 sum_, .param .u64 normed_,
    .param .u64 stop_, .param .u32 width_, .param .f32 inverse_, .param .f32 eps_, .param .u32 rank_,
    .param .u32 size_, .param .u32 region_, .param .u64 next_, .param .u32 next_bytes_, .param .u32 rows_, .param .align 8 .b8 members_[64])
.maxntid {THREADS}, 1, 1
{{
    .shared .align 4 .b8 parts[{shared}];
    .reg .pred %p, %in<{vectors}>;
    .reg .b32 %thread, %threads, %row, %rows, %width, %last, %rank, %size, %region, %call, %flag, %slot, %warps;
    .reg .b32 %r, %i, %spins, %senders, %missing, %t, %u;
    .reg .b64 %from, %stream, %weight, %sum, %normed, %stop, %own, %members, %at, %to, %d, %part, %slots, %step, %zero;
    .reg .b64 %c<{vectors}>, %o<{vectors}>, %s<{vectors}>, %w<{all_words}>;
    .reg .b32 %own<{all_words}>, %x<{all_words}>, %g<{all_words}>, %n<{all_words}>;
    .reg .b16 %h<2>;
    .reg .f32 %a<{all_elements}>, %b<8>, %f<16>, %f, %squares, %factor, %inverse, %eps;

    ld.param.u64 %from, [from_]; ld.param.u64 %stream, [stream_]; ld.param.u64 %weight, [weight_];
    ld.param.u64 %sum, [sum_]; ld.param.u64 %normed, [normed_]; ld.param.u64 %stop, [stop_];
    ld.param.u32 %width, [width_]; ld.param.f32 %inverse, [inverse_]; ld.param.f32 %eps, [eps_];
    ld.param.u32 %rank, [rank_]; ld.param.u32 %size, [size_]; ld.param.u32 %region, [region_];
    mov.u64 %members, members_;
    mul.wide.u32 %at, %rank, 8; add.u64 %at, %at, %members; ld.param.u64 %own, [%at];
    mov.u32 %thread, %tid.x; mov.u32 %threads, %ntid.x; mov.u32 %row, %ctaid.x;
    ld.param.u32 %rows, [rows_]; setp.ge.u32 %p, %row, %rows; @%p bra PREFETCH;
    sub.u32 %last, %width, 1;
    mul.wide.u32 %step, %width, 16;
{places}
    ld.relaxed.gpu.global.u32 %call, [%own];
{inputs}    shl.b32 %flag, %call, 1; or.b32 %flag, %flag, 1;
    and.b32 %slot, %call, 1;
    mul.wide.u32 %part, %region, 16;
    cvt.u64.u32 %slots, %size; mul.lo.u64 %slots, %slots, %part;

    // The threads that send clear the other half, each before it sends.
    and.b32 %t, %call, 0x7ffffffe; setp.ne.u32 %p, %t, 0; @%p bra SEND;
    setp.ge.u32 %p, %thread, %width; @%p bra SEND;
    min.u32 %t, %threads, %width;
    mad.lo.u32 %i, %row, %t, %thread; mul.lo.u32 %senders, %rows, %t;
    xor.b32 %t, %slot, 1;
    cvt.u64.u32 %d, %t; mad.lo.u64 %d, %d, %slots, %own;
    mul.lo.u32 %u, %size, %region;
    mov.u64 %zero, 0;
CLEAR:
    setp.ge.u32 %p, %i, %u; @%p bra CLEARED;
    mul.wide.u32 %at, %i, 16; add.u64 %at, %at, %d;
    st.relaxed.sys.global.v2.u64 [%at + {HEADER}], {{%zero, %zero}};
    add.u32 %i, %i, %senders;
    bra CLEAR;
CLEARED:
    fence.acq_rel.sys;

SEND:
    cvt.u64.u32 %d, %slot; mul.lo.u64 %slots, %d, %slots;
    cvt.u64.u32 %d, %rank; mad.lo.u64 %d, %d, %part, %slots;
    mov.u32 %r, 0;
SEND_TO:
    setp.eq.u32 %p, %r, %rank; @%p bra SENT_TO;
    mul.wide.u32 %at, %r, 8; add.u64 %at, %at, %members; ld.param.u64 %to, [%at];
    add.u64 %to, %to, %d;
{sends}SENT_TO:
    add.u32 %r, %r, 1;
    setp.lt.u32 %p, %r, %size; @%p bra SEND_TO;

    mov.u32 %spins, 0;
{zeros}    mov.u32 %r, 0;
SUM_OF:
    setp.ne.u32 %p, %r, %rank; @%p bra SUM_OTHER;
{own}    bra ADD;
SUM_OTHER:
    cvt.u64.u32 %d, %r; mad.lo.u64 %d, %d, %part, %slots; add.u64 %d, %d, %own;
POLL:
    mov.u32 %missing, 0;
{polls}{checks}    setp.eq.u32 %p, %missing, 0; @%p bra ADD;
    add.u32 %spins, %spins, 1; and.b32 %t, %spins, 1023; setp.ne.u32 %p, %t, 0; @%p bra POLL;
    ld.relaxed.sys.global.u32 %t, [%stop]; setp.eq.u32 %p, %t, 0; @%p bra POLL;
ADD:
{adds}    add.u32 %r, %r, 1;
    setp.lt.u32 %p, %r, %size; @%p bra SUM_OF;

    // The sum, the stream with it, and its squares.
    mov.f32 %squares, 0f00000000;
{totals}{butterfly}    shr.u32 %warps, %threads, 5; shr.u32 %u, %thread, 5; and.b32 %t, %thread, 31;
    setp.eq.u32 %p, %t, 0; mov.u32 %t, parts; mad.lo.u32 %t, %u, 4, %t; @%p st.shared.f32 [%t], %squares;
    bar.sync 0;
{parts}{total}    fma.rn.f32 %factor, %f0, %inverse, %eps; rsqrt.approx.ftz.f32 %factor, %factor;
{normed}    // The last block counts the call: all have read its number, before the barrier.
    setp.ne.u32 %p, %thread, 0; @%p bra DONE;
    atom.acq_rel.gpu.global.add.u32 %t, [%own + 4], 1;
    sub.u32 %u, %rows, 1; setp.ne.u32 %p, %t, %u; @%p bra DONE;
    add.u32 %call, %call, 1;
    st.relaxed.gpu.global.u32 [%own + 4], 0;
    st.relaxed.gpu.global.u32 [%own], %call;
    bra DONE;

PREFETCH:
    mov.u32 %t, %nctaid.x; sub.u32 %t, %t, %rows; sub.u32 %u, %row, %rows; mad.lo.u32 %u, %thread, %t, %u;
    mul.wide.u32 %d, %u, {CHUNK}; ld.param.u32 %t, [next_bytes_]; cvt.u64.u32 %at, %t;
    setp.ge.u64 %p, %d, %at; @%p bra DONE;
    ld.param.u64 %at, [next_]; add.u64 %at, %at, %d;
    {prefetch}
DONE:
    ret;
}}
",
        shared = THREADS / 32 * 4,
    )
}
