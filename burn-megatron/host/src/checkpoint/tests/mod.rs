//! Saving and loading as a run does.

mod crash;
mod damage;
mod killed;
mod lineage;
mod links;
mod manifests;
mod owner;
mod reading;
mod refused;
mod round_trip;
mod saving;
mod storage;
mod truncated;
