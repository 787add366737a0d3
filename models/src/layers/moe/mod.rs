//! Mixture of experts: a router, its experts on the ranks that hold them, and the exchange of tokens between them.

mod config;
pub mod stats;

pub use config::{
    Balance, BalanceOver, Capacity, Dispatcher, DropPolicy, ExpertGroups, Ffn, MoeConfig, RouterConfig, Scores,
    SharedExperts,
};
