//! The memory-bound kernels against fp64, and their times next to the GPU's copy bandwidth.
//!
//! The timed sizes are those of Llama 3 8B with 8192 tokens, of the gated delta rule those of Qwen3-Next, of some kernels
//! also with 16,384. The word `plans` also times column sums and gradients of an embedding with other plans. Ends with a
//! table, whose last column is a copy that moves equally many bytes; kernels that take less time than their launch costs
//! the host are timed after a copy.

mod bandwidths;
mod gated_delta;
mod latent_attention;
mod list;
mod moe_layers;
mod optimizers;
mod plans;
mod timings;

use crate::choice::Choice;
use crate::kernel_tests::client;
use crate::report::Report;
use backend_dist::launch::BoxError;
use bandwidths::Bandwidths;

pub fn run(choice: &Choice, report: &mut Report) -> Result<(), BoxError> {
    let client = client();
    if choice.does("check") {
        for (name, check) in list::all().into_iter().filter(|(name, _)| choice.wants(name)) {
            report.outcome(
                name,
                match check(&client) {
                    0 => Ok(()),
                    bad => Err(format!("{bad} results are further from fp64 than their bounds")),
                },
            );
        }
    }
    if choice.does("time") {
        let bandwidths = Bandwidths::new(Some((&client, choice)));
        time_all(&bandwidths);
        bandwidths.print();
    }
    Ok(())
}

/// Names of checks and of timed kernels.
pub fn names() -> Vec<String> {
    let timed = Bandwidths::new(None);
    time_all(&timed);
    list::all().into_iter().map(|(name, _)| name.to_owned()).chain(timed.into_names()).collect()
}

fn time_all(bandwidths: &Bandwidths) {
    optimizers::all(bandwidths);
    timings::activations(bandwidths);
    timings::low_rank(bandwidths);
    timings::norms(bandwidths);
    latent_attention::all(bandwidths);
    timings::tokens(bandwidths);
    timings::runs(bandwidths);
    gated_delta::all(bandwidths);
    moe_layers::all(bandwidths);
    if bandwidths.names("plans") {
        plans::column_sums(bandwidths);
        plans::embeddings(bandwidths);
    }
}
