//! The table of a plan.

use std::fmt;

use super::ModulePlan;
use crate::plan::bytes;
use crate::plan::gpus::Hardware;

impl ModulePlan {
    /// Seconds of a step's passes on a rank: of its GEMMs, convolutions and attention alone, and with every other operation
    /// in a kernel of its own. GPUs are between both. Communication and the host are not counted.
    pub fn seconds(&self, hardware: &Hardware) -> [f64; 2] {
        let passes = self.micro_batches as f64;
        let arithmetic = passes * self.counts.flops / hardware.gemms;
        [arithmetic, arithmetic + passes * self.counts.moved as f64 / hardware.bandwidth]
    }
}

impl fmt::Display for ModulePlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ([all, trained], ranks) = (self.parameters, self.layout.world_size());
        let frozen = if trained < all { format!(", {trained} of them trained") } else { String::new() };
        writeln!(f, "parameters   {all}{frozen}")?;
        writeln!(
            f,
            "layout       {} on {ranks} rank{}, micro-batches: {}",
            self.layout,
            if ranks == 1 { "" } else { "s" },
            self.micro_batches
        )?;
        let parts = [
            ("weights", self.weights),
            ("gradients", self.gradients),
            ("optimizer states", self.states),
            ("passes of a micro-batch", self.passes),
            ("optimizer step", self.step),
        ];
        let parts: Vec<String> = parts.iter().map(|(name, size)| format!("{name} {}", bytes(*size))).collect();
        writeln!(f, "memory       {} per rank", bytes(self.peak()))?;
        writeln!(f, "             {}", parts.join(", "))?;
        let counts = &self.counts;
        write!(
            f,
            "micro-batch  {:.2} TFLOP in GEMMs, {} moved, {} operations",
            counts.flops / 1e12,
            bytes(counts.moved),
            counts.operations
        )?;
        for (name, count) in &counts.collectives {
            write!(f, ", {name} {} ({})", bytes(count.bytes as u64), count.times)?;
        }
        writeln!(f)
    }
}
