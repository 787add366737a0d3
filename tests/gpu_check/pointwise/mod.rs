//! Checks the memory-bound kernels against fp64 and times them next to the GPU's copy bandwidth.
//!
//! `cargo run --release --example pointwise_check --features cuda [-- PART_OF_A_NAME..]`. The timed sizes are those of
//! Llama 3 8B with 8192 tokens, of the gated delta rule those of Qwen3-Next, of some kernels also with 16,384. The word `plans` also times column sums and gradients
//! of an embedding with other plans. Ends with a table, whose last column is a copy that moves equally many bytes;
//! kernels that take less time than their launch costs the host are timed after a copy. Fails if a result is further
//! from fp64 than its bound.
#[path = "../../tests/pointwise/checks/mod.rs"]
mod checks;
mod clock;
mod gated_delta;
mod latent_attention;
mod list;
mod moe_layers;
mod optimizers;
mod plans;
mod timings;

use cubecl_runtime::runtime::Runtime;

fn main() {
    let filters: Vec<String> = std::env::args().skip(1).collect();
    let client = &cubecl::cuda::CudaRuntime::client(&Default::default());
    let wanted = list::all().into_iter().filter(|(name, _)| clock::wanted(name, &filters));
    let failures: usize = wanted.map(|(_, check)| check(client)).sum();
    let mut clock = clock::Clock::new(client, filters);
    optimizers::all(&mut clock);
    timings::activations(&mut clock);
    timings::low_rank(&mut clock);
    timings::norms(&mut clock);
    latent_attention::all(&mut clock);
    timings::tokens(&mut clock);
    timings::runs(&mut clock);
    gated_delta::all(&mut clock);
    moe_layers::all(&mut clock);
    if clock.asks_for("plans") {
        plans::column_sums(&mut clock);
        plans::embeddings(&mut clock);
    }
    clock.print();
    assert_eq!(failures, 0, "{failures} results are further from the reference than their bounds");
}
