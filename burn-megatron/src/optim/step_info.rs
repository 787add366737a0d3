//! What a step tells the rules of the optimizers.

/// What is the same for all parameters of one step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepInfo {
    /// The learning rate.
    pub lr: f64,
    /// Multiplies the gradient sums: division by tokens and loss scale, and clipping, in one factor.
    pub grad_scale: f64,
}
