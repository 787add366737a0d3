//! Whether rules have legal numbers.

use super::LogitsProcessors;

/// Biases and penalties that leave logits finite.
const MOST: f64 = 1e30;

impl LogitsProcessors {
    /// Whether all numbers are ones with which logits remain numbers.
    ///
    /// # Errors
    /// Names the rule, its value and what is legal.
    pub fn check(&self) -> Result<(), String> {
        if let Some((sequence, by)) = self.sequence_bias.iter().find(|(_, by)| !is_moderate(*by)) {
            return Err(format!("sequence_bias = {by} of {sequence:?} is not a number from -{MOST:e} to {MOST:e}"));
        }
        let penalties = [("presence_penalty", self.presence_penalty), ("frequency_penalty", self.frequency_penalty)];
        if let Some((name, by)) = penalties.iter().find(|(_, by)| !is_moderate(*by)) {
            return Err(format!("{name} = {by} is not a number from -{MOST:e} to {MOST:e}"));
        }
        let decay = self.exponential_decay_length_penalty.map(|(_, factor)| factor);
        let factors = [
            ("encoder_repetition_penalty", self.encoder_repetition_penalty),
            ("the factor of exponential_decay_length_penalty", decay),
        ];
        for (name, by) in factors {
            if let Some(by) = by.filter(|by| !(*by > 0.0 && by.is_finite())) {
                return Err(format!("{name} = {by} is not a number above 0 (1 changes nothing)"));
            }
        }
        Ok(())
    }
}

fn is_moderate(by: f64) -> bool {
    by.abs() <= MOST
}
