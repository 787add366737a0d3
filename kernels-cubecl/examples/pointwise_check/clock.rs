//! Bandwidths of kernels and the table of them.
use crate::checks::random;
use cubecl::prelude::*;
use cubecl::server::Handle;
use half::bf16;
use kernels_cubecl::pointwise::flat::{self, FloatType, Run};
use std::time::Instant;

/// A kernel gets its tensors from as many places in turn that they do not stay in the L2 cache.
const FOOTPRINT: usize = 512 << 20;
/// Batches, of which the median counts, and seconds of a batch.
const BATCHES: usize = 5;
const SECONDS: f64 = 0.02;

/// A tensor in several places, to be used in turn.
pub struct Turns(Vec<Handle>);

impl Turns {
    /// That of call number `turn`.
    pub fn at(&self, turn: usize) -> &Handle {
        &self.0[turn % self.0.len()]
    }
}

struct Row {
    name: String,
    bytes: usize,
    seconds: f64,
}

pub struct Clock<'a> {
    pub client: &'a Client,
    filters: Vec<String>,
    copy: f64,
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
        let mut clock = Self { client, filters, copy: 0.0, rows: vec![], patterns };
        let len = 1 << 28;
        let (from, to) = (clock.tensor(FloatType::F32, len), clock.tensor(FloatType::F32, len));
        let run = |handle| Run { handle, float: FloatType::F32, start: 0, len };
        let call = |turn| flat::write(client, run(from.at(turn)), run(to.at(turn)), false).expect("legal");
        let seconds = clock.median(&call);
        clock.copy = (8 * len) as f64 / seconds;
        clock.rows.push(Row { name: "copy of fp32".into(), bytes: 8 * len, seconds });
        let one = |handle| Run { handle, float: FloatType::F32, start: 0, len: 4 };
        let seconds =
            clock.median(&|turn| flat::write(client, one(from.at(turn)), one(to.at(turn)), false).expect("legal"));
        clock.rows.push(Row { name: "a launch (a copy of four numbers)".into(), bytes: 32, seconds });
        clock
    }

    /// `len` random numbers of type bf16 or fp32, in several places if they are few.
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
            self.rows.push(Row { name: name.into(), bytes, seconds });
        }
    }

    pub fn print(&self) {
        println!("\n{:<44} {:>9} {:>9} {:>6} {:>8}", "kernel", "GB", "ms", "TB/s", "of copy");
        for Row { name, bytes, seconds } in &self.rows {
            let (bytes, rate) = (*bytes as f64, *bytes as f64 / seconds);
            let (gb, ms, tbs, share) = (bytes / 1e9, seconds * 1e3, rate / 1e12, 100.0 * rate / self.copy);
            println!("{name:<44} {gb:>9.3} {ms:>9.4} {tbs:>6.2} {share:>6.0} %");
        }
    }
}
