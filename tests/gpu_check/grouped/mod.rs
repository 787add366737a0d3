//! Grouped GEMMs against fp64 on small sizes, and their times next to a cuBLASLt GEMM for each group at the sizes of MoE
//! models. An error is the greatest difference, over the number itself and the root mean square of all of them.

mod check;
mod fp8;
mod gemms;
mod reference;
pub mod time;

use crate::choice::Choice;
use crate::report::Report;
use backend_dist::launch::BoxError;
use burn::tensor::Device;

pub fn run(choice: &Choice, report: &mut Report) -> Result<(), BoxError> {
    let device = Device::cuda(0);
    if choice.does("check") {
        check::check(&device, report);
    }
    if choice.does("time") {
        time::time(&device, choice, report);
    }
    if choice.does("fp8") {
        fp8::check(&device, report);
        fp8::time(&device, choice);
    }
    Ok(())
}
