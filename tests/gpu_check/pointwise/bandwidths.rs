//! Bandwidths of kernels and the table of them.

use crate::choice::Choice;
use crate::clock::kernel;
use crate::kernel_tests::pointwise::random;
use cubecl::prelude::*;
use cubecl::server::Handle;
use half::bf16;
use kernels_cubecl::pointwise::flat::{self, FloatType, Run};
use std::cell::{LazyCell, RefCell};
use std::collections::BTreeMap;

/// Each tensor has several copies that calls use in turn, so many that they do not stay in the L2 cache.
const FOOTPRINT: usize = 512 << 20;
/// Elements of fp32 of the large copy.
const COPIED: usize = 1 << 28;
/// Elements of the copy that hides the launch of a small kernel.
const HIDING: usize = 1 << 24;

/// Copies of a tensor, used in turn. The memory is taken at the first use, so that only timed kernels have tensors.
pub struct Turns<'a>(LazyCell<Vec<Handle>, Box<dyn FnOnce() -> Vec<Handle> + 'a>>);

impl<'a> Turns<'a> {
    fn new(make: impl FnOnce() -> Vec<Handle> + 'a) -> Self {
        Self(LazyCell::new(Box::new(make)))
    }

    /// The copy for call number `turn`.
    pub fn at(&self, turn: usize) -> &Handle {
        &self.0[turn % self.0.len()]
    }
}

struct Row {
    name: String,
    bytes: usize,
    seconds: f64,
    /// Seconds of a copy that moves equally many bytes.
    copy: f64,
}

/// A GPU, and what its copies take.
struct Gpu<'a> {
    client: &'a Client,
    pool: [Handle; 2],
    /// Seconds of copies by their number of elements.
    copies: RefCell<BTreeMap<usize, f64>>,
    /// 2^20 random numbers each.
    patterns: [(FloatType, Handle); 2],
}

/// Times the kernels that are asked for. Without a GPU it only hears their names.
pub struct Bandwidths<'a> {
    gpu: Option<(Gpu<'a>, &'a Choice)>,
    names: RefCell<Vec<String>>,
    rows: RefCell<Vec<Row>>,
}

impl<'a> Gpu<'a> {
    fn new(client: &'a Client) -> Self {
        let values = random(1 << 20, 9);
        let narrow: Vec<u8> = values.iter().flat_map(|v| bf16::from_f64(*v).to_le_bytes()).collect();
        // No negative second moments.
        let wide: Vec<u8> = values.iter().flat_map(|v| (v.abs() as f32).to_le_bytes()).collect();
        let patterns = [(FloatType::Bf16, narrow), (FloatType::F32, wide)];
        let patterns = patterns.map(|(float, bytes)| (float, client.create_from_slice(&bytes)));
        let pool = [(); 2].map(|()| client.empty(4 * COPIED));
        let gpu = Self { client, pool, copies: RefCell::default(), patterns };
        gpu.pool.iter().for_each(|handle| gpu.fill(handle, FloatType::F32, COPIED));
        gpu
    }

    fn fill(&self, handle: &Handle, float: FloatType, len: usize) {
        let (_, pattern) = self.patterns.iter().find(|(of, _)| *of == float).expect("there is a pattern of this type");
        for start in (0..len).step_by(1 << 20) {
            let count = (1 << 20).min(len - start);
            let from = Run { handle: pattern, float, start: 0, len: count };
            flat::write(self.client, from, Run { handle, float, start, len: count }, false).expect("legal");
        }
    }

    /// Copies `len` elements of fp32; consecutive calls copy consecutive elements.
    fn copy(&self, len: usize, turn: usize) {
        let start = turn % (COPIED / len) * len;
        let [from, to] = self.pool.each_ref().map(|handle| Run { handle, float: FloatType::F32, start, len });
        flat::write(self.client, from, to, false).expect("legal");
    }

    /// Seconds of a copy of `len` elements of fp32.
    fn copy_of(&self, len: usize) -> f64 {
        let known = self.copies.borrow().get(&len).copied();
        known.unwrap_or_else(|| {
            let seconds = kernel(self.client, |turn| self.copy(len, turn));
            self.copies.borrow_mut().insert(len, seconds);
            seconds
        })
    }

    /// Seconds of a copy that moves about as many bytes.
    fn copy_of_bytes(&self, bytes: usize) -> f64 {
        // Rounded, so that few sizes are timed.
        match bytes >> 20 << 18 {
            0 => self.copy_of(4),
            elements => {
                let copied = (elements / 2).min(COPIED);
                self.copy_of(copied) * bytes as f64 / (8 * copied) as f64
            }
        }
    }
}

