//! Saving and loading as a run does.

mod round_trip;
