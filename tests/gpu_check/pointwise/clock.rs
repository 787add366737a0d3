//! Bandwidths of kernels and the table of them.
use crate::checks::random;
use cubecl::prelude::*;
use cubecl::server::Handle;
use half::bf16;
use kernels_cubecl::pointwise::flat::{self, FloatType, Run};
use std::collections::BTreeMap;
use std::time::Instant;

/// Each tensor has several copies that calls use in turn, so many that they do not stay in the L2 cache.
const FOOTPRINT: usize = 512 << 20;
/// Batches, whose median counts, and seconds of a batch.
const BATCHES: usize = 5;
const SECONDS: f64 = 0.02;
/// Elements of fp32 of the large copy.
const COPIED: usize = 1 << 28;
/// Elements of the copy that hides the launch of a small kernel.
const HIDING: usize = 1 << 24;

/// Copies of a tensor, used in turn.
pub struct Turns(Vec<Handle>);

impl Turns {
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

pub struct Clock<'a> {
    pub client: &'a Client,
    filters: Vec<String>,
    /// Bytes per second of the large copy.
    copy: f64,
    pool: [Handle; 2],
    /// Seconds of copies by their number of elements.
    copies: BTreeMap<usize, f64>,
    rows: Vec<Row>,
    /// 2^20 random numbers each.
    patterns: [(FloatType, Handle); 2],
}

/// Whether one of the filters is part of the name, or there is none.
pub fn wanted(name: &str, filters: &[String]) -> bool {
    filters.is_empty() || filters.iter().any(|filter| name.contains(filter))
}

impl<'a> Clock<'a> {
    /// Measures a copy first.
    pub fn new(client: &'a Client, filters: Vec<String>) -> Self {
        let values = random(1 << 20, 9);
        let narrow: Vec<u8> = values.iter().flat_map(|v| bf16::from_f64(*v).to_le_bytes()).collect();
        // No negative second moments.
        let wide: Vec<u8> = values.iter().flat_map(|v| (v.abs() as f32).to_le_bytes()).collect();
        let patterns = [(FloatType::Bf16, narrow), (FloatType::F32, wide)];
        let patterns = patterns.map(|(float, bytes)| (float, client.create_from_slice(&bytes)));
        let pool = [(); 2].map(|()| client.empty(4 * COPIED));
        let mut clock = Self { client, filters, copy: 0.0, pool, copies: BTreeMap::new(), rows: vec![], patterns };
        clock.pool = [(); 2].map(|()| clock.filled(FloatType::F32, COPIED));
        let seconds = clock.copy_of(COPIED);
        clock.copy = (8 * COPIED) as f64 / seconds;
        clock.rows.push(Row { name: "copy of fp32".into(), bytes: 8 * COPIED, seconds, copy: seconds });
        let seconds = clock.copy_of(4);
        clock.rows.push(Row { name: "a launch (a copy of four numbers)".into(), bytes: 32, seconds, copy: seconds });
        clock
    }

    /// Copies `len` elements of fp32; consecutive calls copy consecutive elements.
    fn copy(&self, len: usize, turn: usize) {
        let start = turn % (COPIED / len) * len;
        let [from, to] = self.pool.each_ref().map(|handle| Run { handle, float: FloatType::F32, start, len });
        flat::write(self.client, from, to, false).expect("legal");
    }

    /// Seconds of a copy of `len` elements of fp32.
    fn copy_of(&mut self, len: usize) -> f64 {
        if let Some(seconds) = self.copies.get(&len) {
            return *seconds;
        }
        let seconds = self.median(&|turn| self.copy(len, turn));
        self.copies.insert(len, seconds);
        seconds
    }

    /// Seconds of a copy that moves about as many bytes.
    fn copy_of_bytes(&mut self, bytes: usize) -> f64 {
        // Rounded, so that few sizes are timed.
        match bytes >> 20 << 18 {
            0 => self.copy_of(4),
            elements if elements / 2 >= COPIED => bytes as f64 / self.copy,
            elements => self.copy_of(elements / 2) * bytes as f64 / (4 * elements) as f64,
        }
    }

    /// `len` random numbers of type bf16 or fp32, in several copies if they are few.
    pub fn tensor(&self, float: FloatType, len: usize) -> Turns {
        let places = (FOOTPRINT / (len * float.size())).clamp(1, 8);
        Turns((0..places).map(|_| self.filled(float, len)).collect())
    }

    fn filled(&self, float: FloatType, len: usize) -> Handle {
        let handle = self.client.empty(len * float.size());
        let (_, pattern) = self.patterns.iter().find(|(of, _)| *of == float).expect("there is a pattern of this type");
        let mut at = 0;
        while at < len {
            let count = (1 << 20).min(len - at);
            let from = Run { handle: pattern, float, start: 0, len: count };
            let to = Run { handle: &handle, float, start: at, len: count };
            flat::write(self.client, from, to, false).expect("legal");
            at += count;
        }
        handle
    }

    fn sync(&self) {
        cubecl::future::block_on(self.client.sync()).expect("the kernels ran");
    }

    /// Seconds of a call.
    fn median(&self, call: &impl Fn(usize)) -> f64 {
        let batch = |calls: usize| {
            self.sync();
            let start = Instant::now();
            (0..calls).for_each(call);
            self.sync();
            start.elapsed().as_secs_f64() / calls as f64
        };
        // The first compiles.
        batch(1);
        let calls = (SECONDS / batch(8)).clamp(8.0, 1000.0) as usize;
        let mut seconds = [0; BATCHES].map(|_| batch(calls));
        seconds.sort_by(f64::total_cmp);
        seconds[BATCHES / 2]
    }

    /// Whether a kernel of one of these names is asked for.
    pub fn wants(&self, names: &[&str]) -> bool {
        names.iter().any(|name| wanted(name, &self.filters))
    }

    /// Whether there is a filter that is this word.
    pub fn asks_for(&self, word: &str) -> bool {
        self.filters.iter().any(|filter| filter == word)
    }

    /// Times a kernel that moves `bytes`, if it is asked for.
    pub fn time(&mut self, name: &str, bytes: usize, call: impl Fn(usize)) {
        if self.wants(&[name]) {
            let seconds = self.median(&call);
            let copy = self.copy_of_bytes(bytes);
            self.rows.push(Row { name: name.into(), bytes, seconds, copy });
        }
    }

    /// Times a kernel that takes less time than its launch costs the host: the time that it adds to a large copy
    /// launched before it.
    pub fn time_after_a_copy(&mut self, name: &str, bytes: usize, call: impl Fn(usize)) {
        if self.wants(&[name]) {
            let both = self.median(&|turn| {
                self.copy(HIDING, turn);
                call(turn)
            });
            let (seconds, copy) = (both - self.copy_of(HIDING), self.copy_of_bytes(bytes));
            self.rows.push(Row { name: name.into(), bytes, seconds, copy });
        }
    }

    pub fn print(&self) {
        println!("\n{:<52} {:>6} {:>9} {:>6} {:>8} {:>10}", "kernel", "GB", "ms", "TB/s", "of copy", "same copy");
        for Row { name, bytes, seconds, copy } in &self.rows {
            let (bytes, rate) = (*bytes as f64, *bytes as f64 / seconds);
            let (gb, ms, tbs, share) = (bytes / 1e9, seconds * 1e3, rate / 1e12, 100.0 * rate / self.copy);
            let copy = bytes / copy / 1e12;
            println!("{name:<52} {gb:>6.3} {ms:>9.4} {tbs:>6.2} {share:>6.0} % {copy:>10.2}");
        }
        println!("The last column has the TB/s of a copy that moves as many bytes.");
    }
}