impl<'a> Bandwidths<'a> {
    /// Measures a copy first.
    pub fn new(gpu: Option<(&'a Client, &'a Choice)>) -> Self {
        let gpu = gpu.map(|(client, choice)| (Gpu::new(client), choice));
        let rows = gpu.as_ref().map_or(Vec::new(), |(gpu, _)| {
            [("copy of fp32", COPIED), ("a launch (a copy of four numbers)", 4)]
                .map(|(name, len)| {
                    let seconds = gpu.copy_of(len);
                    Row { name: name.into(), bytes: 8 * len, seconds, copy: seconds }
                })
                .into()
        });
        Self { gpu, names: RefCell::default(), rows: rows.into() }
    }

    fn gpu(&self) -> &Gpu<'a> {
        &self.gpu.as_ref().expect("memory is of a GPU").0
    }

    /// `len` random numbers of bf16, in several copies if they are few.
    pub fn half(&self, len: usize) -> Turns<'_> {
        self.tensor(FloatType::Bf16, len)
    }

    /// The same in fp32.
    pub fn wide(&self, len: usize) -> Turns<'_> {
        self.tensor(FloatType::F32, len)
    }

    fn tensor(&self, float: FloatType, len: usize) -> Turns<'_> {
        Turns::new(move || {
            let copies = (FOOTPRINT / (len * float.size())).clamp(1, 8);
            let filled = |_| {
                let handle = self.gpu().client.empty(len * float.size());
                self.gpu().fill(&handle, float, len);
                handle
            };
            (0..copies).map(filled).collect()
        })
    }

    /// Memory of which it does not matter what is in it.
    pub fn empty(&self, bytes: usize) -> Turns<'_> {
        Turns::new(move || vec![self.gpu().client.empty(bytes)])
    }

    pub fn zeros(&self, bytes: usize) -> Turns<'_> {
        Turns::new(move || vec![self.gpu().client.create_from_slice(&vec![0; bytes])])
    }

    /// Integers of 32 bits.
    pub fn integers<'b>(&'b self, values: impl IntoIterator<Item = usize> + 'b) -> Turns<'b> {
        Turns::new(move || {
            let bytes: Vec<u8> = values.into_iter().flat_map(|value| (value as u32).to_le_bytes()).collect();
            vec![self.gpu().client.create_from_slice(&bytes)]
        })
    }

    /// Whether there is a word that is this one.
    pub fn names(&self, word: &str) -> bool {
        self.gpu.as_ref().is_none_or(|(_, choice)| choice.names(word))
    }

    /// The GPU if a kernel of this name is asked for.
    fn asked(&self, name: &str) -> Option<&Gpu<'a>> {
        self.names.borrow_mut().push(name.into());
        self.gpu.as_ref().filter(|(_, choice)| choice.wants(name)).map(|(gpu, _)| gpu)
    }

    /// Times a kernel that moves `bytes`, if it is asked for.
    pub fn time(&self, name: &str, bytes: usize, call: impl Fn(&Client, usize)) {
        if let Some(gpu) = self.asked(name) {
            let seconds = kernel(gpu.client, |turn| call(gpu.client, turn));
            self.rows.borrow_mut().push(Row { name: name.into(), bytes, seconds, copy: gpu.copy_of_bytes(bytes) });
        }
    }

    /// Times a kernel that takes less time than its launch costs the host: the time that it adds to a large copy
    /// launched before it.
    pub fn time_after_a_copy(&self, name: &str, bytes: usize, call: impl Fn(&Client, usize)) {
        if let Some(gpu) = self.asked(name) {
            let both = kernel(gpu.client, |turn| {
                gpu.copy(HIDING, turn);
                call(gpu.client, turn)
            });
            let seconds = both - gpu.copy_of(HIDING);
            self.rows.borrow_mut().push(Row { name: name.into(), bytes, seconds, copy: gpu.copy_of_bytes(bytes) });
        }
    }

    /// The names of all kernels so far.
    pub fn into_names(self) -> Vec<String> {
        self.names.into_inner()
    }

    pub fn print(&self) {
        println!("\n{:<52} {:>6} {:>9} {:>6} {:>8} {:>10}", "kernel", "GB", "ms", "TB/s", "of copy", "same copy");
        let rate = |bytes: usize, seconds: f64| bytes as f64 / seconds / 1e12;
        let best = rate(8 * COPIED, self.gpu().copy_of(COPIED));
        for Row { name, bytes, seconds, copy } in self.rows.borrow().iter() {
            let (gb, ms, tbs) = (*bytes as f64 / 1e9, seconds * 1e3, rate(*bytes, *seconds));
            let (share, copy) = (100.0 * tbs / best, rate(*bytes, *copy));
            println!("{name:<52} {gb:>6.3} {ms:>9.4} {tbs:>6.2} {share:>6.0} % {copy:>10.2}");
        }
        println!("The last column has the TB/s of a copy that moves as many bytes.");
    }
}
