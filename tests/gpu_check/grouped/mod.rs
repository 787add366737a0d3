//! Checks grouped GEMMs against fp64 on small sizes, and times them next to a cuBLASLt GEMM for each group at the sizes
//! of MoE models.
//!
//! `cargo run --release --example grouped_check --features cuda` on a machine with a Hopper GPU; `-- check`, `-- time`
//! or `-- fp8` (checks and times experts in FP8) does only that, other words choose models by name. Exits 1 if a result
//! is wrong. An error is the greatest difference, over the number itself and the root mean square of all of them.

mod check;
mod fp8;
mod gemms;
mod reference;
mod time;

fn main() {
    let (modes, words): (Vec<String>, Vec<String>) =
        std::env::args().skip(1).partition(|word| ["check", "time", "fp8"].contains(&word.as_str()));
    let wants = |mode: &str| modes.is_empty() || modes.iter().any(|m| m == mode);
    let device = burn::tensor::Device::cuda(0);
    let start = std::time::Instant::now();
    let mut bad = 0;
    if wants("check") {
        bad += check::check(&device);
        println!("checked in {:.1} s", start.elapsed().as_secs_f64());
    }
    if wants("time") {
        bad += time::time(&device, &words);
    }
    if wants("fp8") {
        bad += fp8::check(&device);
        fp8::time(&device);
    }
    println!("{:.1} s", start.elapsed().as_secs_f64());
    if bad > 0 {
        println!("{bad} GEMMs are wrong");
        std::process::exit(1);
    }
    println!("all GEMMs are right");
}
