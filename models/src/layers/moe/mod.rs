//! MoE: a router, its experts on the ranks that hold them, and the dispatch of tokens between them.

mod balance;
mod bias;
mod capacity;
mod config;
mod decide;
mod dispatch;
mod experts;
mod forced;
mod layer;
mod plan;
mod records;
mod router;
mod routing_replay;
mod select;
mod shared;
pub mod stats;

pub use bias::{BiasCounts, ExpertTokens};
pub use config::{
    Balance, BalanceOver, Capacity, Dispatcher, DropPolicy, ExpertGroups, Ffn, MoeConfig, RouterConfig, RouterDevice,
    Scores, SharedExperts,
};
pub use layer::MoeLayer;
pub use records::RouterRecords;
pub use routing_replay::RoutingReplay;
