//! How the rows of an all-to-all are divided.

/// The number of tokens that a member sends to, and receives from, each member of a group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Splits {
    /// To each member.
    pub send: Vec<usize>,
    /// From each member.
    pub receive: Vec<usize>,
}

impl Splits {
    /// The splits of the reverse all-to-all.
    pub fn reversed(&self) -> Self {
        Self { send: self.receive.clone(), receive: self.send.clone() }
    }

    /// Number of tokens sent.
    pub fn sent(&self) -> usize {
        self.send.iter().sum()
    }

    /// Number of tokens received.
    pub fn received(&self) -> usize {
        self.receive.iter().sum()
    }
}
